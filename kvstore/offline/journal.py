"""`Journal`: which shares of a long work are done, so that it can be gone on with.

A file of JSON lines: what the work is, then one line for each share that is done, with what
came of it. A line that a crash has torn counts as not written.

Locking: none; one thread, and one process, writes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from kvstore.errors import InvalidInputError, StorageError, shown
from kvstore.offline.shares import Share
from kvstore.records import Record

R = TypeVar("R", bound=Record)

MAX_LINE = 1 << 24
"""Bytes of a line, beyond what any share's has: a file of longer ones is no journal."""


class Journal(Generic[R]):
    """Of one work.

    Attributes:
        path: the file.
        recalled, asked: how many shares were done before, of those that `recall_all` was
            asked for.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], kind: type[R]) -> None:
        """Open a journal, or begin one.

        Args:
            path: the file.
            about: what the work is: a journal of another work is refused.
            kind: what comes of a share.

        Raises:
            InvalidInputError: the file is another work's, or no journal.
            StorageError: it cannot be read or written.
        """
        self.recalled = self.asked = 0
        self.path = path
        self._about = json.loads(json.dumps(about))
        self._kind = kind
        self._done: dict[Share, R] = {}
        with _errors("read", path):
            whole = self._read() if path.exists() else 0
        with _errors("write", path):
            # Without a buffer: closing does not write again what a full disk refused.
            self._file = path.open("ab", buffering=0)
        try:
            with _errors("write", path):
                self._file.truncate(whole)
            if not whole:
                self._write(self._about)
        except StorageError:
            self._file.close()
            raise

    def recall(self, share: Share) -> R | None:
        """What came of a share, if it was done before."""
        return self._done.get(share)

    def recall_all(self, shares: Sequence[Share]) -> dict[Share, R]:
        """What came of those shares that were done before.

        Raises:
            InvalidInputError: all were. It would tell how things were then, as if they were
                so still.
        """
        told = ((share, self.recall(share)) for share in shares)
        done = {share: result for share, result in told if result is not None}
        self.recalled, self.asked = len(done), len(shares)
        if done and self.recalled == self.asked:
            raise InvalidInputError(
                f"journal: {self.path} is of this work, which is finished. To have it "
                "done again, name another file"
            )
        return done

    def add(self, share: Share, result: R) -> None:
        """A share is done. Raises `StorageError`."""
        self._write({"share": share.to_dict(), "result": result.to_dict()})

    def __enter__(self) -> Self:
        """Closed at the end of the block; the file stays."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file. Raises `StorageError`."""
        with _errors("write", self.path):
            self._file.close()

    def _read(self) -> int:
        """Take what is noted there; how many bytes of whole lines that is."""
        if not self.path.is_file():
            raise self._no_journal("no regular file")
        whole = 0
        with self.path.open("rb") as file:
            while (line := file.readline(MAX_LINE)).endswith(b"\n"):
                entry = self._parsed(line)
                if whole:
                    self._take(entry)
                else:
                    self._require(entry)
                whole += len(line)
        if len(line) == MAX_LINE or (line and not whole):
            raise self._no_journal(shown(line))
        return whole

    def _take(self, entry: Mapping[str, Any]) -> None:
        share = Share.from_dict(entry.get("share"), where=f"{self.path}: share")
        self._done[share] = self._kind.from_dict(
            entry.get("result"), where=f"{self.path}: result"
        )

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with _errors("write", self.path):
            while line:
                line = line[self._file.write(line) :]

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._no_journal(shown(line))
        return found

    def _no_journal(self, found: str) -> InvalidInputError:
        return InvalidInputError(
            f"journal: expected a kvstore journal, or no file yet, found {found} at "
            f"{self.path}. Name another file"
        )

    def _require(self, found: dict[str, Any]) -> None:
        if found != self._about:
            names = [
                name
                for name in self._about | found
                if self._about.get(name) != found.get(name)
            ]
            told = "; ".join(
                f"{name}: expected {shown(self._about.get(name))}, found "
                f"{shown(found.get(name))}"
                for name in names
            )
            if any(name.endswith("_storage") for name in names):
                told += (
                    ": another endpoint, profile, account or the like, in storage_options "
                    "or the environment; or an older kvstore did not note it"
                )
            raise InvalidInputError(
                f"journal: {self.path} is of another work: {told}. Name another file"
            )


@contextlib.contextmanager
def _errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise StorageError(str(path), action, cause) from error
