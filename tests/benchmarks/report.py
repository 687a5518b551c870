"""Results -> a table for the terminal, and the Markdown of docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.figures import OURS, Figure, Results, Spread, ratio

_MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PLOT = re.compile(r"(<!-- plot -->\n).*?(<!-- end -->)", re.DOTALL)


def headings(results: Results) -> list[str]:
    sides = results.sides()
    ratios = [f"{OURS} / {side}" for side in sides[1:]] if OURS in sides else []
    return ["Case", "Quantity", *sides, *ratios]


def lines(results: Results) -> Iterator[list[str]]:
    """One line of the table for each case and quantity."""
    sides = results.sides()
    for row in results.rows():
        by_side = {figure.side: figure for figure in row}
        first = row[0]
        quantity = first.quantity
        if first.unit:
            quantity += f", {first.unit} {'↑' if first.more_is_better else '↓'}"
        cells = [first.case, quantity]
        cells += [_spread(by_side.get(side)) for side in sides]
        if OURS in sides:
            ours = by_side.get(OURS)
            cells += [_ratio(ours, by_side.get(side)) for side in sides[1:]]
        yield cells


def _spread(figure: Figure | None) -> str:
    return str(Spread.of(figure.samples)) if figure else ""


def _ratio(ours: Figure | None, theirs: Figure | None) -> str:
    spread = ratio(ours, theirs) if ours and theirs else None
    return str(spread) if spread else ""


def table(results: Results) -> Table:
    """For the terminal. A case is named once."""
    shown = Table(title=results.benchmark, title_justify="left")
    for heading in headings(results):
        shown.add_column(heading)
    above = ""
    for case, *cells in lines(results):
        shown.add_row("" if case == above else case, *cells)
        above = case
    return shown


def markdown(results: Results) -> str:
    """The same, with what must be known to read it."""
    text = [_machine(results.facts), ""]
    text += [f"{note}\n" for note in results.notes]
    if results.figures:
        head = headings(results)
        text += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        text += [f"| {' | '.join(cells)} |" for cells in lines(results)]
    return "\n".join(text).rstrip() + "\n"


def _machine(facts: dict[str, Any]) -> str:
    """One line of facts."""
    versions = facts.get("versions", {})
    filesystems = facts.get("filesystems", {})
    parts = [
        facts.get("cpu"),
        f"{facts.get('cores')} cores",
        f"{facts.get('memory_gib')} GiB",
        f"Linux {facts.get('kernel')}",
        *(f"{place}: {kind}" for place, kind in filesystems.items() if place != kind),
        f"Python {facts.get('python')}",
        *(f"{name} {version}" for name, version in versions.items()),
        f"commit {facts.get('commit')}",
        f"{facts.get('rounds')} rounds",
        facts.get("date"),
    ]
    return ", ".join(str(part) for part in parts if part) + "."


def replaced(page: str, results: Sequence[Results]) -> str:
    """The page with these results between its markers; others stay as they are."""
    by_name = {result.benchmark: result for result in results}

    def body(match: re.Match[str]) -> str:
        result = by_name.get(match[2])
        return match[0] if result is None else match[1] + markdown(result) + match[3]

    return _MARKED.sub(body, page)


def with_plot(page: str, name: str) -> str:
    """The page with the plot where its marker is."""
    text = f"![Speeds and times of each side: medians, least and most]({name})\n"
    return _PLOT.sub(lambda match: match[1] + text + match[2], page)
