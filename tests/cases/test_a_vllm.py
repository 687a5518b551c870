"""Reports on vLLM's native KV offload, as far as kvstore's own names show their answer.

docs/cases.md says what was reported for each row, and where.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faulty import Faulty, Gate
from stored import (
    KEY,
    OTHER_KEY,
    child,
    chunk_url,
    copy_block,
    document_url,
    folder,
    loaded,
    run_python,
    said,
    temporaries,
)
from work import Work, ended, job, let_arrive, running, succeeded
from work import key as numbered

from kvstore import (
    Config,
    DamagedBlockError,
    InvalidInputError,
    Layout,
    LayoutMismatchError,
    StorageError,
)
from kvstore.config import Group
from kvstore.job import Job
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root, sample_block, sample_config, sample_layout

V1 = sample_layout(
    axes=("head", "layer", "token", "value"),
    shape=(3, 2, 16, 8),
    runner="v1",
    kv_cache_layout="BHLNC",
)
V2 = sample_layout()


# ---- whose bytes they are


def test_a1_other_runner_at_open(root: Root) -> None:
    """Runner V1's blocks are not opened by V2; the error names what differs."""
    assert V1.nbytes == V2.nbytes
    store = root.open(V1)
    block = sample_block(V1)
    store.store(KEY, block)
    with pytest.raises(LayoutMismatchError) as caught:
        root.open(V2)
    assert {d.field for d in caught.value.differences} > {"axes", "runner"}
    isolated = root.open(V2, on_mismatch="isolate")
    assert isolated.url != store.url
    assert not isolated.contains(KEY)
    assert loaded(isolated) is None
    assert loaded(store) == block.tobytes()


def test_a1_runner_alone(root: Root) -> None:
    """Bytes that are alike in all but the runner are kept apart, too."""
    root.open(sample_layout(runner="v1"))
    with pytest.raises(LayoutMismatchError, match="runner: expected 'v2', found 'v1'"):
        root.open(sample_layout(runner="v2"))


def test_a1_block_copied_from_the_other_runner(root: Root) -> None:
    theirs = root.open(V1)
    theirs.store(KEY, sample_block(V1))
    ours = root.open(V2, on_mismatch="isolate")
    copy_block(root, theirs, KEY, ours, KEY)
    assert not ours.contains(KEY)
    with pytest.raises(DamagedBlockError):
        loaded(root.open(V2, on_mismatch="isolate"))
    assert ours.store(KEY, sample_block(V2, 2))
    assert loaded(ours) == sample_block(V2, 2).tobytes()


def test_a2_rank_major_rows_are_never_agnostic(root: Root) -> None:
    """The claim is refused for a row whose workers' parts follow each other."""
    worker = sample_layout(
        axes=("layer", "head", "token", "value"), shape=(2, 2, 16, 8)
    ).with_workers(2, heads_sharded=True)
    assert worker.axes[0] == "worker"
    for layout in (sample_layout(), worker):
        with pytest.raises(InvalidInputError, match="parallel_agnostic: expected false"):
            root.open(layout, config=sample_config(parallel_agnostic=True))
    one, two = (
        root.open(sample_layout(), config=sample_config(tp_size=tp)) for tp in (1, 2)
    )
    one.store(KEY, sample_block(one.layout))
    assert not two.contains(KEY)
    assert loaded(two) is None


def test_a4_auto_is_no_dtype() -> None:
    with pytest.raises(ValueError, match="auto"):
        sample_config(dtype="auto")
    with pytest.raises(ValueError, match="auto"):
        sample_layout(dtype="auto")


def test_a4_float16_and_bfloat16(root: Root) -> None:
    half, brain = (
        root.open(sample_layout(dtype=dtype), config=sample_config(dtype=dtype))
        for dtype in ("float16", "bfloat16")
    )
    half.store(KEY, sample_block(half.layout))
    assert half.url != brain.url
    assert not brain.contains(KEY)


