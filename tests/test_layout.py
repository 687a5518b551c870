import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import DIMS, dim_orders, layouts, memory_orders, unhurried

from kvstore.config import Config, prove_parallel_agnostic
from kvstore.errors import Difference, InvalidInputError
from kvstore.layout import (
    AXES,
    ITEM_BYTES,
    KV_CACHE_LAYOUTS,
    Layout,
    canonical_kv_cache_layout,
)
from kvstore.packing import values
from kvstore.paths import namespace_path
from kvstore.records import Record

# OPT-125M in float16, as vLLM's two model runners really laid it out.
OPT_LAYERS = tuple(f"model.decoder.layers.{i}.self_attn.attn" for i in range(12))
V1 = Layout.from_strides(
    ("block", "head", "layer", "token", "value"),
    (15475, 12, 12, 16, 128),
    (294912, 24576, 2048, 128, 1),
    dtype="float16",
    layer_names=OPT_LAYERS,
    runner="v1",
)
V2 = Layout.from_strides(
    ("block", "head", "token", "value"),
    (15473, 12, 16, 128),
    (24576, 2048, 128, 1),
    dtype="float16",
    layer_names=OPT_LAYERS,
    runner="v2",
)
OPAQUE = Layout.of_bytes(6051, dtype="fp8_ds_mla", reason="2 KV-cache groups")

SAMPLE = Layout(
    axes=("layer", "head", "token", "value"),
    shape=(2, 3, 16, 8),
    dtype="float16",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=("a", "b"),
    tokens_per_block=16,
    page_bytes=768,
)
# Another valid value for every field that is compared.
OTHER: dict[str, Any] = {
    "axes": ("head", "layer", "token", "value"),
    "shape": (2, 3, 8, 16),
    "dtype": "bfloat16",
    "packing": "cpu-vec",
    "backend": "TRITON_ATTN",
    "runner": "v1",
    "kv_cache_layout": "BHLNC",
    "layer_names": ("b", "a"),
    "tokens_per_block": 32,
    "page_bytes": 1024,
    "tensors_digest": "0123456789ab",
}
OPTIONAL = ("packing", "backend", "runner", "kv_cache_layout", "tokens_per_block")


