"""What went wrong in other tiers, rows B of docs/cases.md, must not go wrong here."""

import errno
import json
import os
import random
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import forks, script
from faulty import Faulty
from servers import HOST, Server
from stored import KEY, chunk_url, document_url, loaded, temporaries
from work import PATIENCE, ended, until

from kvstore import (
    DamagedBlockError,
    InvalidInputError,
    Layout,
    LayoutMismatchError,
    StorageError,
    prove_parallel_agnostic,
)
from kvstore.filesystem import ClientName, Filesystem
from kvstore.job import Job, Outcome
from kvstore.jobs import JobRunner
from kvstore.parts import Operation
from kvstore.paths import MAX_KEY_BYTES, block_key, block_path
from kvstore.processes import ThreadMover
from kvstore.rows import worker_layout
from kvstore.tensors import LayerTensor
from kvstore.testing import Root, sample_block, sample_config, sample_layout
from kvstore.transfer import ABSENT, FAILURES, LOADED, Transfer


def opaque(nbytes: int, **known: Any) -> Layout:
    return Layout.of_bytes(nbytes, dtype="float16", reason="a test", **known)


# ---- names


def test_b2_the_longest_names_are_stored(root: Root) -> None:
    store = root.open(config=sample_config(model_name="org/" + "m" * 400))
    key = os.urandom(MAX_KEY_BYTES)
    block = sample_block(store.layout)
    assert store.store(key, block)
    assert loaded(store, key) == block.tobytes()
    # A final name of 250 bytes leaves no room for a suffix: a temporary name needs none.
    filesystem = Filesystem(root.url, root.storage_options, client=root.client)
    name = "n" * 250
    assert filesystem.publish(name, (("zarr.json", [b"data"]),), replace=False)
    assert filesystem.read(f"{name}/zarr.json", 10) == b"data"
    assert all(len(part) <= 250 for file in root.files() for part in file.split("/"))


def test_b3_folders_are_made_by_whoever_comes_first(root: Root) -> None:
    nested = replace(root, url=f"{root.url}/not/yet/there")
    together = threading.Barrier(8)
    block = sample_block(sample_layout())

    def first(number: int) -> None:
        together.wait(PATIENCE)
        store = nested.open(config=sample_config(model_name="org/model"))
        store.store(number.to_bytes(36), block)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first, range(8)))
    store = nested.open(config=sample_config(model_name="org/model"))
    assert all(store.contains(number.to_bytes(36)) for number in range(8))


NAMES = [
    "a@b",
    "a%2Fb",
    "a#b",
    "a?b",
    "a&b",
    "a+b",
    "a b",
    "a/b",
    "a_b",
    "ä",
    "模型",
    "a%b",
]


def test_b23_no_character_of_a_name_joins_two(root: Root) -> None:
    block = sample_block(sample_layout())
    stores = [root.open(config=sample_config(model_name=name)) for name in NAMES]
    assert len({store.url for store in stores}) == len(NAMES)
    for seed, store in enumerate(stores):
        store.store(KEY, sample_block(store.layout, seed))
    for seed, store in enumerate(stores):
        assert loaded(store) == sample_block(store.layout, seed).tobytes()
    stores[0].delete(KEY)
    assert [store.contains(KEY) for store in stores] == [False] + [True] * (len(NAMES) - 1)
    assert stores[0].store(KEY, block)


@pytest.mark.parametrize("key", [b"a@b", b"a%2Fb", b"//", "ä\0\n".encode(), KEY])
def test_b23_a_key_is_read_back_from_its_path(key: bytes) -> None:
    assert block_key(block_path(key)) == key


# ---- what is shared, and what is not


def test_b7_dtypes_share_nothing(root: Root) -> None:
    dtypes = {
        "bfloat16": "bfloat16",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }
    stores = [
        root.open(sample_layout(dtype=dtype), config=sample_config(dtype=name))
        for name, dtype in dtypes.items()
    ]
    assert len({store.config.digest for store in stores}) == 3
    stores[1].store(KEY, sample_block(stores[1].layout))
    assert [store.contains(KEY) for store in stores] == [False, True, False]
    # Even under one config, values of the same width are another layout.
    with pytest.raises(LayoutMismatchError, match="dtype: expected 'float8_e5m2'"):
        root.open(stores[2].layout, config=stores[1].config)


