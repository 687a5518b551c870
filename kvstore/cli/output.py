"""What is read: tables on stdout, progress on stderr, JSON for machines, and files.

What is printed may hold names that are anybody's: all but JSON goes through `printable`,
since a terminal obeys what is in a name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvstore.errors import InvalidInputError, printable
from kvstore.offline.words import age_text as age_text
from kvstore.offline.words import bytes_text as bytes_text
from kvstore.offline.words import value_text as value_text


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    _write(json.dumps(value, indent=2) + "\n")


def print_json_line(value: object) -> None:
    """One JSON document on one line of stdout."""
    _write(json.dumps(value) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. What begins with `#` in a column's name is a number.

    Where stdout is no terminal, no line is cut.
    """
    table = Table(box=None, pad_edge=False)
    for column in columns:
        numeric = column.startswith("#")
        table.add_column(
            column.lstrip("#"), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _print(table)


def print_fields(title: str, fields: Mapping[str, Any]) -> None:
    """Names and values below a title, one to a line."""
    print_line(title)
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        print_line(f"  {name:{width}}  {value_text(value)}")


def print_line(text: str) -> None:
    """A line on stdout."""
    _print(Text(printable(text)))


def print_picture(lines: Iterable[Text]) -> None:
    """Lines on stdout that are never broken, with their colours."""
    for line in lines:
        _print(line, soft_wrap=True)


def looks() -> tuple[bool, int]:
    """Whether stdout shows shades of colours, and how many characters are on its lines."""
    console = _console(io.StringIO())
    shades = console.color_system in ("256", "truecolor") and not console.no_color
    return shades, console.width


def _console(file: IO[str]) -> Console:
    """What prints as on stdout, but to `file`: rich has its own ends for a broken pipe."""
    if sys.stdout.isatty():
        return Console(file=file, force_terminal=True, highlight=False)
    return Console(file=file, highlight=False, width=1_000_000, soft_wrap=True)


def _print(what: Table | Text, *, soft_wrap: bool | None = None) -> None:
    text = io.StringIO()
    _console(text).print(what, soft_wrap=soft_wrap)
    _write(text.getvalue())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def write_file(path: Path, data: bytes) -> None:
    """What `-o` names, whole or not at all: what a failure leaves is what was there.

    Links are followed. A pipe or a device is written to, and stays one.

    Raises:
        InvalidInputError: it cannot be written.
    """
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{secrets.token_hex(8)}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            beside.write_bytes(data)
            os.replace(beside, real)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"-o: cannot write {printable(str(path))}: {error.strerror or error}"
        ) from error


class Bar:
    """Progress of a work in shares, with blocks and bytes and their rates."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        """Callers use `bar`."""
        self._progress = progress
        self._task = progress.add_task(description, total=total, rate="")
        self._blocks = self._nbytes = 0
        self._started = time.monotonic()

    def advance(self, blocks: int, nbytes: int, *, fresh: bool = True) -> None:
        """A share is done; one that was done before counts for no rate."""
        if fresh:
            self._blocks += blocks
            self._nbytes += nbytes
        seconds = max(1e-6, time.monotonic() - self._started)
        rate = (
            f"{self._blocks:,} blocks, {self._blocks / seconds:,.0f}/s, "
            f"{bytes_text(self._nbytes / seconds)}/s"
        )
        self._progress.update(self._task, advance=1, rate=rate)


@contextlib.contextmanager
def bar(description: str, total: int) -> Iterator[Bar]:
    """A progress bar on stderr, where that is a terminal that can move its cursor.

    Args:
        description: what is done.
        total: shares.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield Bar(Progress(console=console), description, total)  # which is never shown
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        # What is printed meanwhile is for stdout, even where that is a file.
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    ) as progress:
        yield Bar(progress, description, total)
