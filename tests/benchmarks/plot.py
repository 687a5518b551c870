"""Results -> one SVG: speeds by block size, ours beside the others'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Results, Spread

COLOURS = ("#2a6f97", "#e07a1f", "#6a994e", "#9d4edd", "#8d99ae")
PANEL = (4.2, 2.9)
PER_ROW = 3


def draw(results: Sequence[Results], target: Path) -> bool:
    """Draw what there is. Returns whether there was anything.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for result in results for panel in _panels(result)]
    if not panels:
        return False
    columns = min(PER_ROW, len(panels))
    lines = -(-len(panels) // columns)
    # The same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kvstore"
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False
    )
    cells = list(grid.flat)
    for cell, (title, figures) in zip(cells, panels, strict=False):
        _bars(cell, title, figures)
    for cell in cells[len(panels) :]:
        cell.set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def _panels(result: Results) -> list[tuple[str, list[Figure]]]:
    """A panel for each place and operation, and one for the times to first token."""
    panels: dict[str, list[Figure]] = {}
    for figure in result.figures:
        place, _, _ = figure.case.partition(", ")
        if result.benchmark in ("local", "bucket") and figure.unit == "GB/s":
            title = f"{place}: {figure.quantity}, GB/s"
        elif result.benchmark == "ttft" and figure.unit == "ms":
            title = f"{figure.quantity}, ms"
        else:
            continue
        panels.setdefault(title, []).append(figure)
    return list(panels.items())


def _bars(axes: Any, title: str, figures: list[Figure]) -> None:
    """Grouped bars of medians, with least and most."""
    cases = list(dict.fromkeys(figure.case for figure in figures))
    sides = list(dict.fromkeys(sorted((f.side for f in figures), key=_ours_first)))
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        for position, case in enumerate(cases):
            found = [f for f in figures if (f.side, f.case) == (side, case)]
            if not found:
                continue
            spread = Spread.of(found[0].samples)
            axes.bar(
                position + (index - (len(sides) - 1) / 2) * width,
                spread.middle,
                width,
                yerr=[[spread.middle - spread.least], [spread.most - spread.middle]],
                color=COLOURS[index % len(COLOURS)],
                ecolor="#444444",
                capsize=2,
                label=side if position == 0 else None,
            )
    names = [case.partition(", ")[2] or case for case in cases]
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def _ours_first(side: str) -> bool:
    return side != "kvstore"
