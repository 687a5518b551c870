"""What vLLM knows of its tensors and numbers -> `Layout` of a row of its primary tier."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    get_offloading_group_ids,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec

from kvstore.errors import InvalidInputError
from kvstore.layout import Layout, canonical_kv_cache_layout
from kvstore.rows import named_layout, worker_layout
from kvstore.tensors import LayerTensor, logical_dtype, tensors_digest
from kvstore.vllm.options import TierOptions

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig


_PLATFORM_FP8 = ("fp8", "fp8_e4m3")


@dataclass(frozen=True)
class WorkerTensors(KVConnectorHandshakeMetadata):
    """What one worker tells the scheduler: its layers' tensors, in the order of a row."""

    rank: int
    num_blocks: int
    layers: tuple[LayerTensor, ...]


def engine_layout(
    workers: list[WorkerTensors], offloading: OffloadingConfig, runner: str
) -> Layout:
    """The layout of a whole row, from what every worker told.

    Raises:
        InvalidInputError: the workers hold different layouts, or what vLLM would offload
            is not what the tensors hold.
    """
    blocks = offloading.cache.blocks_per_chunk
    layouts = [
        worker_layout(
            worker.layers,
            nbytes=offloading.worker_kv_bytes_per_block * blocks,
            num_blocks=worker.num_blocks,
            blocks=blocks,
            runner=runner,
            kv_cache_layout=offloading.kv_cache_layout,
            tokens_per_block=offloading.groups[0].tokens_per_block,
            groups=len(offloading.groups),
        )
        for worker in workers
    ]
    first = layouts[0]
    if offloading.canonical_layout:
        return Layout.of_bytes(
            row_bytes(offloading),
            dtype=first.dtype,
            reason="vLLM's canonical layout joins the workers' pages",
            packing=first.packing,
            backend=first.backend,
            runner=first.runner,
            kv_cache_layout=first.kv_cache_layout,
            layer_names=first.layer_names,
            tokens_per_block=first.tokens_per_block,
            tensors_digest=tensors_digest(workers[0].layers, sharded=False),
        )
    for worker, layout in zip(workers[1:], layouts[1:], strict=True):
        differences = [
            str(difference)
            for difference in first.differences(layout)
            # Stages of a pipeline differ in these, which are joined below.
            if difference.field not in ("layer_names", "tensors_digest")
        ]
        if differences:
            raise InvalidInputError(
                f"workers {workers[0].rank} and {worker.rank} lay out KV differently: "
                + "; ".join(differences)
            )
    names = dict.fromkeys(name for layout in layouts for name in layout.layer_names)
    digests = list(dict.fromkeys(layout.tensors_digest for layout in layouts))
    digest = digests[0]
    if len(digests) > 1:
        digest = hashlib.sha256("".join(map(str, digests)).encode()).hexdigest()[:12]
    whole = replace(first, layer_names=tuple(names), tensors_digest=digest)
    return _joined(whole, offloading)


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """The KV-cache spec of each offloaded layer, in the order of vLLM's own worker."""
    specs: dict[str, Any] = {}
    for group_id in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            specs[name] = each.get(name, group.kv_cache_spec)
    return specs


def layer_tensor(
    name: str, spec: Any, tensor: torch.Tensor, layer: Any, dtype: str
) -> LayerTensor:
    """The facts of one layer, by its spec, its tensor and its module.

    Args:
        name: the layer's name.
        spec: vLLM's KV-cache spec of the layer.
        tensor: the layer's KV tensor.
        layer: the attention module, or None.
        dtype: the cache's dtype where the spec does not say.
    """
    attention = isinstance(spec, AttentionSpec)
    cache_dtype = getattr(spec, "cache_dtype_str", None) or dtype
    return LayerTensor(
        name=name,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=tensor_dtype(cache_dtype, tensor),
        offset=tensor.storage_offset(),
        storage=tensor.untyped_storage().data_ptr(),
        storage_bytes=tensor.untyped_storage().nbytes(),
        page_bytes=spec.page_size_bytes,
        payload_bytes=getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes),
        cache_dtype=cache_dtype,
        plain=attention and _is_plain(spec, tensor),
        backend=None if layer is None else _backend(layer.get_attn_backend()),
        isa=getattr(layer, "isa", None),
    )


