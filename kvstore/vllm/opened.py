"""`Opened`: what a tier has open: a store for each KV group, movers, and upkeep.

It speaks of keys, slots and outcomes; what vLLM makes of these is `KVStoreTier`'s business.

Locking: none, as in the tier.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from kvstore.arrays import Proof
from kvstore.capacity import Room
from kvstore.caretaker import BUCKET_TOUCH_SECONDS, TOUCH_SECONDS, UPKEEP, Caretaker
from kvstore.codecs import parse_codec
from kvstore.collector import Collected, Collector, Limits
from kvstore.config import Config
from kvstore.job import Job, Outcome
from kvstore.jobs import DIED, JobRunner
from kvstore.layout import Layout
from kvstore.processes import launch
from kvstore.releases import require_supported
from kvstore.store import BlockStore
from kvstore.transfer import ABSENT, FOUND, Rows, key_group, learn
from kvstore.upkeep import Upkeep
from kvstore.vllm.options import TierOptions

STORE_TIMEOUTS = 4
"""How many times `io_timeout` a store may wait for its turn, since nobody waits for it. A
load waits once so long.
"""

LOOKUPS_PER_THREAD = 4
"""Lookups at once in an object store, for each transfer: they are small."""

FIRST_LOOK_SECONDS = 5.0
"""How long a drain waits for the first look at the root, before which nothing is stored:
soon after a start no store is lost because of it.
"""

DOCUMENT_BYTES = 8192
"""What a block takes beside its payload, at most: documents, and its last disk block."""


class Opened:
    """From open to close.

    Attributes:
        stores: by KV group.
        local: whether they are folders of this machine.
    """

    def __init__(
        self,
        options: TierOptions,
        config: Config,
        layout: Layout,
        groups: Sequence[int],
    ) -> None:
        """Open one store for each KV group. Nothing runs before `start`.

        Raises:
            KVStoreError: the URL cannot be used, or another layout is recorded there.
        """
        self._options = options
        self._room = room_for(options, layout.nbytes)
        self.stores = _open_stores(options, config, layout, groups)
        self.local = all(store.local for store in self.stores.values())
        self._jobs: JobRunner | None = None
        self._care: Caretaker | None = None
        self._ended: list[Outcome | Collected] = []

    def start(self, rows: Rows, *, name: str) -> None:
        """Start the movers between the stores and `rows`, and the upkeep of the root.

        Raises:
            InvalidInputError: the movers cannot be started.
        """
        options = self._options
        shared = all(store.shared for store in self.stores.values())
        movers = launch(
            {group: store.blocks for group, store in self.stores.items()},
            rows,
            processes=options.processes if shared else 0,
            threads=options.threads,
            lookups=1 if self.local else LOOKUPS_PER_THREAD,
            name=name,
            collector=None if options.read_only else _collector(options, self.stores),
        )
        self._jobs = JobRunner(
            movers,
            deadline=STORE_TIMEOUTS * options.io_timeout,
            grace=options.io_timeout,
            room=self._room,
        )
        if not options.read_only:
            self._care = self._caretaker(self._jobs)

    def _caretaker(self, jobs: JobRunner) -> Caretaker:
        max_bytes, max_age = self._options.max_bytes, self._options.max_age
        seconds = TOUCH_SECONDS if self.local else BUCKET_TOUCH_SECONDS
        return Caretaker(
            jobs.submit,
            self._room,
            limited=max_bytes is not None or max_age is not None,
            touch_seconds=seconds if max_age is None else min(seconds, max_age / 4),
        )

    # ---- jobs

    def submit(self, job: Job) -> None:
        """Have movers do a job."""
        if self._jobs is not None:
            self._jobs.submit(job)

    def finished(self) -> list[Outcome | Collected]:
        """What ended since the last call, learnt from, in this order: of two that tell of
        one block the last is right.
        """
        self._take_ended()
        ended, self._ended = self._ended, []
        return ended

    def _take_ended(self) -> None:
        for outcome in self._jobs.finished() if self._jobs is not None else ():
            if outcome.job.job_id == UPKEEP:
                self._forget_absent(outcome)
                if self._care and (told := self._care.ended(outcome)) is not None:
                    self._forget(told.keys)
                    self._ended.append(told)
                continue
            if self._care and DIED in outcome.problems.values():
                self._care.sweep()  # what it was writing
            self.learn(outcome)
            self._ended.append(outcome)

    def learn(self, outcome: Outcome) -> None:
        """Remember how a job's keys ended."""
        job = outcome.job
        learn(self.stores, job.keys, outcome.words, outcome.proofs, outcome.problems)
        if job.operation == "lookup" and FOUND in outcome.words:
            there = [i for i, word in enumerate(outcome.words) if word == FOUND]
            self.note_used([job.keys[i] for i in there])
        if job.operation == "store" and self._care is not None:
            self._care.note_stored(job.keys)

    def keep_up(self, *, given_up: bool = False) -> None:
        """Submit what upkeep is due; `given_up` says whether nothing is to be written."""
        if self._care is not None and self._jobs is not None:
            self._care.work(waiting=self._jobs.waiting, given_up=given_up)

    def drain(self) -> None:
        """Block until no transfer touches the rows."""
        if self._jobs is not None:
            self._await_first_look(self._jobs)
            self._jobs.drain()

    def close(self) -> None:
        """End the movers. What became of their jobs is still told by `finished`."""
        if self._jobs is not None:
            self._jobs.shutdown()

    def _await_first_look(self, jobs: JobRunner) -> None:
        """Let stores go that wait for nothing else."""
        end = time.monotonic() + FIRST_LOOK_SECONDS
        while jobs.waiting and self._room.used is None and time.monotonic() < end:
            self.keep_up()
            time.sleep(0.005)
            self._take_ended()
        self._take_ended()  # this gives them the room that the look has found

    # ---- what this process knows of a block

    def remembered(self, key: bytes) -> tuple[bool, Proof | None] | None:
        """Whether a block is there, as far as a look is not worth while: in an object
        store, that it was there; anywhere, that it was damaged a moment ago.
        """
        store = self.stores.get(key_group(key))
        if store is None or store.memory.was_damaged_lately(key):
            return False, None
        if (proof := self._proof(store, key)) is None:
            return None
        self.note_used((key,))
        return True, proof

    def suspects(self, keys: Sequence[bytes]) -> tuple[bool, ...]:
        """Which blocks were found damaged; nothing if none was."""
        stores = self.stores
        if not any(store.memory.has_damage for store in stores.values()):
            return ()
        found = ((stores.get(key_group(key)), key) for key in keys)
        return tuple(
            store is not None and store.memory.is_damaged(key) for store, key in found
        )

    def note_used(self, keys: Collection[bytes]) -> None:
        """These blocks were found."""
        if self._care is not None:
            self._care.note_used(keys)

    def touch(self, keys: Collection[bytes]) -> None:
        """These blocks were served from a faster tier; requests are made only for those of
        which it is known that they are in an object store.
        """
        if not self.local:
            stores = ((self.stores.get(key_group(key)), key) for key in keys)
            keys = [key for store, key in stores if self._proof(store, key) is not None]
        self.note_used(keys)

    def _proof(self, store: BlockStore | None, key: bytes) -> Proof | None:
        return None if store is None or store.local else store.memory.recall(key)

    def _forget_absent(self, outcome: Outcome) -> None:
        """What another engine has removed is known by the touch that finds it absent."""
        if ABSENT in outcome.words:
            told = zip(outcome.job.keys, outcome.words, strict=True)
            self._forget([key for key, word in told if word == ABSENT])

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (store := self.stores.get(key_group(key))) is not None:
                store.memory.forget(key)


