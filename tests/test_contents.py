"""What is in a block, in numbers, colours and characters."""

import io
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import dtypes

from kvstore import Layout
from kvstore.cli.heat import heat
from kvstore.errors import InvalidInputError
from kvstore.layout import ITEM_BYTES
from kvstore.offline.colours import NONE, colour, png
from kvstore.offline.contents import BINS, Part, parts_of
from kvstore.packing import pack
from kvstore.testing import sample_layout


def tagged(layout: Layout, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    """K of layer l and head h is ±(10 l + h + 1), and V is 100 times as much."""
    shape = dict(zip(layout.axes, layout.shape, strict=True))
    outer = [axis for axis in layout.axes if axis not in ("token", "value", "packed")]
    size = shape["value"] // 2 if "value" in shape else 8
    values = np.zeros([shape[axis] for axis in outer])
    for at in np.ndindex(*values.shape):
        place = dict(zip(outer, at, strict=True))
        head = place.get("worker", 0) * shape["head"] + place["head"]
        values[at] = 10 * place["layer"] + head + 1
    keys = np.repeat(values[..., None], 16 * size, axis=-1).reshape(*values.shape, 16, size)
    keys = keys.astype(dtype)
    keys[..., ::2] *= dtype(-1)
    return pack(layout, keys, keys * dtype(10))


EXPECTED = ((1.0, 2.0, 3.0), (11.0, 12.0, 13.0))
LAYOUTS = {
    "layer first": sample_layout(),
    "head first": sample_layout(
        axes=("head", "layer", "token", "value"), shape=(3, 2, 16, 8)
    ),
    "token before head": sample_layout(
        axes=("layer", "token", "head", "value"), shape=(2, 16, 3, 8)
    ),
    "workers": sample_layout(
        axes=("worker", "layer", "head", "token", "value"), shape=(3, 2, 1, 16, 8)
    ),
    "several blocks": sample_layout(
        axes=("layer", "block", "head", "token", "value"), shape=(2, 4, 3, 16, 8)
    ),
    "packed": sample_layout(
        axes=("layer", "head", "packed"), shape=(2, 3, 256), packing="cpu-vec"
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_mean_is_at_its_layer_and_head(layout: Layout) -> None:
    keys, content = parts_of(layout, tagged(layout).tobytes())
    assert (keys.name, content.name) == ("K", "V")
    assert keys.rows == "layer"
    assert keys.means == EXPECTED
    assert content.means == tuple(tuple(10 * mean for mean in row) for row in EXPECTED)
    assert (keys.least, keys.most) == (-13, 13)
    assert sum(keys.bins) == keys.values == layout.nbytes // 4
    assert keys.nans == keys.infinities == 0


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("float32", np.float32),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("int8", np.int8),
    ],
)
def test_every_dtype_is_read_as_what_it_is(dtype: str, kind: Any) -> None:
    layout = sample_layout(dtype=dtype)
    block: Any = np.full(layout.shape, 2).astype(kind)
    block[0, 0, 0, 0] = kind(-4)
    keys, content = parts_of(layout, block.tobytes())
    assert keys.means[0][0] == 2 + 2 / 64
    assert keys.means[1] == content.means[0] == (2.0, 2.0, 2.0)
    assert (keys.least, keys.most) == (-4, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_what_is_not_finite_is_counted_and_left_out(dtype: str) -> None:
    layout = sample_layout(dtype=dtype)
    kind = {"float16": np.float16}.get(dtype) or getattr(ml_dtypes, dtype)
    block: Any = np.ones(layout.shape, kind)
    block[0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    block[1, 2, :, :4] = np.nan  # all of K
    keys, content = parts_of(layout, block.tobytes())
    assert (keys.nans, keys.infinities) == (65, 2)
    assert keys.means == ((1.0, 1.0, 1.0), (1.0, 1.0, None))
    assert (content.nans, content.infinities) == (0, 0)
    assert sum(keys.bins) == keys.values - 67
    assert "?" in heat(keys, coloured=False, width=80)[2].plain
    assert "65 NaN, 2 infinite" in heat(keys, coloured=False, width=80)[-1].plain


def test_nothing_is_finite() -> None:
    layout = sample_layout()
    block = np.full(layout.shape, np.nan, np.float16)
    keys, _ = parts_of(layout, block.tobytes())
    assert (keys.span, keys.least, keys.bins) == (None, None, ())
    lines = [line.plain for line in heat(keys, coloured=False, width=80)]
    assert lines[1:] == [
        " 0 ???",
        " 1 ???",
        "none of 384 values is finite: 384 NaN, 0 infinite",
    ]


def test_the_largest_float32_is_no_overflow() -> None:
    layout = sample_layout(dtype="float32")
    largest = np.finfo(np.float32).max
    block: Any = np.full(layout.shape, largest)
    block[0, 0] = -largest
    keys, _ = parts_of(layout, block.tobytes())
    assert keys.span == (float(largest), float(largest))
    assert sum(keys.bins) == keys.values


@given(data=st.data(), dtype=dtypes)
def test_every_value_is_counted_and_shown_whatever_it_is(
    data: st.DataObject, dtype: str
) -> None:
    layout = sample_layout(dtype=dtype)
    size = ITEM_BYTES[dtype]
    values = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1))
    payload = b"".join(values) * layout.nbytes
    for part in parts_of(layout, payload[: layout.nbytes]):
        assert sum(part.bins) + part.nans + part.infinities == part.values
        assert (part.span is None) == (part.least is None) == (part.most is None)
        for coloured in (True, False):
            assert len(heat(part, coloured=coloured, width=80)) >= 3
        assert png(part.fractions())


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e-45, 0.0])
def test_one_value_is_in_the_middle_whatever_its_size(value: float) -> None:
    layout = sample_layout(dtype="float32")
    block = np.full(layout.shape, value, np.float32)
    keys, _ = parts_of(layout, block.tobytes())
    assert keys.least == keys.most == block[0, 0, 0, 0]
    assert keys.bins[BINS // 2] == keys.values


def test_k_and_v_of_an_unknown_packing_are_not_told_apart() -> None:
    layout = sample_layout(packing=None)
    [part] = parts_of(layout, tagged(sample_layout()).tobytes())
    assert (part.name, part.values) == ("values", 2 * 3 * 16 * 8)
    assert part.means == tuple(tuple(5.5 * mean for mean in row) for row in EXPECTED)


def test_of_plain_bytes_the_bytes_are_shown() -> None:
    layout = Layout.of_bytes(6 * 35, dtype="bfloat16", reason="a test")
    [part] = parts_of(layout, bytes(range(210)))
    assert (part.name, part.values) == ("bytes", 210)
    assert (len(part.means), len(part.means[0])) == (30, 7)
    assert part.means[0] == tuple(range(7))
    [part] = parts_of(replace(layout, shape=(37,)), bytes(37))
    assert part.means == ((0,),)


def test_a_block_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="expected the 1536 bytes"):
        parts_of(sample_layout(), bytes(3))


