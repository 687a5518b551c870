"""Rows of real arrays: each is laid out as an engine would, and read back by the layout."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import unhurried

from kvstore.errors import InvalidInputError
from kvstore.layout import KV_CACHE_LAYOUTS, Layout
from kvstore.packing import values
from kvstore.rows import TOKEN_KV_BACKENDS, named_layout, worker_layout
from kvstore.tensors import LayerTensor, logical_dtype

ORDERS = sorted(KV_CACHE_LAYOUTS)
UNPACKED = ("LBHNC", "LBNHC")
AXES = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "value"}


@dataclass(frozen=True)
class Engine:
    """One worker's KV cache: a real array whose values all differ.

    Attributes:
        memory: the cache with its dimensions in the order of `order`.
        order: vLLM's name for it.
        split: kernel blocks that one block of the block table is made of.
    """

    memory: npt.NDArray[np.uint16]
    order: str
    split: int = 1

    @classmethod
    def of(
        cls,
        order: str,
        *,
        layers: int = 2,
        blocks: int = 9,
        heads: int = 3,
        tokens: int = 16,
        size: int = 8,
        split: int = 1,
    ) -> "Engine":
        sizes = {"L": layers, "B": blocks * split, "H": heads, "N": tokens, "C": size}
        shape = [sizes[letter] for letter in order]
        count = math.prod(shape)
        return cls(np.arange(count, dtype=np.uint16).reshape(shape), order, split)

    @property
    def blocks(self) -> int:
        return len(self.tensors[0]) // self.split

    @property
    def tensors(self) -> npt.NDArray[np.uint16]:
        """The cache as (layer, block, head, token, value)."""
        return self.memory.transpose([self.order.index(letter) for letter in "LBHNC"])

    def layers(self, **facts: Any) -> list[LayerTensor]:
        """What the worker sees of each layer's tensor."""
        return [
            replace(self._layer(f"layer{i}", tensor), **facts)
            for i, tensor in enumerate(self.tensors)
        ]

    def _layer(self, name: str, tensor: npt.NDArray[np.uint16]) -> LayerTensor:
        start = tensor.__array_interface__["data"][0]
        origin = self.memory.__array_interface__["data"][0]
        page = tensor[: self.split].size * tensor.itemsize
        return LayerTensor(
            name=name,
            shape=tensor.shape,
            strides=tuple(step // tensor.itemsize for step in tensor.strides),
            dtype="bfloat16",
            offset=(start - origin) // tensor.itemsize,
            storage=origin,
            storage_bytes=self.memory.nbytes,
            page_bytes=page,
            payload_bytes=page,
            cache_dtype="bfloat16",
            plain=True,
            backend="FLASH_ATTN",
        )

    def row(self, chosen: Sequence[int]) -> bytes:
        """The chosen blocks as vLLM offloads them."""
        if self.order[0] == "B":  # whole blocks, all layers in each
            return b"".join(self.memory[block].tobytes() for block in chosen)
        pages = self.memory.reshape(
            len(self.memory), self.blocks, self.split, *self.memory.shape[2:]
        )
        return b"".join(layer[block].tobytes() for layer in pages for block in chosen)

    def layout(
        self,
        blocks: int = 1,
        layers: Sequence[LayerTensor] | None = None,
        **changes: Any,
    ) -> Layout:
        arguments: dict[str, Any] = {
            "nbytes": self.tensors[:, : blocks * self.split].nbytes,
            "num_blocks": self.blocks,
            "blocks": blocks,
            "runner": "v2",
            "kv_cache_layout": self.order,
            "tokens_per_block": self.tensors.shape[3] * self.split,
        }
        return worker_layout(layers or self.layers(), **arguments | changes)


def assert_told_truly(engine: Engine, layout: Layout, chosen: Sequence[int]) -> None:
    """The row's bytes, read by the layout, are what the engine's tensors hold."""
    found = values(layout, engine.row(chosen)).view(np.uint16)
    axes = list(layout.axes)
    if "block" not in axes:
        axes.insert(0, "block")
        found = found[None]
    found = found.transpose([axes.index(AXES[letter]) for letter in "LBHNC"])
    pages = [
        block * engine.split + part for block in chosen for part in range(engine.split)
    ]
    np.testing.assert_array_equal(found, engine.tensors[:, pages])


# ---- rows whose axes are proved


@pytest.mark.parametrize("chosen", [[4], [7, 2, 5]], ids=["one-block", "three-blocks"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_row_is_what_its_axes_say(order: str, chosen: list[int]) -> None:
    engine = Engine.of(order)
    layout = engine.layout(len(chosen))
    named = [axis for axis in KV_CACHE_LAYOUTS[order] if axis != "block" or len(chosen) > 1]
    assert layout.axes == tuple(named)
    assert_told_truly(engine, layout, chosen)
    assert layout == replace(
        layout,
        dtype="bfloat16",
        packing="token-kv",
        backend="FLASH_ATTN",
        runner="v2",
        kv_cache_layout=order,
        layer_names=("layer0", "layer1"),
        tokens_per_block=16,
        page_bytes=768,
        reason=None,
    )


@unhurried
@given(
    st.sampled_from(ORDERS),
    st.fixed_dictionaries(
        {
            "layers": st.integers(1, 3),
            "heads": st.integers(1, 3),
            "tokens": st.integers(1, 3),
            "size": st.integers(1, 3),
            "blocks": st.integers(1, 4),
        }
    ),
)
@example("BLHNC", {"layers": 2, "heads": 1, "tokens": 2, "size": 2, "blocks": 2})
@example("BHLNC", {"layers": 1, "heads": 2, "tokens": 2, "size": 2, "blocks": 2})
def test_no_row_of_any_size_is_told_falsely(order: str, lengths: dict[str, int]) -> None:
    engine = Engine.of(order, **lengths)
    chosen = range(engine.blocks)
    layout = engine.layout(len(chosen))
    assert not layout.opaque
    assert_told_truly(engine, layout, chosen)


@pytest.mark.parametrize("order", UNPACKED)
@pytest.mark.parametrize("chosen", [[4], [7, 2]], ids=["one-block", "two-blocks"])
def test_blocks_that_are_split_for_the_kernel(order: str, chosen: list[int]) -> None:
    engine = Engine.of(order, tokens=8, split=2)
    layout = engine.layout(len(chosen))
    assert layout.axes == KV_CACHE_LAYOUTS[order]
    assert layout.shape[1] == 2 * len(chosen)
    assert_told_truly(engine, layout, chosen)


def test_packed_layers_are_named_in_the_order_of_memory() -> None:
    engine = Engine.of("BLHNC", layers=3)
    layout = engine.layout(layers=engine.layers()[::-1])
    assert layout.layer_names == ("layer0", "layer1", "layer2")
    assert_told_truly(engine, layout, [1])


def test_layers_with_tensors_of_their_own_are_named_in_the_order_of_the_row() -> None:
    engine = Engine.of("LBHNC", layers=3)
    layout = engine.layout(layers=engine.layers()[::-1])
    assert layout.layer_names == ("layer2", "layer1", "layer0")


@pytest.mark.parametrize("backend", sorted(TOKEN_KV_BACKENDS))
def test_backends_that_keep_k_and_v_in_each_cell(backend: str) -> None:
    engine = Engine.of("LBHNC")
    layout = engine.layout(layers=engine.layers(backend=backend))
    assert (layout.packing, layout.backend) == ("token-kv", backend)


@pytest.mark.parametrize("isa", ["amx", "vec", "vec16", "neon"])
def test_tiles_of_a_cpu_are_named_no_further_than_the_head(isa: str) -> None:
    engine = Engine.of("LBHNC", tokens=32)
    layout = engine.layout(layers=engine.layers(backend="CPU_ATTN", isa=isa))
    assert layout.axes == ("layer", "head", "packed")
    assert layout.shape == (2, 3, 256)
    assert layout.packing == f"cpu-{isa}"
    assert layout.tokens_per_block == 32
    assert layout.nbytes == len(engine.row([0]))


def test_8_bit_floats_in_integer_tensors_keep_their_own_name() -> None:
    engine = Engine.of("LBHNC")
    page = engine.layers()[0].page_bytes // 2
    layers = engine.layers(
        dtype="uint8",
        cache_dtype="fp8_e5m2",
        page_bytes=page,
        payload_bytes=page,
        storage_bytes=engine.memory.nbytes // 2,
    )
    layout = engine.layout(layers=layers, nbytes=len(engine.row([0])) // 2)
    assert layout.dtype == "float8_e5m2"
    assert layout.axes == ("layer", "head", "token", "value")


@pytest.mark.parametrize(
    ("cache_dtype", "tensor_dtype", "logical"),
    [
        ("fp8", "uint8", "float8_e4m3fn"),
        ("fp8_e4m3", "uint8", "float8_e4m3fn"),
        ("fp8_e5m2", "uint8", "float8_e5m2"),
        ("fp8_ds_mla", "uint8", "uint8"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("int8_per_token_head", "int8", "int8"),
    ],
)
def test_what_the_values_are(cache_dtype: str, tensor_dtype: str, logical: str) -> None:
    assert logical_dtype(cache_dtype, tensor_dtype) == logical


# ---- rows that nothing describes


def second(**facts: Any) -> Callable[[Engine], list[LayerTensor]]:
    """The engine's layers, the second being otherwise."""

    def layers(engine: Engine) -> list[LayerTensor]:
        first, other = engine.layers()
        return [first, replace(other, **facts)]

    return layers


def every(**facts: Any) -> Callable[[Engine], list[LayerTensor]]:
    return lambda engine: engine.layers(**facts)


@pytest.mark.parametrize(
    ("order", "layers", "changes", "reason"),
    [
        pytest.param(
            "LBHNC", every(backend="MAMBA"), {}, "backend MAMBA keeps", id="unknown-backend"
        ),
        pytest.param(
            "LBHNC", every(backend=None), {}, "backend None keeps", id="no-backend"
        ),
        pytest.param(
            "LBHNC",
            every(backend="FLASH_ATTN (vllm.rocm.Attn)"),
            {},
            r"backend FLASH_ATTN \(vllm\.rocm\.Attn\)",
            id="a-class-of-the-same-name",
        ),
        pytest.param("LBHNC", every(plain=False), {}, "keeps inside", id="A40-scales"),
        pytest.param(
            "LBHNC",
            every(plain=False, isa="amx"),
            {},
            "keeps inside",
            id="tiles-and-scales",
        ),
        pytest.param(
            "LBNHC", every(isa="amx"), {}, "tiles .token, value.", id="tiles-across-heads"
        ),
        pytest.param(
            "LBHNC",
            second(shape=(9, 3, 16, 16)),
            {},
            r"shape: layer0 has \(9, 3, 16, 8\), layer1 has \(9, 3, 16, 16\)",
            id="B20-shapes-differ",
        ),
        pytest.param(
            "LBHNC",
            second(strides=(384, 8, 24, 1)),
            {},
            r"strides: layer0 has \(384, 128, 8, 1\), layer1 has \(384, 8, 24, 1\)",
            id="strides-differ",
        ),
        pytest.param(
            "LBHNC",
            second(dtype="float16"),
            {},
            "dtype: layer0 has bfloat16, layer1 has float16",
            id="dtypes-differ",
        ),
        pytest.param(
            "LBHNC",
            second(cache_dtype="fp8"),
            {},
            "cache_dtype: layer0 has bfloat16, layer1 has fp8",
            id="cache-dtypes-differ",
        ),
        pytest.param(
            "LBHNC",
            second(page_bytes=1536),
            {},
            "page_bytes: layer0 has 768, layer1 has 1536",
            id="pages-differ",
        ),
        pytest.param(
            "LBHNC",
            second(plain=False),
            {},
            "plain: layer0 has True, layer1 has False",
            id="scales-of-one",
        ),
        pytest.param(
            "LBHNC",
            second(backend="TRITON_ATTN"),
            {},
            "backend: layer0 has FLASH_ATTN, layer1 has TRITON_ATTN",
            id="backends-differ",
        ),
        pytest.param(
            "LBHNC",
            second(isa="vec"),
            {},
            "isa: layer0 has None, layer1 has vec",
            id="tiles-of-one",
        ),
        pytest.param(
            "LBHNC", every(payload_bytes=700), {}, "pages are padded", id="padded-pages"
        ),
        pytest.param(
            "LBHNC", second(offset=0), {}, "layers share their bytes", id="shared-bytes"
        ),
        pytest.param("LBHNC", every(), {"groups": 3}, "3 KV-cache groups", id="groups"),
        pytest.param(
            "LBHNC",
            every(),
            {"nbytes": 2000},
            "make 1536 bytes and the row holds 2000",
            id="other-size",
        ),
        pytest.param(
            "LBHNC",
            every(dtype="int4", cache_dtype="int4"),
            {},
            "values of a int4 cache cannot be named",
            id="dtype-without-a-name",
        ),
        pytest.param(
            "LBHNC",
            every(shape=(9, 384), strides=(384, 1)),
            {},
            r"expected dimensions .*, found \(9, 384\)",
            id="two-dimensions",
        ),
        pytest.param(
            "LBHNC",
            every(shape=(8, 3, 16, 8), payload_bytes=700),
            {},
            "8 pages for 9 blocks",
            id="pages-that-do-not-divide",
        ),
        pytest.param(
            "BLHNC", second(offset=400), {}, "gaps or overlaps", id="packed-with-a-gap"
        ),
        pytest.param("BLHNC", second(offset=0), {}, "gaps or overlaps", id="packed-shared"),
        pytest.param(
            "BLHNC", second(storage=1), {}, "even distances", id="packed-in-two-storages"
        ),
    ],
)
def test_a_row_that_nothing_describes_is_bytes_and_says_why(
    order: str,
    layers: Callable[[Engine], list[LayerTensor]],
    changes: dict[str, Any],
    reason: str,
) -> None:
    engine = Engine.of(order)
    layout = engine.layout(layers=layers(engine), **changes)
    assert layout.axes == ("byte",)
    assert layout.nbytes == changes.get("nbytes", len(engine.row([0])))
    assert re.search(reason, layout.reason or "")
    assert layout.layer_names == ("layer0", "layer1")
    assert layout.tokens_per_block == 16
    assert (layout.runner, layout.kv_cache_layout) == ("v2", order)


def test_packed_layers_at_uneven_distances_are_bytes() -> None:
    engine = Engine.of("BLHNC", layers=4)
    layers = [layer for i, layer in enumerate(engine.layers()) if i != 2]
    layout = engine.layout(layers=layers)
    assert layout.opaque
    assert layout.reason == "layers do not lie at even distances"


def test_packed_blocks_that_are_split_for_the_kernel_are_bytes() -> None:
    engine = Engine.of("BLHNC", tokens=8, split=2)
    layout = engine.layout()
    assert layout.opaque
    assert layout.reason == "blocks of packed layers are split for the kernel"


# ---- engines that cannot be served


def test_heads_outside_blocks_are_refused_since_only_part_would_be_offloaded() -> None:
    engine = Engine.of("LHBNC", blocks=64)
    with pytest.raises(
        InvalidInputError,
        match=r"layer0: .*98304 bytes, found 64 of 256.*Set VLLM_KV_CACHE_LAYOUT to one of",
    ):
        engine.layout(kv_cache_layout=None)


def test_an_allocation_may_be_rounded_up() -> None:
    engine = Engine.of("BLHNC", blocks=64)
    layers = engine.layers(storage_bytes=engine.memory.nbytes + 4095)
    assert not engine.layout(layers=layers).opaque
    layers = engine.layers(storage_bytes=engine.memory.nbytes + 4096)
    with pytest.raises(InvalidInputError, match="only part of each"):
        engine.layout(layers=layers)


@pytest.mark.parametrize("name", ["LHBNC", "XYZ"])
def test_a_name_that_cannot_be_described_is_refused_even_for_bytes(name: str) -> None:
    with pytest.raises(InvalidInputError, match="kv_cache_layout: expected one of"):
        Engine.of("LBHNC").layout(kv_cache_layout=name, groups=2)


@pytest.mark.parametrize(
    ("order", "said"),
    [(order, said) for order in ORDERS for said in ORDERS if order != said],
)
def test_an_engine_whose_name_contradicts_its_tensors_is_refused(
    order: str, said: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"engine says {said}.*Please report"):
        Engine.of(order).layout(2, kv_cache_layout=said)


def test_what_a_single_head_cannot_contradict_is_accepted() -> None:
    engine = Engine.of("LBHNC", heads=1)
    layout = engine.layout(kv_cache_layout="LBNHC")
    assert_told_truly(engine, layout, [3])


def test_an_engine_without_a_name_is_believed_by_its_tensors() -> None:
    layout = Engine.of("BHLNC").layout(kv_cache_layout=None)
    assert layout.axes == ("head", "layer", "token", "value")
    assert layout.kv_cache_layout is None


@pytest.mark.parametrize(("order", "alias"), [("LBHNC", "NHD"), ("LBNHC", "HND")])
def test_an_alias_that_contradicts_the_tensors_is_refused(order: str, alias: str) -> None:
    with pytest.raises(InvalidInputError, match="Please report"):
        Engine.of(order).layout(kv_cache_layout=alias)


# ---- layouts by names and numbers alone

NUMBERS: dict[str, Any] = {
    "nbytes": 2 * 3 * 16 * 8 * 2,
    "layer_names": ("layer0", "layer1"),
    "blocks": 1,
    "kv_heads": 3,
    "head_size": 4,
    "tokens": 16,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_names_and_numbers_give_what_the_tensors_give_as_far_as_they_go(
    order: str, blocks: int
) -> None:
    numbers = NUMBERS | {"blocks": blocks, "nbytes": NUMBERS["nbytes"] * blocks}
    named = named_layout(order, **numbers)
    differences = Engine.of(order).layout(blocks).differences(named)
    assert {d.field for d in differences} == {"packing", "backend", "runner"}
    assert all(d.found is None for d in differences)


def test_a_cell_may_be_one_latent_state() -> None:
    layout = named_layout("LBHNC", **NUMBERS | {"kv_heads": 1, "head_size": 24})
    assert layout.shape == (2, 1, 16, 24)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"nbytes": 1537}, id="odd-bytes"),
        pytest.param({"nbytes": 1536 * 2}, id="twice-the-bytes"),
        pytest.param({"kv_heads": 2}, id="other-heads"),
        pytest.param({"kv_heads": 6}, id="heads-of-both-workers"),
        pytest.param({"kv_heads": 5}, id="heads-that-do-not-divide"),
        pytest.param({"kv_heads": 0}, id="no-heads"),
        pytest.param({"head_size": 6}, id="other-head-size"),
        pytest.param({"head_size": 16}, id="half-a-head"),
        pytest.param({"tokens": 48}, id="other-tokens"),
        pytest.param({"tokens": 32}, id="twice-the-tokens"),
        pytest.param({"blocks": 3}, id="other-blocks"),
        pytest.param({"dtype": "float32"}, id="other-dtype"),
        pytest.param({"dtype": "fp8_ds_mla"}, id="dtype-without-a-name"),
        pytest.param({"layer_names": ()}, id="no-layers"),
    ],
)
def test_numbers_that_do_not_multiply_out_are_refused(changes: dict[str, Any]) -> None:
    numbers = NUMBERS | changes
    with pytest.raises(
        InvalidInputError,
        match=rf"multiply out to {numbers['nbytes']} bytes .* {numbers['tokens']} tokens "
        rf"of {numbers['dtype']}, found {numbers['kv_heads']} and {numbers['head_size']}",
    ):
        named_layout("LBHNC", **numbers)


@pytest.mark.parametrize("name", ["LHBNC", "XYZ"])
def test_another_name_is_refused_in_our_words(name: str) -> None:
    with pytest.raises(InvalidInputError, match="kv_cache_layout"):
        named_layout(name, **NUMBERS)


def test_an_alias_is_resolved() -> None:
    assert named_layout("HND", **NUMBERS) == named_layout("LBHNC", **NUMBERS)