def test_b9_each_rank_has_its_own_object_or_all_have_one(root: Root) -> None:
    apart = [root.open(config=sample_config(tp_size=2), rank=rank) for rank in (0, 1)]
    for seed, store in enumerate(apart):
        assert store.store(KEY, sample_block(store.layout, seed))
    for seed, store in enumerate(apart):
        assert loaded(store) == sample_block(store.layout, seed).tobytes()

    heads = sample_layout(
        axes=("head", "layer", "token", "value"), shape=(3, 2, 16, 8), kv_cache_layout=None
    )
    agnostic = prove_parallel_agnostic(heads, claimed=True)
    joined = [
        root.open(heads, config=sample_config(tp_size=size, parallel_agnostic=agnostic))
        for size in (1, 2)
    ]
    assert joined[0].url == joined[1].url
    assert joined[0].store(KEY, sample_block(heads))
    assert not joined[1].store(KEY, sample_block(heads))


def test_b19_aliases_are_one_layout_and_unknown_orders_are_refused(root: Root) -> None:
    first = root.open(sample_layout(kv_cache_layout="LBHNC"))
    assert root.open(sample_layout(kv_cache_layout="HND")).url == first.url
    assert sample_layout(kv_cache_layout="HND").digest == first.layout.digest
    with pytest.raises(InvalidInputError, match="kv_cache_layout: expected one of"):
        sample_layout(kv_cache_layout="LHBNC")


def test_b19_fused_and_split_k_and_v_of_equal_bytes_are_apart(root: Root) -> None:
    fused = root.open(sample_layout(packing="token-kv"))
    split = sample_layout(packing="page-kv")
    assert split.nbytes == fused.layout.nbytes
    with pytest.raises(LayoutMismatchError, match="packing: expected 'page-kv'"):
        root.open(split)


