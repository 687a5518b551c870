"""What lies below a local root, and when it was used: system calls, without a look inside.

A link is neither a folder nor a file, and what vanishes meanwhile was never there. A name
is anybody's: none is taken for a pattern, or for anything but a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from stat import S_ISREG
from typing import NamedTuple

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Gone, a file or a link by now, or deeper than any path of ours."""


class Found(NamedTuple):
    """A file that a listing came upon.

    Attributes:
        path: relative to the root.
        nbytes: its length.
        modified: when it was last written or touched, in seconds since the epoch.
    """

    path: str
    nbytes: int
    modified: float


Inside = Callable[[str], Iterable[tuple[str, Found | None]]]
"""What a folder holds, by path: files, and as None folders. A folder ends with `/`."""


def walk(path: str, after: str, inside: Inside) -> Iterator[Found]:
    """Every file below `path` whose path sorts after `after`, in the order of paths.

    Folders that can hold no such path are not looked into. Kept in memory are the names of
    one folder on each level.
    """
    waiting: list[tuple[str, Found | None]] = [(f"{path}/" if path else "", None)]
    while waiting:
        name, found = waiting.pop()
        if found is not None:
            yield found
            continue
        below = (
            entry
            for entry in inside(name)
            if entry[0] > after or (entry[1] is None and after.startswith(entry[0]))
        )
        waiting += sorted(below, key=itemgetter(0), reverse=True)


def files(root: str, path: str, after: str) -> Iterator[Found]:
    """Every file below a folder, as `walk` says; none if it is absent."""
    return walk(path, after, lambda folder: _inside(root, folder))


def folders(root: str, path: str) -> list[str]:
    """The names of the folders directly below a folder, sorted; none if it is absent."""
    start = f"{path}/" if path else ""
    inside = _inside(root, start)
    return sorted(name[len(start) : -1] for name, found in inside if found is None)


def links(root: str, path: str) -> list[str]:
    """The names of the links to folders directly below a folder, sorted; none if it is
    absent. No other function here follows one.
    """
    try:
        with os.scandir(f"{root}/{path}") as entries:
            return sorted(e.name for e in entries if e.is_symlink() and e.is_dir())
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise


def touch(name: str) -> None:
    """Say that a file was used now, if it is there and this user may say so."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        os.utime(name, follow_symlinks=False)


def _inside(root: str, folder: str) -> list[tuple[str, Found | None]]:
    # A list, so that nothing stays open while somebody reads on, or does not.
    # The root itself may be a link, as a mount point often is.
    flags = _FOLDER | os.O_NOFOLLOW if folder else _FOLDER
    try:
        descriptor = os.open(f"{root}/{folder}".rstrip("/") or "/", flags)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise
    inside: list[tuple[str, Found | None]] = []
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    inside.append((f"{name}/", None))
                    continue
                with contextlib.suppress(FileNotFoundError):
                    told = entry.stat(follow_symlinks=False)
                    if S_ISREG(told.st_mode):
                        inside.append((name, Found(name, told.st_size, told.st_mtime)))
    finally:
        os.close(descriptor)
    return inside
