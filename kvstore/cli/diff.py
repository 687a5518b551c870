"""`diff`: what differs between two groups, or a group and an engine's records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvstore.cli.codes import FOUND
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    StorageOptions,
    Timeout,
    open_root,
)
from kvstore.cli.output import print_json, print_line, print_table, value_text
from kvstore.errors import Difference
from kvstore.offline.diff import Comparison, Side, compare, narrowed

B_OPTIONS = "--b-storage-options"
OtherOptions = Annotated[
    str | None,
    typer.Option(
        B_OPTIONS,
        metavar="JSON|@FILE",
        help="As --storage-options, for B; those of A are not used for it.",
    ),
]
_GIVEN = "A namespace or group, or a JSON file with what `kvstore info --json` prints."
A = Annotated[str, typer.Argument(metavar="A", help=_GIVEN)]
B = Annotated[str, typer.Argument(metavar="B", help=_GIVEN)]


def diff(
    a: A,
    b: B,
    storage_options: StorageOptions = None,
    b_storage_options: OtherOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Tell every field of config and layout in which A and B differ, and what bridges it.

    Example: kvstore diff /mnt/kv/my-model_0123456789ab s3://bucket/kv/my-model_0123456789ab
    """
    ours = _side(a, storage_options, client, timeout, "--storage-options")
    theirs = _side(b, b_storage_options, client, timeout, B_OPTIONS)
    found = compare(ours, theirs)
    (_print_document if as_json else _print)(ours, theirs, found)
    if not found.same:
        raise typer.Exit(FOUND)


def _side(
    given: str,
    storage_options: str | None,
    client: Literal["obstore", "fsspec"],
    timeout: float,
    option: str,
) -> Side:
    if os.path.isfile(given):  # False for what can be no path, where `Path` raises
        return Side.of_file(Path(given))
    root = open_root(given, storage_options, client, timeout, option=option)
    return Side.of_group(root.only_group())


def _print(a: Side, b: Side, found: Comparison) -> None:
    print_line(f"A  {a.name}")
    print_line(f"B  {b.name}")
    rows = []
    for part, differences in (("config", found.config), ("layout", found.layout)):
        if differences is None:
            print_line(f"{part}: not told by both, so not compared")
        for difference in map(narrowed, differences or ()):
            ours, theirs = difference.expected, difference.found
            rows.append(
                (f"{part}.{difference.field}", value_text(ours), value_text(theirs))
            )
    if not rows:
        print_line("No field differs.")
        return
    print_table(("field", "A", "B"), rows)
    for line in _bridges(found):
        print_line(line)


def _bridges(found: Comparison) -> list[str]:
    if found.reordered:
        yes = 'An engine of either takes the other\'s blocks with on_mismatch: "convert".'
    else:
        yes = 'on_mismatch: "convert" does not bridge this.'
    if found.convertible:
        return [yes, "`kvstore convert A DST --like B` writes A's blocks as B's."]
    no = f"`kvstore convert` does not bridge this: {found.obstacles}"
    return [yes, *no.split("\n")]


def _print_document(a: Side, b: Side, found: Comparison) -> None:
    print_json(
        {
            "a": a.name,
            "b": b.name,
            "config": _documents(found.config),
            "layout": _documents(found.layout),
            "same": found.same,
            "on_mismatch_convert": found.reordered,
            "convert": found.convertible,
            "obstacles": found.obstacles,
        }
    )


def _documents(differences: tuple[Difference, ...] | None) -> list[dict[str, Any]] | None:
    if differences is None:
        return None
    return [
        {"field": found.field, "a": found.expected, "b": found.found}
        for found in differences
    ]