def layer(name: str, head_size: int, *, tokens: int = 16, split: int = 1) -> LayerTensor:
    """One of a worker's layers: 10 blocks, 2 heads, bfloat16."""
    page = 2 * tokens * 2 * head_size * 2
    part = tokens // split
    return LayerTensor(
        name=name,
        shape=(10 * split, 2, part, 2 * head_size),
        strides=(page // 2 // split, part * 2 * head_size, 2 * head_size, 1),
        dtype="bfloat16",
        offset=0,
        storage=hash(name),
        storage_bytes=10 * page,
        page_bytes=page,
        payload_bytes=page,
        cache_dtype="bfloat16",
        plain=True,
        backend="FLASH_ATTN",
    )


def layout_of(*layers: LayerTensor) -> Layout:
    return worker_layout(
        layers,
        nbytes=sum(layer.page_bytes for layer in layers),
        num_blocks=10,
        blocks=1,
        runner="v2",
        kv_cache_layout="LBHNC",
        tokens_per_block=16,
    )


def test_b20_layers_of_several_head_sizes_make_a_round_trip(root: Root) -> None:
    layout = layout_of(layer("a", 256), layer("b", 512))
    assert layout.opaque
    store = root.open(layout)
    block = sample_block(layout)
    store.store(KEY, block)
    assert loaded(root.open(layout)) == block.tobytes()
    # As many bytes in other shapes: each layer's own is part of what is compared.
    other = layout_of(layer("a", 512), layer("b", 256))
    assert other.nbytes == layout.nbytes
    with pytest.raises(LayoutMismatchError, match="tensors_digest"):
        root.open(other)


def test_b24_one_object_holds_every_workers_share(root: Root) -> None:
    """So no rank can lack its own; and groups are asked one by one."""
    both = sample_layout().with_workers(2, heads_sharded=True)
    assert both.nbytes == 2 * sample_layout().nbytes
    groups = [root.open(both, group=group) for group in (0, 1)]
    groups[0].store(KEY, sample_block(both))
    assert [store.contains(KEY) for store in groups] == [True, False]
    root.remove(chunk_url(groups[0]))
    with pytest.raises(DamagedBlockError):
        loaded(groups[0])
    assert not groups[0].contains(KEY)


def test_b24_an_object_of_one_rank_is_no_hit_of_another(root: Root) -> None:
    ranks = [root.open(rank=rank) for rank in (0, 1)]
    ranks[0].store(KEY, sample_block(ranks[0].layout))
    assert [store.contains(KEY) for store in ranks] == [True, False]
    assert not ranks[1].load(KEY, bytearray(ranks[1].layout.nbytes))


def test_b25_a_kernels_block_size_changes_no_size(root: Root) -> None:
    """It does change the order of the bytes inside a page, so these are not shared."""
    whole, halves = (layout_of(layer("a", 64, split=split)) for split in (1, 2))
    assert whole.nbytes == halves.nbytes
    stores = [
        root.open(layout, on_mismatch="isolate", config=sample_config())
        for layout in (whole, halves)
    ]
    assert stores[0].config.digest == stores[1].config.digest
    for store in stores:
        store.store(KEY, sample_block(store.layout))
        assert len(root.read(chunk_url(store))) == whole.nbytes + 4
    with pytest.raises(LayoutMismatchError, match="page_bytes"):
        root.open(halves)


# ---- two writers, and a reader


def test_b4_all_writers_of_one_key_succeed(tmp_path: Path) -> None:
    keys = 200
    forks(
        8,
        "def work(number):\n"
        "    store = Root(sys.argv[1]).open()\n"
        "    block = sample_block(store.layout, number)\n"
        f"    for key in range({keys}):\n"
        "        store.store(key.to_bytes(36), block)\n",
        tmp_path,
    )
    store = Root(str(tmp_path)).open()
    blocks = {sample_block(store.layout, number).tobytes() for number in range(8)}
    assert all(loaded(store, key.to_bytes(36)) in blocks for key in range(keys))
    assert not temporaries(tmp_path)


def test_b6_a_reader_has_a_whole_block_or_none_while_it_is_rewritten(root: Root) -> None:
    layout = opaque(64 << 10)
    writer, reader = root.open(layout), root.open(layout)
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        buffer = bytearray(layout.nbytes)
        while not over.is_set():
            try:
                found = reader.load(KEY, buffer)
            except DamagedBlockError:
                continue  # chunk and document were not one writer's: as good as absent
            if found:
                [value] = set(buffer)  # never of two blocks
                seen.append(value)

    def wait_for_a_read(since: int) -> None:
        until(lambda: len(seen) > since or reading.done())

    local = root.url.startswith(("/", "memory:"))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for turn in range(1000 if local else 100):
                writer.delete(KEY)
                assert writer.store(KEY, bytes([turn % 256]) * layout.nbytes)
                if turn % 50 == 49:
                    wait_for_a_read(len(seen))
        finally:
            over.set()
        reading.result(PATIENCE)
    assert len(set(seen)) > 1


def test_b10_no_name_comes_of_a_time_or_a_process_number(tmp_path: Path) -> None:
    """Two engines whose clocks, numbers and random seeds agree, each killed in a store."""
    code = (
        "import os, random, sys, time\n"
        "from kvstore.testing import Root, sample_block\n"
        "os.getpid = os.getppid = lambda: 7\n"
        "time.time, time.time_ns = lambda: 0.0, lambda: 0\n"
        "random.seed(0)\n"
        "store = Root(sys.argv[1]).open()\n"
        "os.rename = lambda *names: os._exit(9)\n"
        "store.store(bytes(range(36)), sample_block(store.layout))\n"
    )
    Root(str(tmp_path)).open().store(KEY[::-1], sample_block(sample_layout()))
    for engines in (1, 2):
        script(code, tmp_path, ends=9)
        assert len(temporaries(tmp_path)) == engines


# ---- what is there, and what is not


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_b11_what_somebody_else_removed_is_absent(root: Root, known: bool) -> None:
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    reader = root.open()
    if known:
        assert reader.contains(KEY)
    root.remove(document_url(store))
    root.remove(chunk_url(store))
    assert not reader.load(KEY, bytearray(block.nbytes))
    assert not reader.contains(KEY)
    assert reader.counts()["damaged"] == 0
    assert store.store(KEY, block)
    assert loaded(reader) == block.tobytes()


@pytest.mark.parametrize("name", ["chunk", "zarr.json"])
def test_b13_zero_length_objects_are_misses(root: Root, name: str) -> None:
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    url = chunk_url if name == "chunk" else document_url
    root.write(url(store), b"")
    buffer = bytearray(block.nbytes)
    with pytest.raises(DamagedBlockError):
        store.load(KEY, buffer)
    assert not store.contains(KEY)
    assert store.store(KEY, block)
    assert loaded(root.open()) == block.tobytes()


def test_b15_removing_what_is_gone_is_no_error(root: Root) -> None:
    store = root.open()
    store.delete(KEY)
    together = threading.Barrier(2)

    def remove(_: int) -> None:
        together.wait(PATIENCE)
        store.delete(KEY)

    for _ in range(10):
        store.store(KEY, sample_block(store.layout))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(remove, range(2)))  # raises what one of them has raised
        assert not store.contains(KEY)
        assert not store.load(KEY, bytearray(store.layout.nbytes))


