"""Filesystems that fail, are slow, or count: fakes around a real `Filesystem`, for tests.

Each wraps any `Filesystem`, one that is wrapped already among them, and takes its place
in a `BlockStore`:

    faulty = FaultyFilesystem(Root("memory://x").filesystem(), RandomFaults(7, 0.1))
    store = open_on(CountingFilesystem(faulty))

What happens below is real: a fault is added to it, or keeps it from happening. No backend
is treated otherwise than another.

Threads: every method may be called from any thread. A copy in another process begins anew:
it counts from zero, and its plan begins again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.buffers import scatter
from kvstore.errors import StorageError
from kvstore.filesystem import Files, Filesystem
from kvstore.testing.plans import (
    CAUSES,
    FAILURES,
    KINDS,
    LIES,
    Fault,
    Kind,
    Operation,
    Plan,
)

Result = TypeVar("Result")

_ACTIONS: Mapping[Operation, str] = {
    "create": "write",
    "publish": "write",
    "delete": "delete",
    "touch": "touch",
    "probe": "write below",
}


class WrappedFilesystem(Filesystem):
    """Hands every operation on, by way of `around`.

    Attributes:
        inner: the filesystem that does the work.
    """

    def __init__(self, inner: Filesystem) -> None:
        # Without the base class's own: whatever that sets up, `inner` has.
        self.inner = inner
        self.url = inner.url
        self.local = inner.local
        self.shared = inner.shared
        self.read_only = inner.read_only

    def __reduce__(self) -> tuple[Callable[..., Filesystem], tuple[Any, ...]]:
        """Pickles as what it wraps, and begins anew."""
        return type(self), (self.inner,)

    def around(
        self, operation: Operation, path: str, proceed: Callable[[], Result]
    ) -> Result:
        """One operation. `proceed` has it done."""
        return proceed()

    def place(self, path: str) -> str:
        """As the inner one's, and no operation."""
        return self.inner.place(path)

    def storage(self) -> str:
        """As the inner one's, and no operation."""
        return self.inner.storage()

    def exists(self, path: str) -> bool:
        """As the inner one's."""
        return self.around("exists", path, lambda: self.inner.exists(path))

    def read(self, path: str, limit: int) -> bytes | None:
        """As the inner one's."""
        return self.around("read", path, lambda: self.inner.read(path, limit))

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """As the inner one's."""
        return self.around("read_into", path, lambda: self.inner.read_into(path, buffers))

    def create(self, path: str, data: bytes, *, fsync: bool = False) -> None:
        """As the inner one's."""
        self.around("create", path, lambda: self.inner.create(path, data, fsync=fsync))

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """As the inner one's."""
        return self.around(
            "publish", path, lambda: self.inner.publish(path, files, replace=replace)
        )

    def delete(self, path: str, names: Sequence[str]) -> None:
        """As the inner one's."""
        self.around("delete", path, lambda: self.inner.delete(path, names))

    def touch(self, path: str, document: bytes) -> None:
        """As the inner one's."""
        self.around("touch", path, lambda: self.inner.touch(path, document))

    def probe(self) -> None:
        """As the inner one's."""
        self.around("probe", "", self.inner.probe)

    def require_writable(self, call: str) -> None:
        """As the inner one's, and no operation."""
        self.inner.require_writable(call)


class CountingFilesystem(WrappedFilesystem):
    """Counts operations, those that fail included.

    Attributes:
        calls: how often each was asked for.
    """

    def __init__(self, inner: Filesystem) -> None:
        super().__init__(inner)
        self.calls: Counter[Operation] = Counter()
        self._lock = threading.Lock()

    def around(
        self, operation: Operation, path: str, proceed: Callable[[], Result]
    ) -> Result:
        """Count it first."""
        with self._lock:
            self.calls[operation] += 1
        return proceed()


