"""What lies under a URL, without an engine."""

import json
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore import FormatError, InvalidInputError, StorageError
from kvstore import testing as kit
from kvstore.offline import Root, Within
from kvstore.offline.group import shares_of
from kvstore.offline.journal import Journal
from kvstore.offline.shares import WIDTH, Share, Unfinished, run
from kvstore.offline.sizes import Measure, Sizes, estimate
from kvstore.paths import block_path
from kvstore.records import Record
from kvstore.testing import sample_block

KEYS = [bytes([number]) * 36 for number in range(40)]


def opened(root: kit.Root, url: str | None = None) -> Root:
    return Root(url or root.url, root.storage_options, client=root.client)


@pytest.fixture
def filled(root: kit.Root) -> kit.Root:
    store = root.open()
    for number, key in enumerate(KEYS):
        store.store(key, sample_block(store.layout, number))
    return root


def test_every_part_can_be_named(filled: kit.Root) -> None:
    store = filled.open()
    namespace = store.path.partition("/")[0]
    parts = {
        "": Within(),
        f"/{namespace}": Within(namespace),
        f"/{namespace}/r0": Within(namespace, 0),
        f"/{store.path}": Within(namespace, 0, 0),
        f"/{store.path}/{block_path(KEYS[7])}": Within(namespace, 0, 0, KEYS[7]),
    }
    for path, within in parts.items():
        found = opened(filled, filled.url + path)
        assert found.within == within
        assert found.within.path == path.lstrip("/")
        assert found.filesystem.url == opened(filled).filesystem.url
        assert [group.path for group in found.groups()] == [store.path]


def test_a_fan_out_is_no_part(filled: kit.Root) -> None:
    store = filled.open()
    with pytest.raises(InvalidInputError, match="block"):
        opened(filled, f"{store.url}/070")
    with pytest.raises(InvalidInputError, match="key: expected"):
        opened(filled, f"{store.url}/070/07")


def test_nothing_is_there(root: kit.Root) -> None:
    assert list(opened(root).groups()) == []
    assert opened(root).namespaces() == []
    for path in ("", "/model_0123456789ab/r0", "/model_0123456789ab/r0/g0"):
        found = opened(root, root.url + path)
        assert list(found.places()) == []
        with pytest.raises(InvalidInputError, match=f"found none at '.*{path}'"):
            found.require_places()


def test_a_namespace_is_known_by_its_ranks_too(filled: kit.Root) -> None:
    store = filled.open()
    namespace = store.path.partition("/")[0]
    for document in (None, b"{", b'{"zarr_format": 3, "node_type": "group"}'):
        path = f"{filled.url}/{namespace}/zarr.json"
        filled.remove(path) if document is None else filled.write(path, document)
        found = opened(filled, f"{filled.url}/{namespace}")
        assert found.within == Within(namespace)
        assert [place.path for place in found.places()] == [store.path]


@pytest.mark.parametrize("name", ["r0", "kv", "kv/r7"])
def test_a_root_may_have_any_name_and_a_document_of_its_own(
    root: kit.Root, name: str
) -> None:
    below = root.below(name)
    store = below.open()
    for document in (None, b'{"zarr_format": 3, "node_type": "group"}', b"?"):
        if document is not None:
            below.write(f"{below.url}/zarr.json", document)
        found = opened(below)
        assert found.within == Within()
        assert [group.path for group in found.groups()] == [store.path]


def test_a_group_tells_what_is_recorded_and_gives_its_blocks(filled: kit.Root) -> None:
    store = filled.open()
    [group] = opened(filled).groups()
    assert (group.config, group.layout, group.url) == (
        store.config,
        store.layout,
        store.url,
    )
    blocks = list(group.blocks())
    assert [block.key for block in blocks] == KEYS
    assert group.load(KEYS[3]) == sample_block(store.layout, 3).tobytes()
    assert group.load(b"\xff" * 36) is None
    facts = group.facts(KEYS[3])
    assert facts.problem is None
    assert facts.nbytes == blocks[3].nbytes
    assert facts.url == store.block_url(KEYS[3])
    assert group.facts(b"\xff" * 36).problem == "absent"


def test_a_group_pickles(filled: kit.Root) -> None:
    if filled.url.startswith("memory"):
        pytest.skip("no other process sees it")
    [group] = pickle.loads(pickle.dumps(list(opened(filled).groups())))
    assert [block.key for block in group.blocks()] == KEYS


def test_a_document_that_cannot_be_read_hides_no_other_group(filled: kit.Root) -> None:
    store = filled.open(group=1)
    filled.write(f"{store.url}/zarr.json", b"{")
    root = opened(filled)
    first, second = root.places()
    assert root.read_group(first).group == 0
    with pytest.raises(FormatError, match="JSON"):
        root.read_group(second)


