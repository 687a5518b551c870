"""`Conversion`: one layout's bytes -> another's, every value at the place of its name.

The axes say which value is which: (layer, block, head, token, value), whatever their order,
however the innermost are packed, and over however many workers the heads are spread. Values
are moved and never changed. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import Difference, InvalidInputError, shown
from kvstore.layout import TILED, Layout
from kvstore.packing import (
    KNOWN,
    Array,
    pack,
    require_divisible,
    unpack,
    unpacked_axes,
    values,
)

_ORDER_FIELDS = frozenset(("axes", "shape", "kv_cache_layout", "runner"))
"""The fields in which two layouts differ that hold the same values in another order."""

_MUST_BE_EQUAL = ("dtype", "layer_names", "tokens_per_block")
_INNER = ("token", "value", "packed")


def only_reordered(layout: Layout, other: Layout) -> bool:
    """Whether two layouts differ in the order of their axes, and in nothing else.

    The runner and vLLM's name of the order may differ with it, but an unknown one is equal
    only to an unknown one. Where the packing is unknown, the innermost axes may say what is
    not true, so that there is no order to be sure of.
    """
    differences = layout.differences(other)
    known = all(
        difference.expected is not None and difference.found is not None
        for difference in differences
    )
    return (
        known
        and {difference.field for difference in differences} <= _ORDER_FIELDS
        and layout.packing is not None
        and sorted(zip(layout.axes, layout.shape, strict=True))
        == sorted(zip(other.axes, other.shape, strict=True))
    )


class Conversion:
    """From one layout to another. Pickles; any thread may use it.

    Attributes:
        source, target: the layouts.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        """Refuse what cannot be converted.

        Raises:
            InvalidInputError: with every reason.
        """
        if reasons := _reasons(source, target):
            raise InvalidInputError(
                "layout: expected two that hold the same values, found otherwise:\n  "
                + "\n  ".join(reasons)
            )
        self.source = source
        self.target = target
        self._split = source.packing != target.packing
        if self._split:
            require_divisible(source)
            require_divisible(target)

    def convert(self, payload: memoryview | bytes | Array) -> Array:
        """One block of the target's shape, from a block of the source.

        Args:
            payload: the source layout's `nbytes` bytes; only read.

        Raises:
            InvalidInputError: not the bytes of one block.
        """
        if self._split:
            parts = unpack(self.source, payload)
            return pack(self.target, *(self._moved(part, split=True) for part in parts))
        moved = self._moved(values(self.source, payload), split=False)
        return np.ascontiguousarray(moved).reshape(self.target.shape)

    def convert_bytes(self, payload: memoryview | bytes | Array) -> memoryview:
        """As `convert`, the block's flat bytes."""
        return memoryview(self.convert(payload).reshape(-1).view("uint8"))

    def _moved(self, array: Array, *, split: bool) -> Array:
        """The values in the target's order of axes; a view where that can be."""
        source, target = _names(self.source, split=split), _names(self.target, split=split)
        workers = _length(self.target, "worker")
        if _length(self.source, "worker") != workers:
            array, source = _gathered(array, source)
            array, source = _spread(array, source, workers)
        for name in set(source) - set(target):  # of length 1
            array = array.squeeze(source.index(name))
            source.remove(name)
        source += (missing := [name for name in target if name not in source])
        array = array.reshape(*array.shape, *(1 for _ in missing))
        return array.transpose([source.index(name) for name in target])


def _reasons(source: Layout, target: Layout) -> list[str]:
    """Why one cannot be made of the other."""
    if source.opaque or target.opaque:
        told = source.reason or target.reason or "nothing is known of what is in it"
        return [f"axes: a block of plain bytes cannot be taken apart ({told})"]
    found = [
        str(Difference(name, getattr(target, name), getattr(source, name)))
        for name in _MUST_BE_EQUAL
        if getattr(source, name) != getattr(target, name)
    ]
    if source.packing is None or target.packing is None:
        found.append("packing: unknown, so that the innermost axes may not be true")
    else:
        for layout in (target, source):
            found += _untrue(layout, split=source.packing != target.packing)
    for name in ("layer", "block"):
        found += _unequal(name, _length(target, name), _length(source, name))
    heads = [
        _length(layout, "worker") * _length(layout, "head") for layout in (target, source)
    ]
    found += _unequal("heads of all workers", *heads)
    if not found and source.packing != target.packing:
        found += _unequal("values of a head", _head_values(target), _head_values(source))
    elif not found:
        for name in _INNER:
            found += _unequal(name, _length(target, name), _length(source, name))
    return found


def _untrue(layout: Layout, *, split: bool) -> list[str]:
    """Why the innermost axes do not say what the packing does, or not enough to `split` K
    and V.
    """
    tiled = str(layout.packing).startswith(TILED)
    if tiled != ("packed" in layout.axes):
        return [f"axes: {layout.axes} are not those of packing {shown(layout.packing)}"]
    if split and layout.packing not in KNOWN:
        return [
            f"packing: expected one of {', '.join(KNOWN)} where it changes, found "
            f"{shown(layout.packing)}"
        ]
    if split and layout.axes[-1] not in ("value", "packed"):
        return [f"axes: expected value or packed innermost, found {layout.axes}"]
    return []


def _unequal(name: str, expected: int, found: int) -> list[str]:
    return [] if expected == found else [str(Difference(name, expected, found))]


def _length(layout: Layout, axis: str) -> int:
    return layout.shape[layout.axes.index(axis)] if axis in layout.axes else 1


def _head_values(layout: Layout) -> int:
    """Values of one head in one block, K and V."""
    tokens = layout.tokens_per_block or 1
    packed = _length(layout, "packed")
    return packed if packed > 1 else tokens * _length(layout, "value")


def _names(layout: Layout, *, split: bool) -> list[str]:
    """The axes of the whole block, or of K and V apart."""
    return list(unpacked_axes(layout) if split else layout.axes)


def _gathered(array: Array, names: Sequence[str]) -> tuple[Array, list[str]]:
    """All workers' heads along one axis: each worker holds the next of them."""
    names = list(names)
    if "worker" not in names:
        return array, names
    array = np.moveaxis(array, names.index("worker"), 0)
    names.remove("worker")
    head = names.index("head") + 1
    array = np.moveaxis(array, head, 1)
    names.remove("head")
    return array.reshape(-1, *array.shape[2:]), ["head", *names]


def _spread(array: Array, names: Sequence[str], workers: int) -> tuple[Array, list[str]]:
    """The inverse of `_gathered`."""
    if workers == 1:
        return array, list(names)
    head = names.index("head")
    array = np.moveaxis(array, head, 0)
    rest = [name for name in names if name != "head"]
    return array.reshape(workers, -1, *array.shape[1:]), ["worker", "head", *rest]
