"""An engine's tensors -> the layout of one row of its primary tier. Pure, no I/O.

vLLM keeps each offloaded block as a row of bytes: for every worker, for every layer's
tensor, the pages of the block. The name `kv_cache_layout` says nothing of what lies
inside a page, so the layout is read off the tensors themselves, and what they do not
tell is not named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from kvstore.errors import InvalidInputError
from kvstore.layout import (
    ITEM_BYTES,
    KV_CACHE_LAYOUTS,
    Layout,
    canonical_kv_cache_layout,
)
from kvstore.tensors import LayerTensor, logical_dtype, tensors_digest

DIMS = ("block", "head", "token", "value")
"""Dimensions of a layer's tensor, as vLLM has standardised them (its RFC 42082)."""

TOKEN_KV_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})
"""Backends whose code keeps K and V side by side in each cell (head, token).

Read in vLLM 0.31 to 0.33: they split a cell's last dimension in the middle. Others keep K
and V in halves of the page, in tiles or shuffled, under the same shape.
"""

_ALIKE = (
    "shape",
    "strides",
    "dtype",
    "page_bytes",
    "cache_dtype",
    "plain",
    "backend",
    "isa",
)


def worker_layout(
    layers: Sequence[LayerTensor],
    *,
    nbytes: int,
    num_blocks: int,
    blocks: int,
    runner: str,
    kv_cache_layout: str | None,
    tokens_per_block: int,
    groups: int = 1,
) -> Layout:
    """The layout of one worker's part of a row.

    Args:
        layers: the worker's layers in the order of the row.
        nbytes: bytes of the part, which the result's `nbytes` equals.
        num_blocks: blocks in the engine's cache.
        blocks: engine blocks in one row.
        runner: `v1` or `v2`.
        kv_cache_layout: vLLM's name for the order.
        tokens_per_block: tokens that one engine block holds.
        groups: KV-cache groups that take turns in a row.

    Returns:
        Named axes where the tensors prove them, else one axis `byte` with the reason.
    """
    first = layers[0]
    dtype = logical_dtype(first.cache_dtype, first.dtype)
    packing = _packing(first)
    _refuse_gaps(first, num_blocks)
    try:
        if groups > 1:
            raise InvalidInputError(f"{groups} KV-cache groups take turns in a row")
        dims, shape, strides, names = _tensor_of_layers(layers, num_blocks, dtype)
        if packing is None:
            raise InvalidInputError(
                f"what backend {first.backend} keeps inside a page is not known"
            )
        layout = Layout.from_strides(
            dims,
            shape,
            strides,
            dtype=dtype,
            layer_names=names,
            blocks=blocks * shape[0] // num_blocks,
            packing=packing,
            backend=first.backend,
            runner=runner,
            kv_cache_layout=kv_cache_layout,
        )
        if layout.nbytes != nbytes:
            raise InvalidInputError(
                f"the axes make {layout.nbytes} bytes and the row holds {nbytes}"
            )
    except InvalidInputError as error:
        return Layout.of_bytes(
            nbytes,
            dtype=dtype,
            reason=str(error),
            packing=packing,
            backend=first.backend,
            runner=runner,
            kv_cache_layout=kv_cache_layout,
            layer_names=[layer.name for layer in layers],
            tokens_per_block=tokens_per_block,
            page_bytes=first.page_bytes,
            tensors_digest=tensors_digest(layers),
        )
    _cross_check(layout)
    return layout


def _refuse_gaps(layer: LayerTensor, num_blocks: int) -> None:
    """vLLM offloads a layer whose blocks do not touch as if all layers lay between them.

    Raises:
        InvalidInputError: they do not, so part of every block would not be offloaded.
    """
    item = layer.page_bytes // max(1, math.prod(layer.shape) // num_blocks)
    step = layer.strides[0] * item * layer.shape[0] // num_blocks
    # An allocation's end may be rounded up, by less than 4096 bytes.
    gap = layer.storage_bytes - num_blocks * step
    if layer.payload_bytes == layer.page_bytes != step and not 0 <= gap < 4096:
        raise InvalidInputError(
            f"{layer.name}: expected blocks that fill the cache's {layer.storage_bytes} "
            f"bytes, found {num_blocks} of {step}: this engine would offload only part "
            "of each. Set VLLM_KV_CACHE_LAYOUT to one of "
            f"{', '.join(KV_CACHE_LAYOUTS)}."
        )


def _packing(layer: LayerTensor) -> str | None:
    if not layer.plain:
        return None
    if layer.isa is not None:
        return f"cpu-{layer.isa}"
    return "token-kv" if layer.backend in TOKEN_KV_BACKENDS else None


