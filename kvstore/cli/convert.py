"""`convert`: a group's blocks in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvstore.cli.codes import FOUND
from kvstore.cli.looking import short
from kvstore.cli.options import (
    DST_OPTIONS,
    AsJson,
    ClientOption,
    Codec,
    DaskAddress,
    DestinationOptions,
    DryRun,
    Jobs,
    JournalFile,
    StorageOptions,
    Timeout,
    open_root,
    require_shared,
)
from kvstore.cli.output import (
    bytes_text,
    print_fields,
    print_json,
    print_line,
    print_table,
    value_text,
)
from kvstore.cli.work import journal_of, recalled, require_there, storages, work
from kvstore.codecs import parse_codec
from kvstore.errors import InvalidInputError
from kvstore.offline.convert import Convert, Converted, claim, plan
from kvstore.offline.diff import narrowed
from kvstore.offline.group import StoredGroup
from kvstore.offline.target import Wanted

Source = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="A namespace or group; or a root, if there is one group in it."
    ),
]
Destination = Annotated[
    str,
    typer.Argument(metavar="DST", help="A root; it may be the same, or not be there yet."),
]
Axes = Annotated[
    str | None,
    typer.Option(
        help="The order of one worker's axes, outermost first: head,layer,token,value"
    ),
]
Packing = Annotated[
    str | None,
    typer.Option(help="How values lie inside a head, e.g. token-kv or cpu-amx."),
]
Runner = Annotated[Literal["v1", "v2"] | None, typer.Option(help="vLLM's model runner.")]
Name = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-layout", help="vLLM's name for the order; it follows from the axes."
    ),
]
Backend = Annotated[str | None, typer.Option(help="The attention backend, to be recorded.")]
Tp = Annotated[int | None, typer.Option(min=1, help="The tensor-parallel size.")]
Agnostic = Annotated[
    bool | None,
    typer.Option(
        "--parallel-agnostic/--no-parallel-agnostic",
        help="Whether the blocks are to be the same under every parallel size.",
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Convert to exactly what an engine has recorded there, instead of by the "
        "options above. It is opened with the options of DST.",
    ),
]
KvHeads = Annotated[
    int | None,
    typer.Option(min=1, help="KV heads of the model: needed where blocks name workers."),
]


def convert(
    src: Source,
    dst: Destination,
    axes: Axes = None,
    packing: Packing = None,
    runner: Runner = None,
    kv_cache_layout: Name = None,
    backend: Backend = None,
    tp: Tp = None,
    parallel_agnostic: Agnostic = None,
    like: Like = None,
    kv_heads: KvHeads = None,
    codec: Codec = "none",
    storage_options: StorageOptions = None,
    dst_storage_options: DestinationOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    journal: JournalFile = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write the blocks of the group at URL in another layout below the root DST.

    Every value keeps its name: layer, head, token. Each block is proved, converted, stored,
    read back and compared. What is there already and holds is left as it is, so that a
    conversion that was interrupted goes on.

    Example: kvstore convert /mnt/kv/model_0123456789ab /mnt/v1 --tp 2
    """
    wanted = Wanted(
        axes=None if axes is None else tuple(axes.split(",")),
        packing=packing,
        runner=runner,
        kv_cache_layout=kv_cache_layout,
        backend=backend,
        tp=tp,
        parallel_agnostic=parallel_agnostic,
    )
    if like is not None and wanted != Wanted():
        raise InvalidInputError(
            "--like: expected no other option that says what is wanted: the group at "
            "--like says all"
        )
    source = open_root(src, storage_options, client, timeout).only_group()
    destination = open_root(
        dst, dst_storage_options, client, timeout, read_only=dry_run, option=DST_OPTIONS
    )
    require_shared(destination.filesystem)
    recorded = like and open_root(like, dst_storage_options, client, timeout).only_group()
    target = plan(source, destination, recorded or wanted, kv_heads=kv_heads)
    task = Convert(source, target, parse_codec(codec))
    if dry_run:
        claim(target)
    done, told = (None, None) if dry_run else _converted(task, jobs, dask, journal)
    if as_json:
        _print_document(task, done, told)
    else:
        _print(task, done)
    if done is not None and done.damaged:
        raise typer.Exit(FOUND)


def _converted(
    task: Convert, jobs: int, dask: str | None, journal: Path | None
) -> tuple[Converted, dict[str, int] | None]:
    """What became of the blocks, and how much of it a journal tells."""
    source, target = task.source, task.target
    about = {
        "work": "convert",
        "source": source.url,
        "source_layout": source.layout.digest,
        "target": target.url,
        "target_layout": target.layout.digest,
        "codec": task.codec,
        **storages(source=source.filesystem, target=target.filesystem),
    }
    with journal_of(journal, about, Converted) as notes:
        shares = source.shares()
        require_there(notes, shares, target.filesystem, {source.path: [target.path]})
        done = work("converting", task, shares, jobs=jobs, dask=dask, journal=notes)
        claim(target)
        return sum((result for _, result in done), Converted()), recalled(notes)


def _differences(source: StoredGroup, target: StoredGroup) -> list[tuple[str, Any, Any]]:
    return [
        (difference.field, difference.found, difference.expected)
        for difference in map(
            narrowed,
            (
                *target.config.differences(source.config),
                *target.layout.differences(source.layout),
            ),
        )
    ]


def _print(task: Convert, done: Converted | None) -> None:
    source, target = task.source, task.target
    print_line(f"source  {source.url}")
    print_line(f"target  {target.url}")
    if done is None:
        print_fields("layout", short(target.layout.to_dict(), everything=False))
    changes = _differences(source, target)
    rows = [(name, value_text(was), value_text(now)) for name, was, now in changes]
    print_table(("field", "source", "target"), rows)
    if done is None:
        print_line("Nothing was written.")
        return
    told = done.to_dict() | {"nbytes": bytes_text(done.nbytes)}
    left_out = told.pop("left_out")
    print_fields("blocks", told)
    for problem in left_out:
        print_line(f"damaged, left out: {problem}")
    if untold := done.damaged - len(left_out):
        print_line(f"and {untold:,} more")


def _print_document(
    task: Convert, done: Converted | None, journal: dict[str, int] | None
) -> None:
    source, target = task.source, task.target
    changes = [
        {"field": name, "source": was, "target": now}
        for name, was, now in _differences(source, target)
    ]
    told: dict[str, Any] = {
        "source": source.url,
        "target": target.url,
        "config": target.config.fields(),
        "layout": target.layout.to_dict(),
        "differences": changes,
        "journal": journal,
    }
    print_json(told | {"done": None if done is None else done.to_dict()})
