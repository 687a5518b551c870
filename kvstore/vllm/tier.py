"""`KVStoreTier`: a `BlockStore` as a secondary tier of vLLM's offloading.

vLLM calls it under its manager's lock and expects every call to return at once; here a
key becomes a path, a chunk id a row of the primary tier, and an outcome a `JobResult`.
What vLLM calls a chunk is a block in all other modules.

Locking: none, since vLLM never enters two calls at once. Lookups and transfers run in
movers, which know the stores' `blocks` and the rows, and nothing of the tier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvstore.blocks import Stored
from kvstore.collector import Collected
from kvstore.config import Config
from kvstore.errors import InvalidInputError
from kvstore.health import Health
from kvstore.job import OWN, Job, Outcome
from kvstore.layout import Layout
from kvstore.parts import FAILED
from kvstore.releases import require_supported
from kvstore.store import BlockStore
from kvstore.transfer import LOADED
from kvstore.trials import Trials
from kvstore.urls import safe_url
from kvstore.vllm.identity import offloading_identity
from kvstore.vllm.layout import bare_layout, row_bytes
from kvstore.vllm.lookups import Lookups
from kvstore.vllm.observed import ObservedTier
from kvstore.vllm.opened import Opened, room_for
from kvstore.vllm.options import TierOptions
from kvstore.vllm.refusing import Refusing

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)

_DONE = frozenset((LOADED, *Stored))
"""The words of keys that are where they should be."""


class KVStoreTier(ObservedTier):
    """A tier that knows its blocks only by vLLM's names and numbers.

    For `secondary_tiers`, beside other tiers. `KVStoreConnector` knows more, and makes a
    tier that takes the layout from the engine's own tensors.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Open the namespace, or stop the engine with one clear error.

        Args:
            offloading_spec: vLLM's offloading spec.
            primary_kv_view: the primary tier's rows, shape (chunks, row bytes).
            tier_type: the name in the configuration, for messages.
            backpressure_detector: vLLM's, handed through.
            options: the fields of `TierOptions`, checked one by one.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        require_supported()
        self.options = TierOptions.parse(options, where=tier_type)
        if self.options.read_only:
            self._bp_detector = Refusing()
        if self.options.locality is not None:
            self.locality = Locality(self.options.locality)
        self._rows = np.asarray(primary_kv_view)
        self._row_bytes = row_bytes(offloading_spec.config)
        if not 0 < self._row_bytes <= self.block_size_bytes:
            raise InvalidInputError(
                f"{tier_type}: expected rows of {self._row_bytes} bytes, found "
                f"{self.block_size_bytes} in the primary tier"
            )
        self.observe(self._row_bytes)
        room_for(self.options, self._row_bytes)  # before the engine has read its weights
        self._opened: Opened | None = None
        self._lookups = Lookups(self.options.lookup_timeout)
        self._close_circuits()
        self._whole: dict[int, Job] = {}  # of which only the first key is tried
        self._told = True
        self._results: list[JobResult] = []
        self._open_stores()

    def _open_stores(self) -> None:
        logger.warning(
            "kvstore: a bare tier cannot see weights, revision, RoPE, hash seed, attention "
            "backend or packing, so engines that differ in these must not share %s. "
            "KVStoreConnector sees and compares them.",
            safe_url(self.options.url),
        )
        offloading = self._offloading_spec.config
        layout = bare_layout(offloading, self._row_bytes, self.options)
        self.open(offloading_identity(offloading, layout), layout)

    def open(self, config: Config, layout: Layout) -> None:
        """Open one store for each KV group, and start the movers; nothing is served before.
        What was open ends then, and goes on if this fails.

        Raises:
            KVStoreError: the URL cannot be used, or another layout is recorded there.
        """
        groups = [group.group_id for group in self._offloading_spec.config.groups]
        opened = Opened(self.options, config, layout, groups)
        opened.start(self._rows, name=f"kvstore-{self.tier_type}")
        self._close()
        self._opened = opened
        self._close_circuits()  # storage has just answered

    def _close_circuits(self) -> None:
        """Nothing is known to fail. A trial whose thread hangs has no end to wait for."""
        options = self.options
        self._health = Health(safe_url(options.url), options.lookup_timeout)
        self._trials = Trials(
            self._health,
            lookup_timeout=options.lookup_timeout,
            io_timeout=options.io_timeout,
        )

    @property
    def stores(self) -> Mapping[int, BlockStore]:
        """By KV group; none before `open`."""
        return {} if self._opened is None else self._opened.stores

    # ---- vLLM's calls

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS once it is known, RETRY until then."""
        if not self._told:
            self._collect()
            self._told = True
        found = self._lookups.ask(key, req_context.req_id)
        if found is None and self._tell(key):
            found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _tell(self, key: OffloadKey) -> bool:
        """Tell `Lookups` what needs no look; returns whether there is anything."""
        if self._health.reads_open:
            self._trials.note_given_up(key)
            self._lookups.tell(key, None)
            self.metrics.not_tried("lookup", "circuit_open", 1)
            return True
        known = None if self._opened is None else self._opened.remembered(key)
        if known is None:
            return False
        self._lookups.tell(key, *known)
        self.note_recalled(known[0])
        return True

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send for what the step asked."""
        self._collect()
        seconds = self.options.lookup_timeout
        if late := self._lookups.take_late():
            self._health.note_late(late)
            self.metrics.late(late)
        if keys := self._lookups.take_new():
            self._submit(Job(OWN, "lookup", keys, (), seconds=seconds))
        for trial in self._trials.due():
            self._submit(trial)
        if self._opened is not None:
            self._opened.keep_up(given_up=self._health.stores.open)
        self._told = False

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that blocks are used, wherever they were served from."""
        if self._opened is not None:
            self._opened.touch(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue the storing of rows. Keys that are there already succeed unwritten."""
        keys = tuple(job_metadata.keys)
        suspects = () if self._opened is None else self._opened.suspects(keys)
        slots = job_metadata.chunk_ids.tolist()
        job = Job(job_metadata.job_id, "store", keys, slots, suspects)
        if self.options.read_only:
            self._give_up(job, "read_only")
        elif not self._health.stores.open:
            self._submit(job)
        elif (trial := self._trials.store(job)) is not None:
            self._whole[job.job_id] = job
            self.metrics.not_tried("store", "circuit_open", len(keys) - len(trial.keys))
            self._submit(trial)
        else:
            self._give_up(job, "circuit_open")

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the filling of rows."""
        keys = tuple(job_metadata.keys)
        proofs = tuple(self._lookups.proof(key) for key in keys)
        slots = job_metadata.chunk_ids.tolist()
        seconds = self.options.io_timeout
        job = Job(job_metadata.job_id, "load", keys, slots, proofs, seconds)
        if self._health.reads_open:
            for key in keys[:1]:
                self._trials.note_given_up(key)
            self._give_up(job, "circuit_open")
        else:
            self._submit(job)

    def _submit(self, job: Job) -> None:
        if self._opened is not None:
            self.note_submitted(job)
            self._opened.submit(job)
        else:
            self._give_up(job, "not_open")

    def _give_up(self, job: Job, reason: str) -> None:
        """End a job as failed, and ask storage nothing."""
        count = len(job.keys)
        self.metrics.not_tried(job.operation, reason, count)
        outcome = Outcome(job, [FAILED] * count, [None] * count, {}, 0.0)
        if job.operation == "lookup":
            self._lookups.answer(outcome)
        self._end(outcome)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call, and how storage is."""
        self.metrics.set_circuit(
            reads_open=self._health.reads_open, writes_open=self._health.stores.open
        )
        return super().get_stats()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What ended since the last call. A key that failed to load becomes a miss, or
        its request would ask for it for ever.
        """
        self._collect()
        results, self._results = self._results, []
        return results

    def _collect(self) -> None:
        if self._opened is None:
            return
        for ended in self._opened.finished():
            if isinstance(ended, Collected):
                self.note_collected(ended)
                continue
            lookup = ended.job.operation == "lookup"
            outcome = self._lookups.answer(ended) if lookup else ended
            self._health.note(outcome)
            self.note_ended(outcome)
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """Keep what vLLM is to be told of a job. Of its own it is told nothing."""
        if outcome.job.job_id != OWN:
            self._results.append(self._result(outcome))

    def _result(self, outcome: Outcome) -> JobResult:
        job = outcome.job
        whole = self._whole.pop(job.job_id, job)
        done = tuple(job.keys)
        if not _DONE.issuperset(outcome.words):
            ended = list(zip(job.keys, outcome.words, strict=True))
            done = tuple(key for key, word in ended if word in _DONE)
            if job.operation == "load":
                self._lookups.mark_miss(key for key, word in ended if word not in _DONE)
                self._trials.note_load(outcome)
        if job.operation == "store":
            self._lookups.mark_stored(done)
        return JobResult(
            job_id=job.job_id,
            success=len(done) == len(whole.keys) == len(whole.slots),
            successful_keys=tuple(map(OffloadKey, done)) or None,
            transfer_time=outcome.seconds,
            transfer_bytes=len(done) * self._row_bytes,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No preference."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's verdicts."""
        self._lookups.forget(req_context.req_id)

    def drain_jobs(self) -> None:
        """Block until no transfer touches the primary tier. vLLM then clears its caches."""
        if self._opened is not None:
            self._opened.drain()
        if self.events is not None:
            self.events.cleared()

    def _close(self) -> None:
        """End the movers, and keep what became of their jobs and lookups."""
        if self._opened is not None:
            self._opened.close()
            self._collect()
            self._opened = None  # it knows movers, and these know the rows

    def shutdown(self) -> None:
        """End all movers, and let go of the primary tier's memory.

        What waits is given up, what runs is waited for.
        """
        self._close()
        self._rows = np.empty((0, 0), np.uint8)
        self._primary_kv_view = memoryview(b"")
