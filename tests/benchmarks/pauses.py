"""`pauses`: what transfers at full speed cost the thread that the scheduler runs on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from benchmarks.figures import Results
from benchmarks.peers import bucket, folder_peers, fresh_folder
from benchmarks.settings import KIB, MIB, Settings, size_name
from benchmarks.tiers import (
    BenchmarkFailed,
    Bytes,
    Config,
    drive,
    fill,
    in_turns,
    jobs_of,
    look_up,
    new_keys,
    opened,
    region,
    rows_of,
    submit,
)

IN_FLIGHT = 8
"""Jobs that are under way at any time: enough for every worker of every tier."""

STEP = 0.002
"""Seconds of Python work between the calls of one scheduler step and the next."""

STORED_AT_MOST = 1 << 30


def pauses(settings: Settings, results: Results) -> None:
    """In a folder on disk, and on S3."""
    with region(settings.total) as memory:
        fill(memory)
        peers = folder_peers(settings)
        rows = rows_of(memory, min(576 * KIB, memory.nbytes // 16))
        case = f"disk, {size_name(rows.shape[1])}"
        for peer in in_turns(list(peers), settings.rounds):
            with fresh_folder(settings.disk) as folder:
                _measure(settings, results, case, peer, peers[peer], str(folder), rows)
        rows = rows_of(memory, min(2 * MIB, memory.nbytes // 16))[:64]
        with bucket(settings, results) as place:
            if place is None:
                return
            case = f"{place.name}, {size_name(rows.shape[1])}"
            for peer in in_turns(list(place.peers), settings.rounds):
                config, root = place.peers[peer], place.fresh()
                _measure(settings, results, case, peer, config, root, rows)


def _measure(
    settings: Settings,
    results: Results,
    case: str,
    peer: str,
    config: Config,
    root: str,
    rows: Bytes,
) -> None:
    keys = new_keys(len(rows))
    with opened(config(root), rows) as tier:
        drive(tier, jobs_of(keys, load=False))
        look_up(tier, keys)
        drive(tier, jobs_of(keys, load=True))
        # Loads fill the rows with what they hold already.
        for name, load in (("store", False), ("load", True)):
            scheduler = Scheduler(tier)
            alone = undisturbed(settings.seconds / 3)
            jobs = _endless(rows, keys, load=load)
            beside = scheduler.run(jobs, settings.seconds)
            calls = sorted(scheduler.calls)
            p99 = calls[int(len(calls) * 0.99)]
            results.add(case, peer, f"call during a {name}, p99", "ms", p99 * 1e3)
            results.add(case, peer, f"call during a {name}, worst", "ms", calls[-1] * 1e3)
            kept = 100 * beside / alone
            results.add(case, peer, f"speed kept during a {name}", "%", kept)


def _endless(rows: Bytes, keys: list[OffloadKey], *, load: bool) -> Iterator[TransferJob]:
    """Loads without end; stores of ever new keys, as far as there is room for them."""
    room = STORED_AT_MOST if not load else None
    for lap in count(1):
        if room is not None and (room := room - rows.nbytes) < 0:
            return
        lap_keys = keys if load else new_keys(len(rows))
        yield from jobs_of(lap_keys, load=load, first=lap << 20)


class Scheduler:
    """The thread that calls the tier, and has Python work of its own between calls."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self.tier = tier
        self.calls: list[float] = []
        self._under_way: set[int] = set()

    def run(self, jobs: Iterator[TransferJob], seconds: float) -> float:
        """Keep the tier busy. Returns how fast this thread counted meanwhile.

        Raises:
            BenchmarkFailed: a job failed.
        """
        started, counted, elapsed = time.perf_counter(), 0, 0.0
        absent = new_keys(1)[0]
        while time.perf_counter() - started < seconds and self._step(jobs, absent):
            more, longer = spun(STEP)
            counted, elapsed = counted + more, elapsed + longer
        while self._under_way:
            self._collect()
            time.sleep(STEP)
        return counted / elapsed

    def _step(self, jobs: Iterator[TransferJob], absent: OffloadKey) -> bool:
        """One scheduler step. Returns whether there is more to do."""
        while len(self._under_way) < IN_FLIGHT:
            job = next(jobs, None)
            if job is None:
                return False
            self._under_way.add(job.job_id)
            with Timed(self.calls):
                submit(self.tier, job)
        with Timed(self.calls):
            self.tier.lookup(absent, ReqContext("benchmark"))
        self._collect()
        with Timed(self.calls):
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
        return True

    def _collect(self) -> None:
        with Timed(self.calls):
            finished = list(self.tier.get_finished_jobs())
        for result in finished:
            self._under_way.discard(result.job_id)
            if not result.success:
                raise BenchmarkFailed(f"job {result.job_id} failed")


class Timed:
    """Notes how long its block took."""

    def __init__(self, calls: list[float]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._calls.append(time.perf_counter() - self._started)


def undisturbed(seconds: float) -> float:
    """Counts per second with no transfers: the best of ten, as others may disturb them."""
    return max(
        counted / elapsed for counted, elapsed in (spun(seconds / 10) for _ in range(10))
    )


def spun(seconds: float) -> tuple[int, float]:
    """Count in Python for that long. Returns the count, and the seconds that it took."""
    counted, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        for _ in range(100):
            counted += 1
    return counted, elapsed
