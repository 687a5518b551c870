"""Each packing against loops that put every value where the backend's own code does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import InvalidInputError
from kvstore.layout import ITEM_BYTES, Layout
from kvstore.packing import unpack, values

Bits = npt.NDArray[np.uint16]
Pack = Callable[[Bits, Bits], list[int]]

LAYERS, HEADS = 2, 3


def bits(tokens: int, size: int) -> tuple[Bits, Bits]:
    """K and V of every layer and head: 16 bits each, NaNs and all."""
    shape = (2, LAYERS, HEADS, tokens, size)
    both = np.random.default_rng(tokens * size).integers(0, 1 << 16, shape, np.uint16)
    return both[0], both[1]


def pack_token_kv(keys: Bits, content: Bits) -> list[int]:
    """In each cell, K and then V."""
    packed: list[int] = []
    for k_cell, v_cell in zip(keys, content, strict=True):
        packed += [*map(int, k_cell), *map(int, v_cell)]
    return packed


def pack_cpu_vec(keys: Bits, content: Bits) -> list[int]:
    """K as [value][token], V as [token][value]."""
    tokens, size = keys.shape
    packed = [int(keys[token, value]) for value in range(size) for token in range(tokens)]
    packed += [
        int(content[token, value]) for token in range(tokens) for value in range(size)
    ]
    return packed


def pack_cpu_amx(keys: Bits, content: Bits) -> list[int]:
    """K as [token/16][value/2][16][2], V as [value/16][token/2][16][2]."""
    tokens, size = keys.shape
    half = tokens * size
    packed = [-1] * (2 * half)
    for token in range(tokens):
        for value in range(size):
            tile = (token // 16) * (size // 2) + value // 2
            packed[(tile * 16 + token % 16) * 2 + value % 2] = int(keys[token, value])
            tile = (value // 16) * (tokens // 2) + token // 2
            place = half + (tile * 16 + value % 16) * 2 + token % 2
            packed[place] = int(content[token, value])
    assert -1 not in packed
    return packed


def packed_layout(packing: str, tokens: int, size: int, dtype: str = "bfloat16") -> Layout:
    return Layout(
        axes=("layer", "head", "packed"),
        shape=(LAYERS, HEADS, 2 * tokens * size),
        dtype=dtype,
        packing=packing,
        tokens_per_block=tokens,
    )


def cell_layout(tokens: int, size: int, dtype: str = "bfloat16") -> Layout:
    return Layout(
        axes=("layer", "head", "token", "value"),
        shape=(LAYERS, HEADS, tokens, 2 * size),
        dtype=dtype,
        packing="token-kv",
        tokens_per_block=tokens,
    )


def block_of(pack: Pack, keys: Bits, content: Bits) -> bytes:
    packed = [
        pack(keys[layer, head], content[layer, head])
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    return np.array(packed, np.uint16).tobytes()


PACKINGS = [
    pytest.param("token-kv", pack_token_kv, 16, 8, id="token-kv"),
    pytest.param("token-kv", pack_token_kv, 1, 3, id="token-kv-one-token"),
    pytest.param("cpu-vec", pack_cpu_vec, 32, 16, id="cpu-vec"),
    pytest.param("cpu-vec", pack_cpu_vec, 16, 6, id="cpu-vec-odd-size"),
    pytest.param("cpu-vec16", pack_cpu_vec, 16, 32, id="cpu-vec16"),
    pytest.param("cpu-amx", pack_cpu_amx, 32, 64, id="cpu-amx"),
    pytest.param("cpu-amx", pack_cpu_amx, 64, 16, id="cpu-amx-many-tokens"),
]


@pytest.mark.parametrize(("packing", "pack", "tokens", "size"), PACKINGS)
def test_every_value_is_found_where_the_backend_puts_it(
    packing: str, pack: Pack, tokens: int, size: int
) -> None:
    keys, content = bits(tokens, size)
    layout = packed_layout(packing, tokens, size)
    if packing == "token-kv":
        layout = cell_layout(tokens, size)
    k, v = unpack(layout, block_of(pack, keys, content))
    assert k.dtype == v.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(k.view(np.uint16), keys)
    np.testing.assert_array_equal(v.view(np.uint16), content)


def test_the_packings_differ_on_one_block() -> None:
    keys, content = bits(32, 32)
    packs = (pack_token_kv, pack_cpu_vec, pack_cpu_amx)
    assert len({block_of(pack, keys, content) for pack in packs}) == 3


@pytest.mark.parametrize("outer", [("worker",), ("worker", "block"), ("block",)])
def test_the_outer_axes_stay(outer: tuple[str, ...]) -> None:
    keys, content = bits(32, 16)
    once = block_of(pack_cpu_amx, keys, content)
    layout = packed_layout("cpu-amx", 32, 16)
    times = 2 ** len(outer)
    row = replace(
        layout, axes=(*outer, *layout.axes), shape=(*(2,) * len(outer), *layout.shape)
    )
    k, v = unpack(row, once * times)
    assert k.shape == v.shape == (*(2,) * len(outer), LAYERS, HEADS, 32, 16)
    for part in k.reshape(times, *keys.shape):
        np.testing.assert_array_equal(part.view(np.uint16), keys)
    for part in v.reshape(times, *keys.shape):
        np.testing.assert_array_equal(part.view(np.uint16), content)


def test_tokens_and_values_come_last_where_tokens_lie_outside_heads() -> None:
    layout = Layout(
        axes=("layer", "token", "head", "value"),
        shape=(1, 3, 2, 4),
        dtype="uint8",
        packing="token-kv",
        tokens_per_block=3,
    )
    k, v = unpack(layout, bytes(range(24)))
    # As (layer, head, token, value):
    assert k.tolist() == [[[[0, 1], [8, 9], [16, 17]], [[4, 5], [12, 13], [20, 21]]]]
    assert v.tolist() == [[[[2, 3], [10, 11], [18, 19]], [[6, 7], [14, 15], [22, 23]]]]


# ---- what cannot be unpacked


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(cell_layout(16, 8), packing=None), id="unknown"),
        pytest.param(packed_layout("cpu-neon", 16, 8), id="neon"),
        pytest.param(packed_layout("token_kv", 16, 8), id="misspelt"),
        pytest.param(packed_layout("", 16, 8), id="empty"),
        pytest.param(
            replace(cell_layout(16, 8), tokens_per_block=None), id="tokens-unknown"
        ),
        pytest.param(
            Layout.of_bytes(
                64, dtype="bfloat16", reason="", packing="cpu-amx", tokens_per_block=32
            ),
            id="opaque",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused(layout: Layout) -> None:
    with pytest.raises(
        InvalidInputError,
        match=f"token-kv, cpu-vec, cpu-vec16, cpu-amx, found {layout.packing!r}",
    ):
        unpack(layout, bytes(layout.nbytes))


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        pytest.param(packed_layout("cpu-amx", 32, 16), -2, id="short"),
        pytest.param(packed_layout("cpu-amx", 32, 16), 2, id="long"),
        pytest.param(packed_layout("cpu-amx", 8, 16), 0, id="half-a-tile"),
        pytest.param(replace(cell_layout(16, 8), shape=(2, 3, 16, 7)), 0, id="odd-cell"),
    ],
)
def test_a_block_that_its_packing_does_not_fit_is_refused_in_our_words(
    layout: Layout, nbytes: int
) -> None:
    with pytest.raises(InvalidInputError):
        unpack(layout, bytes(layout.nbytes + nbytes))


# ---- values

NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
}


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_blocks_values_have_the_logical_dtype_and_every_bit_of_the_bytes(  # D6
    dtype: str,
) -> None:
    layout = replace(cell_layout(16, 8, dtype), packing=None)
    payload = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    array = values(layout, payload)
    assert array.dtype == np.dtype(NUMPY_TYPES[dtype])
    assert array.shape == layout.shape
    assert array.tobytes() == payload.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_values_are_a_view_of_any_buffer(kind: Callable[[bytes], Any]) -> None:
    layout = Layout(axes=("token", "value"), shape=(1, 2), dtype="float16")
    payload = kind(np.array([1.5, -2], "<f2").tobytes())
    array = values(layout, payload)
    assert array.tolist() == [[1.5, -2.0]]
    assert np.shares_memory(array, np.frombuffer(payload, np.uint8))


def test_an_array_of_the_logical_dtype_is_a_payload_too() -> None:
    layout = cell_layout(1, 1)
    block = np.arange(12, dtype=ml_dtypes.bfloat16).reshape(layout.shape)
    np.testing.assert_array_equal(values(layout, block), block)


def test_the_values_of_an_opaque_block_are_its_bytes() -> None:
    layout = Layout.of_bytes(5, dtype="fp8_ds_mla", reason="")
    assert values(layout, b"\0\1\2\3\xff").tolist() == [0, 1, 2, 3, 255]