def strides_of(array: npt.NDArray[Any]) -> tuple[int, ...]:
    """Strides in values, as `torch.Tensor.stride()` gives them."""
    return tuple(stride // array.itemsize for stride in array.strides)


def names_for(lengths: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"layer{i}" for i in range(lengths["layer"]))


# ---- the two rows that vLLM's own tiers took for one


def test_both_runners_rows_have_one_size() -> None:
    assert V1.nbytes == V2.nbytes == 589_824


def test_both_runners_rows_have_other_axes() -> None:
    assert V1.axes == ("head", "layer", "token", "value")
    assert V2.axes == ("layer", "head", "token", "value")
    assert V1.shape == V2.shape == (12, 12, 16, 128)
    assert V1.page_bytes == V2.page_bytes == 49_152
    assert [d.field for d in V1.differences(V2)] == ["axes", "runner"]


def test_both_runners_blocks_go_to_other_paths_although_both_claim_to_be_agnostic() -> None:
    v1, v2 = (
        Config(
            model_name="facebook/opt-125m",
            dtype="float16",
            tokens_per_hash=16,
            parallel_agnostic=prove_parallel_agnostic(layout, claimed=True),
        )
        for layout in (V1, V2)
    )
    assert "parallel_agnostic" not in v1.fields()
    assert v2.fields()["parallel_agnostic"] is False
    assert namespace_path(v1) != namespace_path(v2)


# ---- axes from strides


@pytest.mark.parametrize(
    "order", list(itertools.permutations(DIMS[1:])), ids=lambda order: "-".join(order)
)
def test_every_order_of_axes_is_recovered(order: tuple[str, ...]) -> None:
    lengths = {"block": 3, "layer": 2, "head": 3, "token": 4, "value": 5}
    memory = np.zeros([lengths[dim] for dim in ("block", *order)], np.float16)
    view = memory.transpose([("block", *order).index(dim) for dim in DIMS])
    layout = Layout.from_strides(
        DIMS,
        view.shape,
        strides_of(view),
        dtype="float16",
        layer_names=names_for(lengths),
    )
    assert layout.axes == order
    assert layout.shape == tuple(lengths[dim] for dim in order)


@unhurried
@given(order=memory_orders, dims=dim_orders, sizes=st.tuples(*[st.integers(1, 4)] * 5))
@example(order=DIMS[1:], dims=DIMS, sizes=(2, 3, 1, 1, 2))
def test_a_blocks_bytes_are_its_array_read_by_the_axes(
    order: tuple[str, ...], dims: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    lengths = dict(zip(DIMS, sizes, strict=True))
    in_memory = ("block", *order)
    count = math.prod(sizes)
    memory = np.arange(count, dtype=np.float32).reshape([lengths[d] for d in in_memory])
    engine = memory.transpose([in_memory.index(dim) for dim in dims])

    layout = Layout.from_strides(
        dims,
        engine.shape,
        strides_of(engine),
        dtype="float32",
        layer_names=names_for(lengths),
    )

    long = [axis for axis in layout.axes if lengths[axis] > 1]
    assert long == [dim for dim in order if lengths[dim] > 1]
    rest = [dim for dim in dims if dim != "block"]
    for block in range(lengths["block"]):
        expected = np.moveaxis(engine, dims.index("block"), 0)[block]
        expected = expected.transpose([rest.index(axis) for axis in layout.axes])
        found = values(layout, memory[block].tobytes())
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("blocks", "extra"), [(1, ()), (4, ("block",))])
def test_a_tensor_per_layer_makes_a_row_of_one_page_of_each_layer(
    blocks: int, extra: tuple[str, ...]
) -> None:
    layout = Layout.from_strides(
        ("block", "head", "token", "value"),
        (9, 3, 16, 8),
        (384, 8, 24, 1),
        dtype="bfloat16",
        layer_names=("a", "b"),
        blocks=blocks,
    )
    assert layout.axes == ("layer", *extra, "token", "head", "value")
    assert layout.nbytes == 2 * blocks * 3 * 16 * 8 * 2
    assert layout.tokens_per_block == 16
    assert layout.page_bytes == 768
    assert layout.layer_names == ("a", "b")


def test_a_tensor_of_all_layers_makes_a_row_of_whole_blocks() -> None:
    layout = Layout.from_strides(
        ("block", "layer", "head", "token", "value"),
        (9, 2, 3, 16, 8),
        (768, 384, 128, 8, 1),
        dtype="float8_e5m2",
        layer_names=("a", "b"),
        blocks=2,
    )
    assert layout.axes == ("block", "layer", "head", "token", "value")
    assert layout.shape == (2, 2, 3, 16, 8)
    assert layout.page_bytes == 384


@pytest.mark.parametrize(
    ("strides", "problem"),
    [
        pytest.param((768, 256, 16, 2), "value to step by 1", id="every-other-value"),
        pytest.param((432, 144, 9, 1), "token to step by 8", id="padded-tokens"),
        pytest.param((480, 160, 8, 1), "head to step by 128", id="padded-heads"),
        pytest.param((384, 64, 8, 1), "head to step by 128", id="overlapping-heads"),
        pytest.param((384, 0, 8, 1), "head to step by", id="one-head-for-all"),
        pytest.param((384, 128, 8, -1), "to step by", id="backwards"),
        pytest.param((128, 1152, 8, 1), "head to step by 128", id="LHBNC"),
    ],
)
def test_gaps_and_overlaps_are_refused(strides: tuple[int, ...], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Layout.from_strides(
            ("block", "head", "token", "value"),
            (9, 3, 16, 8),
            strides,
            dtype="float16",
            layer_names=("a",),
        )


@unhurried
@given(memory_orders, st.integers(1, 4))
def test_blocks_that_lie_inside_another_axis_are_refused(
    order: tuple[str, ...], place: int
) -> None:
    lengths = {"block": 3, "layer": 2, "head": 3, "token": 4, "value": 5}
    in_memory = (*order[:place], "block", *order[place:])
    memory = np.zeros([lengths[dim] for dim in in_memory], np.float16)
    with pytest.raises(InvalidInputError, match="gaps or overlaps"):
        Layout.from_strides(
            in_memory,
            memory.shape,
            strides_of(memory),
            dtype="float16",
            layer_names=names_for(lengths),
        )


def test_blocks_that_overlap_each_other_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="overlap"):
        Layout.from_strides(
            ("block", "head", "token", "value"),
            (9, 3, 16, 8),
            (128, 128, 8, 1),
            dtype="float16",
            layer_names=("a",),
        )


def test_as_many_layer_names_as_layers() -> None:
    with pytest.raises(InvalidInputError, match="layer"):
        Layout.from_strides(
            ("block", "layer", "head", "token", "value"),
            (9, 2, 3, 16, 8),
            (768, 384, 128, 8, 1),
            dtype="float16",
            layer_names=("a", "b", "c"),
        )


# ---- packings


@pytest.mark.parametrize("packing", ["cpu-amx", "cpu-vec", "cpu-vec16", "cpu-neon"])
def test_tiles_are_named_no_further_than_the_head(packing: str) -> None:
    layout = Layout.from_strides(
        ("block", "head", "token", "value"),
        (1456, 3, 32, 128),
        (12288, 4096, 128, 1),
        dtype="bfloat16",
        layer_names=("a", "b"),
        packing=packing,
    )
    assert layout.axes == ("layer", "head", "packed")
    assert layout.shape == (2, 3, 4096)
    assert (layout.tokens_per_block, layout.page_bytes) == (32, 24576)


def test_tiles_of_tokens_and_values_that_do_not_touch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"cpu-amx tiles .* order is .*'head'"):
        Layout.from_strides(
            ("block", "head", "token", "value"),
            (9, 3, 32, 8),
            (768, 8, 24, 1),
            dtype="bfloat16",
            layer_names=("a",),
            packing="cpu-amx",
        )


