"""Any secondary tier of vLLM, driven through vLLM's own calls, as a scheduler does."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from specs import Spec, offloading_config
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from benchmarks.process import cpu_seconds

POLL = 0.0003
PATIENCE = 300.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BenchmarkFailed(RuntimeError):
    """What was measured did not do its work, so its times mean nothing."""


@contextmanager
def region(nbytes: int) -> Iterator[Bytes]:
    """Memory as the primary tier has it: a file in shared memory that keeps its name.

    Worker processes map it by that name.
    """
    path = Path(f"/dev/shm/kvstore-benchmark-{os.getpid()}-{os.urandom(4).hex()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        memory[:] = 0  # every page is there before anything is measured
        yield memory
    finally:
        os.close(descriptor)
        path.unlink()


def rows_of(memory: Bytes, block: int) -> Bytes:
    """As many rows of one block as the memory holds."""
    count = memory.nbytes // block
    return memory[: count * block].reshape(count, block)


def fill(memory: Bytes) -> None:
    """With bytes that nothing can compress, and no two blocks alike."""
    rng = np.random.default_rng(0)
    for start in range(0, memory.nbytes, 1 << 24):
        part = memory[start : start + (1 << 24)]
        part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)


def new_keys(count: int) -> list[OffloadKey]:
    """Keys that no store has."""
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


@contextmanager
def opened(config: dict[str, Any], rows: Bytes) -> Iterator[SecondaryTierManager]:
    """A tier by vLLM's own factory, shut down at the end."""
    view: Any = rows
    spec = Spec(offloading_config(worker_kv_bytes_per_block=rows.shape[1]))
    tier = SecondaryTierFactory.create_secondary_tier(dict(config), memoryview(view), spec)
    try:
        yield tier
    finally:
        tier.drain_jobs()
        tier.shutdown()


@dataclass(slots=True)
class Driven:
    """What a run of jobs took, for all of them."""

    seconds: float
    cpu: float
    pauses: list[float] = field(default_factory=list)


def jobs_of(
    keys: Sequence[OffloadKey], *, load: bool, first: int = 0, size: int | None = None
) -> list[TransferJob]:
    """Key `i` in row `i`, in jobs of up to 8 blocks; of fewer where that would make
    fewer jobs than 16, since some tiers transfer a job on one thread.
    """
    size = size or min(8, max(1, len(keys) // 16))
    return [
        TransferJob(
            first + start,
            list(keys[start : start + size]),
            np.arange(start, min(start + size, len(keys)), dtype=np.int32),
            load,
            ReqContext("benchmark"),
        )
        for start in range(0, len(keys), size)
    ]


def submit(tier: SecondaryTierManager, job: TransferJob) -> None:
    (tier.submit_load if job.is_promotion else tier.submit_store)(job)


def drive(
    tier: SecondaryTierManager,
    jobs: Sequence[TransferJob],
    leave_out: frozenset[int] = frozenset(),
) -> Driven:
    """Submit every job, poll until all are reported.

    Raises:
        BenchmarkFailed: a block was not transferred.
    """
    waiting, driven = {job.job_id for job in jobs}, Driven(0.0, 0.0)
    cpu, started = cpu_seconds(leave_out), time.perf_counter()
    for job in jobs:
        submit(tier, job)
    while waiting:
        for result in tier.get_finished_jobs():
            waiting.discard(result.job_id)
            if not result.success:
                raise BenchmarkFailed(f"job {result.job_id} failed")
        tier.on_schedule_end(ScheduleEndContext((), ()))
        if time.perf_counter() - started > PATIENCE:
            raise BenchmarkFailed(f"{len(waiting)} jobs are not reported")
        time.sleep(POLL if waiting else 0)
    driven.seconds = time.perf_counter() - started
    driven.cpu = cpu_seconds(leave_out) - cpu
    return driven


def look_up(
    tier: SecondaryTierManager,
    keys: Sequence[OffloadKey],
    request: str = "benchmark",
    *,
    finish: bool = True,
) -> tuple[float, int]:
    """Ask for every key until it has a verdict. Returns seconds, and how many are there.

    The request is finished, so that the next one asks anew, unless it is to be kept.
    """
    context = ReqContext(request)
    tier.on_new_request(context)
    hits, pending, started = 0, list(keys), time.perf_counter()
    while pending:
        still: list[OffloadKey] = []
        for key in pending:
            verdict = tier.lookup(key, context)
            if verdict is LookupResult.RETRY:
                still.append(key)
            else:
                hits += verdict is LookupResult.HIT
        pending = still
        tier.on_schedule_end(ScheduleEndContext((), ()))
        # What comes next comes as a batch: one key is asked for until it is there.
        while pending and tier.lookup(pending[0], context) is LookupResult.RETRY:
            tier.on_schedule_end(ScheduleEndContext((), ()))
            if time.perf_counter() - started > PATIENCE:
                raise BenchmarkFailed(f"{len(pending)} lookups have no verdict")
            time.sleep(POLL)
    seconds = time.perf_counter() - started
    if finish:
        tier.on_request_finished(context)
    return seconds, hits


def require_hits(hits: int, expected: int) -> None:
    if hits != expected:
        raise BenchmarkFailed(f"expected {expected} blocks to be there, found {hits}")


def require_equal(found: Bytes, expected: Bytes) -> None:
    """Compare all bytes, row by row: a whole comparison would need as much memory again."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(ours, theirs):
            raise BenchmarkFailed(f"block {index} came back with other bytes")


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name once in every round, each of them first as often as the others."""
    for turn in range(rounds):
        shift = turn % len(names)
        yield from (*names[shift:], *names[:shift])


Config = Callable[[str], dict[str, Any]]
"""A fresh folder or prefix -> the configuration of a tier that keeps its blocks there."""