def test_b22_another_process_finds_what_was_stored(root: Root) -> None:
    if root.url.startswith("memory:"):
        pytest.skip("memory:// is one process's own")
    code = (
        "import json, sys\n"
        "from kvstore.testing import Root, sample_block\n"
        "store = Root(*json.loads(sys.argv[1])).open()\n"
        "store.store(bytes(range(36)), sample_block(store.layout))\n"
    )
    script(code, json.dumps([root.url, dict(root.storage_options), root.client]))
    store = root.open()
    assert store.contains(KEY)
    assert loaded(store) == sample_block(store.layout).tobytes()


def test_b22_nothing_is_listed_to_find_a_block() -> None:
    storage = Faulty()
    writer = storage.root.open()
    writer.store(KEY, sample_block(writer.layout))
    assert loaded(storage.root.open()) == sample_block(writer.layout).tobytes()
    assert storage.count("get")
    assert not storage.count("list")


# ---- stores that fail


@pytest.mark.parametrize(
    ("nbytes", "limit"),
    [
        pytest.param(1 << 16, 1 << 15, id="in the chunk"),
        pytest.param(1 << 16, 1 << 16, id="in its last bytes"),
        pytest.param(256, 512, id="in the document"),
    ],
)
def test_b14_a_full_disk_leaves_nothing(tmp_path: Path, nbytes: int, limit: int) -> None:
    code = (
        "import resource, signal, sys\n"
        "from kvstore import Layout, StorageError\n"
        "from kvstore.testing import Root, sample_block\n"
        "nbytes, limit = map(int, sys.argv[2:])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "layout = Layout.of_bytes(nbytes, dtype='float16', reason='a test')\n"
        "store, block = Root(sys.argv[1]).open(layout), sample_block(layout)\n"
        "key = bytes(range(36))\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))\n"
        "try:\n"
        "    store.store(key, block)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
        "assert not store.contains(key)\n"
        "assert not list(__import__('pathlib').Path(sys.argv[1]).rglob('c.0'))\n"
        "assert store.store(key, block)\n"
        "assert store.load(key, block.copy())\n"
    )
    printed = script(code, tmp_path, str(nbytes), str(limit))
    assert f"[Errno {errno.EFBIG}]" in printed
    assert not temporaries(tmp_path)


def test_b14_a_quota_that_is_told_at_the_close_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Root(str(tmp_path)).open()
    block = sample_block(store.layout)
    store.store(KEY[:2] + bytes(34), block)  # the fan-out is there
    close = os.close

    def over_quota(descriptor: int) -> None:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        close(descriptor)
        if regular:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", over_quota)
        with pytest.raises(StorageError, match="quota"):
            store.store(KEY, block)
    assert not temporaries(tmp_path)
    assert not store.contains(KEY)
    assert store.store(KEY, block)