def test_another_packing_leaves_the_axes_as_they_are() -> None:
    layout = Layout.from_strides(
        ("block", "head", "token", "value"),
        (9, 3, 16, 8),
        (384, 128, 8, 1),
        dtype="bfloat16",
        layer_names=("a",),
        packing="token-kv",
    )
    assert layout.axes == ("layer", "head", "token", "value")


# ---- opaque blocks


def test_an_opaque_block_is_its_bytes_and_a_reason() -> None:
    assert OPAQUE.opaque
    assert OPAQUE.axes == ("byte",)
    assert OPAQUE.shape == (6051,)
    assert OPAQUE.nbytes == 6051
    assert OPAQUE.reason == "2 KV-cache groups"
    assert not SAMPLE.opaque


# ---- rows of several workers


def test_one_worker_is_the_row() -> None:
    assert SAMPLE.with_workers(1, heads_sharded=True) == SAMPLE


@pytest.mark.parametrize(
    ("layout", "heads_sharded", "axes", "shape"),
    [
        pytest.param(V1, True, V1.axes, (24, 12, 16, 128), id="shares-of-heads-join"),
        pytest.param(V1, False, ("worker", *V1.axes), (2, *V1.shape), id="not-sharded"),
        pytest.param(V2, True, ("worker", *V2.axes), (2, *V2.shape), id="head-is-inside"),
        pytest.param(OPAQUE, True, ("byte",), (12102,), id="opaque"),
    ],
)
def test_a_row_of_two_workers(
    layout: Layout, heads_sharded: bool, axes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    row = layout.with_workers(2, heads_sharded=heads_sharded)
    assert (row.axes, row.shape) == (axes, shape)
    assert row.nbytes == 2 * layout.nbytes


def shard_of(heads: Sequence[int]) -> tuple[Layout, npt.NDArray[np.float32]]:
    """A worker that holds `heads` of a cross-layer cache, and one block of it."""
    shape = (12, 2, 4, 6)
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    block = np.ascontiguousarray(whole[heads])
    layout = Layout.from_strides(
        ("block", "head", "layer", "token", "value"),
        (1, *block.shape),
        (block.size, *strides_of(block)),
        dtype="float32",
        layer_names=("a", "b"),
    )
    return layout, block


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 12])
def test_shares_of_heads_join_to_the_row_that_one_worker_has(workers: int) -> None:
    one, whole = shard_of(range(12))
    shares = [shard_of(range(r, r + 12 // workers)) for r in range(0, 12, 12 // workers)]
    row = shares[0][0].with_workers(workers, heads_sharded=True)
    joined = b"".join(block.tobytes() for _, block in shares)
    assert joined == whole.tobytes()
    assert one.differences(row) == ()


def test_more_workers_around_a_row_of_workers_are_refused() -> None:
    row = V2.with_workers(2, heads_sharded=True)
    with pytest.raises(InvalidInputError, match="axes"):
        row.with_workers(2, heads_sharded=True)


# ---- to JSON and back


@unhurried
@given(layouts())
def test_a_layout_comes_back_from_json_as_it_was(layout: Layout) -> None:
    stored = json.loads(json.dumps(layout.to_dict()))
    found = Layout.from_dict(stored, where="layout")
    assert found == layout
    assert found.digest == layout.digest
    assert found.reason == layout.reason
    assert found.nbytes == layout.nbytes


@unhurried
@given(layouts())
def test_nbytes_is_what_numpy_says(layout: Layout) -> None:
    item = 1 if layout.opaque else ITEM_BYTES[layout.dtype]
    dtype = np.dtype(f"V{item}")
    assert layout.nbytes == math.prod(layout.shape) * dtype.itemsize


def test_fields_with_a_default_may_be_absent() -> None:
    record = {"axes": ["byte"], "shape": [3], "dtype": "uint8"}
    assert Layout.from_dict(record, where="layout") == Layout(
        axes=("byte",), shape=(3,), dtype="uint8"
    )


@pytest.mark.parametrize("field", ["axes", "shape", "dtype"])
def test_a_missing_field_is_refused(field: str) -> None:
    record = SAMPLE.to_dict()
    del record[field]
    with pytest.raises(InvalidInputError, match=rf"layout\.{field}: .*found none"):
        Layout.from_dict(record, where="layout")


@pytest.mark.parametrize(
    "record", [None, [], "layout", 1, [["axes", ["byte"]]]], ids=lambda r: repr(r)[:20]
)
def test_what_is_not_an_object_is_refused(record: object) -> None:
    with pytest.raises(InvalidInputError, match="layout: expected an object"):
        Layout.from_dict(record, where="layout")


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    record = SAMPLE.to_dict() | {"dtypes": "float16"}
    with pytest.raises(InvalidInputError, match=r"'dtypes'.*Did you mean 'dtype'"):
        Layout.from_dict(record, where="layout")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("axes", "layer", r"layout\.axes: expected a list"),
        ("axes", None, r"layout\.axes: expected a list"),
        ("axes", [1, 2, 3, 4], r"layout\.axes\[0\]: expected str"),
        ("axes", [], "axes: expected one name for each length"),
        ("axes", ["layer", "head", "token"], "axes: expected one name for each length"),
        ("axes", ["layer", "head", "token", "content"], "axes: expected distinct names"),
        ("axes", ["layer", "head", "token", "token"], "axes: expected distinct names"),
        ("axes", ["layer", "head", "token", "byte"], "axes: expected 'byte' alone"),
        ("shape", 768, r"layout\.shape: expected a list"),
        ("shape", [2, 3, 16, True], r"layout\.shape\[3\]: expected int, found True"),
        ("shape", [2, 3, 16, 8.0], r"layout\.shape\[3\]: expected int, found 8\.0"),
        ("shape", [2, 3, 16, "8"], r"layout\.shape\[3\]: expected int, found '8'"),
        ("shape", [2, 3, 16, None], r"layout\.shape\[3\]: expected int, found None"),
        ("shape", [2, 3, 16, -8], "shape: expected lengths of at least 1"),
        ("shape", [2, 3, 16, 0], "shape: expected lengths of at least 1"),
        ("dtype", 16, r"layout\.dtype: expected str"),
        ("dtype", None, r"layout\.dtype: expected str"),
        ("dtype", "", "dtype: expected a resolved dtype"),
        ("dtype", "auto", "dtype: expected a resolved dtype, never 'auto'"),
        ("dtype", "fp8_ds_mla", "dtype: expected one of .*'bfloat16'"),
        ("packing", 1, r"layout\.packing: expected str"),
        ("backend", [], r"layout\.backend: expected str"),
        ("runner", "v3", "runner: expected 'v1' or 'v2'"),
        ("kv_cache_layout", "LHBNC", "kv_cache_layout: expected one of .*LBHNC"),
        ("layer_names", "ab", r"layout\.layer_names: expected a list"),
        ("layer_names", None, r"layout\.layer_names: expected a list"),
        ("layer_names", [0], r"layout\.layer_names\[0\]: expected str"),
        ("tokens_per_block", True, r"layout\.tokens_per_block: expected int, found True"),
        ("tokens_per_block", "16", r"layout\.tokens_per_block: expected int"),
        ("page_bytes", 768.0, r"layout\.page_bytes: expected int"),
        ("reason", 0, r"layout\.reason: expected str"),
    ],
)
def test_a_malformed_field_is_refused(field: str, value: object, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Layout.from_dict(SAMPLE.to_dict() | {field: value}, where="layout")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"axes": "byte"}, r"layout\.axes: expected a list, found 'byte'"),
        ({"shape": (2, 3, 16, 8.0)}, r"layout\.shape\[3\]: expected int, found 8\.0"),
        ({"shape": (2, 3, 16, True)}, r"layout\.shape\[3\]: expected int, found True"),
        ({"shape": (2, 3, 16, np.int64(8))}, r"shape\[3\]: expected int, found np\.int64"),
        ({"dtype": np.dtype("f2")}, r"layout\.dtype: expected str, found dtype"),
        ({"layer_names": "ab"}, r"layout\.layer_names: expected a list, found 'ab'"),
        ({"page_bytes": 768.0}, r"layout\.page_bytes: expected int, found 768\.0"),
    ],
)
def test_a_layout_that_nobody_could_read_is_not_made(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        replace(SAMPLE, **changes)


def test_lists_are_the_same_layout_as_tuples() -> None:
    lists: dict[str, Any] = {"axes": ["head", "value"], "shape": [4, 8]}
    layout = Layout(**lists, dtype="float16")
    assert layout == Layout(axes=("head", "value"), shape=(4, 8), dtype="float16")
    assert Layout(**lists | {"axes": ["byte"], "shape": [32]}, dtype="float16").opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Record):
    """A record with a number of seconds, as a tier's options are."""

    seconds: float