class SlowFilesystem(WrappedFilesystem):
    """Adds latency, in seconds, before every operation or before those that are named."""

    def __init__(
        self, inner: Filesystem, seconds: float | Mapping[Operation, float]
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def __reduce__(self) -> tuple[Callable[..., Filesystem], tuple[Any, ...]]:
        """Pickles whole."""
        return type(self), (self.inner, self._seconds)

    def around(
        self, operation: Operation, path: str, proceed: Callable[[], Result]
    ) -> Result:
        """Wait first."""
        seconds = self._seconds
        time.sleep(seconds.get(operation, 0) if isinstance(seconds, Mapping) else seconds)
        return proceed()


class FaultyFilesystem(WrappedFilesystem):
    """Fails, and lies, by a plan.

    Attributes:
        plan: asked at each operation; may be changed at any time. None has no faults.
        struck: how many faults of which kind there were, by operation.
    """

    REMEMBERED = 1024
    """Paths of which it knows what was there before; the oldest go first."""

    def __init__(self, inner: Filesystem, plan: Plan | None = None) -> None:
        super().__init__(inner)
        self.plan = plan
        self.struck: Counter[tuple[Operation, Kind]] = Counter()
        self._told: dict[str, tuple[bytes | None, bytes | None]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Filesystem], tuple[Any, ...]]:
        """Pickles with its plan."""
        return type(self), (self.inner, self.plan)

    def around(
        self, operation: Operation, path: str, proceed: Callable[[], Result]
    ) -> Result:
        """What can only fail before, or after it took effect."""
        with self._struck(operation, path):
            return proceed()

    def read(self, path: str, limit: int) -> bytes | None:
        """As the inner one's, or a lie."""
        with self._struck("read", path) as struck:
            data = self._note(path, self.inner.read(path, limit))
            if struck is not None:
                data = self._lie(struck[0], path, data)
        return None if data is None else data[:limit]

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """As the inner one's, or a lie."""
        with self._struck("read_into", path) as struck:
            length = self.inner.read_into(path, buffers)
            wanted = sum(buffer.nbytes for buffer in buffers)
            if length not in (None, wanted):
                return length  # the buffers hold nothing that means anything
            data = self._note(path, None if length is None else b"".join(buffers))
            if struck is None:
                return length
            data = self._lie(struck[0], path, data)
            if data is None:
                return None
            if len(data) == wanted:
                scatter((data,), buffers)
        return len(data)

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """As the inner one's, or torn: the last file, which commits the block, fails when
        its bytes are asked for.
        """
        with self._struck("publish", path) as struck:
            if struck is not None and struck[0].kind == "half":
                *others, (name, _) = files
                files = (*others, (name, _Torn(struck[1])))
            return self.inner.publish(path, files, replace=replace)

    def delete(self, path: str, names: Sequence[str]) -> None:
        """As the inner one's, or only the commit mark."""
        with self._struck("delete", path) as struck:
            if struck is not None and struck[0].kind == "half":
                names = names[-1:]
            self.inner.delete(path, names)

    @contextlib.contextmanager
    def _struck(
        self, operation: Operation, path: str
    ) -> Iterator[tuple[Fault, StorageError] | None]:
        """Ask the plan; fail before or after what is done inside.

        A fault counts where it made a difference: not if what it is added to has failed.
        """
        fault = self.plan(operation) if self.plan is not None else None
        if fault is None:
            yield None
            return
        kind = fault.kind if fault.kind in KINDS[operation] else "before"
        error = fault.error(
            self.place(path), _ACTIONS.get(operation, "read"), CAUSES[fault.error]
        )
        if kind != "before":
            try:
                yield fault, error
            except StorageError as raised:
                if raised is not error:
                    raise
        with self._lock:
            self.struck[operation, kind] += 1
        if kind in FAILURES:
            raise error

    def _note(self, path: str, data: bytes | None) -> bytes | None:
        """Remember what a path holds now, and what it held before the last change."""
        with self._lock:
            before, now = self._told.pop(path, (data, data))
            self._told[path] = (before, now) if data == now else (now, data)
            if len(self._told) > self.REMEMBERED:
                self._told.pop(next(iter(self._told)))
        return data

    def _lie(self, fault: Fault, path: str, data: bytes | None) -> bytes | None:
        if fault.kind == "stale":
            with self._lock:
                return self._told.get(path, (data, data))[0]
        if not data or fault.kind not in LIES:
            return data
        if fault.kind == "long":
            return data + b"\0"
        at = min(int(fault.at * len(data)), len(data) - 1)
        if fault.kind == "short":
            return data[:at]
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class _Torn:
    """The parts of a file whose writer fails."""

    def __init__(self, error: StorageError) -> None:
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        raise self._error