def test_a6_revisions(root: Root) -> None:
    """Two commits of one repository, a local folder's weights, and an unknown revision."""
    known: list[dict[str, str]] = [
        {"revision": "a" * 40},
        {"revision": "b" * 40},
        {"weights_digest": "0123456789ab"},
        {},
    ]
    stores = [root.open(config=sample_config(**fields)) for fields in known]
    assert len({store.url for store in stores}) == len(known)
    stores[0].store(KEY, sample_block(stores[0].layout))
    assert [store.contains(KEY) for store in stores] == [True, False, False, False]


def test_a8_rows_of_twice_the_size(root: Root) -> None:
    """A block of N bytes is no block of 2N bytes, and stays what it is."""
    small = Layout.of_bytes(4096, dtype="bfloat16", reason="a test")
    large = replace(small, shape=(8192,))
    theirs = root.open(small)
    theirs.store(KEY, sample_block(small))
    with pytest.raises(LayoutMismatchError, match=r"shape: expected \(8192,\)"):
        root.open(large)
    ours = root.open(large, on_mismatch="isolate")
    copy_block(root, theirs, KEY, ours, KEY)
    before = root.files()
    assert not ours.contains(KEY)
    with pytest.raises(DamagedBlockError):
        loaded(root.open(large, on_mismatch="isolate"))
    assert root.files() == before
    assert loaded(theirs) == sample_block(small).tobytes()


def test_a9_one_copy_for_all_is_a_namespace_of_its_own(root: Root) -> None:
    one = sample_config(parallel_agnostic=True, replicated_layout=True, tp_size=2)
    other = sample_config(parallel_agnostic=True, replicated_layout=True, tp_size=4)
    assert one.digest == other.digest
    others = [
        sample_config(),
        sample_config(tp_size=2),
        sample_config(parallel_agnostic=True),
    ]
    assert one.digest not in {config.digest for config in others}
    stores = [root.open(config=config) for config in (one, other)]
    assert stores[0].store(KEY, sample_block(V2))
    assert not stores[1].store(KEY, sample_block(V2))
    assert loaded(stores[1]) == sample_block(V2).tobytes()
    assert not root.open(config=sample_config(tp_size=2)).contains(KEY)


def test_a10_canonical_formats(root: Root) -> None:
    """Rows as they are, and vLLM's two canonical formats, are three namespaces."""
    layout = Layout.of_bytes(4096, dtype="float16", reason="a test")
    stores = [
        root.open(
            layout,
            config=sample_config(
                canonical_format=canonical, parallel_agnostic=canonical is not None
            ),
        )
        for canonical in (None, "v1-nhd", "v1-hnd")
    ]
    assert len({store.url for store in stores}) == 3
    stores[1].store(KEY, sample_block(layout))
    assert [store.contains(KEY) for store in stores] == [False, True, False]


def test_a24_tokens_of_one_group(tmp_path: Path) -> None:
    """The same bytes in all, but another number of tokens in one group's blocks."""

    def config(*tokens: int) -> Config:
        groups = tuple(Group(tokens_per_block=n, layer_names=(f"l{n}",)) for n in (0, 1))
        return sample_config(
            kv_cache_groups=tuple(
                replace(group, tokens_per_block=n)
                for group, n in zip(groups, tokens, strict=True)
            )
        )

    layout = Layout.of_bytes(4096, dtype="float16", reason="a test")
    root = Root(str(tmp_path))
    theirs = root.open(layout, config=config(64, 16))
    theirs.store(KEY, sample_block(layout))
    ours = root.open(layout, config=config(64, 32))
    assert not ours.contains(KEY)
    # Somebody renames the folder: the recorded config is compared as well.
    old, new = (folder(store.url).parents[1] for store in (theirs, ours))
    shutil.rmtree(new)
    old.rename(new)
    with pytest.raises(LayoutMismatchError, match="kv_cache_groups"):
        root.open(layout, config=config(64, 32))