def test_a_whole_number_may_stand_for_a_fraction_as_far_as_there_is_one() -> None:
    assert Timed.from_dict({"seconds": 30}, where="timed") == Timed(seconds=30.0)
    with pytest.raises(
        InvalidInputError, match=r"timed\.seconds: expected a float"
    ) as refused:
        Timed.from_dict({"seconds": 10**400}, where="timed")
    assert len(str(refused.value)) < 2000


# ---- what differs


def test_every_field_that_differs_is_listed() -> None:
    stored = replace(SAMPLE, **OTHER, reason="because")
    assert SAMPLE.differences(stored) == tuple(
        Difference(name, getattr(SAMPLE, name), value) for name, value in OTHER.items()
    )


def test_no_field_but_the_reason_is_left_out_of_the_comparison() -> None:
    assert {field.name for field in fields(Layout)} == {*OTHER, "reason"}


@pytest.mark.parametrize("name", OTHER)
def test_one_field_that_differs_is_seen_and_gives_another_digest(name: str) -> None:
    stored = replace(SAMPLE, **{name: OTHER[name]})
    assert SAMPLE.differences(stored) == (
        Difference(name, getattr(SAMPLE, name), OTHER[name]),
    )
    assert SAMPLE.digest != stored.digest


@pytest.mark.parametrize("name", [*OPTIONAL, "page_bytes"])
def test_unknown_equals_only_unknown(name: str) -> None:
    nothing: dict[str, Any] = {name: None}
    unknown = replace(SAMPLE, **nothing)
    known = getattr(SAMPLE, name)
    assert unknown.differences(unknown) == ()
    assert unknown.differences(SAMPLE) == (Difference(name, None, known),)
    assert SAMPLE.differences(unknown) == (Difference(name, known, None),)


