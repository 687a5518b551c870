"""What is in a block: K and V by layer and head, and how their values are spread. Pure.

Where a block's packing is unknown, K and V cannot be told apart, and its values are shown
by their axes as they are. Of a block of plain bytes the bytes are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInputError
from kvstore.layout import Layout
from kvstore.packing import Array, unpack, values
from kvstore.records import Record

BINS = 48
"""Bars of a distribution."""

STRETCHES = 32
"""A block of plain bytes is shown in at most so many rows and columns."""

_INNER = ("token", "value", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Record):
    """K, V, or all values of a block, in numbers that can be drawn.

    Attributes:
        name: `K`, `V`, `values` or `bytes`.
        rows, columns: what the rows and columns of `means` are, e.g. `layer` and `head`.
        means: the mean of the values without their signs; None where none is finite.
        bins: how many finite values are in each of equal steps from `least` to `most`; in
            the middle one where these are equal.
        least, most: of the finite values; None where there are none.
        values: how many there are.
        nans, infinities: how many of them are no numbers, or infinite.
    """

    name: str
    rows: str
    columns: str
    means: tuple[tuple[float | None, ...], ...]
    bins: tuple[int, ...]
    least: float | None
    most: float | None
    values: int
    nans: int
    infinities: int

    @property
    def span(self) -> tuple[float, float] | None:
        """The lowest and the highest mean; None where there are none."""
        known = [mean for row in self.means for mean in row if mean is not None]
        return (min(known), max(known)) if known else None

    @property
    def gaps(self) -> str:
        """How many values are not finite, for people."""
        if not self.nans + self.infinities:
            return "none NaN or infinite"
        return f"{self.nans:,} NaN, {self.infinities:,} infinite"

    def fractions(self) -> list[list[float | None]]:
        """`means`, between 0 for the lowest and 1 for the highest of them."""
        low, high = self.span or (0.0, 0.0)
        width = high - low
        return [
            [
                None if mean is None else (mean - low) / width if width else 0.5
                for mean in row
            ]
            for row in self.means
        ]


def parts_of(layout: Layout, payload: memoryview | bytes | Array) -> tuple[Part, ...]:
    """What is in a block: K and V, or one part where they cannot be told apart.

    Args:
        layout: the block's.
        payload: its `layout.nbytes` bytes, proved.

    Raises:
        InvalidInputError: not the bytes of one block.
    """
    block = values(layout, payload)
    if layout.opaque:
        rows = _divisor(block.size, STRETCHES)
        columns = _divisor(block.size // rows, STRETCHES)
        return (_part("bytes", ("part", "part"), block.reshape(rows, columns, -1)),)
    try:
        keys, content = unpack(layout, payload)
    except InvalidInputError:
        return (_part("values", _names(layout), _arranged(block, layout.axes)),)
    outer = tuple(axis for axis in layout.axes if axis not in _INNER)
    axes = (*outer, "token", "value")
    return tuple(
        _part(name, _names(layout), _arranged(array, axes))
        for name, array in (("K", keys), ("V", content))
    )


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is not above `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def _names(layout: Layout) -> tuple[str, str]:
    return "layer", "worker and head" if "worker" in layout.axes else "head"


def _arranged(array: Array, axes: tuple[str, ...]) -> Array:
    """The values as (layer, head, rest): the heads of all workers follow each other."""
    columns = [axis for axis in ("worker", "head") if axis in axes]
    rest = [axis for axis in axes if axis not in ("layer", "worker", "head")]
    rows = ["layer"] if "layer" in axes else []
    order = [axes.index(axis) for axis in (*rows, *columns, *rest)]
    lengths = dict(zip(axes, array.shape, strict=True))
    count = lengths.get("layer", 1)
    heads = lengths.get("worker", 1) * lengths.get("head", 1)
    return array.transpose(order).reshape(count, heads, -1)


def _part(name: str, names: tuple[str, str], array: Array) -> Part:
    means: list[tuple[float | None, ...]] = []
    nans = infinities = 0
    least, most = float("inf"), float("-inf")
    for row in _floats(array):
        finite = np.isfinite(row)
        nans += int(np.isnan(row).sum())
        infinities += int(np.isinf(row).sum())
        sums = np.abs(row).sum(axis=-1, where=finite)
        counts = finite.sum(axis=-1)
        means.append(
            tuple(
                float(total / count) if count else None
                for total, count in zip(sums, counts, strict=True)
            )
        )
        least = min(least, float(np.min(row, where=finite, initial=np.inf)))
        most = max(most, float(np.max(row, where=finite, initial=-np.inf)))
    some = least <= most
    return Part(
        name=name,
        rows=names[0],
        columns=names[1],
        means=tuple(means),
        bins=_bins(array, least, most) if some else (),
        least=least if some else None,
        most=most if some else None,
        values=array.size,
        nans=nans,
        infinities=infinities,
    )


def _floats(array: Array) -> Iterator[npt.NDArray[np.float64]]:
    """Row by row, so that never a whole block is widened."""
    with np.errstate(all="ignore"):  # NaN is counted, and no reason to warn
        for row in array:
            yield row.astype(np.float64)


def _bins(array: Array, least: float, most: float) -> tuple[int, ...]:
    total = np.zeros(BINS, dtype=np.int64)
    for row in _floats(array):
        finite = row[np.isfinite(row)]
        if least == most:  # no range has bins around a number of any size
            total[BINS // 2] += finite.size
        else:
            total += np.histogram(finite, bins=BINS, range=(least, most))[0]
    return tuple(total.tolist())
