"""`KVStoreConnector`: vLLM's offloading connector with kvstore below its CPU tier.

A connector sees all that identity needs. The workers read each layer's tensor and hand
the facts to the scheduler by vLLM's handshake, after both are built and before the first
request; only then is the namespace opened, and a mismatch stops the engine there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec, iter_layer_specs
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.errors import InvalidInputError
from kvstore.layout import Layout
from kvstore.records import refuse_unknown
from kvstore.rows import LayerTensor, worker_layout
from kvstore.vllm.host_worker import KVStoreOffloadingSpec
from kvstore.vllm.identity import known_identity, offloading_identity
from kvstore.vllm.options import VLLM_OPTIONS, TierOptions
from kvstore.vllm.tier import KVStoreTier
from kvstore.vllm.versions import require_supported

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

DEFAULT_PRIMARY_BYTES = 4 << 30
"""Size of the CPU tier where `cpu_bytes_to_use` is not set."""

_MODULE = "kvstore.vllm"
_TIER_OPTIONS = frozenset(f.name for f in fields(TierOptions)) - {
    "kv_heads",  # the connector sees them
    "head_size",
}


@dataclass(frozen=True)
class WorkerTensors(KVConnectorHandshakeMetadata):
    """What one worker tells the scheduler: its layers' tensors, in the order of a row."""

    rank: int
    num_blocks: int
    layers: tuple[LayerTensor, ...]


class ConnectorTier(KVStoreTier):
    """The tier that `KVStoreConnector` puts below vLLM's CPU tier.

    It opens when the workers have told their layout; until then every lookup is a miss.
    """

    def _open_stores(self) -> None:
        """Nothing: `KVStoreConnector` opens the stores at the handshake."""