def test_a_reason_is_told_and_never_compared() -> None:
    otherwise = replace(OPAQUE, reason="pages are padded")
    assert OPAQUE.differences(otherwise) == ()
    assert OPAQUE.digest == otherwise.digest


@unhurried
@given(layouts(), layouts())
def test_two_layouts_differ_exactly_if_their_digests_do(a: Layout, b: Layout) -> None:
    assert a.differences(a) == ()
    assert bool(a.differences(b)) == bool(b.differences(a)) == (a.digest != b.digest)


# ---- the digest, which lies in every stored block


@pytest.mark.parametrize(
    ("layout", "digest"),
    [
        pytest.param(V1, "35b492fde418dd3fdbc34ea5aa714345", id="v1"),
        pytest.param(V2, "a9f10d867463f15ba211217198cff8c2", id="v2"),
        pytest.param(SAMPLE, "9d6a8098cc223234816b2cf49f10a9f1", id="all-fields"),
        pytest.param(OPAQUE, "fd2c59a6c77236869179aecbd8600d9a", id="opaque"),
    ],
)
def test_digests_never_move(layout: Layout, digest: str) -> None:
    assert layout.digest == digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Layout):
    """A layout of a later kvstore, which knows one field more."""

    quantization: str | None = None


def test_a_field_that_is_added_later_moves_no_digest() -> None:
    later = Later.from_dict(SAMPLE.to_dict(), where="layout")
    assert later.digest == SAMPLE.digest
    assert replace(later, quantization="int4").digest != SAMPLE.digest


