"""Listing, removal in numbers, and touching: on every backend, by each client."""

import os
import threading
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from proxy import counted
from servers import Server

from kvstore import StorageAccessError
from kvstore.fsspec_client import _found
from kvstore.listing import Found
from kvstore.survey import Survey, stored_blocks
from kvstore.testing import Root
from kvstore.upkeep import Upkeep

NAMES = ("c.0.0", "zarr.json")
BLOCKS = ("n/r0/g0/a3f/a3f1", "n/r0/g0/a3f/a3f2", "n/r0/g0/b00/b001", "o/r0/g0/a3f/a3f1")
PATHS = sorted(f"{block}/{name}" for block in BLOCKS for name in NAMES)


def opened(root: Root) -> Upkeep:
    filesystem = Upkeep(root.url, root.storage_options, client=root.client)
    filesystem.probe()
    return filesystem


def fill(filesystem: Upkeep, blocks: Sequence[str] = BLOCKS) -> None:
    for folder in {block.rpartition("/")[0] for block in blocks}:
        # A local one is made with its document.
        filesystem.create(f"{folder}/zarr.json", b"{}")

    def publish(block: str) -> None:
        parts = (NAMES[0], [b"12345"]), (NAMES[1], [b"{}"])
        filesystem.publish(block, parts, replace=False)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(publish, blocks))


@pytest.fixture
def filled(root: Root) -> Upkeep:
    """Two namespaces, three fan-outs, four blocks."""
    filesystem = opened(root)
    if filesystem.local:
        for folder in ("n/r0/g0", "o/r0/g0"):
            os.makedirs(f"{root.url}/{folder}")
    fill(filesystem)
    return filesystem


def paths(filesystem: Upkeep, path: str = "", after: str = "") -> list[str]:
    found = filesystem.files(path, after=after)
    return [file.path for file in found if file.path.count("/") == 5]


# ---- folders and files


def test_every_file_is_listed_in_order_with_its_size_and_time(filled: Upkeep) -> None:
    found = list(filled.files(""))
    assert all(isinstance(file, Found) for file in found)
    assert [file.path for file in found] == sorted(file.path for file in found)
    assert [file.path for file in found if file.path.count("/") == 5] == PATHS
    assert {file.nbytes for file in found} == {5, 2}
    assert all(abs(file.modified - time.time()) < 600 for file in found)


def test_a_folder_is_listed_alone(filled: Upkeep) -> None:
    assert paths(filled, "n/r0/g0/a3f") == PATHS[:4]
    assert paths(filled, "o") == PATHS[6:]
    assert list(filled.files("n/r0/g0/a3")) == []  # a name's beginning is no folder
    assert list(filled.files("absent/folder")) == []


def test_a_listing_goes_on_after_a_path(filled: Upkeep) -> None:
    for n, path in enumerate(PATHS):
        assert paths(filled, after=path) == PATHS[n + 1 :]
    assert paths(filled, after="n/r0/g0/a3f/a3f1/d") == PATHS[1:]  # it need not be there
    assert paths(filled, "n/r0/g0/b00", after=PATHS[0]) == PATHS[4:6]
    assert paths(filled, "n/r0/g0/b00", after=PATHS[-1]) == []


def test_folders_are_named_and_files_are_not(filled: Upkeep) -> None:
    assert filled.folders("") == ["n", "o"]
    assert filled.folders("n/r0/g0") == ["a3f", "b00"]
    assert filled.folders("n/r0/g0/a3f") == ["a3f1", "a3f2"]
    assert filled.folders("n/r0/g0/a3f/a3f1") == []
    assert filled.folders("absent") == []


def test_what_is_new_is_listed_at_once(filled: Upkeep) -> None:
    assert filled.folders("n/r0/g0/a3f") == ["a3f1", "a3f2"]
    fill(filled, ["n/r0/g0/a3f/a3f3"])
    assert filled.folders("n/r0/g0/a3f") == ["a3f1", "a3f2", "a3f3"]
    assert len(paths(filled, "n/r0/g0/a3f")) == 6


def test_nothing_lies_below_a_fresh_root(root: Root) -> None:
    filesystem = opened(root)
    assert filesystem.folders("") == []
    assert list(filesystem.files("")) == []


