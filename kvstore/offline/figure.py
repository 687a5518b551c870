"""`draw`: what is in a block, as a picture. The only user of matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import InvalidInputError, printable
from kvstore.offline.contents import Part


def draw(parts: Sequence[Part], title: Sequence[str], path: Path) -> bytes:
    """A heat map and the distribution of each part, as `path` will hold them.

    Args:
        parts: at least one.
        title: lines of anybody's words: nothing in them is markup.
        path: its suffix says the kind of file: `.png`, `.svg`, `.pdf` and others.

    Raises:
        InvalidInputError: matplotlib is missing or cannot start, knows no such kind of
            file, or misses what it needs for it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError(
            "-o: a picture needs the package matplotlib: pip install 'kvstore-zarr[plot]'. "
            "Without -o the terminal shows it"
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"-o: matplotlib cannot keep its list of fonts: {error.strerror}. Set "
            "MPLCONFIGDIR to a folder with room"
        ) from error
    figure = Figure(figsize=(6.4 * len(parts), 8.0), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if (kind := path.suffix.lstrip(".").lower()) not in kinds:
        raise InvalidInputError(
            f"-o: expected a name that ends in one of {', '.join(sorted(kinds))}, found "
            f"{printable(str(path))!r}"
        )
    lines = "\n".join(
        part for line in title for part in textwrap.wrap(printable(line), 60 * len(parts))
    )
    figure.suptitle(lines, parse_math=False, fontsize="medium")
    axes = figure.subplots(2, len(parts), squeeze=False, height_ratios=(3, 2))
    for part, (above, below) in zip(parts, axes.T, strict=True):
        _heat(figure, above, part)
        _spread(below, part)
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=kind, dpi=120)
    except RuntimeError as error:  # of LaTeX, for .pgf and where the user's settings ask
        raise InvalidInputError(f"-o: matplotlib cannot draw .{kind}: {error}") from error
    return drawn.getvalue()


def _heat(figure: Any, axes: Any, part: Part) -> None:
    means = np.array(part.means, dtype=np.float64)  # None becomes NaN
    image = axes.imshow(means, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_facecolor("tab:red")  # seen where there is no number
    figure.colorbar(image, ax=axes)
    axes.set_title(f"{part.name}: mean |value|")
    axes.set_xlabel(part.columns)
    axes.set_ylabel(part.rows)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _spread(axes: Any, part: Part) -> None:
    axes.set_title(f"{part.name}: {part.values:,} values; {part.gaps}")
    if part.least is None or part.most is None:
        axes.text(0.5, 0.5, "none is finite", ha="center", transform=axes.transAxes)
        return
    around = max(0.5, abs(part.most) / 2) if part.least == part.most else 0.0
    edges = np.linspace(part.least - around, part.most + around, len(part.bins) + 1)
    axes.stairs(part.bins, edges, fill=True)
    axes.set_yscale("log")
    axes.set_xlabel("value")
    axes.set_ylabel("values (log)")
