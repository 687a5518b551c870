"""Temporary names: folders in which blocks are built, and the sweep of what was left.

They lie in one folder below a root, in it a folder for each process, and in that a number
for each block. A process holds a shared `flock` on its folder for as long as it uses it.
The kernel takes the lock back however the process ends, so a lock that is free tells that
the writer is dead. The folder's name says by which boot of which machine it was made: of
others' locks a kernel knows nothing, and there only age tells.

Locking: `_lock` is held while a folder is begun, and guards what is written to `_folders`
and `_held`. `sweep` needs no lock of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

TEMPORARY = ".kvstore-tmp"
"""Below a local root: a folder for each process, and in that the temporary names."""

NAMES = 1024
"""Temporary names in one folder, before its process begins another."""

ROOTS = 64
"""Roots in which a process keeps a folder, and with it an open file."""

ABANDONED_SECONDS = 86_400
"""Age of a folder whose lock tells nothing before it counts as left: no write takes a day,
and no two machines' clocks are a day apart."""

_NAME = re.compile(r"(?:([0-9a-f]{8})-)?[0-9a-f]{16}-[0-9a-f]+")
"""A process's folder: boot, process, number. One without a boot is of a release that took
no lock."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GET_FLAGS, _SET_FLAGS, _TOP_FOLDER = 0x80086601, 0x40086602, 0x20000
"""`FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS` and `EXT4_TOPDIR_FL`, of linux/fs.h."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder of temporary names, and the number from which another one is used."""

    path: str
    end: int


_numbers = itertools.count()
_begun = itertools.count()
_lock = threading.Lock()
_folders: dict[str, _Folder] = {}
"""The folder that is used now, by root."""
_held: dict[str, int] = {}
"""Descriptors that hold locks, by folder: those in use, and those that other threads have
not left yet."""


def fresh(root: str) -> str:
    """Make an empty folder whose name nobody else has, below the absolute path `root`."""
    while True:
        number, folder = next(_numbers), _folders.get(root)
        if folder is None or number >= folder.end:
            folder = _begin(root, folder)
        scratch = f"{folder.path}/{number:x}"
        try:
            os.mkdir(scratch)
        except FileNotFoundError:
            # Another thread has begun another folder, or a sweeper was faster than our
            # lock, or somebody tidied up. If the root is gone this raises.
            _begin(root, folder)
        else:
            return scratch


def _begin(root: str, last: _Folder | None) -> _Folder:
    """Begin a folder in the place of `last`, unless another thread has done so."""
    with _lock:
        current = _folders.get(root)
        if current is not None and current is not last:
            return current
        top = f"{root}/{TEMPORARY}"
        descriptor = None
        while descriptor is None:  # a sweeper may take a folder before it is locked
            path = f"{top}/{_process_name()}-{next(_begun):x}"
            descriptor = _make(path)
        _held[path] = descriptor
        _folders.pop(root, None)  # the oldest stays first
        folder = _folders[root] = _Folder(path, next(_numbers) + NAMES)
        if len(_folders) > ROOTS:
            del _folders[next(iter(_folders))]
        in_use = {folder.path for folder in _folders.values()}
        _leave([other for other in _held if other not in in_use])
        return folder


def _make(path: str) -> int | None:
    """Make a folder and lock it. Returns what holds the lock; None if it was swept."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        top = path.rpartition("/")[0]
        with contextlib.suppress(FileExistsError):
            os.mkdir(top)
            _spread(top)
        os.mkdir(path)
    try:
        descriptor = os.open(path, _FOLDER_FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        logger.debug("%s: no locks here: %s", path, error)
    return descriptor  # if it was swept before it was locked, its first name tells


def _leave(folders: Iterable[str]) -> None:
    """Remove folders and let their locks go, but for those that a thread is still in."""
    for folder in folders:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            pass  # somebody tidied up
        except OSError:
            continue
        os.close(_held.pop(folder))


@functools.cache
def _process_name() -> str:
    """Random, so that no other process has it, on whichever machine."""
    return f"{_boot()}-{secrets.token_hex(8)}"


@functools.cache
def _boot() -> str:
    """Names the kernel that knows of this process's locks, from its start to its end."""
    try:
        told = _BOOT_ID.read_bytes()
    except OSError:
        return secrets.token_hex(4)  # nobody's, so that age tells
    return hashlib.sha256(told).hexdigest()[:8]


