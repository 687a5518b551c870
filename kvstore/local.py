"""Blocks in a local folder: system calls only, so that each can be counted.

A block's folder is built under a temporary name and renamed into place. Temporary names
lie in one folder below the root: beside the namespaces and not inside one, so that no
Zarr tool ever walks into a block that is half written, and of a length that does not
depend on the final name.

All goes through the page cache, so that an engine that restarts reads at memory's speed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import secrets
import shutil
from array import array
from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

TEMPORARY = ".kvstore-tmp"
"""Below a local root: a folder for each process, and in that the temporary names."""

NAMES = 1024
"""Temporary names in one folder, before its process begins another."""

PAGE = 4096
"""Bytes of a first read: more than a block's document has."""

RENAMES = 100
"""How often a block is renamed into place again, while other writers replace it."""

_GET_FLAGS, _SET_FLAGS, _TOP_FOLDER = 0x80086601, 0x40086602, 0x20000
"""`FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS` and `EXT4_TOPDIR_FL`, of linux/fs.h."""

_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def read_into(name: str, buffers: Sequence[memoryview]) -> int:
    """Scatter a file into `buffers`: open, fstat, one read, close.

    Returns:
        The file's length. Unless it is exactly what the buffers hold, nothing is read.
    """
    descriptor = _open(name)
    try:
        length = os.fstat(descriptor).st_size
        if length != sum(buffer.nbytes for buffer in buffers):
            return length
        done = os.preadv(descriptor, buffers, 0)
        while done < length:
            count = os.preadv(descriptor, _rest(buffers, done), done)
            if not count:
                return done  # somebody truncates it
            done += count
    finally:
        os.close(descriptor)
    return length


def read(name: str, limit: int) -> bytes:
    """The first `limit` bytes of a small file: open, read, close."""
    descriptor = _open(name)
    try:
        # A block's document fits into the first read, and a short read of a file is its
        # end; asking for `limit` at once would allocate as much.
        data = os.read(descriptor, min(limit, PAGE))
        if len(data) == PAGE:
            while len(data) < limit and (more := os.read(descriptor, limit - len(data))):
                data += more
    finally:
        os.close(descriptor)
    return data


def _open(name: str) -> int:
    """Open a file to read it, and leave its time of access alone.

    Else the first read of a file also reads, and soon writes, the disk's page of inodes: a
    read that is not cached then takes twice as long.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(name, flags)  # only its owner may ask for that


def write(name: str, parts: Iterable[memoryview | bytes]) -> None:
    """Write a new file whole; a short write continues where it stopped."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666)
    try:
        for part in parts:
            done = os.write(descriptor, part)
            while done < len(part):
                done += os.write(descriptor, memoryview(part)[done:])
    finally:
        os.close(descriptor)


