"""Blocks in a local folder: system calls only, so that each can be counted.

A block's folder is built under a temporary name and renamed into place. Temporary names
lie in one folder below the root: beside the namespaces and not inside one, so that no
Zarr tool ever walks into a block that is half written, and of a length that does not
depend on the final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

TEMPORARY = ".kvstore-tmp"
"""The folder of temporary names below a local root."""

_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def read_into(name: str, buffers: Sequence[memoryview]) -> int:
    """Scatter a file into `buffers`: open, read, close.

    Returns:
        The file's length, counted no further than one byte more than the buffers hold.
    """
    pending = [*buffers, memoryview(bytearray(1))]
    total = 0
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while pending and (count := os.readv(descriptor, pending)):
            total += count
            pending = _advance(pending, count)
    finally:
        os.close(descriptor)
    return total


def read(name: str, limit: int) -> bytes:
    """The first `limit` bytes of a small file."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    data = b""
    try:
        while len(data) < limit and (more := os.read(descriptor, limit - len(data))):
            data += more
    finally:
        os.close(descriptor)
    return data


def write(name: str, parts: Sequence[memoryview | bytes]) -> None:
    """Write a new file whole; a short write continues where it stopped."""
    pending = [memoryview(part) for part in parts]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666)
    try:
        while pending:
            pending = _advance(pending, os.writev(descriptor, pending))
    finally:
        os.close(descriptor)


def create(root: Path, path: str, data: bytes) -> None:
    """Write a small file whole, unless there is one already."""
    target = root / path
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    scratch = _scratch(root, folder=False)
    try:
        write(str(scratch), (data,))
        os.link(scratch, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.replace(scratch, target)  # the last writer stays
    finally:
        scratch.unlink(missing_ok=True)


def publish(
    root: Path,
    path: str,
    files: Sequence[tuple[str, Sequence[memoryview | bytes]]],
    *,
    replace: bool,
) -> None:
    """Make a folder of `files` visible at `path` in one step.

    A folder that is there with the last of the files stays, unless it is to be replaced;
    one without it was never committed and makes room. If anything fails, what was there
    is there again.

    Raises:
        FileNotFoundError: the folder that should hold it does not exist.
    """
    scratch = _scratch(root, folder=True)
    aside = scratch.with_name(f"{scratch.name}-aside")
    target = root / path
    try:
        for name, parts in files:
            write(f"{scratch}/{name}", parts)
        moved = replace and _set_aside(target, aside)
        moved = _place(scratch, target, aside, mark=files[-1][0]) or moved
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(aside, target)
        raise
    if moved:
        _remove(aside)


def _place(scratch: Path, target: Path, aside: Path, *, mark: str) -> bool:
    """Rename into place. Returns whether something that was in the way was set aside."""
    try:
        os.rename(scratch, target)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        if (target / mark).exists():
            shutil.rmtree(scratch, ignore_errors=True)
            return False  # another writer was first
        _set_aside(target, aside)
        os.rename(scratch, target)
        return True
    return False


def discard(root: Path, path: str) -> None:
    """Take a folder away in one step, if it is there; then remove it at leisure."""
    aside = _scratch(root, folder=False)
    if _set_aside(root / path, aside):
        _remove(aside)


def _set_aside(target: Path, aside: Path) -> bool:
    """Returns whether there was anything."""
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return False
    return True


def _remove(aside: Path) -> None:
    """Remove what was set aside: a folder, or a file where a folder should have been."""
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        aside.unlink()


def probe(root: Path) -> None:
    """Make the root if it is not there, and prove that it can be written."""
    root.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(root, folder=False)
    write(str(scratch), (b"kvstore",))
    scratch.unlink()


def _scratch(root: Path, *, folder: bool) -> Path:
    """A fresh temporary name, made as a folder if asked."""
    scratch = root / TEMPORARY / secrets.token_hex(8)
    try:
        if folder:
            scratch.mkdir()
        else:
            scratch.parent.mkdir(exist_ok=True)
    except FileNotFoundError:
        scratch.parent.mkdir(exist_ok=True)
        scratch.mkdir()
    return scratch


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What of `buffers` remains after `count` bytes of them."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if count else buffers
