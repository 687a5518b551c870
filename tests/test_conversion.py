"""Every value is where its name says, in whatever order, packing and number of workers."""

import itertools
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import InvalidInputError, Layout, unpack
from kvstore.conversion import Conversion, only_reordered

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 2, 4, 32, 16
NAMES = tuple(f"layers.{number}" for number in range(LAYERS))
PACKED = ("cpu-vec", "cpu-vec16", "cpu-amx")


def layout_of(axes: tuple[str, ...], packing: str, workers: int = 1) -> Layout:
    lengths = {
        "worker": workers,
        "layer": LAYERS,
        "block": BLOCKS,
        "head": HEADS // workers,
        "token": TOKENS,
        "value": 2 * SIZE,
        "packed": 2 * TOKENS * SIZE,
    }
    return Layout(
        axes=axes,
        shape=tuple(lengths[axis] for axis in axes),
        dtype="float32",
        packing=packing,
        layer_names=NAMES,
        tokens_per_block=TOKENS,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    packing = draw(st.sampled_from(("token-kv", *PACKED)))
    outer = ("layer", "block", "head")
    if packing == "token-kv":
        axes = (*draw(st.permutations((*outer, "token"))), "value")
    else:
        axes = (*draw(st.permutations(outer)), "packed")
    workers = draw(st.sampled_from((1, 2, 4)))
    return layout_of(axes if workers == 1 else ("worker", *axes), packing, workers)


def named(layout: Layout, payload: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and V as (layer, block, head of all workers, token, value), by loops."""
    found = []
    axes = [axis for axis in layout.axes if axis not in ("token", "value", "packed")]
    for part in unpack(layout, payload):
        whole = np.zeros((LAYERS, BLOCKS, HEADS, TOKENS, SIZE), "float32")
        for index in itertools.product(*map(range, part.shape[: len(axes)])):
            at = dict(zip(axes, index, strict=True))
            heads = part.shape[axes.index("head")]
            head = at.get("worker", 0) * heads + at["head"]
            whole[at["layer"], at["block"], head] = part[index]
        found.append(whole)
    return found[0], found[1]


def tagged(layout: Layout) -> np.ndarray:
    return np.arange(layout.nbytes // 4, dtype="float32").reshape(layout.shape)


@given(layouts(), layouts())
def test_every_value_keeps_its_name(source: Layout, target: Layout) -> None:
    block = tagged(source)
    converted = Conversion(source, target).convert(block)
    assert converted.shape == target.shape
    assert converted.flags.c_contiguous
    for ours, theirs in zip(named(source, block), named(target, converted), strict=True):
        assert np.array_equal(ours, theirs)
    assert Conversion(target, source).convert(converted).tobytes() == block.tobytes()


def test_a_conversion_pickles() -> None:
    source = layout_of(("layer", "head", "token", "value"), "token-kv")
    target = layout_of(("head", "layer", "token", "value"), "token-kv")
    block = np.arange(source.nbytes // 4, dtype="float32")
    conversion = Conversion(source, target)
    again = pickle.loads(pickle.dumps(conversion))
    assert again.convert(block).tobytes() == conversion.convert(block).tobytes()


PLAIN = layout_of(("layer", "head", "token", "value"), "token-kv")


@pytest.mark.parametrize("packing", ["token-kv", "cpu-vec"])
def test_an_axis_of_one_may_be_there_or_not(packing: str) -> None:
    inner = ("packed",) if packing in PACKED else ("token", "value")
    plain = layout_of(("head", "layer", *inner), packing)
    spread = replace(
        layout_of(("layer", "head", *inner), packing),
        axes=("worker", "layer", "block", "head", *inner),
        shape=(1, LAYERS, 1, HEADS, *plain.shape[2:]),
    )
    for first, second in itertools.permutations((plain, PLAIN, spread), 2):
        there = Conversion(first, second).convert(tagged(first))
        back = Conversion(second, first).convert(there)
        assert np.array_equal(back, tagged(first))
    assert np.array_equal(
        Conversion(plain, spread).convert(tagged(plain))[0, :, 0],
        tagged(plain).swapaxes(0, 1),
    )


def test_what_does_not_divide_is_refused_without_a_block() -> None:
    large = replace(PLAIN, shape=(LAYERS, 1 << 20, TOKENS, 8))  # of 3 GiB
    tiles = replace(
        layout_of(("layer", "head", "packed"), "cpu-amx"),
        shape=(LAYERS, 1 << 20, TOKENS * 8),
    )
    tracemalloc.start()
    with pytest.raises(InvalidInputError, match="do not divide into cpu-amx"):
        Conversion(large, tiles)
    Conversion(large, replace(tiles, packing="cpu-vec"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8"}, "dtype: expected 'int8', found 'float32'"),
        ({"layer_names": NAMES[::-1]}, "layer_names: expected"),
        ({"tokens_per_block": 16}, "tokens_per_block: expected 16, found 32"),
        ({"packing": None}, "packing: unknown"),
        ({"shape": (LAYERS, 2, TOKENS, 2 * SIZE)}, "heads of all workers: expected 2"),
        ({"shape": (LAYERS, HEADS, TOKENS, SIZE)}, "value: expected 16, found 32"),
        ({"shape": (2, HEADS, TOKENS, 2 * SIZE)}, "layer: expected 2, found 3"),
        ({"axes": ("byte",), "shape": (PLAIN.nbytes,)}, "plain bytes"),
        ({"packing": "cpu-amx"}, "axes: .* are not those of packing 'cpu-amx'"),
        ({"packing": "other"}, "packing: expected one of token-kv, .*, found 'other'"),
        (
            {
                "axes": ("layer", "head", "packed"),
                "shape": (LAYERS, HEADS, 2 * TOKENS * SIZE),
                "packing": "cpu-neon",
            },
            "packing: expected one of token-kv, .*, found 'cpu-neon'",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        Conversion(PLAIN, replace(PLAIN, **change))  # type: ignore[arg-type]


def test_k_and_v_are_told_apart_along_the_innermost_axis_only() -> None:
    """A reordering takes any axis; a repacking needs the values of a cell side by side."""
    odd = layout_of(("value", "layer", "head", "token"), "token-kv")
    block = tagged(PLAIN)
    there = Conversion(PLAIN, odd).convert(block)
    assert np.array_equal(there, np.moveaxis(block, 3, 0))
    with pytest.raises(InvalidInputError, match="axes: expected value or packed innermost"):
        Conversion(odd, layout_of(("layer", "head", "packed"), "cpu-amx"))


def test_unknown_tiles_are_moved_whole() -> None:
    tiles = layout_of(("layer", "head", "packed"), "cpu-neon")
    moved = Conversion(tiles, layout_of(("head", "layer", "packed"), "cpu-neon"))
    block = tagged(tiles)
    assert np.array_equal(moved.convert(block), block.swapaxes(0, 1))


def test_every_reason_is_told() -> None:
    other = replace(PLAIN, dtype="int8", tokens_per_block=16, packing=None)
    with pytest.raises(InvalidInputError) as caught:
        Conversion(PLAIN, other)
    for name in ("dtype", "tokens_per_block", "packing"):
        assert f"  {name}: " in str(caught.value)


REORDERED = layout_of(("head", "layer", "token", "value"), "token-kv")


@pytest.mark.parametrize(
    ("other", "answer"),
    [
        (REORDERED, True),
        (PLAIN, True),
        (replace(REORDERED, packing=None), False),
        (replace(REORDERED, dtype="int8"), False),
        (replace(REORDERED, backend="OTHER"), False),
        (replace(REORDERED, runner="v1"), False),
        (layout_of(("head", "layer", "packed"), "cpu-amx"), False),
        (layout_of(("worker", "layer", "head", "token", "value"), "token-kv", 2), False),
    ],
)
def test_only_reordered(other: Layout, answer: bool) -> None:
    assert only_reordered(PLAIN, other) is answer


def test_known_names_of_the_order_may_differ() -> None:
    v2 = replace(PLAIN, runner="v2", kv_cache_layout="LBHNC")
    v1 = replace(REORDERED, runner="v1", kv_cache_layout="BHLNC")
    assert only_reordered(v2, v1)
    assert not only_reordered(replace(v2, packing=None), replace(v1, packing=None))
