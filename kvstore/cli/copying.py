"""`cp`: blocks to another root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from kvstore.cli.codes import FOUND
from kvstore.cli.options import (
    DST_OPTIONS,
    AsJson,
    ClientOption,
    DaskAddress,
    DestinationOptions,
    DryRun,
    Jobs,
    JournalFile,
    StorageOptions,
    Timeout,
    Url,
    open_root,
    parse_storage_options,
    require_shared,
)
from kvstore.cli.output import bytes_text, print_json, print_line, print_table
from kvstore.cli.work import journal_of, recalled, require_there, storages, work
from kvstore.errors import InvalidInputError
from kvstore.offline.copying import Copied, Copy, claim, compare, destination_root
from kvstore.offline.group import StoredGroup
from kvstore.offline.place import locate
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.upkeep import Upkeep

Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The root to copy to: a path or fsspec URL.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Read back and prove what is at DST, what was there before too."
    ),
]


def cp(
    url: Url,
    dst: Destination,
    storage_options: StorageOptions = None,
    dst_storage_options: DestinationOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    journal: JournalFile = None,
    verify: Verify = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy what lies below URL to the root DST, but for blocks that are there already.

    Every block is proved before it is written, and keeps its bytes.

    Example: kvstore cp /mnt/kv s3://bucket/kv
    """
    root = open_root(url, storage_options, client, timeout)
    source = root.filesystem.place(root.within.path)
    options = parse_storage_options(dst_storage_options, DST_OPTIONS)
    reader, destination = (
        destination_root(
            locate(dst, options, client=client, timeout=timeout, read_only=read_only),
            root.namespaces(),
        )
        for read_only in (True, False)
    )
    require_shared(destination)
    if destination.url == root.filesystem.url and (
        destination.local or options == parse_storage_options(storage_options)
    ):
        raise InvalidInputError(
            f"destination: expected another root than the source's, found {destination.url}"
        )
    groups, unreadable = root.readable()
    for group in groups.values():
        compare(group, reader)
    task = Copy(
        groups=groups,
        destination=destination,
        key=root.within.key,
        verify=verify,
        dry_run=dry_run,
    )
    about = {
        "work": "cp",
        "source": source,
        "destination": destination.url,
        "verify": verify,
        **storages(source=root.filesystem, destination=destination),
    }
    sums = dict.fromkeys(groups, Copied())
    with journal_of(None if dry_run else journal, about, Copied) as notes:
        shares = _shares(root, groups.values())
        require_there(notes, shares, reader, {path: [path] for path in groups})
        done = work("copying", task, shares, jobs=jobs, dask=dask, journal=notes)
        if not dry_run:
            _claim(groups.values(), destination)
        for share, found in done:
            sums[share.group] += found
    told = {
        "source": source,
        "destination": destination.url,
        "dry_run": dry_run,
        "journal": recalled(notes),
    }
    _tell(told, sums, unreadable, as_json)
    if unreadable or any(found.damaged for found in sums.values()):
        raise typer.Exit(FOUND)


def _claim(groups: Iterable[StoredGroup], destination: Upkeep) -> None:
    destination.probe()
    for group in groups:
        claim(group, destination)


def _shares(root: Root, groups: Iterable[StoredGroup]) -> list[Share]:
    if (key := root.within.key) is not None:
        fan_out = int(key.hex()[:3], 16)
        return [Share(group.path, fan_out, fan_out + 1) for group in groups]
    return [share for group in groups for share in group.shares()]


def _tell(
    told: dict[str, Any],
    sums: Mapping[str, Copied],
    unreadable: list[str],
    as_json: bool,
) -> None:
    total = sum(sums.values(), Copied())
    if as_json:
        groups = [{"path": path, **found.to_dict()} for path, found in sums.items()]
        print_json(told | {"groups": groups, "unreadable": unreadable, **total.to_dict()})
        return
    names = (
        "to copy" if told["dry_run"] else "copied",
        "kept",
        "repaired",
        "damaged",
        "gone",
    )
    print_table(
        ("group", *(f"#{name}" for name in (*names, "size"))),
        [
            (
                path,
                f"{found.copied:,}",
                f"{found.kept:,}",
                f"{found.repaired:,}",
                f"{found.damaged:,}",
                f"{found.gone:,}",
                bytes_text(found.nbytes),
            )
            for path, found in (*sums.items(), ("total", total))
        ],
    )
    for problem in (*unreadable, *total.left_out):
        print_line(f"left out: {problem}")
    if untold := total.damaged - len(total.left_out):
        print_line(f"and {untold:,} more")