def test_a32_digests_of_every_process_are_equal() -> None:
    """Whatever Python's own hashes start from, and in whichever order fields come."""
    script = (
        "import random\n"
        "from kvstore import Config, Layout\n"
        "from kvstore.paths import namespace_path\n"
        "from kvstore.testing import sample_config, sample_layout\n"
        "def shuffled(value):\n"
        "    items = list(value.to_dict().items())\n"
        "    random.shuffle(items)\n"
        "    return dict(items)\n"
        "config = Config.from_fields(shuffled(sample_config()), where='')\n"
        "layout = Layout.from_dict(shuffled(sample_layout()), where='')\n"
        "print(namespace_path(config), layout.digest)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    printed = {
        run_python(script, **environment, **seed)
        for seed in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"})
    }
    assert len(printed) == 1
    assert sample_config().digest in printed.pop()


def test_a36_layers_of_each_stage(root: Root) -> None:
    """Stages of 21 and 23 layers: each rank's are recorded, and the other's refused."""
    names = tuple(f"model.layers.{n}.attn" for n in range(44))
    stages = [
        sample_layout(layer_names=names[:21], shape=(21, 3, 16, 8)),
        sample_layout(layer_names=names[21:], shape=(23, 3, 16, 8)),
    ]
    for rank, layout in enumerate(stages):
        store = root.open(layout, rank=rank)
        store.store(KEY, sample_block(layout, rank))
    for rank, layout in enumerate(stages):
        assert loaded(root.open(layout, rank=rank)) == sample_block(layout, rank).tobytes()
        with pytest.raises(LayoutMismatchError) as caught:
            root.open(stages[1 - rank], rank=rank)
        assert {d.field for d in caught.value.differences} == {"layer_names", "shape"}


def test_a36_even_stages(root: Root) -> None:
    """Of equal sizes, the names alone tell one stage from the other."""
    root.open(sample_layout(layer_names=("a", "b")), rank=0)
    with pytest.raises(LayoutMismatchError, match="layer_names"):
        root.open(sample_layout(layer_names=("c", "d")), rank=0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda key: key[:-1] + bytes([key[-1] ^ 1]), id="last-byte"),
        pytest.param(lambda key: bytes([key[0] ^ 1]) + key[1:], id="first-byte"),
        pytest.param(lambda key: os.urandom(28) + key[-8:], id="same-low-64-bits"),
        pytest.param(lambda key: key[:8] + os.urandom(28), id="same-high-64-bits"),
        pytest.param(lambda key: key + b"\0", id="longer"),
    ],
)
def test_a42_keys_that_look_alike(root: Root, change: Any) -> None:
    """The whole key counts: salt, adapter and group are in its bytes."""
    store = root.open()
    one = os.urandom(36)
    other = change(one)
    store.store(one, sample_block(store.layout, 1))
    assert not store.contains(other)
    store.store(other, sample_block(store.layout, 2))
    again = root.open()
    assert loaded(again, one) == sample_block(store.layout, 1).tobytes()
    assert loaded(again, other) == sample_block(store.layout, 2).tobytes()
    store.delete(one)
    assert again.contains(other)


def test_a44_another_root_or_prefix_is_a_miss(tmp_path: Path) -> None:
    """Roots that change places give misses, never another block."""
    roots = [Root(str(tmp_path / name)) for name in ("one", "two", "one/below")]
    stores = [root.open() for root in roots]
    stores[0].store(KEY, sample_block(V2, 1))
    stores[1].store(OTHER_KEY, sample_block(V2, 2))
    assert not stores[2].contains(KEY)
    one, two = tmp_path / "one", tmp_path / "two"
    one.rename(tmp_path / "three")
    two.rename(one)
    (tmp_path / "three").rename(two)
    swapped = [root.open() for root in roots[:2]]
    assert [loaded(store, KEY) for store in swapped] == [
        None,
        sample_block(V2, 1).tobytes(),
    ]
    assert [store.contains(OTHER_KEY) for store in swapped] == [True, False]


