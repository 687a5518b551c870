"""The command line: which benchmarks, how much of them, and where the results go."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import plot, report
from benchmarks.facts import facts
from benchmarks.figures import Results
from benchmarks.settings import KIB, MIB, Settings

TEMPORARY = Path(tempfile.gettempdir())
DOCS = Path(__file__).parent.parent.parent / "docs"

BENCHMARKS = {
    "local": "benchmarks.transfers:local",
    "bucket": "benchmarks.transfers:bucket_transfers",
    "object_stores": "benchmarks.companions:object_stores",
    "pauses": "benchmarks.pauses:pauses",
    "lookups": "benchmarks.lookups:lookups",
    "scale": "benchmarks.scale:scale",
    "copies": "benchmarks.copies:copies",
    "codecs": "benchmarks.companions:codecs",
    "ttft": "benchmarks.ttft:ttft",
    "device": "benchmarks.device:device",
}
"""Where each of them is: a function of the settings that adds to the results."""

# A file or a pipe is as wide as the tables.
console = Console(width=None if sys.stdout.isatty() else 160)


def main() -> None:
    """`report` renders files, everything else measures."""
    # A run that is told to end takes its servers, folders and shared memory with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command: Callable[..., None] = measure
    if sys.argv[1:2] == ["report"]:
        del sys.argv[1]
        command = rendered
    typer.run(command)


def measure(
    names: Annotated[
        list[str], typer.Argument(help=f"Any of: all, {', '.join(BENCHMARKS)}.")
    ],
    rounds: Annotated[int, typer.Option(help="Rounds; the sides take turns.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = Path("results"),
    disk: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = TEMPORARY,
    total: Annotated[int, typer.Option(help="MiB that a case stores and loads.")] = 256,
    blocks: Annotated[
        str, typer.Option(help="scale: blocks in a folder, e.g. 1000,100000.")
    ] = "1000,100000",
    disk_blocks: Annotated[
        int, typer.Option(help="scale: the most that are made on the disk.")
    ] = 10_000,
    bucket_blocks: Annotated[
        str, typer.Option(help="scale: blocks on the object store.")
    ] = "1000",
    sizes: Annotated[str, typer.Option(help="Block sizes in KiB.")] = "64,576,2048,16384",
    bucket: Annotated[str | None, typer.Option(help="A bucket's fsspec URL.")] = None,
    storage_options: Annotated[str, typer.Option(help="JSON, of that URL.")] = "{}",
    tier: Annotated[
        list[str] | None,
        typer.Option(help="NAME=JSON: one more tier; {ROOT} is a fresh folder."),
    ] = None,
) -> None:
    """Measure, print a table, write JSON and a plot."""
    chosen = list(BENCHMARKS) if names == ["all"] else names
    for name in chosen:
        if name not in BENCHMARKS:
            raise typer.BadParameter(f"expected all or some of {', '.join(BENCHMARKS)}")
    settings = Settings(
        rounds=rounds,
        disk=disk,
        total=total * MIB,
        sizes=tuple(number * KIB for number in _numbers(sizes)),
        blocks=_numbers(blocks),
        disk_blocks=disk_blocks,
        bucket_blocks=_numbers(bucket_blocks),
        bucket=bucket,
        storage_options=json.loads(storage_options),
        tiers={
            name: json.loads(config)
            for name, _, config in (text.partition("=") for text in tier or ())
        },
    )
    _quiet()
    out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in chosen if not run(name, settings, out)]
    draw([out / f"{name}.json" for name in chosen], out / "performance.svg")
    if failed:
        console.print(f"Failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def _quiet() -> None:
    """Logs of every tier that is opened would drown the tables."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)


def run(name: str, settings: Settings, out: Path) -> bool:
    """Measure one benchmark, print it and write it. Returns whether it went well.

    A failure ends this benchmark only. What it had measured is written with the reason.
    """
    results = Results(name, facts(settings))
    started = time.monotonic()
    with console.status(f"{name} ..."):
        try:
            _function(name)(settings, results)
            well = True
        except Exception as error:
            console.print(traceback.format_exc(), markup=False)
            told = str(error).replace(str(settings.disk), "…")  # results name no places
            results.note(f"Ended by {type(error).__name__}: {told}")
            well = False
    results.facts["seconds"] = round(time.monotonic() - started)
    results.write(out / f"{name}.json")
    console.print(report.table(results))
    for note in results.notes:
        console.print(note, markup=False, style="dim")
    return well


def _function(name: str) -> Callable[[Settings, Results], None]:
    """Imported when it is wanted: some of them import an engine."""
    module, _, attribute = BENCHMARKS[name].partition(":")
    function: Callable[[Settings, Results], None]
    function = getattr(import_module(module), attribute)
    return function


def rendered(
    files: Annotated[list[Path], typer.Argument(help="What `measure` wrote, *.json.")],
    docs: Annotated[
        bool, typer.Option(help="Also rewrite the tables and the plot in docs/.")
    ] = False,
) -> None:
    """Print the tables that docs/performance.md has between its markers."""
    found = [Results.read(file) for file in files]
    found.sort(key=lambda results: list(BENCHMARKS).index(results.benchmark))
    for results in found:
        print(f"<!-- {results.benchmark} -->\n{report.markdown(results)}")
    if docs:
        page, target = DOCS / "performance.md", DOCS / "performance.svg"
        text = report.replaced(page.read_text(), found)
        page.write_text(
            report.with_plot(text, target.name) if draw(files, target) else text
        )


def draw(files: list[Path], target: Path) -> bool:
    """The plot of these results. Returns whether there was anything to draw, and
    something to draw it.
    """
    try:
        drawn = plot.draw([Results.read(file) for file in files if file.exists()], target)
    except ImportError:
        console.print("No plot: matplotlib is not installed.")
        return False
    if drawn:
        console.print(f"Plot: {target}", markup=False)
    return drawn
