"""`Region`: memory that other processes can map, found from an address. Linux only.

vLLM keeps its CPU tier in a mapped file in shared memory. A process that maps the same file
moves blocks without a copy, and without the engine's interpreter.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.transfer import Rows

_MAPPING = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) rw-s (?P<offset>[0-9a-f]+) "
    r"(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+) (?P<inode>\d+) +(?P<path>/.*)",
    re.DOTALL,
)
_File = tuple[int, int, int]
"""What tells one file from all others: its device's two numbers, and its inode's."""

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What is no answer: with a descriptor or memory more, the file could be opened."""

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, since Linux 5.14."""

_POPULATE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """Where rows lie in a file.

    Attributes:
        descriptor: the file, open in this process.
        offset: bytes from the file's start to the first row.
        shape, strides: of the rows.
    """

    descriptor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows) -> Region | None:
        """Where `rows` lie; None unless it is one shared mapping of a file that this
        process may open. The caller closes the descriptor.

        That it is the same file is proved by device and inode, and not by writing to it,
        since rows may be in use. Where a file system tells two numbers for one device, as
        btrfs and overlayfs do, nothing is proved, and the answer is None.

        Raises:
            OSError: no descriptor or memory is left to find out.
        """
        start: int = rows.ctypes.data
        stop = start + (len(rows) - 1) * rows.strides[0] + rows.shape[1]
        found = _mapping(start, stop)
        if found is None:
            return None
        path, file, offset = found
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _SCARCE:
                raise
            return None  # its name is gone, or not ours to open
        status = os.fstat(descriptor)
        device = status.st_dev
        if (os.major(device), os.minor(device), status.st_ino) != file:
            os.close(descriptor)
            return None
        return cls(descriptor, offset, rows.shape, rows.strides)

    def map(self) -> Rows:
        """The same rows, in the process that calls it."""
        length = self.offset + (self.shape[0] - 1) * self.strides[0] + self.shape[1]
        memory = mmap.mmap(self.descriptor, length)
        return np.ndarray(self.shape, np.uint8, memory, self.offset, self.strides)


def populate(rows: Rows) -> None:
    """Map every page of `rows` now, since a first touch costs more than a copy of it.

    Where the kernel cannot, pages are mapped when they are touched.
    """
    advise: Any = ctypes.CDLL(None).madvise  # lets go of the GIL, as mmap's own does not
    start: int = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    stop: int = rows.ctypes.data + (len(rows) - 1) * rows.strides[0] + rows.shape[1]
    for first in range(start, stop, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, stop - first)
        if advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _POPULATE_WRITE):
            return


def _mapping(start: int, stop: int) -> tuple[str, _File, int] | None:
    """Path and identity of the file that holds these addresses, and the first's offset.

    One mapping may be listed in pieces: the kernel splits it where its flags differ.
    """
    found: tuple[str, _File, int] | None = None
    covered = start
    # Names are any bytes; the kernel escapes nothing in them but the end of a line.
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")[:-1]:
        first, last = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if last <= covered or first > covered:
            continue
        match = _MAPPING.fullmatch(line)
        if match is None:
            return None
        file = (int(match["major"], 16), int(match["minor"], 16), int(match["inode"]))
        at = (match["path"], file, int(match["offset"], 16) - first)
        if found is not None and found != at:
            return None
        found = at
        covered = last
        if covered >= stop:
            return found[0], found[1], found[2] + start
    return None
