"""`report`: a page for people who have no terminal at hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

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
from kvstore.cli.output import bytes_text, print_json, print_line, write_file
from kvstore.cli.work import work
from kvstore.offline.census import Census, Count
from kvstore.offline.faults import Fault, Findings
from kvstore.offline.group import shares_of
from kvstore.offline.page import page
from kvstore.offline.report import Report, group_reports, picture, sample
from kvstore.offline.root import Root
from kvstore.offline.upper import Upper
from kvstore.offline.verify import Verify, covering

HtmlFile = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="FILE", dir_okay=False, help="Where it goes."),
]
VerifyOption = Annotated[
    Literal["all", "sample", "none"],
    typer.Option("--verify", help="Which blocks are read and proved."),
]


def report(
    url: Url,
    output: HtmlFile,
    verify: VerifyOption = "sample",
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page: groups in words, sizes, ages, health, and one block's picture.

    Example: kvstore report s3://bucket/kv -o report.html
    """
    root = open_root(url, storage_options, client, timeout)
    now = time.time()
    sums = {place.path: Census() for place in root.require_places()}
    shares = [share for path in sums for share in shares_of(root.filesystem, path)]
    task = Count(root.filesystem, now)
    for share, found in work("counting", task, shares, jobs=jobs, dask=dask):
        sums[share.group] += found
    findings = Findings()
    if verify != "none":
        findings = _verified(root, sums, verify == "all", jobs, dask)
    made = Report(
        url=root.filesystem.place(root.within.path),
        made=now,
        groups=group_reports(root, sums),
        verified=verify,
        findings=findings,
        picture=picture(root, sums),
    )
    write_file(output, page(made).encode())
    if as_json:
        print_json({"output": str(output), **made.to_dict()})
    else:
        _tell(output, made)
    if Fault.UNREAD in findings.found or any(group.unread for group in made.groups):
        raise typer.Exit(FAILED)
    if findings.found or any(group.problem for group in made.groups):
        raise typer.Exit(FOUND)


def _verified(
    root: Root, sums: dict[str, Census], everything: bool, jobs: int, dask: str | None
) -> Findings:
    findings = Findings()
    for problem in Upper(root).problems():
        findings += Findings.of(problem)
    counts = {path: census.blocks for path, census in sums.items()}
    shares = covering(root) if everything else sample(root, counts)
    task = Verify(filesystem=root.filesystem, key=root.within.key)
    for _, found in work("verifying", task, shares, jobs=jobs, dask=dask):
        findings += found
    return findings


def _tell(output: Path, made: Report) -> None:
    census, findings = made.census, made.findings
    print_line(
        f"{output}: {len(made.groups):,} groups, {census.blocks:,} blocks, "
        f"{bytes_text(census.nbytes)}"
    )
    if made.verified != "none":
        found = sum(findings.found.values())
        problems = f"{found:,} problems" if found else "no problem was found"
        print_line(f"{findings.blocks:,} blocks were read and proved: {problems}")
