"""What a local folder can do, beyond reading and writing: checks by system calls."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.offline.checks import Check, fail, ok, warn
from kvstore.offline.words import bytes_text

FULL = 0.05
"""Share of a file system below which it counts as nearly full."""

MOUNTS = Path("/proc/self/mountinfo")

_PROBE_BYTES = 2 << 20
_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)
_MEMORY = ("tmpfs", "ramfs")
_CONTAINER = ("overlay", "aufs")
_NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|9p|lustre|ceph|glusterfs|gpfs|beegfs|fuse.*")


def standing_checks(root: str) -> Iterator[Check]:
    """What can be said of a folder without writing to it. It need not be there.

    Raises:
        OSError: the folder cannot be looked at.
    """
    folder = next(p for p in (Path(root), *Path(root).parents) if p.exists())
    yield _kind(folder)
    yield from _room(folder)
    yield _permissions(folder)


def _kind(folder: Path) -> Check:
    kind, mount = _mount(folder)
    found = f"{kind}, mounted at {mount}"
    name = "file system"
    if kind in _MEMORY:
        return warn(name, found, "It is memory, and empty when the machine has started.")
    if kind in _CONTAINER:
        return warn(
            name, found, "It is a layer of a container and goes with it: mount a volume."
        )
    if _NETWORK.fullmatch(kind):
        return warn(
            name,
            found,
            "It is not in the test matrix: a rename must be atomic and seen by all "
            "machines, and a request has no timeout of its own.",
        )
    return ok(name, found)


def _mount(folder: Path) -> tuple[str, str]:
    """The file system's kind and where it is mounted."""
    path = f"{folder.resolve()}/"
    best = ("unknown", "/")
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
        # Of two at one place, the later one is on top.
        if path.startswith(f"{point.rstrip('/')}/") and len(point) >= len(best[1]):
            best = (after.split()[0], point)
    return best


def _room(folder: Path) -> Iterator[Check]:
    told = os.statvfs(folder)
    whole, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    found = f"{bytes_text(free)} of {bytes_text(whole)}"
    if free < _PROBE_BYTES:
        yield fail("free space", found, "Make room, or choose another place.")
    elif free < FULL * whole:
        yield warn("free space", found, "Set max_bytes, so that it does not run full.")
    else:
        yield ok("free space", found)
    if told.f_files and told.f_favail < FULL * told.f_files:  # some count none
        yield warn(
            "free inodes",
            f"{told.f_favail:,} of {told.f_files:,}",
            "A block takes three: set max_bytes, or make a file system with more.",
        )


def _permissions(folder: Path) -> Check:
    told = folder.stat()
    mode, mask = stat.S_IMODE(told.st_mode), _umask()
    found = f"{folder}: mode {mode:04o}, owner {user_name(told.st_uid)}; umask {mask:03o}"
    if mode & stat.S_IWOTH:
        return warn(
            "permissions",
            found,
            "Every user of this machine may put blocks there: chmod o-w, unless all are "
            "trusted.",
        )
    if mask & 0o400:
        return fail("permissions", found, "The umask hides files from their own owner.")
    shared = "others may read blocks" if not mask & 0o004 else "others cannot read blocks"
    return ok("permissions", f"{found}: {shared}")


def _umask() -> int:
    """Without setting it, which other threads would see."""
    found = re.search(
        r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(found[1], 8) if found else 0


def user_name(number: int) -> str:
    """A user's name, or number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def acting_checks(folder: str) -> Iterator[Check]:
    """What needs files to be written, in an empty folder; they are left to the caller.

    Raises:
        OSError: what every file system can do failed.
    """
    yield _rename(Path(folder))
    yield _link(Path(folder))
    yield _lock(Path(folder))
    yield _fsync(Path(folder))
    yield _direct(Path(folder))


def _rename(folder: Path) -> Check:
    for name in ("from", "to"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    try:
        os.rename(folder / "from", folder / "to")
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
    else:
        return fail(
            "rename",
            "a folder was renamed over one that was not empty",
            "Blocks could replace each other: choose another file system.",
        )
    os.rename(folder / "from", folder / "third")
    return ok("rename", "a folder gets its name in one step, and only if it is free")


def _link(folder: Path) -> Check:
    try:
        os.link(folder / "to" / "file", folder / "link")
    except OSError as error:
        return warn(
            "hard links",
            f"none: {error.strerror}",
            "Where two engines make a namespace at once, the last one's document stays.",
        )
    return ok("hard links", "the first writer of a document stays")


def _lock(folder: Path) -> Check:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return warn(
            "locks",
            f"none: {error.strerror}",
            "What killed writers leave is then swept after a day, not at once.",
        )
    finally:
        os.close(descriptor)
    return ok("locks", "flock works: what killed writers leave is swept at once")


def _fsync(folder: Path) -> Check:
    with (folder / "fsync").open("wb") as file:
        file.write(os.urandom(_PROBE_BYTES))
        file.flush()
        began = time.monotonic()
        try:
            os.fsync(file.fileno())
        except OSError as error:
            return warn("fsync", f"none: {error.strerror}", "Do not set fsync.")
    took = time.monotonic() - began
    return ok("fsync", f"{took * 1e3:,.1f} ms for {bytes_text(_PROBE_BYTES)}")


def _direct(folder: Path) -> Check:
    try:
        os.close(os.open(folder / "fsync", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return ok("O_DIRECT", f"not here ({error.strerror}); kvstore does not use it")
    return ok("O_DIRECT", "possible; kvstore does not use it")