# ---- vLLM's names


@pytest.mark.parametrize("name", KV_CACHE_LAYOUTS)
def test_a_name_of_vllm_spells_its_axes(name: str) -> None:
    letters = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "value"}
    assert KV_CACHE_LAYOUTS[name] == tuple(letters[letter] for letter in name)
    assert set(KV_CACHE_LAYOUTS[name]) <= set(AXES)
    assert canonical_kv_cache_layout(name) == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        pytest.param("HND", "LBHNC", id="B19-HND"),
        pytest.param("NHD", "LBNHC", id="B19-NHD"),
    ],
)
def test_an_alias_is_resolved(alias: str, name: str) -> None:
    assert canonical_kv_cache_layout(alias) == name


@pytest.mark.parametrize("name", ["LHBNC", "lbhnc", "LBHN", "", "auto"])
def test_a_name_whose_rows_cannot_be_described_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"LBHNC.*HND.*VLLM_KV_CACHE_LAYOUT"):
        canonical_kv_cache_layout(name)


def test_an_alias_is_the_same_layout() -> None:  # B19
    alias = replace(SAMPLE, kv_cache_layout="HND")
    stored = Layout.from_dict(SAMPLE.to_dict() | {"kv_cache_layout": "HND"}, where="layout")
    assert alias == stored == SAMPLE
    assert SAMPLE.differences(alias) == ()
    assert alias.digest == SAMPLE.digest
