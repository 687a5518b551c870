"""Which memory other processes can map, and that it is the same memory."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.region import Region, populate
from kvstore.transfer import Rows

PAGE = mmap.PAGESIZE


@pytest.fixture
def path() -> Iterator[Path]:
    """A file of 64 pages in shared memory."""
    path = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(64 * PAGE))
    yield path
    path.unlink(missing_ok=True)


def mapped(path: Path, offset: int = 0, **options: Any) -> Any:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, offset=offset, **options)


def rows_in(memory: Any, offset: int = 0, count: int = 8, nbytes: int = PAGE) -> Rows:
    return np.ndarray((count, nbytes), np.uint8, memory, offset)


def assert_same(rows: Rows) -> None:
    """A second mapping of the region shows what is written to the first."""
    region = Region.of(rows)
    assert region is not None
    try:
        other = region.map()
    finally:
        os.close(region.descriptor)
    assert (other.shape, other.strides) == (rows.shape, rows.strides)
    assert other.ctypes.data != rows.ctypes.data
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    assert (other == rows).all()
    populate(other)
    assert (other == rows).all()
    other[-1, -1] ^= 255
    assert other[-1, -1] == rows[-1, -1]


@pytest.mark.parametrize("where", ["shm", "disk"])
def test_a_mapping_of_a_named_file_is_found(path: Path, tmp_path: Path, where: str) -> None:
    if where == "disk":
        path = tmp_path / "rows"
        path.write_bytes(bytes(64 * PAGE))
    assert_same(rows_in(mapped(path)))


@pytest.mark.parametrize("start", [0, 3 * PAGE], ids=["whole", "part"])
@pytest.mark.parametrize("offset", [0, 2 * PAGE, 100], ids=["0", "two pages", "100"])
def test_rows_at_an_offset_of_a_mapping_at_an_offset(
    path: Path, start: int, offset: int
) -> None:
    assert_same(rows_in(mapped(path, start), offset))


def test_rows_with_strides(path: Path) -> None:
    whole = rows_in(mapped(path), count=16)
    assert_same(whole[::2])
    assert_same(whole[3::4, 100:200])
    assert_same(whole[:1, :7])
    assert not whole[1, 300:].any()  # between the rows nothing was touched


@pytest.mark.parametrize(
    "name", ["with space", "tab\t", "line\nbreak", "\udcff\x85\u2028", "é"]
)
def test_names_of_files_are_any_bytes(path: Path, name: str) -> None:
    odd = path.with_name(f"{path.name}{name}")
    path.rename(odd)
    try:
        rows = rows_in(mapped(odd))
        if "\n" in name:
            assert Region.of(rows) is None  # the kernel does not tell its name
        else:
            assert_same(rows)
        # Other memory is found in spite of it.
        path.write_bytes(bytes(64 * PAGE))
        assert_same(rows_in(mapped(path)))
    finally:
        odd.unlink()


MADV_DONTDUMP, PROT_READ = 16, 1


def system_call(name: str, memory: Any, first: int, count: int, argument: int) -> None:
    """Of pages `first` to `first + count`."""
    start = rows_in(memory).ctypes.data + first * PAGE
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    assert call(ctypes.c_void_p(start), ctypes.c_size_t(count * PAGE), argument) == 0


def pieces(path: Path) -> int:
    maps = Path("/proc/self/maps").read_text(errors="replace")
    return sum(line.endswith(str(path)) for line in maps.splitlines())


def test_a_mapping_that_the_kernel_lists_in_pieces(path: Path) -> None:
    memory = mapped(path)
    system_call("madvise", memory, 2, 3, MADV_DONTDUMP)
    assert pieces(path) == 3
    assert_same(rows_in(memory))
    assert_same(rows_in(memory, 3 * PAGE, 1))
    assert_same(rows_in(memory, 6 * PAGE))


def test_rows_that_may_not_be_written_are_not_found(path: Path) -> None:
    memory = mapped(path)
    system_call("mprotect", memory, 4, 2, PROT_READ)
    assert Region.of(rows_in(memory)) is None
    assert Region.of(rows_in(memory, 5 * PAGE, 1)) is None
    assert_same(rows_in(memory, 6 * PAGE))
    assert_same(rows_in(memory, 0, 4))
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert Region.of(rows_in(view)) is None


def test_private_memory_is_not_found(path: Path) -> None:
    assert Region.of(np.zeros((8, PAGE), np.uint8)) is None
    assert Region.of(rows_in(mapped(path, flags=mmap.MAP_PRIVATE))) is None


def test_shared_memory_without_a_name_is_not_found() -> None:
    assert Region.of(rows_in(mmap.mmap(-1, 64 * PAGE))) is None
    descriptor = os.memfd_create("rows")
    os.ftruncate(descriptor, 64 * PAGE)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    assert Region.of(rows_in(memory)) is None


def test_a_file_that_was_deleted_is_not_found(path: Path) -> None:
    memory = mapped(path)
    path.unlink()
    assert Region.of(rows_in(memory)) is None


def test_another_file_of_the_same_name_is_not_taken_for_it(path: Path) -> None:
    memory = mapped(path)
    other = path.with_suffix(".other")
    other.write_bytes(bytes(64 * PAGE))
    before = len(os.listdir("/proc/self/fd"))
    other.rename(path)
    assert Region.of(rows_in(memory)) is None
    # Even where its name is the one that the kernel shows for what was deleted.
    path.rename(f"{path} (deleted)")
    try:
        assert Region.of(rows_in(memory)) is None
    finally:
        Path(f"{path} (deleted)").unlink()
    assert len(os.listdir("/proc/self/fd")) == before


_TWO_MOUNTS = """
import mmap, os, subprocess, sys
import numpy as np
from pathlib import Path
from kvstore.region import Region

folder, found = Path({folder!r}), []
for _ in range(2):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    (folder / "rows").write_bytes(bytes(64 << 10))
    with (folder / "rows").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    rows = np.ndarray((4, 4096), np.uint8, memory)
    found.append((rows, (folder / "rows").stat().st_ino, Region.of(rows) is not None))
(below, inode, first), (above, other, second) = found
print(inode == other, first, second, Region.of(below) is not None)
"""


def test_a_file_of_the_same_name_and_inode_on_another_mount_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    """Each tmpfs counts its inodes from the start."""
    code = _TWO_MOUNTS.format(folder=str(tmp_path))
    own = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*own, "mount", "-t", "tmpfs", "tmpfs", tmp_path]).returncode:
        pytest.skip("only a user who may mount can do so")
    told = subprocess.run(
        [*own, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert told.split() == ["True", "True", "True", "False"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_is_scarce_is_no_answer(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_in(mapped(path))

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        Region.of(rows)
    number = errno.EACCES
    assert Region.of(rows) is None


def test_two_mappings_side_by_side_are_not_one(path: Path, tmp_path: Path) -> None:
    """Rows must lie in one file, in one order."""
    reserved = mmap.mmap(-1, 16 * PAGE)
    start = rows_in(reserved).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    shared_fixed = mmap.MAP_SHARED | 0x10
    with path.open("r+b") as file:
        for at, offset in ((0, 0), (4 * PAGE, 9 * PAGE)):
            found = libc.mmap(
                ctypes.c_void_p(start + at),
                ctypes.c_size_t(4 * PAGE),
                mmap.PROT_READ | mmap.PROT_WRITE,
                shared_fixed,
                file.fileno(),
                ctypes.c_long(offset),
            )
            assert found == start + at
    assert Region.of(rows_in(reserved)) is None
    assert_same(rows_in(reserved, 0, 4))
    assert_same(rows_in(reserved, 4 * PAGE, 4))
