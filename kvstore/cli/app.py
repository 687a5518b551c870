"""`kvstore`: the command line. What the commands do is in `kvstore.offline`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from kvstore.__about__ import __version__
from kvstore.cli import (
    convert,
    copying,
    diff,
    doctor,
    gc,
    import_vllm,
    looking,
    plot,
    report,
    verify,
)
from kvstore.cli.codes import FAILED, FOUND, REFUSED, UNUSABLE
from kvstore.cli.options import LEFT_OUT
from kvstore.cli.output import print_line
from kvstore.cli.streams import take_streams
from kvstore.errors import (
    DamagedBlockError,
    FormatError,
    KVStoreError,
    LayoutMismatchError,
    StorageError,
    printable,
)


def _end(*_: object, **__: object) -> None:
    """What a command ends with that has found nothing else."""
    if LEFT_OUT.get():
        raise typer.Exit(FOUND)


app = typer.Typer(
    name="kvstore",
    result_callback=_end,
    help="Look at a KV cache, check it, move it, convert it: offline, at any fsspec URL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print_line(f"kvstore {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
]


@app.callback()
def _begin(version: Version = False) -> None:
    LEFT_OUT.set(False)


app.command()(looking.ls)
app.command()(looking.info)
app.command()(looking.du)
app.command()(verify.verify)
app.command()(gc.gc)
app.command()(copying.cp)
app.command()(diff.diff)
app.command()(convert.convert)
app.command("import-vllm")(import_vllm.import_vllm)
app.command()(plot.plot)
app.command()(doctor.doctor)
app.command()(report.report)


def main() -> None:
    """The `kvstore` command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as of work in the background
            signal.signal(number, _interrupted)
    take_streams()
    try:
        app()
    except MemoryError:
        sys.stderr.write("error: a block is larger than the memory that is left\n")
        sys.exit(FAILED)
    except KVStoreError as error:
        lines = map(printable, str(error).split("\n"))
        sys.stderr.write("error: {}\n".format("\n".join(lines)))
        sys.exit(exit_code(error))


def _interrupted(number: int, _: object) -> None:
    """End at once: shares take long, and whatever ends them, a block is whole or not there,
    and so is a line of a journal.
    """
    try:
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # the bar has hidden the cursor
    finally:
        os._exit(128 + number)


def exit_code(error: KVStoreError) -> int:
    """What the command ends with."""
    if isinstance(error, DamagedBlockError):
        return FOUND
    if isinstance(error, StorageError):
        return FAILED
    if isinstance(error, LayoutMismatchError | FormatError):
        return REFUSED
    return UNUSABLE
