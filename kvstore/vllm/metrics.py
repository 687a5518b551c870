"""`TierMetrics`: what happens in a tier, counted for vLLM's Prometheus endpoint.

vLLM takes the numbers after each step, carries them to its front end, and adds the labels
`model_name` and `engine`. Its names need the prefix `vllm:`: by it vLLM finds what it has
registered. Counters get `_total` from Prometheus.

Locking: none, since vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvstore.blocks import Stored
from kvstore.job import NO_ROOM, Job, Outcome
from kvstore.parts import FAILED, INVALID, LATE
from kvstore.transfer import ABSENT, DAMAGED, FOUND, LOADED, REFUSED, TIMEOUT

KINDS = {
    FAILED: "other",
    INVALID: "other",
    LATE: "late",
    TIMEOUT: "timeout",
    REFUSED: "access",
}
"""Words of keys that failed, and the kind of error that each stands for."""

REASONS = ("read_only", "circuit_open", "not_open", "no_room")
"""Why blocks are not tried, although nothing failed."""

EVICTIONS = ("no_room", "expired", "orphan")
"""Why blocks are removed."""

BLOCKS = "vllm:kvstore_blocks"
ERRORS = "vllm:kvstore_errors"
NOT_TRIED = "vllm:kvstore_not_tried_blocks"
EVICTED = "vllm:kvstore_evicted_blocks"
MOVED = "vllm:kvstore_transferred_bytes"
SECONDS = "vllm:kvstore_job_duration_seconds"
QUEUED = "vllm:kvstore_queued_blocks"
CIRCUIT = "vllm:kvstore_circuit_open"
USED = "vllm:kvstore_used_bytes"
LIMIT = "vllm:kvstore_limit_bytes"

_OPERATION = ("operation",)
_MOVING = frozenset((LOADED, Stored.STORED, Stored.REPAIRED))

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    BLOCKS: OffloadingCounterMetadata(
        "Blocks by operation (lookup, load, store) and how they ended: found, absent, "
        "loaded, stored, kept (it was there already), repaired, damaged or failed.",
        ("operation", "result"),
    ),
    ERRORS: OffloadingCounterMetadata(
        "Blocks that failed, by operation and kind of error: timeout, late (they waited "
        "too long for their turn, or a lookup for its answer), access (storage refused "
        "it), other.",
        ("operation", "kind"),
    ),
    NOT_TRIED: OffloadingCounterMetadata(
        "Blocks that were not tried, by operation and reason: read_only, circuit_open, "
        "not_open, no_room.",
        ("operation", "reason"),
    ),
    EVICTED: OffloadingCounterMetadata(
        "Blocks that this engine removed, by reason: no_room, expired, orphan.",
        ("reason",),
    ),
    MOVED: OffloadingCounterMetadata(
        "Bytes of the blocks that were loaded or written, before any codec.", _OPERATION
    ),
    SECONDS: OffloadingHistogramMetadata(
        "Seconds from the submission of a job to its end, by operation.",
        _OPERATION,
        (
            0.001,
            0.0025,
            0.005,
            0.01,
            0.025,
            0.05,
            0.1,
            0.25,
            0.5,
            1,
            2.5,
            5,
            10,
            30,
            60,
            120,
        ),
    ),
    QUEUED: OffloadingGaugeMetadata(
        "Blocks that wait or are being worked on, by operation.", _OPERATION
    ),
    CIRCUIT: OffloadingGaugeMetadata(
        "1 while storage is left alone after failures, by direction (read, write).",
        ("direction",),
    ),
    USED: OffloadingGaugeMetadata("Bytes in storage, where they are counted."),
    LIMIT: OffloadingGaugeMetadata("Bytes that storage may hold, where there is a limit."),
}
"""What vLLM registers, by name."""

_RESULTS: dict[str, tuple[str, ...]] = {
    "lookup": (FOUND, ABSENT, DAMAGED),
    "load": (LOADED, ABSENT, DAMAGED),
    "store": tuple(Stored),
}

Series = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels."""