def room_for(options: TierOptions, nbytes: int) -> Room:
    """Room below the limit, if there is one, for blocks of so many bytes.

    Raises:
        InvalidInputError: the limit is too small for such blocks.
    """
    return Room(options.max_bytes, nbytes + DOCUMENT_BYTES)


def _open_stores(
    options: TierOptions, config: Config, layout: Layout, groups: Sequence[int]
) -> dict[int, BlockStore]:
    return {
        group: BlockStore.open(
            options.url,
            config,
            layout,
            group=group,
            storage_options=options.storage_options,
            client=options.client,  # type: ignore[arg-type]  # checked by TierOptions
            on_mismatch=options.on_mismatch,  # type: ignore[arg-type]  # checked by TierOptions
            codec=parse_codec(options.codec),
            timeout=options.io_timeout,
            fsync=options.fsync,
            read_only=options.read_only,
            provenance={"engine": f"vllm {require_supported()}"},
        )
        for group in groups
    }


def _collector(options: TierOptions, stores: Mapping[int, BlockStore]) -> Collector:
    root = Upkeep(
        options.url,
        options.storage_options,
        client=options.client,  # type: ignore[arg-type]  # checked by TierOptions
        timeout=options.io_timeout,
    )
    # Half a block is nobody's when its writer must have ended its store, or itself.
    orphan_seconds = 2 * (STORE_TIMEOUTS + 1) * options.io_timeout
    limits = Limits(options.max_bytes, options.max_age, orphan_seconds)
    return Collector(root, limits, [store.path for store in stores.values()])
