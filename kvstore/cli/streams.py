"""stdout and stderr where nobody takes what is written: closed, full, or read no more."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from kvstore.cli.codes import BROKEN_PIPE
from kvstore.errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def take_streams() -> None:
    """Make both such that every way of writing to them ends alike, the libraries' too.

    What stdout does not take is a `StorageError`, or ends the command if nobody reads on.
    What stderr does not take is lost: it tells of an end, and does not change it.
    """
    sys.stdout = _taken(sys.stdout, sys.__stdout__, _Stdout)
    sys.stderr = _taken(sys.stderr, sys.__stderr__, _Stderr)


class _Stdout(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        try:
            while (written := super().write(data)) is None:  # others made it non-blocking
                select.select((), (self,), ())
        except OSError as error:
            # What is left in the buffers would fail once more, at the end.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(BROKEN_PIPE) from None
            raise StorageError("stdout", "write", error.strerror or str(error)) from error
        return written


class _Stderr(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def _taken(stream: TextIO | None, own: TextIO | None, kind: type[io.FileIO]) -> TextIO:
    if stream is None:  # closed: what is opened next must not take its place
        return open(os.devnull, "w")
    if stream is not own:
        return stream  # put there by who calls `main` as a function
    return io.TextIOWrapper(
        io.BufferedWriter(kind(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",  # a name may be in any script
        line_buffering=True,
    )
