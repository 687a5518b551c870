"""vLLM's configuration -> `Config`: what must be equal for KV to be the same values."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)

from kvstore.config import Config, Group, prove_parallel_agnostic
from kvstore.layout import Layout
from kvstore.vllm.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

_VOLATILE = frozenset(
    ("_name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version")
)
"""Fields of a model's config that say where it came from, not what it computes."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def offloading_identity(
    offloading: OffloadingConfig,
    layout: Layout,
    *,
    dtype: str | None = None,
    known: Mapping[str, str] | None = None,
) -> Config:
    """The config that vLLM's `FileMapper` would hash, `parallel_agnostic` proved.

    Args:
        offloading: vLLM's offloading configuration.
        layout: the blocks' layout, for the proof.
        dtype: the cache's dtype as the engine's specs resolved it; by default, vLLM's
            offloading configuration says it.
        known: fields of `Config` that change the values, as far as they are known.
    """
    parallel = offloading.parallel
    canonical = None
    if offloading.canonical_layout:
        assert offloading.kv_cache_layout is not None
        canonical = canonical_format_id(offloading.kv_cache_layout)
    agnostic = prove_parallel_agnostic(
        layout,
        claimed=parallel.is_parallelism_agnostic or offloading.replicated_layout,
        replicated_layout=offloading.replicated_layout,
        canonical_format=canonical,
    )
    return Config(
        model_name=offloading.model.name,
        dtype=dtype or offloading.model.dtype,
        tokens_per_hash=offloading.cache.tokens_per_hash,
        blocks_per_file=offloading.cache.blocks_per_chunk,
        kv_cache_groups=tuple(
            Group(
                tokens_per_block=group.tokens_per_block,
                layer_names=tuple(group.layer_names),
            )
            for group in offloading.groups
        ),
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        parallel_agnostic=agnostic,
        replicated_layout=offloading.replicated_layout,
        canonical_format=canonical,
        **(known or {}),
    )


def known_identity(vllm_config: VllmConfig) -> dict[str, str]:
    """The fields of `Config` that only the engine's full configuration tells.

    What cannot be known is left out, and said in the log once, since two models that
    differ in it alone would share a namespace.
    """
    model = vllm_config.model_config
    known = {
        "model_config_digest": _model_config_digest(vllm_config),
        "prefix_hash": _prefix_hash(vllm_config),
    }
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if (digest := weights_digest(Path(model.model))) is not None:
        known["weights_digest"] = digest
    elif commit is not None:
        known["revision"] = str(commit)
    if "weights_digest" not in known and not _COMMIT.fullmatch(str(commit)):
        logger.warning(
            "kvstore: which weights %s are is known only as revision %r, which may come "
            "to mean others. Set --revision to a commit, so that KV of other weights "
            "can never be reused.",
            model.model,
            commit,
        )
    return known


def _model_config_digest(vllm_config: VllmConfig) -> str:
    """Digest of what the model computes, RoPE and overrides included."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    facts = {
        "text_config": _stable(model.hf_text_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "load_format": str(vllm_config.load_config.load_format),
        "skip_layers": list(vllm_config.cache_config.kv_cache_dtype_skip_layers),
        "sliding_window": not model.disable_sliding_window,
        "draft_model": speculative and str(speculative.model),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _stable(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value


def _prefix_hash(vllm_config: VllmConfig) -> str:
    """The block hashes' algorithm, and the seed where the environment sets one."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        logger.warning(
            "kvstore: %s hashes start from a random seed in each process, so nothing "
            "stored now can be found after a restart. Set PYTHONHASHSEED.",
            algorithm,
        )
    return algorithm if seed is None else f"{algorithm}:{seed}"
