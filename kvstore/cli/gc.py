"""`gc`: room is made, the least recently used blocks first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvstore.cli.codes import FOUND
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    DryRun,
    Jobs,
    StorageOptions,
    Timeout,
    Url,
    open_root,
    parse_duration,
    parse_size,
)
from kvstore.cli.output import bytes_text, print_json, print_line, print_table
from kvstore.cli.work import work
from kvstore.errors import InvalidInputError, StorageError
from kvstore.offline.gc import Remove, Removed, Rules, Trim, Weigh, Weight, quotas_of
from kvstore.offline.group import shares_of
from kvstore.offline.root import Root
from kvstore.offline.shares import Share

MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes", metavar="SIZE", help="What may stay, e.g. 512MiB, 1.5TB or 100000B."
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="DURATION",
        help="Remove what was not used for so long, e.g. 30d, 12h or 90min.",
    ),
]


def gc(
    url: Url,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    as_json: AsJson = False,
) -> None:
    """Remove blocks below URL, the least recently used first, until limits hold.

    URL is a root, a namespace, a rank or a group: only what lies below it counts and goes.
    Half blocks older than an hour go in any case.

    Example: kvstore gc s3://bucket/kv --max-bytes 1.5TB --older-than 30d --dry-run
    """
    if max_bytes is None and older_than is None:
        raise InvalidInputError("gc: expected --max-bytes or --older-than, found neither")
    limit = None if max_bytes is None else parse_size(max_bytes, "--max-bytes")
    age = None if older_than is None else parse_duration(older_than, "--older-than")
    root = open_root(url, storage_options, client, timeout, read_only=dry_run, blocks=False)
    groups, unreadable = root.readable()
    totals = dict.fromkeys(groups, Removed())
    if not dry_run:
        root.filesystem.sweep()
    rules = Rules(now=root.now(), max_age=age, dry_run=dry_run)
    told = {"url": root.filesystem.url, "dry_run": dry_run, "unreadable": unreadable}
    try:
        for share, removed in _removed(root, list(totals), rules, limit, jobs):
            totals[share.group] += removed
    except StorageError:
        _tell(told | {"whole": False}, totals, as_json)
        raise
    left = _tell(told | {"whole": True}, totals, as_json)
    over = limit is not None and left > limit
    if over and not as_json:
        print_line(
            f"The limit does not hold: {bytes_text(left)} are left. What was used or "
            "written meanwhile stays, and half blocks of the last hour: run it again later."
        )
    if over or unreadable:
        raise typer.Exit(FOUND)


def _removed(
    root: Root, groups: list[str], rules: Rules, limit: int | None, jobs: int
) -> Iterator[tuple[Share, Removed]]:
    """What becomes of each share, as it comes."""
    filesystem = root.filesystem
    shares = [share for group in groups for share in shares_of(filesystem, group)]
    cut, excess = None, 0
    if limit is not None:
        weighed = work("weighing", Weigh(filesystem, rules), shares, jobs=jobs)
        weight = sum((found for _, found in weighed), Weight(steps={}))
        cut, excess = weight.cut(limit), weight.nbytes - limit
    edges: dict[Share, int] = {}
    task = Remove(filesystem=filesystem, rules=rules, cut=cut)
    for share, removed in work("removing", task, shares, jobs=jobs):
        excess -= removed.evicted_bytes
        edges[share] = removed.edge
        yield share, removed
    if cut is None:
        return
    quotas = quotas_of(edges, excess)
    trim = Trim(filesystem=filesystem, rules=rules, cut=cut, quotas=quotas)
    yield from work("trimming", trim, list(quotas), jobs=jobs)


def _tell(told: dict[str, Any], totals: dict[str, Removed], as_json: bool) -> int:
    """Print what was done. Returns the bytes that are left, if all was listed."""
    total = sum(totals.values(), Removed())
    left = total.nbytes - total.freed
    whole = told["whole"]
    if as_json:
        groups = [{"path": path, **_told(found, whole)} for path, found in totals.items()]
        print_json(told | {"groups": groups, **_told(total, whole)})
        return left
    names = (
        "group",
        "#expired",
        "#evicted",
        "#half",
        "#freed",
        "#blocks left",
        "#size left",
    )
    shown = slice(len(names) if whole else -2)
    rows = [*totals.items(), ("total", total)]
    print_table(names[shown], [_row(path, found)[shown] for path, found in rows])
    for problem in told["unreadable"]:
        print_line(f"left out: {problem}")
    if not whole:
        print_line("Not all was looked at: storage failed.")
    if told["dry_run"]:
        print_line("This was a dry run: nothing was removed.")
    return left


def _told(found: Removed, whole: bool) -> dict[str, Any]:
    """What is left is known only if all was listed."""
    gone = found.expired + found.evicted + found.halves
    return {
        "expired": found.expired,
        "evicted": found.evicted,
        "halves": found.halves,
        "freed": found.freed,
        "blocks": found.blocks - gone if whole else None,
        "nbytes": found.nbytes - found.freed if whole else None,
    }


def _row(path: str, found: Removed) -> tuple[str, ...]:
    told = _told(found, whole=True)
    return (
        path,
        f"{told['expired']:,}",
        f"{told['evicted']:,}",
        f"{told['halves']:,}",
        bytes_text(told["freed"]),
        f"{told['blocks']:,}",
        bytes_text(told["nbytes"]),
    )