class KVStoreConnector(OffloadingConnector):
    """Named by `kv_connector` and `kv_connector_module_path` in vLLM's configuration.

    `kv_connector_extra_config` takes the fields of `TierOptions` (of which only `url` is
    needed) beside vLLM's own offloading options.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Check the options, then build vLLM's connector with our tier in it.

        Raises:
            InvalidInputError: an option is unknown or cannot be used.
            UnsupportedVersionError: this vLLM is not supported.
        """
        require_supported()
        if vllm_config.parallel_config.nnodes_within_dp > 1:
            raise InvalidInputError(
                "parallel_config: expected all workers of an engine on one node, found "
                f"{vllm_config.parallel_config.nnodes_within_dp} nodes: a row of the CPU "
                "tier holds only its own node's workers, so that part of each block "
                "would be missing"
            )
        inject_tier(vllm_config)
        self._workers: WorkerTensors | None = None
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> Any:
        """VLLM's metrics. The front-end process asks for them without ever building the
        connector, so the tier is put into the configuration here too.
        """
        inject_tier(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note what the engine's tensors are, then give them to vLLM's worker."""
        config = self._kv_cache_config
        specs = {
            name: spec
            for group in config.kv_cache_groups
            for name, spec in zip(group.layer_names, _layer_specs(group), strict=True)
        }
        layers = get_layers_from_vllm_config(
            self._vllm_config,
            AttentionLayerBase,
            list(specs),
        )
        dtype = build_offloading_config(
            self._vllm_config, self._kv_cache_config
        ).model.dtype
        self._workers = WorkerTensors(
            rank=self._vllm_config.parallel_config.rank,
            num_blocks=config.num_blocks,
            layers=tuple(
                _layer_tensor(name, spec, kv_caches[name], layers.get(name), dtype)
                for name, spec in specs.items()
            ),
        )
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker tells the scheduler."""
        return self._workers

    # ---- scheduler

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the namespace for the layout that the workers told.

        vLLM calls it again when an engine wakes up; the same layout then opens again.

        Raises:
            KVStoreError: the engine cannot use the URL, or must not.
        """
        told = [m for m in metadata.values() if isinstance(m, WorkerTensors)]
        offloading = build_offloading_config(self._vllm_config, self._kv_cache_config)
        expected = offloading.parallel.world_size
        if len({worker.rank for worker in told}) != expected:
            raise InvalidInputError(
                f"handshake: expected the tensors of {expected} workers, found "
                f"{sorted(worker.rank for worker in told)}"
            )
        layout = engine_layout(told, offloading, self._vllm_config)
        dtypes = {layer.cache_dtype for worker in told for layer in worker.layers}
        config = offloading_identity(
            offloading,
            layout,
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
            known=known_identity(self._vllm_config),
        )
        for tier in self.scheduler.manager.secondary_tiers:
            if isinstance(tier, ConnectorTier):
                tier.open(config, layout)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As `set_xfer_handshake_metadata`, for any pipeline-parallel rank."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))


def inject_tier(vllm_config: VllmConfig) -> None:
    """Turn the user's options into vLLM's own: a spec, and one secondary tier more.

    Idempotent: vLLM hands the configuration from process to process.

    Raises:
        InvalidInputError: an option is unknown, missing, or of another type.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    if extra.get("spec_name") == KVStoreOffloadingSpec.__name__:
        return
    refuse_unknown(extra, _TIER_OPTIONS | VLLM_OPTIONS, where="kv_connector_extra_config")
    ours = {name: extra[name] for name in _TIER_OPTIONS & extra.keys()}
    TierOptions.parse(ours, where="kv_connector_extra_config")
    tier = {"type": ConnectorTier.__name__, "module_path": __name__, **ours}
    SecondaryTierFactory.get_tier_class(tier)
    theirs = {name: value for name, value in extra.items() if name not in ours}
    theirs.setdefault("cpu_bytes_to_use", _primary_bytes())
    theirs["secondary_tiers"] = [*theirs.get("secondary_tiers", ()), tier]
    theirs["spec_name"] = KVStoreOffloadingSpec.__name__
    theirs["spec_module_path"] = KVStoreOffloadingSpec.__module__
    transfer.kv_connector_extra_config = theirs


def _primary_bytes() -> int:
    """At most half of what shared memory has left."""
    return min(DEFAULT_PRIMARY_BYTES, shutil.disk_usage("/dev/shm").free // 2)


def engine_layout(
    workers: list[WorkerTensors], offloading: OffloadingConfig, vllm_config: VllmConfig
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
            runner="v2" if vllm_config.use_v2_model_runner else "v1",
            kv_cache_layout=offloading.kv_cache_layout,
            tokens_per_block=offloading.groups[0].tokens_per_block,
            groups=len(offloading.groups),
        )
        for worker in workers
    ]
    first = layouts[0]
    for worker, layout in zip(workers[1:], layouts[1:], strict=True):
        differences = [
            str(difference)
            for difference in first.differences(layout)
            if difference.field != "layer_names"  # stages of a pipeline differ in these
        ]
        if differences:
            raise InvalidInputError(
                f"workers {workers[0].rank} and {worker.rank} lay out KV differently: "
                + "; ".join(differences)
            )
    copies = 1 if offloading.replicated_layout else offloading.parallel.world_size
    return first.with_workers(
        copies,
        heads_sharded=offloading.parallel.is_parallelism_agnostic
        and offloading.parallel.world_size == offloading.parallel.tp_size,
    )


def _layer_specs(group: Any) -> list[Any]:
    specs = list(iter_layer_specs(group.kv_cache_spec))
    return specs if len(specs) == len(group.layer_names) else specs * len(group.layer_names)


def _layer_tensor(
    name: str, spec: Any, tensor: torch.Tensor, layer: Any, dtype: str
) -> LayerTensor:
    attention = isinstance(spec, AttentionSpec)
    return LayerTensor(
        name=name,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        offset=tensor.storage_offset(),
        storage=tensor.untyped_storage().data_ptr(),
        storage_bytes=tensor.untyped_storage().nbytes(),
        page_bytes=spec.page_size_bytes,
        payload_bytes=getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes),
        cache_dtype=getattr(spec, "cache_dtype_str", None) or dtype,
        plain=attention and _is_plain(spec, tensor),
        backend=None if layer is None else _backend(layer.get_attn_backend()),
        isa=getattr(layer, "isa", None),
    )


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
