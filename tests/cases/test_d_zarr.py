"""What goes wrong between Zarr tools, rows D of docs/cases.md. The readers that know
nothing of kvstore are plain zarr-python and tensorstore."""

import gc
import json
import logging
import pickle
import shutil
import threading
import tracemalloc
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from bare import Bare
from children import forks, script
from faulty import Faulty
from stored import KEY, chunk_url, document_url, folder, loaded
from work import PATIENCE

from kvstore import (
    BlockStore,
    DamagedBlockError,
    FormatError,
    InvalidInputError,
    Layout,
    StorageTimeoutError,
)
from kvstore.codecs import CODECS, Codec
from kvstore.layout import ITEM_BYTES
from kvstore.testing import Root, sample_block, sample_layout

DATA = Path(__file__).parent.parent / "data"


def stored(root: Root, layout: Layout | None = None, **options: Any) -> BlockStore:
    """A store with one block."""
    store = root.open(layout, **options)
    store.store(KEY, sample_block(store.layout))
    return store


def edited(root: Root, url: str, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change a document behind kvstore's back."""
    document = json.loads(root.read(url))
    change(document)
    data = json.dumps(document).encode()
    root.write(url, data)
    return data


def through_tensorstore(store: BlockStore) -> Any:
    spec = {"driver": "zarr3", "kvstore": f"{store.block_url(KEY)}/"}
    return tensorstore.open(spec, open=True).result()


# ---- what is missing


def test_d1_a_missing_chunk_is_damage_and_never_a_fill_value(root: Root) -> None:
    store = stored(root)
    root.remove(chunk_url(store))
    with pytest.raises(DamagedBlockError, match="missing"):
        loaded(root.open())
    with pytest.raises(DamagedBlockError):
        loaded(store)
    assert not store.contains(KEY)


def test_d1_a_missing_chunk_is_no_zeros_for_others_either(tmp_path: Path) -> None:
    store = stored(Root(str(tmp_path)))
    folder(chunk_url(store)).unlink()
    block: Any = zarr.open_array(folder(store.block_url(KEY)), mode="r")
    assert np.isnan(np.asarray(block[...])).all()


def test_d4_a_block_in_shards_is_refused(tmp_path: Path) -> None:
    """Written by zarr-python as a valid array of the same values and attributes."""
    root = Root(str(tmp_path))
    store = stored(root)
    document = json.loads(root.read(document_url(store)))
    assert [codec["name"] for codec in document["codecs"]] == ["bytes", "crc32c"]
    values = np.asarray(zarr.open_array(folder(store.block_url(KEY)), mode="r")[...])

    def shard(document: dict[str, Any]) -> None:
        inner = [1, *store.layout.shape[1:]]
        configuration = {
            "chunk_shape": inner,
            "codecs": document["codecs"],
            "index_codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "index_location": "end",
        }
        document["codecs"] = [{"name": "sharding_indexed", "configuration": configuration}]

    edited(root, document_url(store), shard)
    root.remove(chunk_url(store))
    array: Any = zarr.open_array(folder(store.block_url(KEY)), mode="r+")
    array[...] = values
    assert np.asarray(array[...]).tobytes() == values.tobytes()
    with pytest.raises(DamagedBlockError, match="codecs"):
        loaded(root.open())


# ---- documents


@pytest.mark.parametrize("dtype", [*ITEM_BYTES, "int4"])
def test_d5_the_fill_value_is_written(dtype: str, root: Root) -> None:
    layout = sample_layout(dtype=dtype) if dtype in ITEM_BYTES else opaque(dtype, 48)
    document = json.loads(root.read(document_url(stored(root, layout))))
    assert document["fill_value"] in ("NaN", 255, 128)


def test_d5_golden_documents_have_it() -> None:
    found = [json.loads(path.read_text()) for path in DATA.rglob("zarr.json")]
    arrays = [document for document in found if document["node_type"] == "array"]
    assert len(arrays) >= 6
    assert all(document["fill_value"] in ("NaN", 255) for document in arrays)


def opaque(dtype: str, nbytes: int) -> Layout:
    return Layout.of_bytes(nbytes, dtype=dtype, reason="a test")


PATTERNS = {
    "bfloat16": np.arange(65_536, dtype="<u2").tobytes(),
    "float8_e4m3fn": bytes(range(256)),
    "float8_e5m2": bytes(range(256)),
    "int4": bytes(range(256)),  # two values in a byte
}


def layout_of(dtype: str) -> Layout:
    nbytes = len(PATTERNS[dtype])
    if dtype == "int4":
        return opaque(dtype, nbytes)
    shape = (16, nbytes // ITEM_BYTES[dtype] // 16)
    return Layout(axes=("token", "value"), shape=shape, dtype=dtype)


@pytest.mark.parametrize("dtype", PATTERNS)
def test_d6_every_bit_pattern_survives(dtype: str, root: Root) -> None:
    store = root.open(layout_of(dtype))
    store.store(KEY, PATTERNS[dtype])
    assert loaded(root.open(layout_of(dtype))) == PATTERNS[dtype]
    assert root.read(chunk_url(store))[:-4] == PATTERNS[dtype]
    document = json.loads(root.read(document_url(store)))
    assert document["attributes"]["kvstore"]["dtype"] == dtype
    ours = ("attributes", "kvstore")
    edited(root, document_url(store), lambda d: d[ours[0]][ours[1]].update(dtype="int8"))
    with pytest.raises(DamagedBlockError, match="dtype"):
        loaded(root.open(layout_of(dtype)))


@pytest.mark.parametrize("dtype", PATTERNS)
def test_d6_others_read_every_bit_pattern(dtype: str, tmp_path: Path) -> None:
    store = Root(str(tmp_path)).open(layout_of(dtype))
    store.store(KEY, PATTERNS[dtype])
    assert through_tensorstore(store).read().result().tobytes() == PATTERNS[dtype]
    if dtype == "bfloat16":
        return  # zarr-python has no such type of its own
    code = (
        "import importlib.metadata as metadata, sys\n"
        "sys.modules['kvstore'] = sys.modules['ml_dtypes'] = None\n"
        "metadata.entry_points = lambda: metadata.EntryPoints()\n"
        "import zarr\n"
        "print(zarr.open_array(sys.argv[1], mode='r')[...].tobytes().hex())\n"
    )
    assert script(code, folder(store.block_url(KEY))) == f"{PATTERNS[dtype].hex()}\n"


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "codec": lambda d: d["codecs"].insert(1, {"name": "nope", "configuration": {}}),
    "data type": lambda d: d.update(data_type="nope"),
    "format 2": lambda d: d.update(zarr_format=2),
    "format 4": lambda d: d.update(zarr_format=4),
    "extension": lambda d: d.update(ours={"name": "nope", "must_understand": True}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_d15_what_is_not_understood_is_neither_absent_nor_overwritten_in_silence(
    broken: str, root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    store = stored(root)
    edited(root, document_url(store), BROKEN[broken])
    with caplog.at_level(logging.WARNING, "kvstore"):
        with pytest.raises(DamagedBlockError, match="expected"):
            loaded(store)
        assert store.store(KEY, sample_block(store.layout))
    assert "damaged block" in caplog.text
    assert store.block_url(KEY) in caplog.text
    assert store.counts()["repaired"] == store.counts()["damaged"] == 1
    assert loaded(root.open()) == sample_block(store.layout).tobytes()


@pytest.mark.parametrize("broken", ["format 2", "format 4", "extension"])
@pytest.mark.parametrize("level", ["namespace", "group"])
def test_d15_a_group_that_is_not_understood_stops_the_engine_and_stays(
    broken: str, level: str, root: Root
) -> None:
    store = stored(root)
    where = store.url if level == "group" else store.url.removesuffix("/r0/g0")
    data = edited(root, f"{where}/zarr.json", BROKEN[broken])
    with pytest.raises(FormatError, match="expected"):
        root.open()
    assert root.read(f"{where}/zarr.json") == data


@pytest.mark.parametrize("place", ["namespace", "group", "fan-out"])
def test_d19_consolidated_metadata_hides_nothing(place: str, tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    store = stored(root)
    where = {
        "namespace": folder(store.url).parent.parent,
        "group": folder(store.url),
        "fan-out": folder(store.block_url(KEY)).parent,
    }[place]
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(str(where))
    assert b"consolidated_metadata" in (where / "zarr.json").read_bytes()
    later = KEY[:2] + bytes(34)  # the same fan-out, which the snapshot does not have
    store.store(later, sample_block(store.layout, 1))
    reader = root.open()
    assert loaded(reader, later) == sample_block(store.layout, 1).tobytes()
    assert loaded(reader) == sample_block(store.layout).tobytes()


# ---- checksums and codecs


@pytest.mark.parametrize("what", ["document", "chunk", "both"])
def test_d11_a_checksum_that_was_taken_away_is_missed(what: str, root: Root) -> None:
    store = stored(root)
    codecs = json.loads(root.read(document_url(store)))["codecs"]
    assert codecs[-1] == {"name": "crc32c"}
    if what != "chunk":
        edited(root, document_url(store), lambda document: document["codecs"].pop())
    if what != "document":
        root.write(chunk_url(store), root.read(chunk_url(store))[:-4])
    with pytest.raises(DamagedBlockError):
        loaded(root.open())
    assert root.open().store(KEY, sample_block(store.layout)) == (what != "chunk")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_d12_tensorstore_reads_and_writes_the_same_arrays(
    dtype: str, tmp_path: Path
) -> None:
    root = Root(str(tmp_path))
    store = stored(root, sample_layout(dtype=dtype))
    document = json.loads(root.read(document_url(store)))
    assert [codec["name"] for codec in document["codecs"]] == ["bytes", "crc32c"]
    read = through_tensorstore(store).read().result()  # D11: its index is not shifted
    assert read.tobytes() == sample_block(store.layout).tobytes()
    shutil.rmtree(folder(store.block_url(KEY)))
    where = f"{store.block_url(KEY)}/"
    spec = {"driver": "zarr3", "kvstore": where, "metadata": document}
    tensorstore.open(spec, create=True).result().write(read).result()
    assert loaded(root.open(store.layout)) == read.tobytes()


def test_d12_an_array_of_zarrs_defaults_is_refused(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    store = stored(root)
    block = folder(store.block_url(KEY))
    attributes = json.loads((block / "zarr.json").read_text())["attributes"]
    values = np.asarray(zarr.open_array(block, mode="r")[...])
    shutil.rmtree(block)
    zarr.create_array(block, data=values, attributes=attributes)
    with pytest.raises(DamagedBlockError, match="expected"):
        loaded(root.open())
    assert root.open().store(KEY, values)
    assert loaded(root.open()) == values.tobytes()


# ---- writers


def test_d7_a_writer_that_was_killed_in_a_chunk_leaves_a_miss(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from kvstore import Layout\n"
        "from kvstore.testing import Root, sample_block\n"
        "layout = Layout.of_bytes(64 << 20, dtype='float16', reason='a test')\n"
        "store, write, done = Root(sys.argv[1]).open(layout), os.write, 0\n"
        "assert 'zarr' not in sys.modules  # whose own stores may write in place\n"
        "def count(descriptor, data):\n"
        "    global done\n"
        "    done += len(data)\n"
        "    if done > 32 << 20:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(descriptor, data)\n"
        "os.write = count\n"
        "store.store(bytes(range(36)), sample_block(layout))\n"
    )
    script(code, tmp_path, ends=-9)
    [half] = tmp_path.rglob("c.0")
    assert 0 < half.stat().st_size < 64 << 20
    store = Root(str(tmp_path)).open(opaque("float16", 64 << 20))
    assert not store.contains(KEY)
    assert not store.load(KEY, bytearray(64 << 20))
    assert store.store(KEY, bytes(64 << 20))


def test_d8_opening_is_no_race_and_removes_nothing(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    block = sample_block(sample_layout()).tobytes()
    stored(root)
    work = (
        "def work(number):\n"
        "    for turn in range(50):\n"
        "        store = Root(sys.argv[1]).open()\n"
        "        block = sample_block(store.layout)\n"
        "        store.store(turn.to_bytes(36), block)\n"
        "        for key in (0, turn // 2, turn):\n"
        "            assert store.load(key.to_bytes(36), block.copy())\n"
    )
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(forks, 16, work, tmp_path)
        loads = 0
        while not writing.done():
            assert loaded(root.open()) == block
            loads += 1
        writing.result()
    assert loads
    store = root.open()
    assert all(loaded(store, turn.to_bytes(36)) == block for turn in range(50))


def test_d8_the_first_of_many_makes_the_namespace(tmp_path: Path) -> None:
    """Of each of ten: nothing is there yet, neither the root nor any document."""
    forks(
        16,
        "def work(number):\n"
        "    for turn in range(10):\n"
        "        store = Root(f'{sys.argv[1]}/{turn}/kv').open()\n"
        "        store.store(number.to_bytes(36), sample_block(store.layout, number))\n",
        tmp_path,
    )
    for turn in range(10):
        store = Root(f"{tmp_path}/{turn}/kv").open()
        for number in range(16):
            block = sample_block(store.layout, number).tobytes()
            assert loaded(store, number.to_bytes(36)) == block


def test_d8_half_a_document_is_a_miss_and_repaired(root: Root) -> None:
    store = stored(root)
    whole = root.read(document_url(store))
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        root.write(document_url(store), whole[:length])
        assert not root.open().contains(KEY)
        assert root.open().store(KEY, sample_block(store.layout))
        assert loaded(root.open()) == sample_block(store.layout).tobytes()


def test_d10_a_part_of_a_block_cannot_be_written(root: Root) -> None:
    store = root.open()
    block = sample_block(store.layout)
    halves = block[: block.nbytes // 2], block[block.nbytes // 2 :]
    together = threading.Barrier(2)

    def write(number: int) -> None:
        together.wait(PATIENCE)
        with pytest.raises(InvalidInputError, match="bytes of one block"):
            store.store(KEY, halves[number])

    for written in (False, True):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, range(2)))
        assert store.contains(KEY) == written
        store.store(KEY, block)
    assert loaded(store) == block.tobytes()


# ---- places


def test_d9_every_backend_has_the_same_files(root: Root) -> None:
    store = stored(root)
    namespace = store.url.split("/")[-3]
    files = [name for name in root.files() if "/.kvstore-tmp/" not in name]
    block = f"r0/g0/000/{KEY.hex()}"
    assert {name.rpartition(f"{namespace}/")[2] for name in files} == {
        "zarr.json",
        "r0/zarr.json",
        "r0/g0/zarr.json",
        "r0/g0/000/zarr.json",
        f"{block}/zarr.json",
        f"{block}/c.0.0.0.0",
    }
    assert len(files) == 6


@pytest.mark.parametrize("spelling", ["{}", "{}/", "file://{}", "local://{}", "file://{}/"])
def test_d9_every_spelling_is_one_folder(spelling: str, tmp_path: Path) -> None:
    nested = tmp_path / "not" / "there"
    store = stored(Root(spelling.format(nested)))
    plain = Root(str(nested)).open()
    assert plain.url == store.url == f"file://{plain.url.removeprefix('file://')}"
    assert loaded(plain) == sample_block(store.layout).tobytes()


# ---- processes, threads and memory


def test_d13_a_forked_child_uses_a_folder(tmp_path: Path) -> None:
    """And nothing that kvstore imports has a thread, of which Python would warn."""
    code = (
        "import warnings\n"
        "warnings.simplefilter('error')\n"
        "import os, signal, sys\n"
        "from kvstore.testing import Root, sample_block\n"
        "key, store = bytes(range(36)), Root(sys.argv[1]).open()\n"
        "block = sample_block(store.layout)\n"
        "store.store(key, block)\n"
        "assert store.load(key, block.copy())\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(20)\n"
        "    found = block.copy() * 0\n"
        "    assert store.load(key, found) and (found == block).all()\n"
        "    assert store.store(key[::-1], block)\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert store.load(key[::-1], block.copy())\n"
    )
    script(code, tmp_path)


def test_d23_what_a_store_was_made_of_crosses_to_another_process(
    root: Root, tmp_path: Path
) -> None:
    if root.url.startswith("memory:"):
        pytest.skip("memory:// is one process's own")
    store = stored(root)
    (tmp_path / "pickled").write_bytes(pickle.dumps(store.blocks))
    code = (
        "import pathlib, pickle, sys\n"
        "blocks = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "payload = bytearray(blocks.nbytes)\n"
        "assert blocks.load(bytes(range(36)), memoryview(payload), None) is not None\n"
        "print(payload.hex())\n"
    )
    printed = script(code, tmp_path / "pickled")
    assert printed == f"{sample_block(store.layout).tobytes().hex()}\n"


class Garbage:
    """A cycle whose end wants a lock."""

    def __init__(self, lock: threading.RLock, ended: list[str]) -> None:
        self.cycle, self.lock, self.ended = self, lock, ended

    def __del__(self) -> None:
        with self.lock:
            self.ended.append(threading.current_thread().name)


def load_with_a_lock(store: BlockStore, ended: list[str]) -> list[object]:
    """Load while a lock is held that garbage wants; what came of it."""
    lock = threading.RLock()
    came: list[object] = []

    def load() -> None:
        with lock:
            Garbage(lock, ended)
            gc.set_threshold(1)
            gc.enable()
            try:
                came.append(loaded(store))
            except StorageTimeoutError as error:
                came.append(error)

    thresholds = gc.get_threshold()
    gc.disable()
    try:
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    return came


def test_d14_a_load_waits_for_no_lock_of_its_caller(root: Root) -> None:
    store = stored(root, timeout=PATIENCE / 2)
    ended: list[str] = []
    [came] = load_with_a_lock(store, ended)
    assert ended
    if root.client == "obstore":
        assert came == sample_block(store.layout).tobytes()
    assert loaded(store) == sample_block(store.layout).tobytes()


def test_d14_garbage_on_the_loops_thread_costs_a_timeout_and_no_more() -> None:
    """fsspec's loop is a thread of its own: what is finalised there may want anything."""
    storage = Bare()
    store = stored(storage.root, timeout=2.0)
    ended: list[str] = []

    def collect_once() -> None:
        storage.on_request = lambda: None
        gc.collect(0)

    lock = threading.Lock()
    storage.on_request = collect_once
    gc.disable()
    try:
        with lock:
            Garbage(lock, ended)  # type: ignore[arg-type]  # any lock does
            with pytest.raises(StorageTimeoutError):
                loaded(store)
    finally:
        gc.enable()
    assert loaded(store) == sample_block(store.layout).tobytes()
    assert ended == ["fsspecIO"]


def test_d16_a_load_is_one_request_and_a_store_two_writes() -> None:
    storage = Faulty()
    store = stored(storage.root)
    other = KEY[:2] + bytes(34)  # the same fan-out

    def requests(call: Callable[[], object]) -> list[str]:
        storage.seen.clear()
        call()
        return [request for request, _ in storage.seen]

    block = sample_block(store.layout)
    assert requests(lambda: store.store(other, block)) == ["get", "put", "put"]
    assert requests(lambda: store.store(other, block)) == ["get"]
    reader = storage.root.open()
    assert requests(lambda: reader.contains(KEY)) == ["get"]
    for _ in range(3):
        assert requests(lambda: loaded(reader)) == ["get"]
    assert requests(lambda: loaded(reader, other)) == ["get", "get"]
    assert requests(lambda: reader.contains(b"absent")) == ["get"]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_d17_a_load_takes_no_more_than_two_blocks(scheme: str, tmp_path: Path) -> None:
    nbytes = 256 << 20
    where = str(tmp_path) if scheme == "file" else f"memory://{uuid.uuid4().hex}"
    store = Root(where).open(opaque("float16", nbytes))
    store.store(KEY, np.full(nbytes, 7, np.uint8))
    buffer = np.ones(nbytes, np.uint8)  # its pages are there
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = memory("VmRSS")
    assert store.load(KEY, buffer)
    assert memory("VmHWM") - before < 2 * nbytes
    assert (buffer == 7).all()
    store.delete(KEY)


def memory(name: str) -> int:
    """A line of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text()
    [line] = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def test_d17_many_loads_leave_nothing(root: Root) -> None:
    store = stored(root, opaque("float16", 128 << 10))
    buffer = bytearray(store.layout.nbytes)
    local = root.url.startswith(("/", "memory:"))

    def load(times: int) -> int:
        for _ in range(times):
            store.load(KEY, buffer)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = load(100)
        # Clients of buckets fill caches of their own, yet no block stays.
        spare = 16 << 10 if local else store.layout.nbytes
        assert load(1000 if local else 200) < before + spare
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_d21_no_range_is_a_suffix(codec: Codec) -> None:
    """A filesystem that refuses all but ranges from a start to an end."""
    storage = Bare()
    store = stored(storage.root, codec=codec)
    block = sample_block(store.layout, values=16)
    store.store(KEY[::-1], block)
    reader = storage.root.open()
    assert loaded(reader, KEY[::-1]) == block.tobytes()
    assert loaded(reader) == sample_block(store.layout).tobytes()
