"""Packings that kvstore knows: one block's payload <-> its K and V.

A packing says how the values inside the innermost axes are arranged. Each arrangement
below is a fact about an attention backend, checked in the tests against that backend's
own writing kernel or against the model's own K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInputError
from kvstore.layout import Layout

Array = npt.NDArray[np.generic]

_NUMPY_TYPES: Mapping[str, npt.DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
}


def values(layout: Layout, payload: memoryview | bytes | Array) -> Array:
    """A block's bytes as an array of the layout's shape and logical dtype, uncopied.

    Raises:
        InvalidInputError: not the bytes of one block.
    """
    dtype = np.uint8 if layout.opaque else _NUMPY_TYPES[layout.dtype]
    flat = np.frombuffer(payload, dtype=np.uint8)
    if flat.nbytes != layout.nbytes:
        raise InvalidInputError(
            f"payload: expected the {layout.nbytes} bytes of one block, found {flat.nbytes}"
        )
    return flat.view(dtype).reshape(layout.shape)


def unpacked_axes(layout: Layout) -> tuple[str, ...]:
    """The axes of K and V as `unpack` gives them."""
    inner = ("token", "value", "packed")
    return (*(axis for axis in layout.axes if axis not in inner), "token", "value")


def unpack(layout: Layout, payload: memoryview | bytes | Array) -> tuple[Array, Array]:
    """K and V of one block, each with the layout's outer axes, then (token, value).

    Args:
        layout: a layout whose packing is one of those below and whose tokens are known.
        payload: the block's `layout.nbytes` bytes.

    Raises:
        InvalidInputError: the packing is unknown.
    """
    return _split(layout, values(layout, payload))


def require_divisible(layout: Layout) -> None:
    """Prove that `unpack` takes blocks of a layout, and `pack` makes them. Takes no memory,
    whatever the layout's size.

    Raises:
        InvalidInputError: as `unpack`, or the shape does not divide as the packing needs.
    """
    _split(layout, np.broadcast_to(np.uint8(0), layout.shape))


def _split(layout: Layout, block: Array) -> tuple[Array, Array]:
    packing, tokens = _known(layout)
    try:
        if layout.axes[-1] == "packed":
            block = block.reshape(*block.shape[:-1], 2, -1)
            return packing.split(block[..., 0, :], block[..., 1, :], tokens)
        block = np.moveaxis(block, layout.axes.index("token"), -2)
        keys, content = np.split(block, 2, axis=-1)
        return packing.split(keys, content, tokens)
    except ValueError as error:
        raise _does_not_divide(layout, error) from error


def pack(layout: Layout, keys: Array, content: Array) -> Array:
    """The inverse of `unpack`: one block of the layout's shape and logical dtype.

    Args:
        layout: as for `unpack`.
        keys: K, with the layout's outer axes, then (token, value).
        content: V, likewise.

    Raises:
        InvalidInputError: the packing is unknown, or K and V are no block of this layout.
    """
    packing, tokens = _known(layout)
    try:
        keys, content = packing.join(keys, content, tokens)
        if layout.axes[-1] == "packed":
            block = np.stack((keys, content), axis=-2)
        else:
            block = np.concatenate((keys, content), axis=-1)
            block = np.moveaxis(block, -2, layout.axes.index("token"))
        return np.ascontiguousarray(block).reshape(layout.shape)
    except ValueError as error:
        raise _does_not_divide(layout, error) from error


def _known(layout: Layout) -> tuple[_Packing, int]:
    packing = _PACKINGS.get(layout.packing or "")
    tokens = layout.tokens_per_block
    if packing is None or tokens is None or layout.opaque:
        known = ", ".join(KNOWN)
        raise InvalidInputError(
            f"packing: expected one of {known}, found {layout.packing!r}: the values of "
            "such a block cannot be told apart"
        )
    return packing, tokens


def _does_not_divide(layout: Layout, error: ValueError) -> InvalidInputError:
    return InvalidInputError(
        f"packing: blocks of shape {layout.shape} and {layout.tokens_per_block} tokens do "
        f"not divide into {layout.packing}: {error}"
    )


def _token_major(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    """K and V side by side in every (head, token) cell, packed or not."""
    return keys, content


def _split_vec(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    """K as [value][token], V as [token][value] (`csrc/cpu/cpu_attn_vec.hpp`)."""
    size = keys.shape[-1] // tokens
    outer = keys.shape[:-1]
    return (
        np.swapaxes(keys.reshape(*outer, size, tokens), -1, -2),
        content.reshape(*outer, tokens, size),
    )


def _join_vec(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    outer = keys.shape[:-2]
    return np.swapaxes(keys, -1, -2).reshape(*outer, -1), content.reshape(*outer, -1)


def _split_amx(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    """K as [token/16][value/2][16][2], V as [value/16][token/2][16][2]
    (`csrc/cpu/cpu_attn_amx.hpp`).
    """
    size = keys.shape[-1] // tokens
    outer = keys.shape[:-1]
    front = len(outer)
    k = keys.reshape(*outer, tokens // 16, size // 2, 16, 2)
    v = content.reshape(*outer, size // 16, tokens // 2, 16, 2)
    k = np.moveaxis(k, front + 2, front + 1)
    v = np.moveaxis(v, (front + 1, front + 3, front), (front, front + 1, front + 2))
    return k.reshape(*outer, tokens, size), v.reshape(*outer, tokens, size)


def _join_amx(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    size = keys.shape[-1]
    outer = keys.shape[:-2]
    front = len(outer)
    k = keys.reshape(*outer, tokens // 16, 16, size // 2, 2)
    v = content.reshape(*outer, tokens // 2, 2, size // 16, 16)
    k = np.moveaxis(k, front + 1, front + 2)
    v = np.moveaxis(v, (front, front + 1, front + 2), (front + 1, front + 3, front))
    return k.reshape(*outer, -1), v.reshape(*outer, -1)


class _Packing(NamedTuple):
    """`split` gives K and V their (token, value), and `join` takes it from them again."""

    split: Callable[[Array, Array, int], tuple[Array, Array]]
    join: Callable[[Array, Array, int], tuple[Array, Array]]


_PACKINGS: Mapping[str, _Packing] = {
    "token-kv": _Packing(_token_major, _token_major),
    "cpu-vec": _Packing(_split_vec, _join_vec),
    "cpu-vec16": _Packing(_split_vec, _join_vec),
    "cpu-amx": _Packing(_split_amx, _join_amx),
}

KNOWN = tuple(_PACKINGS)
"""Names of the packings whose K and V can be told apart."""
