"""`KVStoreTier`: a `BlockStore` as a secondary tier of vLLM's offloading.

vLLM calls it under its manager's lock and expects every call to return at once; here a
key becomes a path, a chunk id a row of the primary tier, and an outcome a `JobResult`.
What vLLM calls a chunk is a block in all other modules.

Locking: none, since vLLM never enters two calls at once. Lookups and transfers run in
movers, which know the stores' `blocks` and the rows, and nothing of the tier.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
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
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from kvstore.blocks import Stored
from kvstore.codecs import parse_codec
from kvstore.config import Config
from kvstore.errors import InvalidInputError
from kvstore.jobs import Job, JobRunner, Outcome
from kvstore.layout import Layout
from kvstore.mover import FAILED
from kvstore.processes import launch
from kvstore.store import BlockStore
from kvstore.transfer import FOUND, LOADED, key_group, learn
from kvstore.urls import safe_url
from kvstore.vllm.identity import offloading_identity
from kvstore.vllm.layout import bare_layout, row_bytes
from kvstore.vllm.lookups import Lookups
from kvstore.vllm.options import TierOptions
from kvstore.vllm.versions import require_supported

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)


QUEUE_TIMEOUTS = 4
"""How many times `io_timeout` a block may wait for its turn before it is given up."""

LOOKUPS_PER_THREAD = 4
"""Lookups at once in an object store, for each transfer: they are small."""

_DONE = frozenset((LOADED, *Stored))
"""The words of keys that are where they should be."""


class KVStoreTier(SecondaryTierManager):
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
        if self.options.locality is not None:
            self.locality = Locality(self.options.locality)
        self._rows = np.asarray(primary_kv_view)
        self.stores: dict[int, BlockStore] = {}
        self._row_bytes = row_bytes(offloading_spec.config)
        if not 0 < self._row_bytes <= self.block_size_bytes:
            raise InvalidInputError(
                f"{tier_type}: expected rows of {self._row_bytes} bytes, found "
                f"{self.block_size_bytes} in the primary tier"
            )
        self._jobs: JobRunner | None = None
        self._lookups = Lookups()
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

        Raises:
            KVStoreError: the URL cannot be used, or another layout is recorded there.
        """
        options = self.options
        stores = {
            group.group_id: BlockStore.open(
                options.url,
                config,
                layout,
                group=group.group_id,
                storage_options=options.storage_options,
                client=options.client,  # type: ignore[arg-type]  # checked by TierOptions
                on_mismatch=options.on_mismatch,  # type: ignore[arg-type]  # checked by TierOptions
                codec=parse_codec(options.codec),
                timeout=options.io_timeout,
                provenance={"engine": f"vllm {require_supported()}"},
            )
            for group in self._offloading_spec.config.groups
        }
        self._end_jobs()
        self.stores = stores
        shared = all(store.shared for store in stores.values())
        self._jobs = JobRunner(
            launch(
                {group: store.blocks for group, store in self.stores.items()},
                self._rows,
                processes=options.processes if shared else 0,
                threads=options.threads,
                lookups=1 if self.local else LOOKUPS_PER_THREAD,
                name=f"kvstore-{self.tier_type}",
            ),
            deadline=QUEUE_TIMEOUTS * options.io_timeout,
            grace=options.io_timeout,
        )

    @property
    def local(self) -> bool:
        """Whether every store is a folder of this machine."""
        return all(store.local for store in self.stores.values())

    # ---- vLLM's calls

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS once it is known, RETRY until then."""
        if not self._told:
            self._collect()
            self._told = True
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            found = self._remembered(key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _remembered(self, key: OffloadKey) -> bool | None:
        """What this process knows of a key without a look: in an object store, that it was
        there, until a load says otherwise; anywhere, that it was damaged a moment ago.
        """
        store = self.stores.get(key_group(key))
        proof = None
        if store is not None and not store.memory.was_damaged_lately(key):
            proof = None if store.local else store.memory.recall(key)
            if proof is None:
                return None
        self._lookups.tell(key, proof is not None, proof)
        return proof is not None

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send for what the step asked."""
        self._collect()
        keys = self._lookups.take_new()
        if keys:
            self._submit(Job(-1, "lookup", keys, ()))
        self._told = False

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue the storing of rows. Keys that are there already succeed unwritten."""
        keys = tuple(job_metadata.keys)
        suspects: tuple[bool, ...] = ()
        if any(store.memory.has_damage for store in self.stores.values()):
            suspects = tuple(self._is_suspect(key) for key in keys)
        slots = job_metadata.chunk_ids.tolist()
        self._submit(Job(job_metadata.job_id, "store", keys, slots, suspects))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the filling of rows."""
        keys = tuple(job_metadata.keys)
        proofs = tuple(self._lookups.proof(key) for key in keys)
        slots = job_metadata.chunk_ids.tolist()
        self._submit(Job(job_metadata.job_id, "load", keys, slots, proofs))

    def _is_suspect(self, key: OffloadKey) -> bool:
        store = self.stores.get(key_group(key))
        return store is not None and store.memory.is_damaged(key)

    def _submit(self, job: Job) -> None:
        if self._jobs is not None:
            self._jobs.submit(job)
        else:
            count = len(job.keys)
            problems = {0: "nothing is open yet"}
            self._end(Outcome(job, [FAILED] * count, [None] * count, problems, 0.0))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What ended since the last call. A key that failed to load becomes a miss, or
        its request would ask for it for ever.
        """
        self._collect()
        results, self._results = self._results, []
        return results

    def _collect(self) -> None:
        if self._jobs is not None:
            for outcome in self._jobs.finished():
                self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """Learn from a job, and keep what vLLM is to be told."""
        job = outcome.job
        if len(self.stores) == 1:
            [store] = self.stores.values()
            learn(store, job.keys, outcome.words, outcome.proofs, outcome.problems)
        else:
            self._learn_by_group(outcome)
        if job.operation == "lookup":
            told = zip(job.keys, outcome.words, outcome.proofs, strict=True)
            for key, word, proof in told:
                self._lookups.tell(key, word == FOUND, proof)
        if failed := outcome.words.count(FAILED):
            logger.warning(
                "%s of %d of %d blocks failed; the first: %s",
                job.operation,
                failed,
                len(job.keys),
                next(iter(outcome.problems.values()), "no reason was given"),
            )
        if job.operation != "lookup":
            self._results.append(self._result(outcome))

    def _learn_by_group(self, outcome: Outcome) -> None:
        groups = [key_group(key) for key in outcome.job.keys]
        for group, store in self.stores.items():
            own = [i for i, other in enumerate(groups) if other == group]
            learn(
                store,
                [outcome.job.keys[i] for i in own],
                [outcome.words[i] for i in own],
                [outcome.proofs[i] for i in own],
                {
                    n: outcome.problems[i]
                    for n, i in enumerate(own)
                    if i in outcome.problems
                },
            )

    def _result(self, outcome: Outcome) -> JobResult:
        job = outcome.job
        done = tuple(job.keys)
        if not _DONE.issuperset(outcome.words):
            ended = list(zip(job.keys, outcome.words, strict=True))
            done = tuple(key for key, word in ended if word in _DONE)
            if job.operation == "load":
                self._lookups.mark_miss(key for key, word in ended if word not in _DONE)
        return JobResult(
            job_id=job.job_id,
            success=len(done) == len(job.keys) == len(job.slots),
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
        """Block until no transfer touches the primary tier."""
        if self._jobs is not None:
            self._jobs.drain()

    def _end_jobs(self) -> None:
        """End the movers, and keep what became of their jobs and lookups."""
        if self._jobs is not None:
            self._jobs.shutdown()
            self._collect()
            self._jobs = None  # it knows movers, and these know the rows

    def shutdown(self) -> None:
        """End all movers, and let go of the primary tier's memory.

        What waits is given up, what runs is waited for.
        """
        self._end_jobs()
        self._rows = np.empty((0, 0), np.uint8)
        self._primary_kv_view = memoryview(b"")
