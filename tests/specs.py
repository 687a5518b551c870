"""The parts of vLLM's objects that a tier reads, without an engine."""

import mmap
import time
import uuid
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

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
    """

    config: OffloadingConfig
    count: int = 16
    shared: bool = False
    memory: Any = None

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
            weakref.finalize(self, path.unlink)
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
