"""What the kernel says of this process, its worker processes, and the page cache."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def descendants() -> Iterator[int]:
    """Every living process that this one started, or one of those did."""
    todo = [os.getpid()]
    while todo:
        process = todo.pop()
        for task in _listed(f"/proc/{process}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{process}/task/{task}/children").read_text()
                children = [int(child) for child in text.split()]
                yield from children
                todo += children


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def cpu_seconds(leave_out: frozenset[int] = frozenset()) -> float:
    """CPU time of this process and of its workers, the ended ones included.

    Args:
        leave_out: processes that are not workers: a server, say.
    """
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for process in descendants():
        if process not in leave_out:
            with suppress(OSError):
                stat = Path(f"/proc/{process}/stat").read_text()
                fields = stat.rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def private_memory(leave_out: frozenset[int] = frozenset()) -> int:
    """Bytes of memory that this process and its workers have for themselves.

    The primary tier, which all of them map, is not counted.
    """
    processes = [os.getpid(), *descendants()]
    return sum(_anonymous(p) for p in processes if p not in leave_out)


def _anonymous(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def flush(folder: Path) -> None:
    """Bring all that was written to the folder's filesystem to its device."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(descriptor)


def drop_caches(folder: Path) -> str:
    """Make the next read of the folder's files come from the device.

    Returns:
        How: the whole page cache where this process may, else file by file, which
        leaves names and inodes cached.
    """
    flush(folder)
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        evict(folder)
        return "posix_fadvise(DONTNEED) on every file"
    return "drop_caches"


def evict(folder: Path) -> None:
    """Take the folder's files, and no others, out of the page cache."""
    flush(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