def test_b17_while_all_writes_fail_loads_are_served() -> None:
    storage = Faulty()
    store = storage.root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)

    def refuse(request: str, path: str) -> None:
        if request == "put":
            raise OSError(errno.ENOSPC, "no room")

    storage.before = refuse
    for number in range(20):
        with pytest.raises(StorageError, match="no room"):
            store.store(number.to_bytes(36), block)
        assert loaded(store) == block.tobytes()
    storage.before = lambda request, path: None
    assert store.store(bytes(36), block)


def test_b18_a_buffer_that_is_no_whole_block_is_refused(root: Root) -> None:
    """There is no size to set: the layout has it. What is stored has every byte."""
    store = root.open()
    block = sample_block(store.layout)
    for part in (block[:-1], block[: len(block) // 2], b""):
        with pytest.raises(InvalidInputError, match="of one block"):
            store.store(KEY, part)
    assert not store.contains(KEY)
    store.store(KEY, block)
    assert len(root.read(chunk_url(store))) == block.nbytes + 4


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_b16_a_server_by_its_number_without_a_region(
    s3_server: Server, client: ClientName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert s3_server.endpoint.startswith(f"http://{HOST}:")
    store = Root(f"{s3_server.url}/b16-{client}", s3_server.storage_options, client).open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    assert loaded(store) == block.tobytes()
    with pytest.raises(StorageError, match="bucket does not exist"):
        Root("s3://nowhere/kv", s3_server.storage_options, client).open()


# ---- many keys at once

KEYS, SLOTS = 5000, 64


def key_of(number: int) -> bytes:
    """Fan-outs are few, so that the time goes into blocks."""
    return number.to_bytes(32) + bytes(4)


def payload_of(number: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def test_b21_no_key_has_anothers_bytes_whatever_fails() -> None:
    """64 threads, 5000 keys that take turns in 64 rows, and a tenth of requests fail."""
    storage, layout = Faulty(), opaque(1024)
    store = storage.root.open(layout, timeout=2.0)
    rows = np.zeros((SLOTS, layout.nbytes), np.uint8)
    dice, lock = random.Random(0), threading.Lock()

    def fail_at_random(request: str, path: str) -> None:
        with lock:
            unlucky = dice.random() < 0.1
        if unlucky:
            raise dice.choice([ConnectionResetError, TimeoutError, PermissionError])("")

    storage.before = fail_at_random
    mover = ThreadMover(
        Transfer({0: store.blocks}, rows), threads=SLOTS, lookups=1, name="b21"
    )
    runner = JobRunner([mover], deadline=600, grace=600)
    try:
        stored = {
            number
            for number, word in run(runner, "store", rows, fills=True)
            if word not in FAILURES
        }
        served = lost = 0
        for number, word in run(runner, "load", rows, fills=False):
            if word == LOADED:
                assert number in stored
                expected = payload_of(number, layout.nbytes)
                assert (rows[number % SLOTS] == expected).all(), number
                served += 1
            elif word == ABSENT:
                assert number not in stored
            else:
                assert word in FAILURES
                lost += 1
    finally:
        runner.shutdown()
    assert served > KEYS // 4
    assert lost
    assert len(stored) < KEYS


def run(
    runner: JobRunner, operation: Operation, rows: Any, *, fills: bool
) -> Iterator[tuple[int, str]]:
    """One job for each turn of the rows; how each key of it ended."""
    for start in range(0, KEYS, SLOTS):
        numbers = range(start, min(KEYS, start + SLOTS))
        for number in numbers:
            rows[number % SLOTS] = payload_of(number, rows.shape[1]) if fills else 0
        keys, slots = map(key_of, numbers), (number % SLOTS for number in numbers)
        runner.submit(Job(start, operation, tuple(keys), tuple(slots)))
        outcomes: list[Outcome] = ended(runner, 1)
        yield from zip(numbers, outcomes[0].words, strict=True)
