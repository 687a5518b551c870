"""The rows that vLLM's `fs` tier writes: names -> keys, files -> blocks.

    <hhh>/<hh>_g<group>/<block hash in hex>.bin

A row is a block's bytes, rounded up to a page of memory: nothing in it tells what they
are, nor proves them. Names are believed only if vLLM would have given exactly them. No
link is followed, and nothing is ever written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import DamagedBlockError, KVStoreError, shown
from kvstore.failures import storage_error
from kvstore.paths import MAX_KEY_BYTES

PAGES = (4096, 16_384, 65_536)
"""Bytes of a page of memory on the machines that vLLM runs on."""

FAN_OUT = re.compile("[0-9a-f]{3}")
_GROUP = re.compile(r"(?P<digits>[0-9a-f]{2})_g(?P<group>0|[1-9][0-9]{0,9})")
_ROW = re.compile(r"(?P<hash>(?:[0-9a-f]{2})+)\.bin")
_UNFINISHED = re.compile(r"[0-9a-f]+\.bin_[0-9]+\.tmp")
_GROUP_BYTES = 4

_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""What a link and a socket answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """A name that vLLM gives a row.

    Attributes:
        key: the engine's: the hash, and the group's number.
        group: that number.
        name: relative to the folder of the rows.
        folder: descriptor of the folder that it is in, until the next entry is asked for.
    """

    key: bytes
    group: int
    name: str
    folder: int


@dataclass(frozen=True, slots=True)
class Other:
    """A name that is no row's.

    Attributes:
        name: relative to the folder of the rows.
        unfinished: whether it is one of a row that is being written, or was.
    """

    name: str
    unfinished: bool = False


def entries(folder: str, first: int, stop: int) -> Iterator[Row | Other]:
    """What lies in some fan-outs. No file is opened.

    Args:
        folder: of the rows.
        first: a fan-out, from 0.
        stop: the fan-out behind the last, up to 4,096.

    Raises:
        StorageError: a folder cannot be read.
    """
    with reading(folder), _folder(folder) as rows:
        for number in range(first, stop):
            fan_out = f"{number:03x}"
            try:
                with _folder(fan_out, rows) as inner:
                    yield from _of_fan_out(inner, fan_out)
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                yield Other(fan_out)


def _of_fan_out(folder: int, fan_out: str) -> Iterator[Row | Other]:
    for name in _names(folder):
        match = _GROUP.fullmatch(name)
        if match is None:
            yield Other(f"{fan_out}/{name}")
            continue
        try:
            with _folder(name, folder) as inner:
                yield from _of_group(inner, f"{fan_out}/{name}", match)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            yield Other(f"{fan_out}/{name}")


def _of_group(folder: int, path: str, match: re.Match[str]) -> Iterator[Row | Other]:
    group = int(match["group"])
    begin = f"{path[:3]}{match['digits']}"
    for name in _names(folder):
        row = _ROW.fullmatch(name)
        if row is None or not name.startswith(begin) or not _fits(row["hash"], group):
            yield Other(f"{path}/{name}", _UNFINISHED.fullmatch(name) is not None)
            continue
        key = bytes.fromhex(row["hash"]) + group.to_bytes(_GROUP_BYTES, "big")
        yield Row(key, group, f"{path}/{name}", folder)


def _fits(digits: str, group: int) -> bool:
    """Whether a key is made of them."""
    return (
        len(digits) <= 2 * (MAX_KEY_BYTES - _GROUP_BYTES) and group < 1 << 8 * _GROUP_BYTES
    )


def _names(folder: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name


@contextlib.contextmanager
def _folder(name: str, above: int | None = None) -> Iterator[int]:
    """A descriptor of a folder; a link to one is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(name, flags, dir_fd=above)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---- one row


def padded_lengths(nbytes: int) -> frozenset[int]:
    """The lengths that a row of so many bytes may have: vLLM rounds it up to a page."""
    return frozenset(-(-nbytes // page) * page for page in PAGES)


def read_row(row: Row, nbytes: int, buffer: memoryview | None) -> None:
    """Read a row, or only look at it.

    Args:
        row: as `entries` has it, before the next one is asked for.
        nbytes: bytes of a block.
        buffer: as long as the longest of `padded_lengths`; the block is at its beginning.
            None to look at no more than the length.

    Raises:
        DamagedBlockError: it cannot be a whole row of such blocks, and why.
        FileNotFoundError: it has been removed.
        StorageError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    place = shown(row.name)
    try:
        descriptor = os.open(os.path.basename(row.name), flags, dir_fd=row.folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _NO_FILE:
            raise DamagedBlockError(place, "expected a file, found none") from error
        raise storage_error(error, "read", place, ()) from error
    try:
        with reading(row.name):
            problem = _problem(descriptor, nbytes, buffer)
    finally:
        os.close(descriptor)
    if problem is not None:
        raise DamagedBlockError(place, problem)


def _problem(descriptor: int, nbytes: int, buffer: memoryview | None) -> str | None:
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        return "expected a file, found none"
    length = before.st_size
    if length not in (lengths := padded_lengths(nbytes)):
        told = " or ".join(f"{number:,}" for number in sorted(lengths))
        return (
            f"expected {told} bytes, a block of {nbytes:,} rounded up to a page, found "
            f"{length:,}: it is truncated, or of another layout"
        )
    if buffer is None:
        return None
    done = 0
    while done < length:
        count = os.preadv(descriptor, [buffer[done:length]], done)
        if not count:
            return "it was truncated while it was read"
        done += count
    after = os.fstat(descriptor)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        return "it was written while it was read"
    return _content_problem(buffer[:length], nbytes)


def _content_problem(row: memoryview, nbytes: int) -> str | None:
    """vLLM's memory for rows begins as zeros, and it writes only blocks into it."""
    values = np.frombuffer(row, np.uint8)
    if values[nbytes:].any():
        return (
            f"expected zeros behind the {nbytes:,} bytes of a block, found other bytes: it "
            "is of another layout"
        )
    if not values[:nbytes].any():
        return "expected values, found zeros only, as a power failure leaves a file"
    return None


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Errors of the place's folder or file, translated."""
    try:
        yield
    except OSError as error:
        if isinstance(error, KVStoreError):
            raise
        raise storage_error(error, "read", shown(place), ()) from error
