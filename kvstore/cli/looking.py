"""`ls`, `info` and `du`: what is there. They read documents, list, and write nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from kvstore.cli.codes import FAILED, FOUND
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    DaskAddress,
    Jobs,
    StorageOptions,
    Timeout,
    Url,
    open_root,
)
from kvstore.cli.output import (
    age_text,
    bytes_text,
    print_fields,
    print_json,
    print_line,
    print_table,
)
from kvstore.cli.work import work
from kvstore.errors import FormatError, KVStoreError, StorageError
from kvstore.offline.group import shares_of
from kvstore.offline.place import Within
from kvstore.offline.root import Root
from kvstore.offline.sizes import Measure, Sizes, estimate


def ls(
    url: Url,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the KV groups below URL: model, layout, and about how many blocks.

    Where there are many blocks, a sample tells (~); `kvstore du` counts.

    Example: kvstore ls s3://bucket/kv
    """
    root = open_root(url, storage_options, client, timeout, blocks=False)
    found = [_listed(root, place) for place in root.places()]
    if as_json:
        print_json({"url": root.filesystem.url, "groups": [told for told, _ in found]})
    elif found:
        print_table(
            ("group", "model", "dtype", "axes", "runner", "#blocks", "#size", "#last used"),
            [_row(told) for told, _ in found],
        )
    else:
        print_line(f"{root.filesystem.place(root.within.path)} holds no KV group.")
    _end(end for _, end in found)


def _listed(root: Root, place: Within) -> tuple[dict[str, Any], int]:
    """What is told of a group, and what the command ends with for it."""
    unknown = dict.fromkeys(Sizes().to_dict())
    told: dict[str, Any] = {"path": place.path, "exact": False, **unknown}
    try:
        sizes, exact = estimate(root.filesystem, place.path)
        told |= {"exact": exact, **sizes.to_dict()}
        group = root.read_group(place)
    except (FormatError, StorageError) as error:
        return told | {"problem": str(error)}, _end_of(error)
    told |= {"config": group.config.fields(), "layout": group.layout.to_dict()}
    return told, 0


def _end_of(error: KVStoreError) -> int:
    return FAILED if isinstance(error, StorageError) else FOUND


def _end(ends: Iterable[int]) -> None:
    """End with the worst, if anything is wrong: nothing hides what comes behind it."""
    if code := max(ends, default=0):
        raise typer.Exit(code)


def _row(told: dict[str, Any]) -> Sequence[str]:
    counts: tuple[str, ...] = ("?", "?", "?")
    if told["blocks"] is not None:
        about = "" if told["exact"] else "~"
        counts = (
            f"{about}{told['blocks']:,}",
            f"{about}{bytes_text(told['nbytes'])}",
            age_text(told["newest"]),
        )
    if "problem" in told:
        return (told["path"], f"unreadable: {told['problem']}", "", "", "", *counts)
    layout = told["layout"]
    return (
        told["path"],
        told["config"]["model_name"],
        layout["dtype"],
        ",".join(layout["axes"]),
        layout["runner"] or "-",
        *counts,
    )


def du(
    url: Url,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    as_json: AsJson = False,
) -> None:
    """Count the blocks below URL and add up their sizes, group by group.

    Example: kvstore du /mnt/kv
    """
    root = open_root(url, storage_options, client, timeout, blocks=False)
    sizes = measure(root, jobs, dask)
    total = sum(sizes.values(), Sizes())
    if as_json:
        groups = [{"path": path, **found.to_dict()} for path, found in sizes.items()]
        print_json({"url": root.filesystem.url, "groups": groups, **total.to_dict()})
        return
    rows = [*sizes.items(), ("total", total)]
    print_table(
        ("group", "#blocks", "#half blocks", "#size", "#oldest use", "#last used"),
        [
            (
                path,
                f"{found.blocks:,}",
                f"{found.halves:,}",
                bytes_text(found.nbytes),
                age_text(found.oldest),
                age_text(found.newest),
            )
            for path, found in rows
        ],
    )


def measure(root: Root, jobs: int, dask: str | None) -> dict[str, Sizes]:
    """The sizes of every group, by its path. Raises `KVStoreError`."""
    sizes = {place.path: Sizes() for place in root.require_places()}
    shares = [share for path in sizes for share in shares_of(root.filesystem, path)]
    task = Measure(root.filesystem)
    for share, found in work("counting", task, shares, jobs=jobs, dask=dask):
        sizes[share.group] += found
    return sizes


SHOWN = 2
"""Layers whose names are all told."""

Everything = Annotated[
    bool, typer.Option("--all", help="Every layer's name, and all else that is recorded.")
]


def info(
    url: Url,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Say what a namespace, a group or one block is, in full.

    Example: kvstore info /mnt/kv/my-model_0123456789ab/r0/g0
    """
    root = open_root(url, storage_options, client, timeout)
    found = [_described(root, place) for place in root.require_places()]
    if as_json:
        print_json([told for told, _ in found])
    else:
        for told, _ in found:
            _print(told, everything)
    _end(end for _, end in found)


def _print(told: dict[str, Any], everything: bool) -> None:
    if "problem" in told:
        print_line(f"{told['url']}: unreadable: {told['problem']}")
        return
    print_fields(f"{told['url']}: config", short(told["config"], everything))
    print_fields("layout", short(told["layout"], everything))
    if "block" in told:
        block = told["block"]
        used = "unknown" if block["used"] is None else f"{age_text(block['used'])} ago"
        problem = block["problem"] or "none"
        print_fields("block", block | {"used": used, "problem": problem})
    else:
        print_fields("blocks", _counted(told["sizes"]))


def _described(root: Root, place: Within) -> tuple[dict[str, Any], int]:
    """What there is to say of a group, and what the command ends with for it."""
    url, key = root.filesystem.place(place.path), root.within.key
    try:
        group = root.read_group(place)
        told = {
            "url": url,
            "config": group.config.fields(),
            "layout": group.layout.to_dict(),
        }
        if key is None:
            sizes, exact = estimate(group.filesystem, group.path)
            return told | {"sizes": {"exact": exact, **sizes.to_dict()}}, 0
    except (FormatError, StorageError) as error:
        return {"url": url, "problem": str(error)}, _end_of(error)
    block = group.facts(key)
    return told | {"block": block.to_dict()}, FOUND if block.problem else 0


def _counted(told: dict[str, Any]) -> dict[str, str]:
    about = "" if told["exact"] else "about "
    return {
        "count": f"{about}{told['blocks']:,}",
        "half": f"{about}{told['halves']:,}",
        "size": f"{about}{bytes_text(told['nbytes'])}",
        "used": f"{age_text(told['oldest'])} to {age_text(told['newest'])} ago",
    }


def short(record: dict[str, Any], everything: bool) -> dict[str, Any]:
    """A record without what is unknown, and long lists by their first member, unless all is
    wanted.
    """
    if everything:
        return record
    told = {name: value for name, value in record.items() if value is not None}
    if len(names := told.get("layer_names", ())) > SHOWN:
        told["layer_names"] = f"{names[0]} and {len(names) - 1} more"
    if "kv_cache_groups" in told:
        told["kv_cache_groups"] = [
            f"{len(group['layer_names'])} layers of {group['tokens_per_block']} tokens"
            for group in told["kv_cache_groups"]
        ]
    return told
