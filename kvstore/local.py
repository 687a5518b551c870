"""Blocks in a local folder: system calls only, so that each can be counted.

A block's folder is built under a temporary name and renamed into place. Temporary names
lie in one folder below the root: beside the namespaces and not inside one, so that no
Zarr tool ever walks into a block that is half written, and of a length that does not
depend on the final name.

All goes through the page cache, so that an engine that restarts reads at memory's speed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence

from kvstore.scratch import fresh, remove

PAGE = 4096
"""Bytes of a first read: more than a block's document has."""

RENAMES = 100
"""How often a block is renamed into place again, while other writers replace it."""

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_NO_FSYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What file systems answer that keep no folders to be written."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What is no file, whoever put it into the place of one."""


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
        # end; asking for `limit` at once would allocate as much. A pipe has no offset.
        data = os.pread(descriptor, min(limit, PAGE), 0)
        if len(data) == PAGE:
            while len(data) < limit:
                more = os.pread(descriptor, limit - len(data), len(data))
                if not more:
                    break
                data += more
    finally:
        os.close(descriptor)
    return data


def _open(name: str) -> int:
    """Open a file to read it. What is no file is not followed nor waited for.

    The time of access is left alone. Else the first read of a file also reads, and soon
    writes, the disk's page of inodes: a read that is not cached then takes twice as long.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(name, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(name, flags)  # only its owner may ask for that


def kind(name: str) -> str | None:
    """What lies in the place of a file; None if it is a file, or nobody can tell."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(name).st_mode))
    except OSError:
        return None


def write(name: str, parts: Iterable[memoryview | bytes], *, fsync: bool = False) -> None:
    """Write a new file whole; a short write continues where it stopped."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666)
    try:
        for part in parts:
            done = os.write(descriptor, part)
            while done < len(part):
                done += os.write(descriptor, memoryview(part)[done:])
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_folder(name: str) -> None:
    """Write the names in a folder to the disk, and wait for it."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)


def create(root: str, path: str, data: bytes, *, fsync: bool = False) -> None:
    """Write a small file whole, unless there is one already.

    The folder that it belongs to is made with it in one step, if it is not there. With
    `fsync` both are on the disk before they have their names, and these at the return.
    """
    target = f"{root}/{path}"
    if os.path.lexists(target):
        return
    scratch = fresh(root)
    folder, _, name = target.rpartition("/")
    ours = f"{scratch}/{name}"
    try:
        write(ours, (data,), fsync=fsync)
        if fsync:
            _fsync_folder(scratch)
        os.rename(scratch, folder)
    except OSError as error:
        try:
            if error.errno not in _OCCUPIED:
                raise
            _link(ours, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if fsync:
            _fsync_folder(folder)
    if fsync:
        _fsync_folder(folder.rpartition("/")[0])


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
    fsync: bool = False,
) -> bool:
    """Make a folder of `files` visible at `path` in one step.

    With `fsync` all is on the disk before it gets its name, and the name at the return.

    A folder that is there with the last of the files stays, unless it is to be replaced;
    one without it was never committed and makes room. If anything fails, what was there
    is there again.

    Returns:
        Whether it is ours that is there now; False if another writer was first.

    Raises:
        FileNotFoundError: the folder that should hold it does not exist.
    """
    scratch = fresh(root)
    aside = f"{scratch}-aside"
    target = f"{root}/{path}"
    try:
        for name, parts in files:
            write(f"{scratch}/{name}", parts, fsync=fsync)
        if fsync:
            _fsync_folder(scratch)
        moved = replace and _set_aside(target, aside)
        ours, in_the_way = _place(scratch, target, aside, mark=files[-1][0])
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(aside, target)
        raise
    if moved or in_the_way:
        _remove(aside)
    if fsync and ours:
        _fsync_folder(target.rpartition("/")[0])
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


def discard(root: str, path: str, names: Sequence[str]) -> None:
    """Remove files from a folder, the last name first, and the folder if it is empty then.

    It is the folder that is there now: one that a writer puts into its place meanwhile
    stays whole. A link in the place of it, or of a folder above it, is an error: what lies
    behind is not ours.
    """
    with contextlib.suppress(FileNotFoundError), _folders_below(root, path) as folders:
        *_, above, folder = folders
        for name in reversed(names):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder)
        with contextlib.suppress(OSError):  # more lies there, and is not ours
            os.rmdir(path.rpartition("/")[2], dir_fd=above)


@contextlib.contextmanager
def _folders_below(root: str, path: str) -> Iterator[list[int]]:
    """Descriptors of the root, of a folder below it and of all between, reached through no
    link but the root.
    """
    folders = [os.open(root, _FOLDER)]
    try:
        for name in path.split("/"):
            folders.append(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folders[-1]))
        yield folders
    finally:
        for descriptor in folders:
            os.close(descriptor)


def _set_aside(target: str, aside: str) -> bool:
    """Returns whether there was anything."""
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return False
    return True


def _remove(aside: str) -> None:
    """Remove what was set aside: a folder, or a file where a folder should have been."""
    remove(aside)
    with contextlib.suppress(OSError):
        os.unlink(aside)


def probe(root: str) -> None:
    """Make the root if it is not there, and prove that it can be written."""
    os.makedirs(root, exist_ok=True)
    scratch = fresh(root)
    write(f"{scratch}/probe", (b"kvstore",))
    os.unlink(f"{scratch}/probe")
    os.rmdir(scratch)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What of `buffers` remains after `done` bytes of them."""
    rest = []
    for buffer in buffers:
        rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return [buffer for buffer in rest if buffer.nbytes]