def _tensor_of_layers(
    layers: Sequence[LayerTensor], num_blocks: int, dtype: str
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Dimensions, shape, strides and layer names of what the layers are together.

    Raises:
        InvalidInputError: no axes describe them, and why.
    """
    first = layers[0]
    for layer in layers[1:]:
        for field in _ALIKE:
            ours, theirs = getattr(first, field), getattr(layer, field)
            if ours != theirs:
                raise InvalidInputError(
                    f"layers differ in {field}: {first.name} has {ours}, "
                    f"{layer.name} has {theirs}"
                )
    if len(first.shape) != len(DIMS):
        raise InvalidInputError(f"expected dimensions {DIMS}, found {first.shape}")
    if first.shape[0] % num_blocks:
        raise InvalidInputError(f"{first.shape[0]} pages for {num_blocks} blocks")
    if dtype not in ITEM_BYTES:
        raise InvalidInputError(f"the values of a {dtype} cache cannot be named")
    kernel_blocks = first.shape[0] // num_blocks
    item = ITEM_BYTES[dtype]
    names = tuple(layer.name for layer in layers)
    if first.strides[0] * item * kernel_blocks == first.page_bytes:
        if first.page_bytes != first.payload_bytes:
            raise InvalidInputError("pages are padded")
        places = {(layer.storage, layer.offset) for layer in layers}
        if len(places) != len(layers):
            raise InvalidInputError("layers share their bytes")
        return DIMS, first.shape, first.strides, names
    # Layers lie side by side within each block, which is offloaded whole.
    ordered = sorted(layers, key=lambda layer: layer.offset)
    steps = {b.offset - a.offset for a, b in pairwise(ordered)}
    if len(steps) > 1 or len({layer.storage for layer in layers}) > 1:
        raise InvalidInputError("layers do not lie at even distances")
    if kernel_blocks > 1:
        raise InvalidInputError("blocks of packed layers are split for the kernel")
    step = steps.pop() if steps else first.strides[0]
    blocks_, heads, tokens, size = first.shape
    block_step, head_step, token_step, value_step = first.strides
    return (
        ("block", "layer", "head", "token", "value"),
        (blocks_, len(layers), heads, tokens, size),
        (block_step, step, head_step, token_step, value_step),
        tuple(layer.name for layer in ordered),
    )


def _cross_check(layout: Layout) -> None:
    """The engine's name for the order must not contradict its tensors.

    Raises:
        InvalidInputError: it does; one of the two is wrong, and nothing can be served.
    """
    expected = KV_CACHE_LAYOUTS.get(layout.kv_cache_layout or "")
    if expected is None:
        return
    long = dict(zip(layout.axes, layout.shape, strict=True))
    found = [axis for axis in layout.axes if long[axis] > 1 and axis != "packed"]
    named = [axis for axis in expected if axis in found]
    if found != named:
        raise InvalidInputError(
            f"kv_cache_layout: the engine says {layout.kv_cache_layout}, so axes {named}, "
            f"but its tensors have {found}. Please report this with the engine's version."
        )


def named_layout(
    kv_cache_layout: str,
    *,
    nbytes: int,
    layer_names: Sequence[str],
    blocks: int,
    kv_heads: int,
    head_size: int,
    tokens: int,
    dtype: str,
) -> Layout:
    """The layout of one worker's part of a row, by names and numbers alone.

    For a tier that never sees a tensor. Packing, backend and runner stay unknown.

    Raises:
        InvalidInputError: the numbers do not multiply out to `nbytes`.
    """
    cells = len(layer_names) * blocks * kv_heads * tokens
    item = ITEM_BYTES.get(dtype, 0)
    # K and V; or the one latent state of every head (MLA), which counts as one head.
    sizes = (2 * head_size, head_size) if kv_heads == 1 else (2 * head_size,)
    size = nbytes // max(1, cells * item)
    if size not in sizes or cells * item * size != nbytes:
        raise InvalidInputError(
            f"kv_heads, head_size: expected numbers that multiply out to {nbytes} bytes "
            f"in {len(layer_names)} layers × {blocks} blocks × {tokens} tokens of "
            f"{dtype}, found {kv_heads} and {head_size}"
        )
    lengths = {
        "layer": len(layer_names),
        "block": blocks,
        "head": kv_heads,
        "token": tokens,
        "value": size,
    }
    order = KV_CACHE_LAYOUTS[canonical_kv_cache_layout(kv_cache_layout)]
    axes = tuple(axis for axis in order if axis != "block" or blocks > 1)
    return Layout(
        axes=axes,
        shape=tuple(lengths[axis] for axis in axes),
        dtype=dtype,
        kv_cache_layout=kv_cache_layout,
        layer_names=tuple(layer_names),
        tokens_per_block=tokens,
        page_bytes=kv_heads * tokens * size * item,
    )