def test_temporary_files_are_not_listed(filled: Upkeep, root: Root) -> None:
    if filled.local:
        os.makedirs(f"{root.url}/.kvstore-tmp/p")
        Path(f"{root.url}/.kvstore-tmp/p/left").write_bytes(b"x")
    else:
        root.write(f"{root.url}/.kvstore-tmp/left", b"x")
    assert filled.folders("") == ["n", "o"]
    assert not any("kvstore-tmp" in file.path for file in filled.files(""))


ODD = ("with space/ä/%41?#", "a*b[c]/q", "a.txt", "ctl\x01\n/x", "+&=/~")


def test_odd_names_come_out_as_they_are(filled: Upkeep, root: Root) -> None:
    for name in ODD:
        if filled.local:
            target = Path(root.url, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"theirs")
        else:
            root.write(f"{root.url}/{name}", b"theirs")
    found = {file.path for file in filled.files("")}
    assert found >= {*ODD, *PATHS}
    assert {name.partition("/")[0] for name in ODD if "/" in name} < set(filled.folders(""))


def test_more_than_one_page(root: Root) -> None:
    filesystem = opened(root)
    if filesystem.local:
        os.makedirs(f"{root.url}/n/r0/g0")
    many = [f"n/r0/g0/a3f/{n:04x}" for n in range(1100)]
    fill(filesystem, many)
    wanted = [f"{block}/{name}" for block in many for name in NAMES]
    assert paths(filesystem) == wanted
    assert paths(filesystem, after=wanted[1050]) == wanted[1051:]
    removed, problem = filesystem.delete_many([(block, NAMES) for block in many[:1050]])
    assert (removed, problem) == (many[:1050], None)
    assert paths(filesystem) == wanted[2100:]


# ---- removal


def test_many_blocks_are_removed(filled: Upkeep) -> None:
    absent = "n/r0/g0/b00/b009"
    asked = [BLOCKS[0], absent, BLOCKS[2]]
    assert filled.delete_many([(path, NAMES) for path in asked]) == (asked, None)
    assert paths(filled) == PATHS[2:4] + PATHS[6:]
    assert filled.delete_many([]) == ([], None)


def test_documents_go_before_chunks(s3_server: Server) -> None:
    with counted(s3_server.endpoint) as requests:
        options = {**s3_server.storage_options, "endpoint_url": requests.endpoint}
        filesystem = Upkeep(f"{s3_server.url}/order", options, client="fsspec")
        fill(filesystem)
        requests.take()
        filesystem.delete_many([(path, NAMES) for path in BLOCKS])
        seen = [request.rpartition("/")[2] for request in requests.take()]
    assert seen == ["zarr.json"] * 4 + ["c.0.0"] * 4


def test_s3_deletes_in_bulk(s3_server: Server) -> None:
    with counted(s3_server.endpoint) as requests:
        options = {**s3_server.storage_options, "endpoint_url": requests.endpoint}
        filesystem = Upkeep(f"{s3_server.url}/bulk", options)
        fill(filesystem)
        requests.take()
        filesystem.delete_many([(path, NAMES) for path in BLOCKS])
        assert [request.partition(" ")[0] for request in requests.take()] == ["POST"] * 2


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_failure_removes_nothing_and_is_told(s3_server: Server, client: str) -> None:
    root = Root(f"{s3_server.url}/refused", s3_server.storage_options, client)  # type: ignore[arg-type]  # one of two
    fill(opened(root))
    wrong = {**s3_server.storage_options, "secret": "another-secret"}
    refused = Upkeep(root.url, wrong, client=root.client, timeout=5)
    removed, problem = refused.delete_many([(path, NAMES) for path in BLOCKS])
    assert removed == []
    assert isinstance(problem, StorageAccessError)
    assert "another-secret" not in str(problem)
    assert paths(opened(root)) == PATHS
    with pytest.raises(StorageAccessError):
        list(refused.files(""))
    with pytest.raises(StorageAccessError):
        refused.folders("")


# ---- touching


def test_a_touched_block_is_younger(filled: Upkeep, root: Root) -> None:
    path = f"{BLOCKS[0]}/zarr.json"

    def modified() -> float:
        [time] = [f.modified for f in filled.files(BLOCKS[0]) if f.path == path]
        return time

    if filled.local:
        os.utime(f"{root.url}/{path}", (1, 1))
    before = modified()
    deadline = time.monotonic() + 20
    while modified() <= before:  # some tell whole seconds
        assert time.monotonic() < deadline
        filled.touch(BLOCKS[0], b"{}")
    assert filled.read(path, 100) == b"{}"


