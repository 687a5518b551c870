"""How fast a storage takes blocks of a typical size, gives them back and removes them."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.errors import StorageError
from kvstore.filesystem import Filesystem
from kvstore.paths import DOCUMENT
from kvstore.records import Record

BLOCK_BYTES = 2 << 20
"""16 tokens of an 8-billion-parameter model with 8 KV heads in 16 bits."""

BLOCKS = 64
"""That many at most."""

AT_ONCE = 8
"""As an engine's `threads`."""

CHUNK = "chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Record):
    """Of one operation.

    Attributes:
        blocks, nbytes: that were moved; with `AT_ONCE` threads.
        seconds: from the first to the last.
        median, slowest: seconds for one block.
    """

    blocks: int
    nbytes: int
    seconds: float
    median: float
    slowest: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)


class Trial:
    """Blocks in one folder of a root.

    Attributes:
        written: the folders of the blocks that may be there.
    """

    def __init__(self, filesystem: Filesystem, folder: str) -> None:
        """Writes nothing yet. The folder must be there."""
        self.written: list[str] = []
        self._filesystem = filesystem
        self._folder = folder
        self._payload = os.urandom(BLOCK_BYTES)

    def store(self, seconds: float) -> Speed:
        """Publish blocks for so long. Raises `StorageError`."""
        until = time.monotonic() + seconds

        def names() -> Iterator[str]:
            for number in range(BLOCKS):
                if number >= AT_ONCE and time.monotonic() > until:
                    return
                self.written.append(f"{self._folder}/{number}")
                yield self.written[-1]

        return timed(self._store, names(), BLOCK_BYTES)

    def load(self) -> Speed:
        """Read them all back. Raises `StorageError`, also if other bytes come."""
        return timed(self._load, list(self.written), BLOCK_BYTES)

    def delete(self) -> Speed:
        """Remove them. Raises `StorageError`."""
        return timed(self._delete, list(self.written), BLOCK_BYTES)

    def tidy(self) -> None:
        """Remove what a failure may have left. What cannot be removed is swept later."""
        for path in list(self.written):
            with contextlib.suppress(StorageError):
                self._delete(path)

    def _store(self, path: str) -> None:
        files = ((CHUNK, (self._payload,)), (DOCUMENT, (b"{}",)))
        self._filesystem.publish(path, files, replace=False)

    def _load(self, path: str) -> None:
        buffer = bytearray(BLOCK_BYTES)
        document = self._filesystem.read(f"{path}/{DOCUMENT}", 16)
        length = self._filesystem.read_into(f"{path}/{CHUNK}", [memoryview(buffer)])
        if document != b"{}" or length != BLOCK_BYTES or buffer != self._payload:
            place = self._filesystem.place(path)
            raise StorageError(place, "read back", "other bytes than were written")

    def _delete(self, path: str) -> None:
        self._filesystem.delete(path, (CHUNK, DOCUMENT))
        self.written.remove(path)


def timed(work: Callable[[str], None], names: Iterable[str], nbytes: int) -> Speed:
    """Do some work for each name, some at once.

    Args:
        work: raises `StorageError`, which ends it.
        names: asked for one at a time, as threads are free; at least one.
        nbytes: that one piece of work moves.
    """
    lock, waiting = threading.Lock(), iter(names)
    durations: list[float] = []

    def worker() -> None:
        nonlocal waiting
        while True:
            with lock:
                name = next(waiting, None)
            if name is None:
                return
            started = time.monotonic()
            try:
                work(name)
            except StorageError:
                with lock:
                    waiting = iter(())  # the others end too
                raise
            durations.append(time.monotonic() - started)

    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for done in [pool.submit(worker) for _ in range(AT_ONCE)]:
                done.result()
        except BaseException:  # a signal's too: what is under way is waited for, no more
            with lock:
                waiting = iter(())
            raise
    return Speed(
        blocks=len(durations),
        nbytes=nbytes * len(durations),
        seconds=time.monotonic() - began,
        median=statistics.median(durations or [0.0]),
        slowest=max(durations, default=0.0),
    )