def tensor_dtype(cache_dtype: str, tensor: torch.Tensor) -> str:
    """A tensor's dtype; of an 8-bit cache, the platform's own (some GPUs have another)."""
    kind = current_platform.fp8_dtype() if cache_dtype in _PLATFORM_FP8 else tensor.dtype
    return str(kind).removeprefix("torch.")


def _is_plain(spec: AttentionSpec, tensor: torch.Tensor) -> bool:
    """Whether a cell is K and V of one head and token, each of the head's size."""
    return (
        spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.tokens_per_state == 1
        and spec.head_size == spec.head_size_v
        and tensor.shape[-1] == 2 * spec.head_size
    )


def _backend(backend: Any) -> str:
    """A backend's name, with its class where the name alone could be another's.

    Several classes call themselves FLASH_ATTN, and some of them shuffle.
    """
    name: str = backend.get_name()
    module, qualname = backend.full_cls_name()
    standard = f"vllm.v1.attention.backends.{name.lower().removesuffix('_attn')}"
    if module in (standard, f"{standard}_attn", f"{standard}_attention"):
        return name
    return f"{name} ({module}.{qualname})"


def row_bytes(offloading: OffloadingConfig) -> int:
    """Bytes of a row that hold KV: vLLM rounds a row up to a page, and pads the rest."""
    worker: int = offloading.worker_kv_bytes_per_block
    return worker * int(offloading.cache.blocks_per_chunk) * _copies(offloading)


def bare_layout(offloading: OffloadingConfig, nbytes: int, options: TierOptions) -> Layout:
    """The layout of a row as far as names and numbers tell: axes if the heads multiply
    out, else bytes; packing, backend and runner unknown.

    Raises:
        InvalidInputError: heads were given and do not multiply out.
    """
    names = tuple(name for group in offloading.groups for name in group.layer_names)
    dtype = offloading.model.dtype
    if dtype in _PLATFORM_FP8:
        dtype = str(current_platform.fp8_dtype()).removeprefix("torch.")
    dtype = logical_dtype(dtype, dtype)
    name = offloading.kv_cache_layout
    resolved = None if name is None else canonical_kv_cache_layout(name)
    given = (options.kv_heads, options.head_size)
    if given == (None, None) or resolved is None:
        return Layout.of_bytes(
            nbytes,
            dtype=dtype,
            reason="a bare tier sees no tensors, and its options or vLLM name no order",
            kv_cache_layout=resolved,
            layer_names=names,
            tokens_per_block=offloading.groups[0].tokens_per_block,
        )
    if current_platform.is_cpu():
        raise InvalidInputError(
            "kv_heads, head_size: expected neither on the CPU platform, whose attention "
            "writes tiles of its own inside each head. Leave them out, or use "
            "KVStoreConnector, which sees the tiles"
        )
    if None in given or len(offloading.groups) != 1 or offloading.canonical_layout:
        raise InvalidInputError(
            "kv_heads, head_size: expected both, for one KV group in vLLM's direct "
            f"layout, found {given} for {len(offloading.groups)} groups"
        )
    layout = named_layout(
        resolved,
        nbytes=nbytes // _copies(offloading),
        layer_names=names,
        blocks=offloading.cache.blocks_per_chunk,
        kv_heads=options.kv_heads or 0,
        head_size=options.head_size or 0,
        tokens=offloading.groups[0].tokens_per_block,
        dtype=dtype,
    )
    return _joined(layout, offloading)


def _joined(worker: Layout, offloading: OffloadingConfig) -> Layout:
    """The layout of a row of as many workers' parts as it holds."""
    parallel = offloading.parallel
    return worker.with_workers(
        _copies(offloading),
        heads_sharded=parallel.is_parallelism_agnostic
        and parallel.world_size == parallel.tp_size,
    )


def _copies(offloading: OffloadingConfig) -> int:
    """Workers' parts in a row: one of each, or a single one that all of them hold."""
    return 1 if offloading.replicated_layout else int(offloading.parallel.world_size)
