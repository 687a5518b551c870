"""The parts of vLLM's objects that a tier reads, without an engine."""

import mmap
import os
import time
import uuid
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from work import until

from kvstore.tensors import LayerTensor
from kvstore.testing import Root
from kvstore.vllm.layout import WorkerTensors

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(12))
PAGE = 4096


def offloading_config(**changes: Any) -> OffloadingConfig:
    """OPT-125M on one worker, with `changes` to any field of any part."""
    parts: dict[str, dict[str, Any]] = {
        "parallel": {
            "rank": 0,
            "world_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "data_parallel_rank_local": None,
            "is_parallelism_agnostic": False,
        },
        "model": {"name": "facebook/opt-125m", "dtype": "float16"},
        "cache": {"tokens_per_hash": 16, "blocks_per_chunk": 1},
    }
    whole: dict[str, Any] = {
        "worker_kv_bytes_per_block": 589_824,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": str(uuid.uuid4()),
        "kv_cache_layout": "LBHNC",
        "replicated_layout": False,
        "canonical_layout": False,
        "groups": ((0, 16, LAYERS),),
    }
    for name, value in changes.items():
        for fields in (whole, *parts.values()):
            if name in fields:
                fields[name] = value
                break
        else:
            raise AssertionError(name)
    groups = tuple(
        OffloadingGroupConfig(group_id=group, tokens_per_block=tokens, layer_names=names)
        for group, tokens, names in whole.pop("groups")
    )
    return OffloadingConfig(
        groups=groups,
        model=OffloadingModelConfig(**parts["model"]),
        cache=OffloadingCacheConfig(**parts["cache"]),
        parallel=OffloadingParallelConfig(**parts["parallel"]),
        **whole,
    )