# ---- colours and characters


def part_of(means: tuple[tuple[float | None, ...], ...]) -> Part:
    return Part(
        name="K",
        rows="layer",
        columns="head",
        means=means,
        bins=(),
        least=-1.0,
        most=1.0,
        values=9,
        nans=0,
        infinities=0,
    )


def test_the_lowest_is_dark_and_the_highest_light() -> None:
    part = part_of(((1.0, 2.0), (3.0, None)))
    assert part.fractions() == [[0.0, 0.5], [1.0, None]]
    assert sum(colour(0.0)) < sum(colour(0.5)) < sum(colour(1.0))
    assert part_of(((4.0, 4.0),)).fractions() == [[0.5, 0.5]]


def test_two_rows_share_a_line_of_colours() -> None:
    part = part_of(((1.0, 2.0), (3.0, None), (1.0, 1.0)))
    lines = heat(part, coloured=True, width=80)
    assert [line.plain for line in lines[1:-1]] == [" 0 ▀▀", " 2 ▀▀"]
    styles = [str(span.style) for span in lines[1].spans]
    dark, light = ("#{:02x}{:02x}{:02x}".format(*colour(at)) for at in (0.0, 1.0))
    assert styles[0] == f"{dark} on {light}"
    assert styles[1].endswith("on #{:02x}{:02x}{:02x}".format(*NONE))
    assert str(lines[2].spans[0].style) == dark  # and nothing below it


def test_more_heads_than_columns_share_them() -> None:
    part = part_of((tuple(float(head) for head in range(128)),) * 2)
    lines = heat(part, coloured=False, width=20)
    assert max(len(line.plain) for line in lines[1:-1]) == 19
    assert lines[1].plain.endswith("@")


def test_a_png_is_what_others_read() -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    picture = image.open(io.BytesIO(png([[0.0, 1.0, None], [0.5, 0.5, 0.5]])))
    assert picture.size == (3, 2)
    assert picture.getpixel((1, 0)) == colour(1.0)
    assert picture.getpixel((2, 0)) == NONE
    assert picture.getpixel((0, 1)) == colour(0.5)
