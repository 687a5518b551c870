"""`KVStoreTier`: a `BlockStore` as a secondary tier of vLLM's offloading.

vLLM calls it under its manager's lock and expects every call to return at once; here a
key becomes a path, a chunk id a row of the primary tier, and an outcome a `JobResult`.
What vLLM calls a chunk is a block in all other modules.

Locking: vLLM never enters two calls at once. Transfers run on the `JobRunner`'s threads
and probes on the lookup thread; both touch nothing of the tier but its stores, which are
safe for threads and fixed once `_open` has run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
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
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from kvstore.config import Config
from kvstore.errors import DamagedBlockError, InvalidInputError, KVStoreError
from kvstore.jobs import Job, JobRunner, Operation, Outcome
from kvstore.layout import Layout
from kvstore.store import BlockStore
from kvstore.urls import safe_url
from kvstore.vllm.identity import offloading_identity
from kvstore.vllm.layout import bare_layout, row_bytes
from kvstore.vllm.options import TierOptions
from kvstore.vllm.versions import require_supported

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)


QUEUE_TIMEOUTS = 4
"""How many times `io_timeout` a block may wait for its turn before it is given up."""


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
        self._open_stores()
        self._jobs = JobRunner(
            self._transfer,
            threads=self.options.threads,
            deadline=QUEUE_TIMEOUTS * self.options.io_timeout,
            name=f"kvstore-{tier_type}",
        )
        self._lookups = _Lookups(self)

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
        """Open one store for each KV group; nothing is served before.

        Raises:
            KVStoreError: the URL cannot be used, or another layout is recorded there.
        """
        options = self.options
        self.stores = {
            group.group_id: BlockStore.open(
                options.url,
                config,
                layout,
                group=group.group_id,
                storage_options=options.storage_options,
                client=options.client,  # type: ignore[arg-type]  # checked by TierOptions
                on_mismatch=options.on_mismatch,  # type: ignore[arg-type]  # checked by TierOptions
                timeout=options.io_timeout,
                provenance={"engine": f"vllm {require_supported()}"},
            )
            for group in self._offloading_spec.config.groups
        }

    # ---- vLLM's calls

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS once a probe has told, RETRY until then."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue the storing of rows. Keys that are there already succeed unwritten."""
        self._submit("store", job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the filling of rows."""
        self._submit("load", job_metadata)

    def _submit(self, operation: Operation, transfer: TransferJob) -> None:
        slots = [int(chunk_id) for chunk_id in transfer.chunk_ids]
        self._jobs.submit(
            Job(transfer.job_id, operation, tuple(transfer.keys), tuple(slots))
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What ended since the last call. A key that failed to load becomes a miss, or
        its request would ask for it for ever.
        """
        return [self._result(outcome) for outcome in self._jobs.finished()]

    def _result(self, outcome: Outcome) -> JobResult:
        job = outcome.job
        if job.operation == "load" and not outcome.success:
            failed = set(job.keys) - set(outcome.succeeded)
            self._lookups.mark_miss([OffloadKey(key) for key in failed])
        return JobResult(
            job_id=job.job_id,
            success=outcome.success,
            successful_keys=tuple(OffloadKey(key) for key in outcome.succeeded) or None,
            transfer_time=outcome.seconds,
            transfer_bytes=len(outcome.succeeded) * self._row_bytes,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No preference."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's verdicts."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's probes."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Block until no transfer touches the primary tier."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End all threads, and let go of the primary tier's memory.

        What waits is given up, what runs is waited for.
        """
        self._lookups.shutdown()
        self._jobs.shutdown()
        self._rows = np.empty((0, 0), np.uint8)
        self._primary_kv_view = memoryview(b"")

    # ---- worker threads

    @property
    def local(self) -> bool:
        """Whether every store is a folder of this machine."""
        return all(store.local for store in self.stores.values())

    def contains(self, key: bytes) -> bool:
        """Whether a block is there. Raises `KVStoreError` where storage cannot tell."""
        store = self.stores.get(get_offload_group_idx(OffloadKey(key)))
        if store is None:
            return False
        return store.contains(key)

    def _transfer(self, operation: Operation, key: bytes, slot: int) -> bool:
        """One key of a job. Failures are told in the log and to vLLM, never raised."""
        store = self.stores.get(get_offload_group_idx(OffloadKey(key)))
        if store is None or not 0 <= slot < len(self._rows):
            logger.warning("%s refused: no group or row for slot %d", operation, slot)
            return False
        row = self._rows[slot, : self._row_bytes]
        try:
            if operation == "load":
                return store.load(key, row)
            store.store(key, row)
        except DamagedBlockError:
            return False  # the store has told the log
        except KVStoreError as error:
            logger.warning("%s failed: %s", operation, error)
            return False
        return True


class _Lookups(AsyncLookupManager):
    """vLLM's asynchronous lookups over `BlockStore.contains`."""

    def __init__(self, tier: KVStoreTier) -> None:
        self._tier = tier
        self._stopping = False
        name = f"kvstore-lookup-{tier.tier_type}"
        self._probes = ThreadPoolExecutor(tier.options.threads, name)
        super().__init__(tier.tier_type)

    def batch_lookup(
        self, keys: list[OffloadKey], req_context: ReqContext
    ) -> Iterable[bool]:
        """Whether each key is there. Called from the lookup thread.

        What storage could not tell, or not within `io_timeout`, is a miss for this
        request, and for no other.
        """
        if self._stopping:
            return [False] * len(keys)
        # A folder answers faster than threads can take turns.
        width = 1 if self._tier.local else self._tier.options.threads
        parts = [keys[start::width] for start in range(min(width, len(keys)))]
        probes = [self._probes.submit(self._probe, part) for part in parts]
        done, late = wait(probes, self._tier.options.io_timeout)
        for probe in late:
            probe.cancel()
        told: dict[OffloadKey, bool | KVStoreError] = {}
        for part, probe in zip(parts, probes, strict=True):
            if probe in done and not probe.cancelled():
                told |= zip(part, probe.result(), strict=True)
        errors = [answer for answer in told.values() if isinstance(answer, KVStoreError)]
        if errors or len(told) < len(keys):
            logger.warning(
                "%d of %d lookups failed and %d took too long, taken as misses for this "
                "request; the first: %s",
                len(errors),
                len(keys),
                len(keys) - len(told),
                errors[0] if errors else "no answer",
            )
        return [told.get(key) is True for key in keys]

    def _probe(self, keys: list[OffloadKey]) -> list[bool | KVStoreError]:
        """What storage tells of each key, an error included."""
        told: list[bool | KVStoreError] = []
        for key in keys:
            try:
                told.append(self._tier.contains(key))
            except KVStoreError as error:
                told.append(error)
        return told

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """As vLLM 0.33 has it: a probe that is under way will tell for itself."""
        super().mark_miss(
            [
                key
                for key in keys
                if (state := self._lookup_state.get(key)) is not None
                and state.result is not None
            ]
        )

    def shutdown(self) -> None:
        """Give up what waits, then end the lookup thread."""
        self._stopping = True
        self._probes.shutdown(wait=False, cancel_futures=True)
        super().shutdown()
