"""Who may only read, and who removes: rows D20 and D22 of docs/cases.md."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import forks, script
from faulty import Faulty
from servers import READER_KEY, Server
from stored import KEY, loaded
from work import PATIENCE

from kvstore import BlockStore, InvalidInputError, StorageError
from kvstore.collector import Collected, Collector, Limits
from kvstore.filesystem import ClientName
from kvstore.testing import Root, sample_block
from kvstore.upkeep import Upkeep


def with_a_block(root: Root) -> BlockStore:
    store = root.open()
    store.store(KEY, sample_block(store.layout))
    return store


# ---- who may only read


def test_d20_a_store_that_only_reads_refuses_to_write_and_loads(root: Root) -> None:
    with_a_block(root)
    files = root.files()
    store = root.open(read_only=True)
    block = sample_block(store.layout)
    for write in (lambda: store.store(bytes(36), block), lambda: store.delete(KEY)):
        with pytest.raises(InvalidInputError, match="was opened with read_only"):
            write()
    assert loaded(store) == block.tobytes()
    assert not store.contains(bytes(36))
    assert root.files() == files


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_d20_who_has_no_right_to_write_opens_and_loads(
    client: ClientName, s3_server: Server
) -> None:
    writers = Root(f"{s3_server.url}/d20-{client}", s3_server.storage_options, client)
    with_a_block(writers)
    options = s3_server.storage_options | {"key": READER_KEY}
    store = Root(writers.url, options, client).open(read_only=True)
    assert loaded(store) == sample_block(store.layout).tobytes()


# ---- who removes


def test_d22_a_block_may_be_removed_by_two_at_once(tmp_path: Path) -> None:
    store = Root(str(tmp_path)).open()
    for number in range(50):
        store.store(number.to_bytes(36), sample_block(store.layout))
    forks(
        2,
        "def work(number):\n"
        "    store = Root(sys.argv[1]).open()\n"
        "    for key in range(50):\n"
        "        store.delete(key.to_bytes(36))\n",
        tmp_path,
    )
    assert not any(store.contains(number.to_bytes(36)) for number in range(50))
    assert not list(tmp_path.rglob("c.0*"))


def test_d22_a_removal_that_was_killed_half_way_has_removed(tmp_path: Path) -> None:
    store = with_a_block(Root(str(tmp_path)))
    code = (
        "import os, sys\n"
        "from kvstore.testing import Root\n"
        "unlink = os.unlink\n"
        "def last(name, **where):\n"
        "    unlink(name, **where)\n"
        "    if name == 'zarr.json':\n"
        "        os._exit(9)\n"
        "os.unlink = last\n"
        "Root(sys.argv[1]).open().delete(bytes(range(36)))\n"
    )
    script(code, tmp_path, ends=9)
    assert [path.name for path in tmp_path.rglob("c.0*")]
    assert not store.contains(KEY)
    assert not store.load(KEY, bytearray(store.layout.nbytes))
    assert store.store(KEY, sample_block(store.layout))


def test_d22_a_removal_that_failed_half_way_has_removed() -> None:
    """In an object store the document, which commits a block, goes first."""
    storage = Faulty()
    store = with_a_block(storage.root)

    def fail(request: str, path: str) -> None:
        if request == "delete" and path.endswith("/c.0.0.0.0"):
            raise ConnectionResetError("half way")

    storage.before = fail
    with pytest.raises(StorageError, match="half way"):
        store.delete(KEY)
    storage.before = lambda request, path: None
    assert not store.contains(KEY)
    assert not store.load(KEY, bytearray(store.layout.nbytes))
    store.delete(KEY)
    assert not [name for name in storage.root.files() if KEY.hex() in name]


def test_d22_two_may_evict_the_same_blocks(root: Root) -> None:
    """Each removes what it has found; what the other one has removed is no failure."""
    store = root.open()
    block = sample_block(store.layout)
    keys = [number.to_bytes(36) for number in range(40)]
    for key in keys:
        store.store(key, block)
    together = threading.Barrier(2)

    def evict(_: int) -> Collected:
        upkeep = Upkeep(root.url, root.storage_options, client=root.client)
        collector = Collector(upkeep, Limits(1, None, 1e9), [store.path])
        together.wait(PATIENCE)
        return collector.collect()

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(evict, range(2)))
    assert [end.problem for end in ends] == [None, None]
    assert set(ends[0].keys) | set(ends[1].keys) == set(keys)
    fresh = root.open()
    assert not any(fresh.contains(key) for key in keys)
    assert not [name for name in root.files() if any(key.hex() in name for key in keys)]
    assert store.store(KEY, block)
    assert loaded(store) == block.tobytes()