def tensors(
    rank: int = 0, layers: tuple[str, ...] = LAYERS, **changes: Any
) -> WorkerTensors:
    """One worker's layers in LBHNC: 12 heads × 16 tokens × 2 × 64 values of float16."""
    heads = changes.pop("heads", 12)
    page = heads * 16 * 128 * 2
    facts: dict[str, Any] = {
        "shape": (100, heads, 16, 128),
        "strides": (page // 2, 2048, 128, 1),
        "dtype": "float16",
        "storage": 1,
        "storage_bytes": 100 * page * len(layers),
        "page_bytes": page,
        "payload_bytes": page,
        "cache_dtype": "float16",
        "plain": True,
        "backend": "FLASH_ATTN",
        **changes,
    }
    return WorkerTensors(
        rank=rank,
        num_blocks=100,
        layers=tuple(
            LayerTensor(name=name, offset=n * 100 * page // 2, **facts)
            for n, name in enumerate(layers)
        ),
    )


def model_config(**changes: Any) -> Any:
    """The parts of a VllmConfig that tell which values a model computes."""
    text: dict[str, Any] = {
        "hidden_size": 64,
        "rope_parameters": {"rope_theta": 1e4},
        "_name_or_path": "somewhere",
        "transformers_version": "5.0",
    } | changes.pop("text", {})
    model = {
        "model": "org/model",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "disable_sliding_window": False,
        "hf_config": SimpleNamespace(),
        "hf_text_config": SimpleNamespace(to_dict=lambda: dict(text)),
        "max_model_len": 4096,
        "seed": 0,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(
            kv_cache_dtype_skip_layers=[], prefix_caching_hash_algo="sha256"
        ),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )


@dataclass
class Spec:
    """What a tier reads of an `OffloadingSpec`."""

    config: OffloadingConfig
    extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks_per_chunk = self.config.cache.blocks_per_chunk
        self.tokens_per_hash = self.config.cache.tokens_per_hash
        self.tokens_per_block = tuple(g.tokens_per_block for g in self.config.groups)
        self.replicated_layout = self.config.replicated_layout


@dataclass
class Rows:
    """A primary tier: rows rounded up to a page, as vLLM's are.

    Attributes:
        shared: whether they lie in a file of shared memory, which has its name while the
            rows live, as vLLM's do. Other processes can map only these.
        memory: that file, mapped.
        unlink: takes the file's name away. It happens by itself when the rows go.
    """

    config: OffloadingConfig
    count: int = 16
    shared: bool = False
    memory: Any = None
    unlink: Any = None

    def __post_init__(self) -> None:
        copies = 1 if self.config.replicated_layout else self.config.parallel.world_size
        self.nbytes = (
            self.config.worker_kv_bytes_per_block
            * self.config.cache.blocks_per_chunk
            * copies
        )
        padded = -(-self.nbytes // PAGE) * PAGE
        self.array = np.zeros((self.count, padded), np.uint8)
        if self.shared:
            path = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
            self.unlink = weakref.finalize(self, path.unlink)
            path.write_bytes(bytes(self.array.nbytes))
            with path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0)
            self.array = np.ndarray(self.array.shape, np.uint8, self.memory)

    def fill(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.array[:] = rng.integers(0, 256, self.array.shape, dtype=np.uint8)


def make_tier(rows: Rows, options: dict[str, Any]) -> SecondaryTierManager:
    """A tier by vLLM's own factory."""
    config = {"type": "KVStoreTier", "module_path": "kvstore.vllm", **options}
    view: Any = rows.array  # some of NumPy's stubs have no buffer protocol
    return SecondaryTierFactory.create_secondary_tier(
        config,
        memoryview(view),
        Spec(rows.config),
    )


def open_tier(
    tiers: list[SecondaryTierManager], root: Root, rows: Rows, **options: Any
) -> SecondaryTierManager:
    """A tier below a root, which the fixture `tiers` shuts down."""
    where = {"storage_options": dict(root.storage_options), "client": root.client}
    options = {"url": root.url, **where, **options}
    tiers.append(make_tier(rows, options))
    return tiers[-1]


def keys_of(count: int, group: int = 0) -> list[Any]:
    """Fresh keys of one KV group."""
    return [make_offload_key(os.urandom(32), group) for _ in range(count)]


def submit(
    tier: SecondaryTierManager, number: int, operation: str, keys: list[Any], slots: Any
) -> None:
    """Submit a job, and poll for nothing."""
    job = TransferJob(
        number, keys, np.array(slots, np.int32), operation == "load", ReqContext("r")
    )
    getattr(tier, f"submit_{operation}")(job)


def run_job(
    tier: SecondaryTierManager,
    operation: str,
    keys: list[OffloadKey],
    slots: list[int],
    request: str = "r",
) -> JobResult:
    """Submit one job, and poll until it is reported."""
    context = ReqContext(request)
    job = TransferJob(7, keys, np.array(slots, np.int32), operation == "load", context)
    getattr(tier, f"submit_{operation}")(job)
    tier.drain_jobs()
    [result] = tier.get_finished_jobs()
    assert not list(tier.get_finished_jobs())
    return result


def counts(tier: SecondaryTierManager, metric: str) -> dict[tuple[str, ...], float]:
    """What one counter of a tier has counted since it was last asked, by its labels."""
    stats = tier.get_stats()
    assert stats is not None
    counted: dict[tuple[str, ...], float] = stats.data["data"][metric]
    return counted


def until_found(tier: SecondaryTierManager, key: OffloadKey) -> None:
    """New requests ask for a key until one is told that it is there."""

    def found() -> bool:
        verdicts = look_up(tier, [key], "until")
        tier.on_request_finished(ReqContext("until"))
        return verdicts == [LookupResult.HIT]

    until(found)


def look_up(
    tier: SecondaryTierManager, keys: list[OffloadKey], request: str = "r"
) -> list[LookupResult]:
    """Ask until every key has a verdict, as a scheduler does step by step."""
    context = ReqContext(request)
    tier.on_new_request(context)
    verdicts: dict[OffloadKey, LookupResult] = {}
    while len(verdicts) < len(keys):
        for key in keys:
            verdict = tier.lookup(key, context)
            if verdict is not LookupResult.RETRY:
                verdicts[key] = verdict
        tier.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.001)  # a step takes a moment, in which threads have their turn
    return [verdicts[key] for key in keys]