NAMES = (
    "..",
    ".",
    "/abs",
    "a/../b",
    "../../a",
    "a/",
    "a\\b",
    "~",
    "%2e%2e",
    "*",
    "a b",
    "é",
    "n" * 300,
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name[:10]}")
def test_a45_names_stay_below_the_root(tmp_path: Path, name: str) -> None:
    root = Root(str(tmp_path / "outer" / "kv"))
    store = root.open(config=sample_config(model_name=name))
    store.store(KEY, sample_block(store.layout))
    assert loaded(root.open(config=sample_config(model_name=name))) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["outer"]
    assert [p.name for p in (tmp_path / "outer").iterdir()] == ["kv"]
    folders = [p for p in (tmp_path / "outer" / "kv").iterdir() if p.name != TEMPORARY]
    assert folders == [folder(store.url).parents[1]]


def test_a45_names_are_apart_though_their_folders_look_alike(root: Root) -> None:
    """Also in a bucket, where a name with slashes could be anybody's folder."""
    names = ("a/b", "a_b", "a/b/", "../a_b", "a\\b")
    stores = [root.open(config=sample_config(model_name=name)) for name in names]
    assert len({store.url for store in stores}) == len(names)
    stores[0].store(KEY, sample_block(V2))
    assert [store.contains(KEY) for store in stores] == [True] + [False] * 4
    prefix = stores[0].url[: stores[0].url.index("/a_b_")]
    assert all(store.url.removeprefix(prefix).count("/") == 3 for store in stores)


@pytest.mark.parametrize("name", ["", "a\0b"], ids=["empty", "NUL"])
def test_a45_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="model_name: expected a name"):
        sample_config(model_name=name)


# ---- bytes that are not what they should be


