"""One block, opened: proved, and then the same for NumPy, zarr-python, xarray and torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored import chunk_url

from kvstore import DamagedBlockError, InvalidInputError, Layout
from kvstore import testing as kit
from kvstore.layout import ITEM_BYTES
from kvstore.offline import Block, Root
from kvstore.offline.target import Wanted, target_of
from kvstore.offline.views import data_array, dataset, kv_tensors, tensor, zarr_array
from kvstore.packing import pack
from kvstore.testing import sample_block, sample_config, sample_layout
from kvstore.testing.roots import LAYERS

KEY = bytes(range(36))
HEADS, TOKENS, SIZE = 4, 16, 8
LAYOUT = sample_layout(
    shape=(2, HEADS, TOKENS, 2 * SIZE), page_bytes=HEADS * TOKENS * 2 * SIZE * 2
)


def stored(root: kit.Root, layout: Layout = LAYOUT, **options: Any) -> bytes:
    """The bytes of a block that is there now; few values, so that codecs have work."""
    payload = sample_block(layout, values=60)
    assert root.open(layout, **options).store(KEY, payload)
    return payload.tobytes()


def opened(root: kit.Root) -> Block:
    group = Root(root.url, root.storage_options, client=root.client).only_group()
    block = group.open(KEY)
    assert block is not None
    return block


def of(layout: Layout, payload: bytes | None = None) -> Block:
    payload = sample_block(layout).tobytes() if payload is None else payload
    return Block(url="memory://x", key=KEY, group=0, layout=layout, payload=payload)


def of_dtype(dtype: str) -> Block:
    page = HEADS * TOKENS * 2 * SIZE * ITEM_BYTES[dtype]
    return of(replace(LAYOUT, dtype=dtype, page_bytes=page))


# ---- from storage


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
def test_a_block_is_opened_by_any_client(root: kit.Root, codec: str) -> None:
    payload = stored(root, codec=codec)
    block = opened(root)
    assert (block.payload, block.layout, block.key) == (payload, LAYOUT, KEY)
    assert block.url == root.open(LAYOUT).block_url(KEY)
    array = zarr_array(block)
    root.open(LAYOUT).delete(KEY)
    assert np.asarray(array[...]).tobytes() == payload
    assert np.asarray(array[1, 2:4]).tobytes() == block.values[1, 2:4].tobytes()


def test_what_does_not_hold_its_proof_is_not_opened(root: kit.Root) -> None:
    payload = stored(root)
    store = root.open(LAYOUT)
    root.write(chunk_url(store, KEY), bytes([payload[0] ^ 1]) + payload[1:] + bytes(4))
    with pytest.raises(DamagedBlockError, match="crc32c"):
        opened(root)


def test_what_is_absent_is_none(root: kit.Root) -> None:
    stored(root)
    group = Root(root.url, root.storage_options, client=root.client).only_group()
    assert group.open(bytes(36)) is None


# ---- numpy


def test_nothing_can_be_written_into_a_block() -> None:
    block = of(LAYOUT)
    keys, content = block.keys_and_values()
    for array in (block.values, keys, content):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_blocks_words_do_not_show_its_bytes() -> None:
    assert "payload" not in repr(of(LAYOUT))


def named() -> tuple[Any, Any]:
    """K and V, each value of which says where it belongs: (layer, head, token, value)."""
    count = 2 * HEADS * TOKENS * SIZE
    keys = np.arange(count, dtype=np.float32).reshape(2, HEADS, TOKENS, SIZE)
    return keys, -keys - 1


PACKED = ("layer", "head", "packed")
FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "head, token": (("layer", "head", "token", "value"), "token-kv"),
    "token, head": (("layer", "token", "head", "value"), "token-kv"),
    "cpu-vec": (PACKED, "cpu-vec"),
    "cpu-amx": (PACKED, "cpu-amx"),
}


def formed(form: str) -> Block:
    """A block of `named` values in one of the forms."""
    axes, packing = FORMS[form]
    lengths = {"layer": 2, "head": HEADS, "token": TOKENS, "value": 2 * SIZE}
    size = 32 if packing == "cpu-amx" else SIZE  # tiles are of 16 values
    lengths |= {"packed": TOKENS * 2 * size}
    layout = replace(
        LAYOUT,
        axes=axes,
        shape=tuple(lengths[axis] for axis in axes),
        dtype="float32",
        packing=packing,
        kv_cache_layout=None,
        page_bytes=None,
    )
    keys, content = (np.pad(part, [(0, 0)] * 3 + [(0, size - SIZE)]) for part in named())
    return of(layout, pack(layout, keys, content).tobytes())


@pytest.mark.parametrize("form", FORMS)
def test_k_and_v_have_their_names_in_every_form(form: str) -> None:
    block = formed(form)
    assert block.kv_axes == ("layer", "head", "token", "value")
    parts = block.keys_and_values()
    of_xarray = dataset(block)
    for name, found, expected in zip("KV", parts, named(), strict=True):
        assert np.array_equal(found[..., :SIZE], expected)
        variable = of_xarray[name].sel(layer=LAYERS[1]).isel(head=2, token=5, value=3)
        assert variable.item() == expected[1, 2, 5, 3]


# ---- re-sharding


def test_every_value_lands_where_its_name_says() -> None:
    source = formed("head, token")
    config, layout = target_of(sample_config(), source.layout, Wanted(tp=2))
    sharded = source.converted(layout)
    assert (config.tp_size, layout.axes[0]) == (2, "worker")
    keys, content = named()
    for name, expected in (("K", keys), ("V", content)):
        variable = dataset(sharded)[name]
        for head in range(HEADS):
            found = variable.sel(layer=LAYERS[1]).isel(worker=head // 2, head=head % 2)
            assert np.array_equal(found, expected[1, head])
    assert sharded.converted(source.layout) == source


def test_what_cannot_be_converted_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInputError, match="dtype: expected 'bfloat16'"):
        of(LAYOUT).converted(replace(LAYOUT, dtype="bfloat16"))


# ---- other libraries


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_dtypes_are_the_logical_ones(dtype: str) -> None:
    block = of_dtype(dtype)
    expected = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert block.values.dtype == data_array(block).dtype == dataset(block).K.dtype
    assert block.values.dtype == expected
    array: Any = zarr_array(block)
    assert np.asarray(array[...]).tobytes() == block.payload
    assert array.attrs["kvstore"]["dtype"] == dtype
    assert array.dtype == (expected if expected.itemsize > 1 else np.uint8)


def test_a_zarr_array_is_the_stored_one(root: kit.Root) -> None:
    stored(root)
    array: Any = zarr_array(opened(root))
    url = root.open(LAYOUT).block_url(KEY)
    document = json.loads(root.read(f"{url}/zarr.json"))
    assert array.attrs["kvstore"] == document["attributes"]["kvstore"]
    assert (list(array.shape), array.dtype) == (document["shape"], document["data_type"])
    assert list(array.metadata.dimension_names) == document["dimension_names"]


def test_a_zarr_array_is_only_read() -> None:
    array: Any = zarr_array(of(LAYOUT))
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0


def test_data_arrays_have_names_and_say_where_they_are_from(root: kit.Root) -> None:
    payload = stored(root)
    array = data_array(opened(root))
    assert array.dims == LAYOUT.axes
    assert list(array.layer.values) == list(LAYERS)
    assert array.values.tobytes() == payload
    assert array.attrs["url"] == root.open(LAYOUT).block_url(KEY)
    assert (array.name, array.attrs["key"]) == (KEY.hex(), KEY.hex())


def test_layers_without_names_are_numbers() -> None:
    array = data_array(of(replace(LAYOUT, layer_names=())))
    assert "layer" in array.dims
    assert not array.coords


OPAQUE = Layout.of_bytes(48, dtype="bfloat16", reason="a hybrid model")


@pytest.mark.parametrize("parts", [Block.keys_and_values, dataset, kv_tensors])
def test_plain_bytes_have_no_k_and_v(parts: Callable[[Block], object]) -> None:
    with pytest.raises(InvalidInputError, match="packing: expected one of"):
        parts(of(OPAQUE))


def test_plain_bytes_are_bytes() -> None:
    array = data_array(of(OPAQUE))
    assert array.dims == ("byte",)
    assert array.dtype == np.uint8
    assert np.asarray(zarr_array(of(OPAQUE))[...]).tobytes() == of(OPAQUE).payload


# ---- torch


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_tensors_have_the_logical_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    block = of_dtype(dtype)
    whole, axes = tensor(block)
    assert (whole.dtype, axes) == (getattr(torch, dtype), LAYOUT.axes)
    assert tuple(whole.shape) == LAYOUT.shape
    assert whole.view(torch.uint8).numpy().tobytes() == block.payload
    *parts, axes = kv_tensors(block)
    assert axes == block.kv_axes
    for found, expected in zip(parts, block.keys_and_values(), strict=True):
        assert found.dtype == whole.dtype
        assert found.view(torch.uint8).numpy().tobytes() == expected.tobytes()


def test_a_tensor_has_memory_of_its_own() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    block = of_dtype("float16")
    before = block.payload
    tensor(block)[0].zero_()
    assert block.payload == before != bytes(len(before))


def test_a_tensor_of_plain_bytes() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    found, axes = tensor(of(OPAQUE))
    assert (found.dtype, axes) == (torch.uint8, ("byte",))
    assert found.numpy().tobytes() == of(OPAQUE).payload
