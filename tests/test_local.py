"""Blocks in a folder, by system calls: every way a file can be read, and two writers."""

import errno
import fcntl
import itertools
import mmap
import os
import shutil
import subprocess
import sys
import threading
import uuid
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.local import (
    PAGE,
    create,
    discard,
    probe,
    publish,
    read,
    read_into,
)
from kvstore.scratch import TEMPORARY

TRAILER = 4


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """One on each kind of filesystem."""
    if request.param == "disk":
        yield tmp_path
        return
    folder = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def written(folder: Path, nbytes: int) -> tuple[str, bytes]:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    path = folder / "chunk"
    path.write_bytes(data)
    return str(path), data


def evict(name: str, first: int = 0, length: int = 0) -> None:
    """Out of the page cache, from `first` on."""
    descriptor = os.open(name, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def buffers(nbytes: int, offset: int) -> list[memoryview]:
    """A payload that begins `offset` bytes after a page's start, and a trailer."""
    memory = memoryview(mmap.mmap(-1, nbytes + offset + PAGE))
    return [memory[offset : offset + nbytes], memoryview(bytearray(TRAILER))]


@pytest.mark.parametrize("nbytes", [1, 1000, PAGE, 6051, 64 << 10, (1 << 20) + 512])
@pytest.mark.parametrize("cached", ["all", "none", "beginning", "end"])
@pytest.mark.parametrize("offset", [0, 1, 512, PAGE])
def test_a_file_is_read_wherever_it_is_and_wherever_it_goes(
    folder: Path, nbytes: int, cached: str, offset: int
) -> None:
    name, data = written(folder, nbytes + TRAILER)
    half = nbytes // 2 // PAGE * PAGE
    if cached != "all":
        evict(name, half if cached == "beginning" else 0, half if cached == "end" else 0)
    payload, trailer = buffers(nbytes, offset)
    assert read_into(name, [payload, trailer]) == len(data)
    assert bytes(payload) + bytes(trailer) == data


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("change", [-TRAILER - PAGE, -1, 1, PAGE])
def test_a_file_of_another_length_is_not_read(
    folder: Path, cached: bool, change: int
) -> None:
    name, _ = written(folder, 2 * PAGE + TRAILER + change)
    if not cached:
        evict(name)
    payload, trailer = buffers(2 * PAGE, 0)
    assert read_into(name, [payload, trailer]) == 2 * PAGE + TRAILER + change
    assert not any(payload)


def test_an_empty_file_has_no_bytes(folder: Path) -> None:
    name, _ = written(folder, 0)
    assert read_into(name, buffers(PAGE, 0)) == 0


def test_a_file_that_is_not_there_raises(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_into(str(folder / "chunk"), buffers(PAGE, 0))


@pytest.mark.parametrize("left", [0, 1, PAGE, 3 * PAGE + 100, 8 * PAGE + 1])
def test_a_file_that_is_cut_while_it_is_read_is_too_short(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    name, _ = written(folder, 8 * PAGE + TRAILER)
    read = os.preadv

    def cut_first(*arguments: Any) -> int:
        os.truncate(name, left)
        done: int = read(*arguments)
        return done

    monkeypatch.setattr(os, "preadv", cut_first)
    assert read_into(name, buffers(8 * PAGE, 0)) == left


def test_no_file_stays_open(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for nbytes in (PAGE, 6051):
        name, _ = written(folder, nbytes)
        evict(name)
        read_into(name, buffers(PAGE, 0))
        read_into(name, buffers(nbytes - TRAILER, 0))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_read_leaves_the_time_of_access_alone(folder: Path) -> None:
    name, data = written(folder, PAGE + TRAILER)
    os.utime(name, (0, 1))  # older than its change, so that a usual read would set it
    assert read_into(name, buffers(PAGE, 0)) == len(data)
    assert read(name, 2 * PAGE) == data
    assert os.stat(name).st_atime == 0


def test_a_file_of_another_owner_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = written(folder, PAGE + TRAILER)
    usual = os.open

    def refuse(name: str, flags: int) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return usual(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert read(name, 2 * PAGE) == data
    assert read_into(name, buffers(PAGE, 0)) == len(data)


# ---- the folder of temporary names


def test_what_is_made_is_spread_where_the_filesystem_can(tmp_path: Path) -> None:
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True)
    if not kind.startswith("ext"):
        pytest.skip(f"tmp_path is no ext4 but {kind}")
    probe(str(tmp_path))
    flags = array("i", [0])
    descriptor = os.open(tmp_path / TEMPORARY, os.O_RDONLY)
    fcntl.ioctl(descriptor, 0x80086601, flags)
    os.close(descriptor)
    assert flags[0] & 0x20000  # what `lsattr` shows as T


def test_a_filesystem_that_cannot_spread_serves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    before = os.listdir("/proc/self/fd")
    probe(str(tmp_path))
    create(str(tmp_path), "a/zarr.json", b"data")
    assert nothing_temporary(tmp_path)
    locked = 1  # the folder of temporary names
    assert len(os.listdir("/proc/self/fd")) <= len(before) + locked


def test_a_process_begins_another_folder_and_removes_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.scratch.NAMES", 3)
    seen = set()
    for number in range(9):
        create(str(tmp_path), f"{number}/zarr.json", b"data")
        [folder] = (tmp_path / TEMPORARY).iterdir()
        seen.add(folder.name)
    assert len(seen) in (3, 4)  # the counter is the process's
    assert nothing_temporary(tmp_path)


def test_temporary_folders_that_somebody_removed_are_made_again(tmp_path: Path) -> None:
    create(str(tmp_path), "a/zarr.json", b"data")
    for removed in (next((tmp_path / TEMPORARY).iterdir()), tmp_path / TEMPORARY):
        shutil.rmtree(removed)
        publish(str(tmp_path), f"a/{removed.name}", [("c", [b"data"])], replace=False)
        assert (tmp_path / "a" / removed.name / "c").read_bytes() == b"data"
        shutil.rmtree(tmp_path / TEMPORARY)
        create(str(tmp_path), f"{removed.name}/zarr.json", b"data")
        assert (tmp_path / removed.name / "zarr.json").read_bytes() == b"data"


def test_a_process_that_ends_leaves_no_temporary_folder(tmp_path: Path) -> None:
    code = "import sys; from kvstore.local import create; create(sys.argv[1], 'a/b', b'')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "a/b").exists()
    assert list((tmp_path / TEMPORARY).iterdir()) == []


# ---- create


def nothing_temporary(root: Path) -> bool:
    return not list((root / TEMPORARY).glob("*/*"))


def test_a_file_is_made_with_its_folder(tmp_path: Path) -> None:
    create(str(tmp_path), "a/zarr.json", b"first")
    create(str(tmp_path), "a/zarr.json", b"second")
    create(str(tmp_path), "a/b/zarr.json", b"below")
    assert (tmp_path / "a" / "zarr.json").read_bytes() == b"first"
    assert (tmp_path / "a" / "b" / "zarr.json").read_bytes() == b"below"
    assert nothing_temporary(tmp_path)


@pytest.mark.parametrize("content", [None, "other"], ids=["empty", "with another file"])
def test_a_file_is_made_in_a_folder_that_is_there(
    tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "a").mkdir()
    if content:
        (tmp_path / "a" / content).touch()
    create(str(tmp_path), "a/zarr.json", b"data")
    assert (tmp_path / "a" / "zarr.json").read_bytes() == b"data"
    assert not content or (tmp_path / "a" / content).exists()
    assert nothing_temporary(tmp_path)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_file_is_made_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other").touch()
    create(str(tmp_path), "a/zarr.json", b"data")
    assert (tmp_path / "a" / "zarr.json").read_bytes() == b"data"
    assert nothing_temporary(tmp_path)


def test_another_failure_to_link_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other").touch()
    with pytest.raises(OSError, match="full"):
        create(str(tmp_path), "a/zarr.json", b"data")
    assert not (tmp_path / "a" / "zarr.json").exists()
    assert nothing_temporary(tmp_path)


def at_once(call: Callable[[int], Any], count: int = 4) -> list[Any]:
    together = threading.Barrier(count)

    def run(number: int) -> Any:
        together.wait()
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_of_several_that_make_one_file_one_stays_whole(tmp_path: Path) -> None:
    for turn in range(20):
        path = f"{turn}/zarr.json"

        def make(number: int, path: str = path) -> None:
            create(str(tmp_path), path, bytes([number]) * 9000)

        at_once(make)
        found = (tmp_path / path).read_bytes()
        assert found in [bytes([number]) * 9000 for number in range(4)]
        assert os.listdir(tmp_path / str(turn)) == ["zarr.json"]
    assert nothing_temporary(tmp_path)


# ---- publish


def files(number: int, nbytes: int = 9000) -> Any:
    data = bytes([number]) * nbytes
    return (("c.0", [data[:100], memoryview(data)[100:]]), ("zarr.json", [data]))


def whole(folder: Path) -> int:
    """Which writer's block it is; every file must be that one's."""
    [number] = {*(folder / "c.0").read_bytes(), *(folder / "zarr.json").read_bytes()}
    return int(number)


def test_the_first_block_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    assert publish(str(tmp_path), "block", files(1), replace=False) is True
    assert publish(str(tmp_path), "block", files(2), replace=False) is False
    assert whole(tmp_path / "block") == 1
    assert publish(str(tmp_path), "block", files(3), replace=True) is True
    assert whole(tmp_path / "block") == 3
    assert nothing_temporary(tmp_path)


@pytest.mark.parametrize("replace", [False, True])
def test_of_several_that_publish_one_block_one_stays_whole(
    tmp_path: Path, replace: bool
) -> None:
    for turn in range(20):

        def put(number: int, path: str = str(turn)) -> bool:
            return publish(str(tmp_path), path, files(number), replace=replace)

        ours = at_once(put)
        assert any(ours)
        if not replace:
            assert ours == [number == whole(tmp_path / str(turn)) for number in range(4)]
        assert whole(tmp_path / str(turn)) in range(4)
    assert nothing_temporary(tmp_path)


@pytest.mark.parametrize("what", ["file", "folder", "chunk"])
def test_what_is_no_block_makes_room(tmp_path: Path, what: str) -> None:
    target = tmp_path / "block"
    if what == "file":
        target.write_bytes(b"x")
    else:
        target.mkdir()
        (target / ("c.0" if what == "chunk" else "other")).write_bytes(b"x")
    assert publish(str(tmp_path), "block", files(1), replace=False)
    assert sorted(os.listdir(target)) == ["c.0", "zarr.json"]
    assert nothing_temporary(tmp_path)


def failing() -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("replace", [False, True])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, replace: bool) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    broken = (("c.0", failing()), ("zarr.json", [b""]))
    with pytest.raises(OSError, match="full"):
        publish(str(tmp_path), "block", broken, replace=replace)
    assert whole(tmp_path / "block") == 1
    assert nothing_temporary(tmp_path)


def test_a_replacement_that_cannot_be_placed_puts_back_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    rename, calls = os.rename, itertools.count()

    def second_fails(source: str, target: str) -> None:
        if next(calls) == 1:
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="broken"):
        publish(str(tmp_path), "block", files(2), replace=True)
    assert whole(tmp_path / "block") == 1
    assert nothing_temporary(tmp_path)


def test_a_block_whose_folder_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        publish(str(tmp_path), "fan/block", files(1), replace=False)
    assert nothing_temporary(tmp_path)


NAMES = [name for name, _ in files(1)]


def test_discarding_is_whole_and_may_be_repeated(tmp_path: Path) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    discard(str(tmp_path), "block", NAMES)
    discard(str(tmp_path), "block", NAMES)
    assert not (tmp_path / "block").exists()
    assert nothing_temporary(tmp_path)


def test_discarding_leaves_what_others_have_put_there(tmp_path: Path) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    (tmp_path / "block" / "mine").mkdir()
    (tmp_path / "block" / "mine" / "notes").write_text("mine")
    discard(str(tmp_path), "block", NAMES)
    discard(str(tmp_path), "block", NAMES)
    assert [path.name for path in (tmp_path / "block").iterdir()] == ["mine"]
    assert (tmp_path / "block" / "mine" / "notes").read_text() == "mine"


@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_a_block_that_is_put_into_the_place_of_one_that_goes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another writer comes when the document is gone, or when both files are."""
    publish(str(tmp_path), "block", files(1), replace=False)
    usual = getattr(os, call)
    calls: list[str] = []

    def interrupted(name: str, **options: Any) -> None:
        if call == "rmdir" or calls == [NAMES[-1]]:
            monkeypatch.setattr(os, call, usual)
            assert publish(str(tmp_path), "block", files(2), replace=False)
        calls.append(name)
        usual(name, **options)

    monkeypatch.setattr(os, call, interrupted)
    discard(str(tmp_path), "block", NAMES)
    assert whole(tmp_path / "block") == 2
    assert calls == ([*reversed(NAMES)] if call == "unlink" else ["block"])
    assert nothing_temporary(tmp_path)


def test_nothing_is_discarded_behind_a_link(tmp_path: Path) -> None:
    publish(str(tmp_path), "theirs", files(1), replace=False)
    (tmp_path / "block").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotADirectoryError):
        discard(str(tmp_path), "block", NAMES)
    assert whole(tmp_path / "theirs") == 1


def test_a_link_in_the_place_of_a_file_is_discarded_and_not_followed(
    tmp_path: Path,
) -> None:
    (tmp_path / "block").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "block" / NAMES[0]).symlink_to(tmp_path / "victim")
    discard(str(tmp_path), "block", NAMES)
    assert not (tmp_path / "block").exists()
    assert (tmp_path / "victim").read_text() == "mine"


# ---- fsync


class Order:
    """What was written to the disk and renamed, in order, of real files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, ...]] = []
        self._usual: dict[str, Any] = {}
        for name in ("fsync", "rename", "link", "replace"):
            self._usual[name] = getattr(os, name)
            monkeypatch.setattr(os, name, getattr(self, name))

    def fsync(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        entries = sorted(os.listdir(name)) if os.path.isdir(name) else os.stat(name).st_size
        self._usual["fsync"](descriptor)
        self.seen.append(("fsync", Path(name).name, str(entries)))

    def rename(self, source: str, target: str) -> None:
        self._usual["rename"](source, target)
        self.seen.append(("rename", Path(source).name, Path(target).name))

    def link(self, source: str, target: str) -> None:
        self._usual["link"](source, target)
        self.seen.append(("link", Path(source).name, Path(target).name))

    def replace(self, source: str, target: str) -> None:
        raise AssertionError("os.replace")


def test_a_block_is_on_the_disk_before_it_has_a_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(str(tmp_path), "fan/zarr.json", b"")
    order = Order(monkeypatch)
    assert publish(str(tmp_path), "fan/block", files(1), replace=False, fsync=True)
    [(_, number, _)] = [seen for seen in order.seen if seen[0] == "rename"]
    assert order.seen == [
        ("fsync", "c.0", "9000"),
        ("fsync", "zarr.json", "9000"),
        ("fsync", number, "['c.0', 'zarr.json']"),
        ("rename", number, "block"),
        ("fsync", "fan", "['block', 'zarr.json']"),
    ]
    order.seen.clear()
    assert publish(str(tmp_path), "fan/block", files(2), replace=True, fsync=True)
    kinds = [seen[0] for seen in order.seen]
    assert kinds == ["fsync", "fsync", "fsync", "rename", "rename", "fsync"]
    assert whole(tmp_path / "fan/block") == 2
    assert not publish(str(tmp_path), "fan/block", files(3), replace=False, fsync=True)


def test_a_document_is_on_the_disk_before_it_has_a_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(str(tmp_path))
    order = Order(monkeypatch)
    create(str(tmp_path), "a/zarr.json", b"data", fsync=True)
    [number] = [seen[1] for seen in order.seen if seen[0] == "rename"]
    assert order.seen == [
        ("fsync", "zarr.json", "4"),
        ("fsync", number, "['zarr.json']"),
        ("rename", number, "a"),
        ("fsync", tmp_path.name, "['.kvstore-tmp', 'a']"),
    ]
    (tmp_path / "b" / "other").mkdir(parents=True)
    order.seen.clear()
    create(str(tmp_path), "b/zarr.json", b"data", fsync=True)
    assert order.seen[2:] == [
        ("link", "zarr.json", "zarr.json"),
        ("fsync", "b", "['other', 'zarr.json']"),
        ("fsync", tmp_path.name, "['.kvstore-tmp', 'a', 'b']"),
    ]


def test_nothing_waits_for_the_disk_unless_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(monkeypatch)
    create(str(tmp_path), "fan/zarr.json", b"")
    publish(str(tmp_path), "fan/block", files(1), replace=False)
    publish(str(tmp_path), "fan/block", files(1), replace=True)
    assert "fsync" not in [seen[0] for seen in order.seen]


def failing_fsync(monkeypatch: pytest.MonkeyPatch, code: int, *, of_folders: bool) -> None:
    usual = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}") == of_folders:
            raise OSError(code, os.strerror(code))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_folders_that_cannot_be_fsynced_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    failing_fsync(monkeypatch, code, of_folders=True)
    create(str(tmp_path), "fan/zarr.json", b"", fsync=True)
    assert publish(str(tmp_path), "fan/block", files(1), replace=False, fsync=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("replace", [False, True])
def test_files_that_cannot_be_fsynced_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, replace: bool
) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    failing_fsync(monkeypatch, code, of_folders=False)
    for path in ("block", "other"):
        with pytest.raises(OSError, match=os.strerror(code)):
            publish(str(tmp_path), path, files(2), replace=replace, fsync=True)
    assert whole(tmp_path / "block") == 1
    assert not (tmp_path / "other").exists()
    assert nothing_temporary(tmp_path)


def test_a_name_that_cannot_be_fsynced_is_a_failure_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(str(tmp_path), "block", files(1), replace=False)
    usual = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        publish(str(tmp_path), "block", files(2), replace=True, fsync=True)
    assert whole(tmp_path / "block") == 2  # a reader sees it, the disk may not have it
    assert nothing_temporary(tmp_path)
