"""`import-vllm`: a cache of vLLM's own `fs` tier, adopted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    Timeout,
    open_root,
    require_shared,
)
from kvstore.cli.output import bytes_text, print_fields, print_json, print_line
from kvstore.cli.work import journal_of, recalled, require_there, storages, work
from kvstore.codecs import parse_codec
from kvstore.errors import InvalidInputError, shown
from kvstore.offline.convert import claim
from kvstore.offline.import_vllm import Import, Imported, Plan, plan, strays, vouched
from kvstore.offline.vllm_fs import VllmCache
from kvstore.paths import group_path

_STORED = ("imported", "repaired", "kept")

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The root_dir of vLLM's fs tier, or the folder in it that holds config.json.",
    ),
]
Destination = Annotated[
    str,
    typer.Argument(metavar="DST", help="A root: the URL that the engine on kvstore has."),
]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A namespace or group that an engine on kvstore has recorded, started with "
        "the settings of the one that wrote DIR. It may lie in DST.",
    ),
]
LayoutFile = Annotated[
    Path | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        dir_okay=False,
        help="Instead of --like: what `kvstore info --json` prints of such a group.",
    ),
]


def import_vllm(
    directory: Directory,
    dst: Destination,
    like: Like = None,
    layout: LayoutFile = None,
    codec: Codec = "none",
    dst_storage_options: DestinationOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    journal: JournalFile = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Store the rows in DIR, which vLLM's own fs tier wrote, as blocks below the root DST.

    vLLM records neither what the bytes of a row are nor a checksum. What they are is your
    word, given by --like or --layout; that they are whole is taken on trust. What is there
    already and holds is left as it is. DIR is only read.

    Example: kvstore import-vllm /mnt/vllm s3://bucket/kv --like s3://bucket/kv
    """
    if (like is None) == (layout is None):
        raise InvalidInputError(
            "like, layout: expected one of them, which says what the rows are: vLLM has "
            "not recorded it. The surest is to start an engine on kvstore once, with the "
            "same settings, and to name what it records by --like"
        )
    name = parse_codec(codec)
    destination = open_root(
        dst, dst_storage_options, client, timeout, read_only=dry_run, option=DST_OPTIONS
    )
    require_shared(destination.filesystem)
    recorded = layout or open_root(str(like), dst_storage_options, client, timeout)
    planned = plan(VllmCache.find(directory), vouched(recorded, destination))
    _require_apart(directory, planned)
    task = Import(planned.source, planned.targets, name, dry=dry_run)
    done, told = _imported(task, jobs, dask, None if dry_run else journal)
    if as_json:
        _print_document(planned, done, told, dry_run=dry_run)
    else:
        _print(planned, done, dry_run=dry_run)
    if done.refused or done.strays:
        raise typer.Exit(FOUND)


def _require_apart(directory: Path, planned: Plan) -> None:
    """What vLLM has written is only read, and must not be mixed with blocks."""
    target = planned.targets[0]
    if not target.filesystem.local:
        return
    rows = planned.source.rows
    folders = [Path(rows), Path(rows.removesuffix("_r0")), directory]
    vllms = [folder.resolve() for folder in folders]
    root = Path(target.filesystem.url.removeprefix("file://")).resolve()
    namespace = (root / target.namespace).resolve()
    if (
        root == Path(rows).parent.resolve()
        or any(root.is_relative_to(folder) for folder in vllms)
        or any(namespace.is_relative_to(folder) for folder in vllms)
        or any(folder.is_relative_to(namespace) for folder in vllms)
    ):
        raise InvalidInputError(
            f"DST: expected a root apart from vLLM's folders, found {shown(str(root))}, "
            f"whose namespace {shown(str(namespace))} would be among the rows in "
            f"{shown(rows)} or what belongs to them. Name another folder"
        )


def _imported(
    task: Import, jobs: int, dask: str | None, journal: Path | None
) -> tuple[Imported, dict[str, int] | None]:
    """What became of the rows, and how much of it a journal tells."""
    first = task.targets[0]
    about = {
        "work": "import-vllm",
        "source": task.source.rows,
        "targets": [target.url for target in task.targets],
        "target_layouts": [target.layout.digest for target in task.targets],
        "codec": task.codec,
        **storages(targets=first.filesystem),
    }
    label = group_path(first.namespace, first.rank, first.group).rpartition("/")[0]
    shares, beside = task.source.shares(label)
    with journal_of(journal, about, Imported) as notes:
        paths = [target.path for target in task.targets]
        require_there(notes, shares, first.filesystem, {label: paths})
        done = work("importing", task, shares, jobs=jobs, dask=dask, journal=notes)
        for target in task.targets:
            claim(target)
        return sum((result for _, result in done), strays(beside)), recalled(notes)


def _print(planned: Plan, done: Imported, *, dry_run: bool) -> None:
    print_line(f"source  {shown(planned.source.rows)}")
    for target in planned.targets:
        print_line(f"target  {target.url}")
    first = planned.targets[0]
    print_fields("layout, on your word", short(first.layout.to_dict(), everything=False))
    fields = first.config.fields()
    if planned.word:
        print_fields("config, on your word", {name: fields[name] for name in planned.word})
    told = done.to_dict() | {"nbytes": bytes_text(done.nbytes)}
    left_out = told.pop("left_out")
    left = _STORED if dry_run else ()
    print_fields("rows", {n: value for n, value in told.items() if n not in left})
    for problem in left_out:
        print_line(f"left out: {problem}")
    if untold := done.refused + done.strays - len(left_out):
        print_line(f"and {untold:,} more")
    if dry_run:
        print_line("Nothing was written.")
    elif done.imported:
        print_line("The bytes are taken on trust: vLLM has written no checksum.")


def _print_document(
    planned: Plan, done: Imported, journal: dict[str, int] | None, *, dry_run: bool
) -> None:
    first = planned.targets[0]
    told: dict[str, Any] = {
        "source": planned.source.rows,
        "targets": [target.url for target in planned.targets],
        "config": first.config.fields(),
        "config_on_your_word": list(planned.word),
        "layout": first.layout.to_dict(),
        "dry_run": dry_run,
        "journal": journal,
        "rows": done.to_dict(),
    }
    print_json(told)
