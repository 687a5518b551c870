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

from kvstore.config import Config, Group, hub_snapshot, prove_parallel_agnostic
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

_MODEL_FACTS = ("code_revision", "model_impl", "hf_config_path", "config_format")
_CACHE_FACTS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")

_LENGTH_MATTERS = ("longrope", "long_factor", "llama4", "attn_scale")
"""Models whose positions are scaled by how long a request may be."""

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
    fields: dict[str, Any] = {
        "model_name": offloading.model.name,
        "dtype": dtype or offloading.model.dtype,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_file": offloading.cache.blocks_per_chunk,
        "kv_cache_groups": tuple(
            Group(
                tokens_per_block=group.tokens_per_block,
                layer_names=tuple(group.layer_names),
            )
            # Keys name a group by its number, and vouch for nothing of its place here.
            for group in sorted(offloading.groups, key=lambda group: group.group_id)
        ),
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "parallel_agnostic": agnostic,
        "replicated_layout": offloading.replicated_layout,
        "canonical_format": canonical,
    }
    return Config(**fields | dict(known or {}))


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
    if (snapshot := hub_snapshot(model.model)) is not None:
        known["model_name"], known["revision"] = snapshot
        return known
    if (digest := weights_digest(Path(model.model))) is not None:
        known["weights_digest"] = digest
    elif commit is not None:
        known["revision"] = str(commit)
    if "weights_digest" not in known and not _COMMIT.fullmatch(str(commit)):
        logger.warning(
            "kvstore: which weights %r are is known only as revision %r, which may come "
            "to mean others. Set --revision to a commit, so that KV of other weights "
            "can never be reused.",
            model.model,
            commit,
        )
    return known


def _model_config_digest(vllm_config: VllmConfig) -> str:
    """Digest of what the model computes, RoPE and overrides included."""
    model = vllm_config.model_config
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    text_config = model.hf_text_config.to_dict()
    facts: dict[str, Any] = {
        "text_config": _stable(text_config),
        "quantization": [model.quantization, getattr(model, "quantization_config", None)],
        "checkpoint_quantization": getattr(model.hf_config, "quantization_config", None),
        "dtype": str(model.dtype),
        "load_format": str(vllm_config.load_config.load_format),
        "loader": getattr(vllm_config.load_config, "model_loader_extra_config", None),
        "skip_layers": list(cache.kv_cache_dtype_skip_layers),
        "sliding_window": not model.disable_sliding_window,
        "draft_model": speculative and str(speculative.model),
    }
    for config, names in ((model, _MODEL_FACTS), (cache, _CACHE_FACTS)):
        facts |= {name: str(getattr(config, name, None)) for name in names}
    if any(word in json.dumps(text_config, default=str) for word in _LENGTH_MATTERS):
        facts["max_model_len"] = model.max_model_len
    if str(vllm_config.load_config.load_format) == "dummy":
        facts["seed"] = model.seed
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        facts["interleave"] = getattr(parallel, "cp_kv_cache_interleave_size", None)
    text = json.dumps(_stable(facts), sort_keys=True, separators=(",", ":"), default=_named)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _named(value: object) -> str:
    """A value that JSON has no form for, without the address that `str` may give."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


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
