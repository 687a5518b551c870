"""What commands take alike: arguments and options, parsed once."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvstore.errors import InvalidInputError, StorageError, printable, shown
from kvstore.filesystem import Filesystem
from kvstore.offline.root import Root

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="A root, or a namespace, group or block in it: a path or any fsspec URL.",
    ),
]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON|@FILE",
        help="What the URL's fsspec filesystem takes, as a JSON object, or @ and the name "
        "of a file that holds it. Credentials belong in a file, or in the environment.",
    ),
]
DST_OPTIONS = "--dst-storage-options"
DestinationOptions = Annotated[
    str | None,
    typer.Option(
        DST_OPTIONS,
        metavar="JSON|@FILE",
        help="What DST's fsspec filesystem takes: a JSON object, or @ and the name of a "
        "file. No other options are used for DST.",
    ),
]
Codec = Annotated[str, typer.Option(help="How blocks are written: none, zstd or blosc.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and do nothing of it.")
]
ClientOption = Annotated[
    Literal["obstore", "fsspec"],
    typer.Option("--client", help="What talks to S3 and Google Cloud Storage."),
]
Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds that one request may take.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, max=256, help="Parts that are worked on at once.")
]
DaskAddress = Annotated[
    str | None,
    typer.Option(
        "--dask",
        metavar="ADDRESS",
        help="Work on the Dask cluster whose scheduler is there, not on threads. "
        "The workers are given the storage options, credentials included.",
    ),
]
JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        dir_okay=False,
        help="Note there what is done, and go on behind it if the file is there already.",
    ),
]


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_BYTES = {"b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _BYTES |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(text: str, option: str) -> int:
    """Bytes, as people write them: `512MiB`, `1.5TB`. Raises `InvalidInputError`."""
    expected = "a size such as 512MiB, 1.5TB or 100000B"
    return int(_parse_amount(text, option, _BYTES, expected))


def parse_duration(text: str, option: str) -> float:
    """Seconds, as people write them: `30d`, `12h`. Raises `InvalidInputError`."""
    expected = "a duration such as 30d, 12h, 90min or 45s"
    return _parse_amount(text, option, _SECONDS, expected)


def _parse_amount(text: str, option: str, units: Mapping[str, int], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    amount = float(match[1]) * unit if match and unit else math.inf
    if not math.isfinite(amount):
        raise InvalidInputError(f"{option}: expected {expected}, found {shown(text)}")
    return amount


def parse_storage_options(
    text: str | None, option: str = "--storage-options"
) -> dict[str, Any] | None:
    """The object that `option` gives, itself or in a file.

    Raises:
        InvalidInputError: no JSON object, or no such file. The text is not repeated: it
            may hold credentials.
    """
    if text is None:
        return None
    where = option
    if text.startswith("@"):
        where = f"{option}: {printable(text[1:])}"
        try:
            text = Path(text[1:]).expanduser().read_text()
        except (OSError, ValueError, RuntimeError) as error:  # of `~nobody`, for one
            raise InvalidInputError(
                f"{where}: expected a JSON file, found {type(error).__name__}"
            ) from error
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InvalidInputError(f"{where}: expected a JSON object, found none")
    return options


def open_root(
    url: str,
    storage_options: str | None,
    client: Literal["obstore", "fsspec"],
    timeout: float,
    *,
    read_only: bool = True,
    option: str = "--storage-options",
    blocks: bool = True,
) -> Root:
    """The root that a command's arguments name; `option` is where its options are from, and
    `blocks` whether the URL of a block will do.

    Raises `KVStoreError`.
    """
    options = parse_storage_options(storage_options, option)
    root = Root(url, options, client=client, timeout=timeout, read_only=read_only)
    if root.within.key is not None and not blocks:
        raise InvalidInputError(
            "url: expected a root, namespace, rank or group, found one block. Name what it "
            "lies in, or see kvstore info"
        )
    if option != DST_OPTIONS:
        _tell_links(root)
    return root


LEFT_OUT: ContextVar[bool] = ContextVar("LEFT_OUT", default=False)
"""Whether this command looks at less than it was asked to."""


def _tell_links(root: Root) -> None:
    links = []
    with contextlib.suppress(StorageError):  # who lists next is told
        links = root.links()
    for link in links:
        LEFT_OUT.set(True)
        place = printable(root.filesystem.place(link))
        sys.stderr.write(
            f"left out: {place} is a symbolic link, which engines follow and no command: "
            "name the folder that it leads to, or move that here\n"
        )


def require_shared(destination: Filesystem) -> None:
    """Refuse a DST that ends with the command. Raises `InvalidInputError`."""
    if not destination.shared:
        raise InvalidInputError(
            f"DST: expected storage that other processes see, found {destination.url}, "
            "which ends with this one"
        )