def _forget() -> None:
    """In a child, after a fork: what the parent began is the parent's."""
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have held it
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()
    _folders.clear()
    _process_name.cache_clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _leave(list(_held)))


def leave(root: str) -> None:
    """Remove this process's folder below `root`; the next temporary name begins another.

    Every folder is left when its process ends. This is for whoever must leave nothing
    sooner. One in which another thread is at work stays.
    """
    with _lock:
        folder = _folders.pop(root, None)
        if folder is not None:
            _leave([folder.path])


# ---- the sweep


def sweep(root: str) -> int:
    """Remove the folders of temporary names whose writers are dead.

    One of this boot is dead if its lock is free. One of another boot or machine, or where
    locks do not work, is taken for dead when nothing in its folder has changed for
    `ABANDONED_SECONDS`. What has no name that a writer gives is left alone, and no symbolic
    link is followed. Any number of processes may sweep beside any number of writers.

    Returns:
        How many folders were removed. A failure is no error: it goes to the log.
    """
    path = f"{root}/{TEMPORARY}"
    removed = sum(_each(root, lambda top, name: _sweep_one(root, top, name)).values())
    if removed:
        logger.info("removed %d folders that dead writers left in %s", removed, path)
    return removed


def abandoned(root: str) -> list[str]:
    """The folders whose writers are dead, sorted: what `sweep` removes."""

    def look(top: int, name: str) -> bool:
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=top)
        try:
            return _is_dead(descriptor, top, name)
        finally:
            os.close(descriptor)  # and the lock goes

    return [name for name, dead in _each(root, look).items() if dead]


def _each(root: str, do: Callable[[int, str], bool]) -> dict[str, bool]:
    """What `do` says of each folder of temporary names. A failure goes to the log."""
    path, said = f"{root}/{TEMPORARY}", {}
    try:
        top = os.open(path, _FOLDER_FLAGS)
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.debug("%s: not swept: %s", path, error)
        return {}
    try:
        for name in sorted(filter(_NAME.fullmatch, os.listdir(top))):
            try:
                said[name] = do(top, name)
            except (OSError, RecursionError) as error:
                logger.debug("%s: not swept: %s", f"{path}/{name}", error)
    finally:
        os.close(top)
    return said


def _sweep_one(root: str, top: int, name: str) -> bool:
    descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=top)
    try:
        if not _is_dead(descriptor, top, name):
            return False
        # Taken away in one step: should its writer live after all, it finds no folder and
        # begins again, rather than a folder from which files vanish. What a sweeper leaves
        # when it is killed itself lies in its own folder, and the next one finds it.
        taken = fresh(root)
        try:
            os.rename(name, f"{taken}/{name}", src_dir_fd=top)
        except FileNotFoundError:
            return False  # another sweeper was first
        finally:
            remove(taken)
    finally:
        os.close(descriptor)  # and the lock goes
    return True


def remove(folder: str) -> None:
    """Remove a folder and all below it, as far as that is possible. No link is followed.

    Folders that somebody has nested deeper than Python goes stay.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _is_dead(descriptor: int, top: int, name: str) -> bool:
    """If it is so by its lock, nobody gets that lock before `descriptor` is closed."""
    match = _NAME.fullmatch(name)
    if match is not None and match[1] == _boot():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.debug("%s: no locks here: %s", name, error)
        else:
            return True
    return _last_change(top, name) < time.time() - ABANDONED_SECONDS


def _last_change(top: int, name: str) -> float:
    """When a folder or anything in it was changed, as far as their times tell."""
    latest = 0.0
    for _, _, files, folder in os.fwalk(name, dir_fd=top, onerror=_raise):
        latest = max(latest, os.fstat(folder).st_mtime)
        for file in files:
            found = os.stat(file, dir_fd=folder, follow_symlinks=False)
            latest = max(latest, found.st_mtime)
    return latest


def _raise(error: OSError) -> None:
    raise error


# ---- where folders lie


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