def test_touching_what_is_absent_is_no_failure(tmp_path: Path) -> None:
    Upkeep(tmp_path).touch("n/r0/g0/a3f/gone", b"{}")
    assert list(tmp_path.iterdir()) == []


# ---- folders of this machine


def test_a_link_is_neither_folder_nor_file(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside, root / "n"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    (root / "linked").symlink_to(outside)
    (root / "n/self").symlink_to(root)
    (root / "n/file2").symlink_to(outside / "file")
    (tmp_path / "name").symlink_to(root)
    os.mkfifo(root / "n/pipe")
    for url in (root, tmp_path / "name"):  # the root itself may be one
        filesystem = Upkeep(url)
        assert filesystem.folders("") == ["n"]
        assert [file.path for file in filesystem.files("")] == ["n/file"]
        assert list(filesystem.files("linked")) == []
        assert filesystem.folders("linked") == []


def test_names_that_are_no_text_and_deep_trees(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    deep = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):  # of a path that no system call takes
        os.mkdir("d" * 250, dir_fd=deep)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    found = [file.path for file in Upkeep(tmp_path).files("")]
    assert found == [os.fsdecode(b"\xff\xfe")]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir(mode=0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # to whom pytest's folders are closed too
    try:
        with pytest.raises(StorageAccessError):
            list(Upkeep(tmp_path).files(""))
        with pytest.raises(StorageAccessError):
            Upkeep(tmp_path).folders("n")
    finally:
        os.seteuid(user)


def test_what_vanishes_meanwhile_was_never_there(tmp_path: Path) -> None:
    filesystem = Upkeep(tmp_path)
    for n in range(3):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}/file").write_bytes(b"x")
    found = filesystem.files("")
    assert next(found).path == "0/file"
    (tmp_path / "1/file").unlink()
    (tmp_path / "1").rmdir()
    assert [file.path for file in found] == ["2/file"]


def test_listing_beside_writers_and_removers(tmp_path: Path) -> None:
    filesystem = Upkeep(tmp_path)
    (tmp_path / "n/r0/g0").mkdir(parents=True)
    fill(filesystem, BLOCKS[:3])
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            fill(filesystem, ["n/r0/g0/a3f/churn"])
            filesystem.delete("n/r0/g0/a3f/churn", NAMES)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            found = [path for path in paths(filesystem) if "churn" not in path]
            assert found == PATHS[:6]
    finally:
        ended.set()
        thread.join()


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    def peak(folders: int) -> int:
        for n in range(folders):
            (tmp_path / f"{n}").mkdir(exist_ok=True)
            for m in range(100):
                (tmp_path / f"{n}/{m}").touch()
        tracemalloc.start()
        try:
            assert sum(1 for _ in Upkeep(tmp_path).files("")) == folders * 100
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)
    few = peak(10)
    assert peak(80) < 2 * few


def test_a_listing_that_is_given_up_holds_nothing_open(tmp_path: Path) -> None:
    """Nor does one that nobody reads to its end, however long somebody keeps it."""
    filesystem = opened(Root(str(tmp_path)))
    os.makedirs(tmp_path / "n/r0/g0")
    fill(filesystem, BLOCKS[:3])
    before = os.listdir("/proc/self/fd")
    survey = Survey(filesystem)
    for _ in range(3):
        survey.stripe(1)
    found = filesystem.files("")
    assert next(found).path == PATHS[0]
    assert os.listdir("/proc/self/fd") == before
    blocks = stored_blocks(filesystem, "n/r0/g0", 0xA3F, 0xB00)
    assert next(blocks).path == BLOCKS[0]
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(RuntimeError, match="a reader said so"):
        blocks.throw(RuntimeError("a reader said so"))
    assert next(found).path == PATHS[1]


# ---- backends that tell less


def test_a_backend_without_times_is_refused_in_words() -> None:
    with pytest.raises(OSError, match="time of change"):
        _found("a/b", {"name": "a/b", "size": 3, "type": "file"})
    told = {"size": 3, "updated": "2026-01-01T00:00:00.5Z"}
    assert _found("a/b", told) == Found("a/b", 3, 1767225600.5)