def test_sizes_are_those_of_the_files(filled: kit.Root) -> None:
    root = opened(filled)
    [place] = root.places()
    sizes, exact = estimate(root.filesystem, place.path)
    assert exact
    shares = shares_of(root.filesystem, place.path)
    measured = sum(map(Measure(root.filesystem), shares), Sizes())
    assert measured == sizes
    assert (sizes.blocks, sizes.halves) == (len(KEYS), 0)
    read = sum(
        len(filled.read(f"{filled.open().block_url(key)}/{name}"))
        for key in KEYS
        for name in ("zarr.json", "c.0.0.0.0")
    )
    assert sizes.nbytes == read


# ---- work in shares


def test_shares_cover_what_is_there_and_begin_at_fixed_places(filled: kit.Root) -> None:
    root = opened(filled)
    [place] = root.places()
    shares = shares_of(root.filesystem, place.path)
    assert all(share.first % WIDTH == 0 == share.stop % WIDTH for share in shares)
    found = [
        block.key
        for group in root.groups()
        for share in shares
        for block in group.blocks(share.first, share.stop)
    ]
    assert found == KEYS


SHARES = [Share("group", start, start + 1) for start in range(20)]


def test_no_more_than_so_many_are_under_way() -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def task(share: Share) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        threading.Event().wait(0.01)
        with lock:
            under_way -= 1
        return share.first

    asked = 0

    def shares() -> object:
        nonlocal asked
        for share in SHARES:
            asked += 1
            yield share

    done = []
    with ThreadPoolExecutor(8) as pool:
        for _, result in run(task, shares(), pool, ahead=3):  # type: ignore[arg-type]
            done.append(result)
            assert asked <= len(done) + 3
    assert sorted(done) == [share.first for share in SHARES]
    assert most <= 3


def test_an_error_ends_all() -> None:
    seen = []

    def task(share: Share) -> None:
        seen.append(share.first)
        if share.first == 2:
            raise ValueError("two")

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="two"):
        list(run(task, SHARES, pool, ahead=4))
    assert len(seen) < len(SHARES)


def test_what_was_done_is_told_before_the_error() -> None:
    barrier = threading.Barrier(3)

    def task(share: Share) -> int:
        barrier.wait(10)
        if share.first == 0:
            raise ValueError("zero")
        threading.Event().wait(0.1)  # the error comes first
        if share.first == 1:
            raise Unfinished(-1, OSError("one"))
        return share.first

    done: list[int] = []
    with ThreadPoolExecutor(3) as pool, pytest.raises(ValueError, match="zero"):
        done.extend(result for _, result in run(task, SHARES, pool, ahead=3))
    assert sorted(done) == [-1, 2]


def test_what_was_done_of_a_share_is_told_before_its_error() -> None:
    def task(share: Share) -> int:
        raise pickle.loads(pickle.dumps(Unfinished(7, OSError("no network"))))

    done: list[int] = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="no network"):
        done.extend(result for _, result in run(task, SHARES[:1], pool, ahead=1))
    assert done == [7]


@dataclass(frozen=True, slots=True)
class Count(Record):
    blocks: int


ABOUT = {"work": "count", "url": "file:///kv"}


def test_a_journal_recalls_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, ABOUT, Count) as journal:
        assert journal.recall(SHARES[0]) is None
        journal.add(SHARES[0], Count(3))
        journal.add(SHARES[1], Count(4))
    with path.open("ab") as file:
        file.write(b'{"share": {"group"')  # torn by a crash
    with Journal(path, ABOUT, Count) as journal:
        found = [journal.recall(share) for share in SHARES[:3]]
        assert found == [Count(3), Count(4), None]
        journal.add(SHARES[2], Count(5))
    with Journal(path, ABOUT, Count) as journal:
        assert journal.recall(SHARES[2]) == Count(5)
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("content", [b"x", b"x\n", b"[]\n", b'{"work": 1}\n', b"\xff\n"])
def test_what_is_no_journal_of_this_work_is_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match="journal"):
        Journal(path, ABOUT, Count)
    assert path.read_bytes() == content


def test_a_journal_is_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # of zeros, and no disk has as many
    os.mkfifo(tmp_path / "pipe")
    for other in (path, tmp_path / "pipe", Path("/dev/full"), Path("/dev/zero")):
        with pytest.raises(InvalidInputError, match="or no file yet, found"):
            Journal(other, ABOUT, Count)


@pytest.mark.parametrize("room", [3, 10])
def test_a_journal_on_a_full_disk_is_an_error_of_storage(room: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    soft, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, ABOUT, Count) as journal:
        journal.add(SHARES[0], Count(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, most))
        try:
            with pytest.raises(StorageError, match="File too large"):
                journal.add(SHARES[1], Count(4))
            journal.__exit__()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, most))
    with Journal(path, ABOUT, Count) as journal:
        assert [journal.recall(share) for share in SHARES[:2]] == [Count(3), None]


def test_a_journal_of_another_work_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, ABOUT, Count):
        pass
    with pytest.raises(InvalidInputError, match="url: expected 'file:///other', found"):
        Journal(path, ABOUT | {"url": "file:///other"}, Count)
