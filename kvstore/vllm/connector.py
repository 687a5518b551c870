"""`KVStoreConnector`: vLLM's offloading connector with kvstore below its CPU tier.

A connector sees all that identity needs. The workers read each layer's tensor and hand
the facts to the scheduler by vLLM's handshake, after both are built and before the first
request; only then is the namespace opened, and a mismatch stops the engine there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
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

from kvstore.errors import InvalidInputError
from kvstore.filesystem import Filesystem
from kvstore.records import refuse_unknown
from kvstore.releases import require_supported
from kvstore.vllm.host_worker import KVStoreOffloadingSpec
from kvstore.vllm.identity import known_identity, offloading_identity
from kvstore.vllm.layout import WorkerTensors, engine_layout, layer_specs, layer_tensor
from kvstore.vllm.options import VLLM_OPTIONS, TierOptions
from kvstore.vllm.tier import KVStoreTier

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

DEFAULT_PRIMARY_BYTES = 4 << 30
"""Size of the CPU tier where `cpu_bytes_to_use` is not set."""

_TIER_OPTIONS = frozenset(f.name for f in fields(TierOptions)) - {
    "kv_heads",  # the connector sees them
    "head_size",
}


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
        if role is KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0:
            probe_tiers(vllm_config)  # the first connector that an engine builds
        self._workers: WorkerTensors | None = None
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> Any:
        """vLLM's metrics. The front-end process asks for them without ever building the
        connector, so the tier is put into the configuration here too.
        """
        inject_tier(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note what the engine's tensors are, then give them to vLLM's worker."""
        config = self._kv_cache_config
        specs = layer_specs(config)
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
                layer_tensor(name, spec, kv_caches[name], layers.get(name), dtype)
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

        vLLM 0.32 calls it once, at the start. Called again, it opens the same layout again;
        if that fails, what is open goes on.

        Raises:
            KVStoreError: the engine cannot use the URL, or must not.
        """
        starts = not any(tier.stores for tier in self._tiers())
        try:
            told = [m for m in metadata.values() if isinstance(m, WorkerTensors)]
            self._open(sorted(told, key=lambda worker: worker.rank))
        except BaseException:
            if starts:
                self._end_start()
            raise

    def _end_start(self) -> None:
        """vLLM ends the engine without a shutdown, and the CPU tier's memory would outlive
        it: its file has a name until someone removes it.
        """
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        try:
            self.shutdown()
        except Exception:  # the error that is being raised says why
            logger.exception("shutdown after a refused start failed")
        Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").unlink(missing_ok=True)

    def _tiers(self) -> list[ConnectorTier]:
        """kvstore's own."""
        tiers = self.scheduler.manager.secondary_tiers
        return [tier for tier in tiers if isinstance(tier, ConnectorTier)]

    def _open(self, told: list[WorkerTensors]) -> None:
        offloading = build_offloading_config(self._vllm_config, self._kv_cache_config)
        expected = offloading.parallel.world_size
        if len({worker.rank for worker in told}) != expected:
            raise InvalidInputError(
                f"handshake: expected the tensors of {expected} workers, found "
                f"{sorted(worker.rank for worker in told)}"
            )
        runner = "v2" if self._vllm_config.use_v2_model_runner else "v1"
        layout = engine_layout(told, offloading, runner)
        dtypes = {layer.cache_dtype for worker in told for layer in worker.layers}
        config = offloading_identity(
            offloading,
            layout,
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
            known=known_identity(self._vllm_config),
        )
        for tier in self._tiers():
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
    others = _secondary_tiers(extra)
    if any(map(_is_ours, others)):
        return
    refuse_unknown(extra, _TIER_OPTIONS | VLLM_OPTIONS, where="kv_connector_extra_config")
    ours = {name: extra[name] for name in _TIER_OPTIONS & extra.keys()}
    TierOptions.parse(ours, where="kv_connector_extra_config")
    tier = {"type": ConnectorTier.__name__, "module_path": __name__, **ours}
    theirs = {name: value for name, value in extra.items() if name not in ours}
    theirs.setdefault("cpu_bytes_to_use", _primary_bytes())
    theirs["secondary_tiers"] = [*others, tier]
    theirs["spec_name"] = KVStoreOffloadingSpec.__name__
    theirs["spec_module_path"] = KVStoreOffloadingSpec.__module__
    transfer.kv_connector_extra_config = theirs


def probe_tiers(vllm_config: VllmConfig) -> None:
    """Prove that each kvstore URL can be used, before any shared memory is mapped.

    Raises:
        KVStoreError: one cannot.
    """
    for tier in _secondary_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config):
        if _is_ours(tier):
            names = tier.keys() - {"type", "module_path"}
            options = TierOptions.parse({n: tier[n] for n in names}, where="kvstore")
            Filesystem(
                options.url,
                options.storage_options,
                client=options.client,  # type: ignore[arg-type]  # checked by TierOptions
                timeout=options.io_timeout,
                read_only=options.read_only,
            ).probe()


def _secondary_tiers(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    where = "kv_connector_extra_config.secondary_tiers"
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list):
        raise InvalidInputError(f"{where}: expected a list, found {type(tiers).__name__}")
    for i, tier in enumerate(tiers):
        if not isinstance(tier, Mapping):
            raise InvalidInputError(
                f"{where}[{i}]: expected an object, found {type(tier).__name__}"
            )
    return tiers


def _is_ours(tier: Mapping[str, Any]) -> bool:
    """Whether `inject_tier` has put it there."""
    named = tier.get("type"), tier.get("module_path")
    return named == (ConnectorTier.__name__, __name__)


def _primary_bytes() -> int:
    """At most half of shared memory: of all of it, so that every process of the engine
    finds the same number.
    """
    return min(DEFAULT_PRIMARY_BYTES, shutil.disk_usage("/dev/shm").total // 2)