def create(root: str, path: str, data: bytes) -> None:
    """Write a small file whole, unless there is one already.

    The folder that it belongs to is made with it in one step, if it is not there.
    """
    target = f"{root}/{path}"
    if os.path.exists(target):
        return
    scratch = _scratch(root)
    folder, _, name = target.rpartition("/")
    ours = f"{scratch}/{name}"
    try:
        write(ours, (data,))
        os.rename(scratch, folder)
    except OSError as error:
        try:
            if error.errno not in _OCCUPIED:
                raise
            _link(ours, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Give a file a second name, unless the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.replace(source, target)  # the last writer stays


def publish(
    root: str,
    path: str,
    files: Sequence[tuple[str, Iterable[memoryview | bytes]]],
    *,
    replace: bool,
) -> bool:
    """Make a folder of `files` visible at `path` in one step.

    A folder that is there with the last of the files stays, unless it is to be replaced;
    one without it was never committed and makes room. If anything fails, what was there
    is there again.

    Returns:
        Whether it is ours that is there now; False if another writer was first.

    Raises:
        FileNotFoundError: the folder that should hold it does not exist.
    """
    scratch = _scratch(root)
    aside = f"{scratch}-aside"
    target = f"{root}/{path}"
    try:
        for name, parts in files:
            write(f"{scratch}/{name}", parts)
        moved = replace and _set_aside(target, aside)
        ours, in_the_way = _place(scratch, target, aside, mark=files[-1][0])
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(aside, target)
        raise
    if moved or in_the_way:
        _remove(aside)
    return ours


def _place(scratch: str, target: str, aside: str, *, mark: str) -> tuple[bool, bool]:
    """Rename into place. Returns whether it is there, and whether something that was in
    the way was set aside.
    """
    moved = False
    for attempt in range(RENAMES + 1):
        try:
            os.rename(scratch, target)
        except OSError as error:
            if attempt == RENAMES or error.errno not in _OCCUPIED:
                raise
        else:
            break
        if os.path.exists(f"{target}/{mark}"):
            shutil.rmtree(scratch, ignore_errors=True)
            return False, moved  # another writer was first
        # Nobody committed it, so it makes room; or somebody replaces it at this moment.
        if not os.path.exists(aside):
            moved = _set_aside(target, aside) or moved
    return True, moved


def discard(root: str, path: str) -> None:
    """Take a folder away in one step, if it is there; then remove it at leisure."""
    scratch = _scratch(root)
    _set_aside(f"{root}/{path}", f"{scratch}/aside")
    _remove(scratch)


def _set_aside(target: str, aside: str) -> bool:
    """Returns whether there was anything."""
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return False
    return True


def _remove(aside: str) -> None:
    """Remove what was set aside: a folder, or a file where a folder should have been."""
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(aside)


def probe(root: str) -> None:
    """Make the root if it is not there, and prove that it can be written."""
    os.makedirs(root, exist_ok=True)
    scratch = _scratch(root)
    write(f"{scratch}/probe", (b"kvstore",))
    os.unlink(f"{scratch}/probe")
    os.rmdir(scratch)


def _scratch(root: str) -> str:
    """A fresh folder with a temporary name."""
    number = next(_numbers)
    parent = f"{root}/{TEMPORARY}/{_process_name()}-{number // NAMES:x}"
    scratch = f"{parent}/{number:x}"
    while True:
        try:
            os.mkdir(scratch)
        except FileNotFoundError:
            # The first name, or somebody tidied up. If the root is gone this raises.
            _make_parent(parent)
        else:
            return scratch


def _make_parent(parent: str) -> None:
    """Begin a folder of temporary names, in the place of this process's last one."""
    top = parent.rpartition("/")[0]
    try:
        os.mkdir(parent)
    except FileExistsError:
        pass
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(top)
            _spread(top)
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
    _remove_parents(
        other for other in _parents - {parent} if other.rpartition("/")[0] == top
    )
    _parents.add(parent)


def _remove_parents(parents: Iterable[str]) -> None:
    """Those that are empty: another thread may still be in one."""
    for parent in parents:
        with contextlib.suppress(OSError):
            os.rmdir(parent)
            _parents.discard(parent)


_numbers = itertools.count()
_parents: set[str] = set()
"""Folders of temporary names that this process has made: about one for each root."""


@functools.cache
def _process_name() -> str:
    """Random, so that no other process has it, on whichever machine."""
    return secrets.token_hex(8)


os.register_at_fork(after_in_child=_process_name.cache_clear)
os.register_at_fork(after_in_child=_parents.clear)
atexit.register(lambda: _remove_parents(list(_parents)))


def _spread(folder: str) -> None:
    """Ask the filesystem to keep the folders in a folder far apart, where it knows how.

    ext4 gives no inode again for a minute or more after its file was deleted, but passes
    over it at every new file of the same group: beside an eviction, publishing becomes
    several times slower. `chattr +T` lets each folder of temporary names begin in a group
    of its own, which the next `NAMES` blocks then share: a group of its own for each block
    would read the maps of them all.
    """
    flags = array("i", [0])
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        flags[0] |= _TOP_FOLDER
        fcntl.ioctl(descriptor, _SET_FLAGS, flags)
    except OSError as error:
        logger.debug("%s: no such hint here: %s", folder, error)
    finally:
        os.close(descriptor)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What of `buffers` remains after `done` bytes of them."""
    rest = []
    for buffer in buffers:
        rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return [buffer for buffer in rest if buffer.nbytes]
