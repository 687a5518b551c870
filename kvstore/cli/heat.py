"""A heat map in a terminal: by colours where it has them, otherwise by characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from kvstore.offline.colours import colour
from kvstore.offline.contents import Part

_SHADES = ".:-=+*#%@"
_NONE = "?"
_HALF = "▀"
"""Its upper half has one colour and its lower half another: two rows in one line."""


def heat(part: Part, *, coloured: bool, width: int) -> list[Text]:
    """Lines that show a part: its name, the map, and what the numbers are.

    Args:
        part: of a block.
        coloured: whether the terminal has colours.
        width: its columns. Where there are too many heads for them, neighbours share one.
    """
    label = len(str(len(part.means))) + 2
    rows = _narrowed(part.fractions(), max(1, width - label - 1))
    about = f"{part.name}: mean |value| by {part.rows} (down) and {part.columns} (across)"
    lines = [Text(about)]
    step = 2 if coloured else 1
    for first in range(0, len(rows), step):
        line = Text(f"{first:>{label - 1}} ")
        pairs = zip(*rows[first : first + step], strict=True)
        for cells in pairs:
            line.append_text(_coloured(cells) if coloured else _shaded(cells[0]))
        lines.append(line)
    return [*lines, Text(_scale(part, coloured))]


def _shaded(fraction: float | None) -> Text:
    if fraction is None:
        return Text(_NONE)
    return Text(_SHADES[min(int(fraction * len(_SHADES)), len(_SHADES) - 1)])


def _coloured(cells: tuple[float | None, ...]) -> Text:
    upper = "#{:02x}{:02x}{:02x}".format(*colour(cells[0]))
    if len(cells) == 1:
        return Text(_HALF, Style(color=upper))
    lower = "#{:02x}{:02x}{:02x}".format(*colour(cells[1]))
    return Text(_HALF, Style(color=upper, bgcolor=lower))


def _scale(part: Part, coloured: bool) -> str:
    if part.span is None or part.least is None or part.most is None:
        return f"none of {part.values:,} values is finite: {part.gaps}"
    low, high = part.span
    darkest, lightest = ("dark", "light") if coloured else (_SHADES[0], _SHADES[-1])
    return (
        f"{low:.3g} ({darkest}) to {high:.3g} ({lightest}); {part.values:,} values from "
        f"{part.least:.3g} to {part.most:.3g}, {part.gaps}"
    )


def _narrowed(rows: list[list[float | None]], most: int) -> list[list[float | None]]:
    """At most so many columns: neighbours are averaged."""
    if len(rows[0]) <= most:
        return rows
    bounds = [len(rows[0]) * column // most for column in range(most + 1)]
    return [
        [_mean(row[first:stop]) for first, stop in itertools.pairwise(bounds)]
        for row in rows
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
