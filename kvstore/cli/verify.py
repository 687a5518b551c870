"""`verify`: whether all that lies there is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvstore.cli.codes import FAILED, FOUND
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    DaskAddress,
    Jobs,
    JournalFile,
    StorageOptions,
    Timeout,
    Url,
    open_root,
)
from kvstore.cli.output import bytes_text, print_json_line, print_line, print_table
from kvstore.cli.work import journal_of, recalled, storages, work
from kvstore.errors import StorageError
from kvstore.offline.faults import Fault, Findings, Problem
from kvstore.offline.journal import Journal
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.offline.upper import Upper
from kvstore.offline.verify import Verify, covering

ABOVE = "(above)"
"""In place of a group, for what lies above the groups."""

Delete = Annotated[
    bool,
    typer.Option(
        "--delete", help="Remove blocks that are damaged or half, if they still are."
    ),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Write missing documents of ranks and fan-outs anew."),
]


def verify(
    url: Url,
    delete: Delete = False,
    repair: Repair = False,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    jobs: Jobs = 8,
    dask: DaskAddress = None,
    journal: JournalFile = None,
    as_json: AsJson = False,
) -> None:
    """Prove every block below URL: document, key, layout, length and checksum.

    Nothing is written without --delete or --repair. With --json, each problem is a line,
    and the last line is the sum.

    Example: kvstore verify s3://bucket/kv --journal verify.journal
    """
    read_only = not (delete or repair)
    root = open_root(url, storage_options, client, timeout, read_only=read_only)
    if root.within.key is not None:
        root.require_places()
    task = Verify(
        filesystem=root.filesystem,
        key=root.within.key,
        delete=delete,
        repair=repair,
        now=root.now() if delete else 0.0,
    )
    about = {
        "work": "verify",
        "url": root.filesystem.url,
        "part": root.within.path,
        "delete": delete,
        "repair": repair,
        **storages(url=root.filesystem),
    }
    totals: dict[str, Findings] = {}
    with journal_of(journal, about, Findings, journal=Readable) as notes:
        try:
            for group, findings in _found(root, task, jobs, dask, notes):
                _tell(findings, as_json)
                totals[group] = totals.get(group, Findings()) + findings
        except StorageError:
            _tell_sums(root, totals, notes, as_json, whole=False)
            raise
    if not totals:
        root.require_places()
    total = _tell_sums(root, totals, notes, as_json, whole=True)
    if Fault.UNREAD in total.found:
        raise typer.Exit(FAILED)
    if total.found:
        raise typer.Exit(FOUND)


def _found(
    root: Root, task: Verify, jobs: int, dask: str | None, notes: Journal[Findings] | None
) -> Iterator[tuple[str, Findings]]:
    """What is found, by group, as it is found."""
    shares = covering(root)
    # Before anything is mended: a journal may be refused.
    done = work("verifying", task, shares, jobs=jobs, dask=dask, journal=notes)
    for problem in Upper(root, repair=task.repair, delete=task.delete).problems():
        yield ABOVE, Findings.of(problem)
    for share in shares:
        yield share.group, Findings()
    for share, findings in done:
        yield share.group, findings


class Readable(Journal[Findings]):
    """Recalls the shares of which all could be read."""

    def recall(self, share: Share) -> Findings | None:
        """As `Journal.recall`."""
        done = super().recall(share)
        return None if done is None or Fault.UNREAD in done.found else done


def _tell(findings: Findings, as_json: bool) -> None:
    for problem in findings.problems:
        if as_json:
            print_json_line(problem.to_dict())
        else:
            print_line(_problem_text(problem))
    untold = sum(findings.found.values()) - len(findings.problems)
    if untold and not as_json:
        print_line(f"and {untold:,} more")


def _problem_text(problem: Problem) -> str:
    done = f" [{problem.done}]" if problem.done else ""
    return f"{problem.fault}  {problem.path}  {problem.detail}{done}"


def _tell_sums(
    root: Root,
    totals: dict[str, Findings],
    notes: Journal[Findings] | None,
    as_json: bool,
    *,
    whole: bool,
) -> Findings:
    """Print what was found in all; `whole` says whether all was looked at."""
    total = sum(totals.values(), Findings())
    if as_json:
        groups = [{"path": name, **_sum(found)} for name, found in totals.items()]
        told = {"url": root.filesystem.url, "journal": recalled(notes), "whole": whole}
        print_json_line(told | {"groups": groups, **_sum(total)})
        return total
    _print_tables(totals, total)
    if not whole:
        print_line("Not all was looked at: storage failed.")
    elif not total.found:
        print_line("No problem was found.")
    return total


def _print_tables(totals: dict[str, Findings], total: Findings) -> None:
    print_table(
        ("group", "#blocks", "#unproved", "#size", "#problems"),
        [_row(name, found) for name, found in [*totals.items(), ("total", total)]],
    )
    if total.found:
        print_table(
            ("group", "problem", "#found", "#mended"),
            [
                (name, fault, f"{count:,}", f"{found.mended.get(fault, 0):,}")
                for name, found in totals.items()
                for fault, count in sorted(found.found.items())
            ],
        )


def _row(name: str, found: Findings) -> tuple[str, ...]:
    return (
        name,
        f"{found.blocks:,}",
        f"{found.unproved:,}",
        bytes_text(found.nbytes),
        f"{sum(found.found.values()):,}",
    )


def _sum(found: Findings) -> dict[str, Any]:
    told = found.to_dict()
    del told["problems"]
    return told