@pytest.mark.parametrize("place", ["first", "middle", "last", "checksum"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a16_one_flipped_bit(root: Root, place: str, codec: Any) -> None:
    """A chunk of the right length with one wrong bit is not loaded; a store repairs it."""
    store = root.open(codec=codec)
    block = sample_block(store.layout, values=16)
    store.store(KEY, block)
    data = bytearray(root.read(chunk_url(store)))
    payload = len(data) - 4
    places = {"first": 0, "middle": payload // 2, "last": payload - 1, "checksum": -1}
    data[places[place]] ^= 1
    root.write(chunk_url(store), bytes(data))
    for reader in (root.open(), store):
        with pytest.raises(DamagedBlockError):
            loaded(reader)
        assert not reader.contains(KEY)
    assert store.store(KEY, block)
    assert loaded(root.open()) == block.tobytes()


def test_a16_blocks_that_changed_places(root: Root) -> None:
    """Valid in themselves, under each other's key: neither is loaded."""
    store = root.open()
    blocks = {KEY: sample_block(V2, 1), OTHER_KEY: sample_block(V2, 2)}
    for key, block in blocks.items():
        store.store(key, block)
    for url in (chunk_url, document_url):
        ours, theirs = url(store, KEY), url(store, OTHER_KEY)
        data, other = root.read(ours), root.read(theirs)
        root.write(ours, other)
        root.write(theirs, data)
    for key in blocks:
        reader = root.open()
        assert not reader.contains(key)
        with pytest.raises(DamagedBlockError):
            loaded(root.open(), key)


def test_a16_chunks_that_changed_places(root: Root) -> None:
    """Each chunk keeps its own checksum: the document must hold as well."""
    store = root.open()
    for seed, key in enumerate((KEY, OTHER_KEY)):
        store.store(key, sample_block(V2, seed))
    ours, theirs = chunk_url(store, KEY), chunk_url(store, OTHER_KEY)
    data, other = root.read(ours), root.read(theirs)
    root.write(ours, other)
    root.write(theirs, data)
    for key in (KEY, OTHER_KEY):
        with pytest.raises(DamagedBlockError):
            loaded(root.open(), key)


SIZES = (512 * 5, 4096 * 3 + 512, 6051, 3_098_112)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a20_sizes_that_no_page_divides(root: Root, nbytes: int) -> None:
    layout = Layout.of_bytes(nbytes, dtype="bfloat16", reason="a test of sizes")
    store, block = root.open(layout), sample_block(layout)
    store.store(KEY, block)
    assert loaded(root.open(layout)) == block.tobytes()


def test_a22_five_groups_after_a_restart(tmp_path: Path) -> None:
    """Each group's blocks are found by a new process, in their own shape."""
    script = (
        "import sys\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "root, action, key = Root(sys.argv[1]), sys.argv[2], bytes(range(32))\n"
        "for group, tokens in enumerate((4, 16, 32, 64, 256)):\n"
        "    layout = sample_layout(shape=(2, 3, tokens, 8), tokens_per_block=tokens)\n"
        "    store = root.open(layout, group=group)\n"
        "    block, buffer = sample_block(layout, group), bytearray(layout.nbytes)\n"
        "    key += group.to_bytes(4, 'big')\n"
        "    if action == 'store':\n"
        "        assert store.store(key, block)\n"
        "    assert store.contains(key) and store.load(key, buffer), group\n"
        "    assert bytes(buffer) == block.tobytes(), group\n"
        "    key = key[:32]\n"
    )
    for action in ("store", "load", "load"):
        run_python(script, str(tmp_path), action)
    shapes = {
        tuple(json.loads((block / "zarr.json").read_bytes())["shape"])
        for block in (chunk.parent for chunk in tmp_path.rglob("c.0.0.0.0"))
    }
    assert len(shapes) == 5


@pytest.mark.parametrize("place", ["tmpfs", "overlay"])
def test_a19_filesystems_without_direct_io(tmp_path: Path, place: str) -> None:
    path = Path("/dev/shm") / f"kvstore-test-{uuid4().hex}"
    if place == "overlay":
        path = tmp_path / "merged"
    path.mkdir()
    mounted = False
    try:
        if place == "overlay":
            mounted = _mount_overlay(tmp_path, path)
        root = Root(str(path / "kv"))
        store, block = root.open(), sample_block(V2)
        store.store(KEY, block)
        assert loaded(root.open()) == block.tobytes()
        root.write(chunk_url(store), bytes(V2.nbytes + 4))
        with pytest.raises(DamagedBlockError):
            loaded(store)
        assert store.store(KEY, block)
        store.delete(KEY)
        assert not store.contains(KEY)
    finally:
        if mounted:
            # This process holds the folder of its temporary names there to its end.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        shutil.rmtree(path)


def _mount_overlay(tmp_path: Path, path: Path) -> bool:
    layers = [tmp_path / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    lower, upper, work = layers
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if done.returncode:
        pytest.skip(f"this user cannot mount an overlay: {done.stderr.strip()}")
    return True


# ---- storage that fails


BACKEND_ERRORS: list[Exception] = [
    OSError(errno.EIO, "Input/output error"),
    KeyError("key"),
    TimeoutError(),
    ValueError("a value"),
    RuntimeError("a backend's own"),
]


@pytest.mark.parametrize("error", BACKEND_ERRORS, ids=lambda e: type(e).__name__)
def test_a13_whatever_a_backend_raises_is_an_error_of_storage(error: Exception) -> None:
    """And neither an absence nor the end of the process; the next call works."""
    faulty = Faulty()
    store = faulty.root.open()
    store.store(KEY, sample_block(V2))

    def fail(request: str, path: str) -> None:
        raise error

    faulty.before = fail
    for call in (
        lambda: store.contains(KEY),
        lambda: loaded(store),
        lambda: store.store(OTHER_KEY, sample_block(V2)),
    ):
        with pytest.raises(StorageError):
            call()
    faulty.before = lambda request, path: None
    assert loaded(store) == sample_block(V2).tobytes()


def test_a14_a_passing_error_deletes_nothing() -> None:
    faulty = Faulty()
    store = faulty.root.open()
    store.store(KEY, sample_block(V2))
    before = faulty.root.files()

    def once(request: str, path: str) -> None:
        if request == "get":
            faulty.before = lambda request, path: None
            raise OSError(errno.EIO, "Input/output error")

    faulty.before = once
    with pytest.raises(StorageError, match="Input/output error"):
        loaded(store)
    assert faulty.root.files() == before
    assert faulty.count("delete", "zarr.json") == 0
    assert store.counts()["damaged"] == 0
    assert loaded(store) == sample_block(V2).tobytes()


def test_a14_a_passing_error_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(str(tmp_path))
    root.open().store(KEY, sample_block(V2))
    for call in ("preadv", "pread", "open"):
        store = root.open()
        with monkeypatch.context() as patch:

            def fail(*arguments: Any) -> int:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, call, fail)
            with pytest.raises(StorageError, match="Input/output error"):
                loaded(store)
        assert folder(chunk_url(store)).stat().st_size == V2.nbytes + 4
        assert loaded(store) == sample_block(V2).tobytes()


def test_a18_opening_lists_nothing() -> None:
    """However many blocks and leftovers there are, no listing is asked for."""
    faulty = Faulty()
    store = faulty.root.open()
    store.store(KEY, sample_block(V2))
    before = len(faulty.seen)
    again = faulty.root.open()
    requests = len(faulty.seen) - before
    for n in range(100):
        key = n.to_bytes(36)
        again.store(key, sample_block(V2))
    before = len(faulty.seen)
    assert loaded(faulty.root.open()) is not None
    assert len(faulty.seen) - before == requests + 2  # the load's own
    assert faulty.count("list") == 0


def test_a18_opening_a_folder_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(str(tmp_path))
    store = root.open()
    store.store(KEY, sample_block(V2))
    for n in range(1000):  # what crashed writers left
        (tmp_path / ".kvstore-tmp" / f"{n:016x}-0" / "0").mkdir(parents=True)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a folder was listed")

    for name in ("listdir", "scandir", "walk"):
        monkeypatch.setattr(os, name, refuse)
    assert loaded(root.open()) == sample_block(V2).tobytes()


def test_a27_what_failed_is_stored_when_it_is_offered_again() -> None:
    faulty = Faulty()
    store = faulty.root.open()
    keys = [bytes([n]) * 36 for n in range(8)]
    failing = [keys[2].hex(), keys[5].hex()]

    def fail(request: str, path: str) -> None:
        if request == "put" and path.split("/")[-2] in failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    faulty.before = fail
    for n, key in enumerate(keys):
        if key.hex() in failing:
            with pytest.raises(StorageError, match="No space"):
                store.store(key, sample_block(V2, n))
        else:
            assert store.store(key, sample_block(V2, n))
    present = [n not in (2, 5) for n in range(8)]
    assert [store.contains(key) for key in keys] == present
    assert [loaded(store, key) is not None for key in keys] == present
    faulty.before = lambda request, path: None
    assert [store.store(key, sample_block(V2, n)) for n, key in enumerate(keys)] == [
        not there for there in present
    ]
    for n, key in enumerate(keys):
        assert loaded(faulty.root.open(), key) == sample_block(V2, n).tobytes()


def test_a28_a_store_under_way_is_no_block_yet() -> None:
    """A miss until it is whole, then a hit; a second store of the key ends well, too."""
    faulty = Faulty()
    store = faulty.root.open()
    gate = Gate(lambda request, path: request == "put" and KEY.hex() in path)
    faulty.before = gate
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(store.store, KEY, sample_block(V2)) for _ in range(2)]
        try:
            for _ in ends:
                assert gate.waiting.acquire(timeout=60)
            assert not store.contains(KEY)
            assert loaded(store) is None
        finally:
            gate.opened.set()
        assert all(end.result(60) in (True, False) for end in ends)
    assert store.contains(KEY)
    assert loaded(faulty.root.open()) == sample_block(V2).tobytes()


# ---- processes that end, and many at once


def test_a33_a_writer_killed_between_two_starts(tmp_path: Path) -> None:
    """What it was writing is a miss, and the next engine starts and stores."""
    script = (
        "import os, sys\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "store = Root(sys.argv[1]).open()\n"
        "block, write = sample_block(store.layout), os.write\n"
        "def dies(descriptor, data):\n"
        "    if len(data) == block.nbytes:\n"
        "        write(descriptor, data[:100])\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return write(descriptor, data)\n"
        "os.write = dies\n"
        "store.store(bytes(range(36)), block)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = Root(str(tmp_path)).open()
    assert not store.contains(KEY)
    assert store.store(KEY, sample_block(V2))
    assert loaded(Root(str(tmp_path)).open()) == sample_block(V2).tobytes()


def test_a33_the_old_process_leaves_the_new_ones_blocks_alone(tmp_path: Path) -> None:
    """An engine that ends late, when its successor is at work under the same root."""
    script = (
        "import sys\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "store = Root(sys.argv[1]).open()\n"
        "store.store(bytes(36), sample_block(sample_layout()))\n"
        "print('stored', flush=True)\n"
        "sys.stdin.read()\n"
    )
    held, went = threading.Event(), threading.Event()
    write = os.write

    def held_up(descriptor: int, data: bytes) -> int:
        if len(data) == V2.nbytes:
            held.set()
            assert went.wait(60)
        return write(descriptor, data)

    with child(script, str(tmp_path)) as old:
        assert said(old) == "stored"
        store = Root(str(tmp_path)).open()
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(os, "write", held_up)
            end = pool.submit(store.store, KEY, sample_block(V2))
            try:
                assert held.wait(60)
                old.communicate("")  # it ends while a block of the new one is half written
            finally:
                went.set()
            assert end.result(60)
        assert old.returncode == 0
    assert loaded(store) == sample_block(V2).tobytes()
    assert store.contains(bytes(36))


def test_a35_replicas_store_one_key_at_once(tmp_path: Path) -> None:
    """Two processes of one namespace: both succeed, one block, no temporary is left."""
    script = (
        "import sys\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "store = Root(sys.argv[1]).open()\n"
        "block = sample_block(store.layout)\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "for n in range(50):\n"
        "    store.store(n.to_bytes(36, 'big'), block)\n"
        "print(store.url)\n"
    )
    with child(script, str(tmp_path)) as one, child(script, str(tmp_path)) as two:
        for replica in (one, two):
            assert said(replica) == "open"
        for replica in (one, two):
            assert replica.stdin
            replica.stdin.write("go\n")
            replica.stdin.flush()
        urls = {replica.communicate()[0] for replica in (one, two)}
        assert (one.returncode, two.returncode) == (0, 0)
    store = Root(str(tmp_path)).open()
    assert urls == {store.url + "\n"}
    for n in range(50):
        assert loaded(store, n.to_bytes(36)) == sample_block(V2).tobytes()
    assert len(list(tmp_path.rglob("c.0.0.0.0"))) == 50
    assert temporaries(tmp_path) == []


def test_a38_loads_in_masses_leave_stores_their_turn() -> None:
    """10,000 keys at once: no more run than there are threads, and a store gets through."""
    work = Work()
    with running(work, threads=3) as runner:
        runner.submit(job(1, *range(10_000)))
        work.wait_for(3)
        assert len(work.calls) == 3
        runner.submit(Job(2, "store", (numbered(20_000),), (0,)))
        let_arrive(runner)
        work.gate.set()
        outcomes = {outcome.job.job_id: outcome for outcome in ended(runner, 2)}
    assert len(succeeded(outcomes[1])) == 10_000
    assert len(succeeded(outcomes[2])) == 1
    operations = [operation for operation, _, _ in work.calls]
    assert operations.index("store") < 100  # while the rest waited


# ---- a disk that does not do its part


def test_a48_too_few_file_descriptors(tmp_path: Path) -> None:
    """Stores and loads may fail while none is left; afterwards all is as before."""
    script = (
        "import resource, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from kvstore import StorageError\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "store = Root(sys.argv[1]).open()\n"
        "block, files = sample_block(store.layout), []\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "def step(n):\n"
        "    key = n.to_bytes(36, 'big')\n"
        "    try:\n"
        "        store.store(key, block)\n"
        "        return store.load(key, bytearray(block.nbytes))\n"
        "    except StorageError as error:\n"
        "        assert 'Too many open files' in str(error), error\n"
        "        return False\n"
        "with ThreadPoolExecutor(32) as pool:\n"
        "    list(pool.map(step, range(200)))\n"
        "    try:\n"
        "        while True:\n"
        "            files.append(open('/dev/null'))\n"
        "    except OSError:\n"
        "        pass\n"
        "    assert not any(pool.map(step, range(200, 400)))\n"
        "    for file in files:\n"
        "        file.close()\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "    assert all(pool.map(step, range(400)))\n"
        "print(store.counts()['damaged'])\n"
    )
    assert run_python(script, str(tmp_path)) == "0\n"


def test_a48_a_root_that_goes_away(tmp_path: Path) -> None:
    """Stores fail, loads miss, and all works again when it is back."""
    root = Root(str(tmp_path / "kv"))
    store = root.open()
    store.store(KEY, sample_block(V2))
    (tmp_path / "kv").rename(tmp_path / "away")
    assert not store.contains(KEY)
    assert loaded(store) is None
    with pytest.raises(StorageError, match="cannot write"):
        store.store(KEY, sample_block(V2))
    (tmp_path / "away").rename(tmp_path / "kv")
    assert loaded(store) == sample_block(V2).tobytes()
    assert store.store(OTHER_KEY, sample_block(V2))


NOBODY = 65534


@pytest.mark.parametrize("owner", ["another", "itself"])
def test_a48_a_root_that_cannot_be_written(owner: str) -> None:
    """Another user's, or its own and read-only: loads work on, stores fail, it lives."""
    privileged = os.geteuid() == 0
    if owner == "another" and not privileged:
        pytest.skip("only root can become another user")
    place = Path(tempfile.mkdtemp(prefix="kvstore-test-"))  # where others may look
    try:
        place.chmod(0o755)
        store = Root(str(place)).open()
        store.store(KEY, sample_block(V2))
        script = (
            "import os, sys\n"
            "from kvstore import StorageAccessError\n"
            "from kvstore.testing import Root, sample_block, sample_layout\n"
            "place, user = sys.argv[1], int(sys.argv[2])\n"
            "store, key = Root(place).open(), bytes(range(36))\n"
            "block = sample_block(store.layout)\n"
            "for folder, _, _ in os.walk(place):\n"
            "    os.chmod(folder, 0o555)\n"
            "    if sys.argv[3] == 'itself':\n"
            "        os.chown(folder, user, -1)\n"
            "os.seteuid(user)\n"
            "buffer = bytearray(block.nbytes)\n"
            "assert store.contains(key) and store.load(key, buffer)\n"
            "assert bytes(buffer) == block.tobytes()\n"
            "try:\n"
            "    store.store(bytes(36), block)\n"
            "except StorageAccessError as error:\n"
            "    print(error)\n"
            "assert not store.contains(bytes(36))\n"
            "assert not store.store(key, block)\n"
            "try:\n"
            "    Root(place).open()\n"
            "except StorageAccessError as error:\n"
            "    print(error)\n"
        )
        user = NOBODY if privileged else os.geteuid()
        first, second = run_python(script, str(place), str(user), owner).splitlines()
        assert first.startswith("cannot write file://")
        assert "Permission denied" in first
        assert second.startswith("cannot write below file://")
    finally:
        for path, _, _ in os.walk(place):
            os.chmod(path, 0o755)
        shutil.rmtree(place)
