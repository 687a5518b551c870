"""Packings that kvstore can take apart: one block's payload -> its K and V.

A packing says how the values inside the innermost axes are arranged. Each arrangement
below is a fact about an attention backend, checked in the tests against that backend's
own writing kernel or against the model's own K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


def unpack(layout: Layout, payload: memoryview | bytes | Array) -> tuple[Array, Array]:
    """K and V of one block, each with the layout's outer axes, then (token, value).

    Args:
        layout: a layout whose packing is one of those below and whose tokens are known.
        payload: the block's `layout.nbytes` bytes.

    Raises:
        InvalidInputError: the packing is unknown.
    """
    split = _PACKINGS.get(layout.packing or "")
    tokens = layout.tokens_per_block
    if split is None or tokens is None or layout.opaque:
        known = ", ".join(_PACKINGS)
        raise InvalidInputError(
            f"packing: expected one of {known}, found {layout.packing!r}: the values of "
            "such a block cannot be told apart"
        )
    block = values(layout, payload)
    try:
        if layout.axes[-1] == "packed":
            block = block.reshape(*block.shape[:-1], 2, -1)
            return split(block[..., 0, :], block[..., 1, :], tokens)
        block = np.moveaxis(block, layout.axes.index("token"), -2)
        keys, content = np.split(block, 2, axis=-1)
        return split(keys, content, tokens)
    except ValueError as error:
        raise InvalidInputError(
            f"packing: blocks of shape {layout.shape} and {tokens} tokens do not divide "
            f"into {layout.packing}: {error}"
        ) from error


def _token_major(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    """K and V side by side in every (head, token) cell."""
    return keys, content


def _cpu_vec(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
    """K as [value][token], V as [token][value] (`csrc/cpu/cpu_attn_vec.hpp`)."""
    size = keys.shape[-1] // tokens
    outer = keys.shape[:-1]
    return (
        np.swapaxes(keys.reshape(*outer, size, tokens), -1, -2),
        content.reshape(*outer, tokens, size),
    )


def _cpu_amx(keys: Array, content: Array, tokens: int) -> tuple[Array, Array]:
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


_PACKINGS: Mapping[str, Callable[[Array, Array, int], tuple[Array, Array]]] = {
    "token-kv": _token_major,
    "cpu-vec": _cpu_vec,
    "cpu-vec16": _cpu_vec,
    "cpu-amx": _cpu_amx,
}