def _zeros() -> Counter[Series]:
    """Every series of every counter, so that a rate sees the first event too."""
    series: list[Series] = [(EVICTED, (reason,)) for reason in EVICTIONS]
    for operation, results in _RESULTS.items():
        series += ((BLOCKS, (operation, str(end))) for end in (*results, FAILED))
        series += ((ERRORS, (operation, kind)) for kind in KINDS.values())
        if operation != "lookup":
            series.append((MOVED, (operation,)))
        series += ((NOT_TRIED, (operation, reason)) for reason in REASONS)
    return Counter(dict.fromkeys(series, 0))


class TierMetrics:
    """Numbers since vLLM last took them.

    Each call costs as much as there are different words in a job, however many its keys.
    """

    def __init__(self, block_bytes: int) -> None:
        """All is zero.

        Args:
            block_bytes: bytes of one block's payload.
        """
        self._block_bytes = block_bytes
        self._counts = _zeros()
        self._seconds: dict[str, list[float]] = {}
        self._gauges: dict[Series, int] = {}
        self._changed: dict[Series, int] = {}
        for operation in _RESULTS:
            self._set(QUEUED, 0, operation)
        self.set_circuit(reads_open=False, writes_open=False)

    def job_submitted(self, job: Job) -> None:
        """A job begins, and will end in one `job_ended`."""
        self._add_queued(job.operation, len(job.keys))

    def job_ended(self, outcome: Outcome) -> None:
        """A job has ended, well or not."""
        operation = outcome.job.operation
        for word, count in Counter(outcome.words).items():
            if word == NO_ROOM:
                self.not_tried(operation, "no_room", count)
                continue
            kind = KINDS.get(word)
            if kind is not None:
                self._counts[ERRORS, (operation, kind)] += count
            if word in _MOVING:
                self._counts[MOVED, (operation,)] += count * self._block_bytes
            end = word if kind is None else FAILED
            self._counts[BLOCKS, (operation, end)] += count
        self._seconds.setdefault(operation, []).append(outcome.seconds)
        self._add_queued(operation, -len(outcome.job.keys))

    def late(self, count: int) -> None:
        """So many lookups were not answered in time. Their answers are not counted."""
        self._counts[ERRORS, ("lookup", KINDS[LATE])] += count
        self._counts[BLOCKS, ("lookup", FAILED)] += count
        self._add_queued("lookup", -count)

    def recalled(self, found: bool) -> None:
        """A lookup was answered from memory: the block is there, or was damaged lately."""
        self._counts[BLOCKS, ("lookup", FOUND if found else DAMAGED)] += 1

    def not_tried(self, operation: str, reason: str, count: int) -> None:
        """Blocks were not tried, for one of `REASONS`."""
        self._counts[NOT_TRIED, (operation, reason)] += count

    def evicted(self, reason: str, count: int) -> None:
        """Blocks were removed, for one of `EVICTIONS`."""
        self._counts[EVICTED, (reason,)] += count

    def set_usage(self, used: int, limit: int | None) -> None:
        """Bytes in storage, and how many there may be."""
        self._set(USED, used)
        if limit is not None:
            self._set(LIMIT, limit)

    def set_circuit(self, *, reads_open: bool, writes_open: bool) -> None:
        """Whether storage is left alone for a while. Open means that it is."""
        self._set(CIRCUIT, int(reads_open), "read")
        self._set(CIRCUIT, int(writes_open), "write")

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What is new since the last call, None if nothing is. Gauges are told when they
        change.
        """
        if not (self._counts or self._changed or self._seconds):
            return None
        stats = OffloadingConnectorStats()
        for (name, labels), value in self._counts.items():
            stats.increase_counter(name, value, labels)
        for (name, labels), value in self._changed.items():
            stats.set_gauge(name, value, labels)
        for operation, seconds in self._seconds.items():
            for value_seconds in seconds:
                stats.observe_histogram(SECONDS, value_seconds, (operation,))
        self._counts.clear()
        self._changed.clear()
        self._seconds.clear()
        return stats

    def _add_queued(self, operation: str, count: int) -> None:
        queued = self._gauges[QUEUED, (operation,)]
        self._set(QUEUED, queued + count, operation)

    def _set(self, name: str, value: int, *labels: str) -> None:
        if self._gauges.get((name, labels)) != value:
            self._gauges[name, labels] = self._changed[name, labels] = value
