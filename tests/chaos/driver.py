"""`Driver`: a tier, driven as vLLM's scheduler does it, by blocks that tell their keys.

It stores fresh keys as fast as rows get free, and has requests look up and load keys of
before: some hot ones all the time, and others at random. Each row that was loaded is
compared with what its key must have.
"""

import hashlib
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from specs import Rows, make_tier, offloading_config, submit
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

JOB_KEYS = 4
"""Keys of one store."""

ASKED = 4
"""Keys of a request, beside the hot ones."""

LOADS = 2
"""Loads for each store, or storage would do nothing else."""

KNOWN = 4096
"""Keys of which some are asked for."""


def key_of(number: int) -> OffloadKey:
    """A hash, as vLLM's are."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8)).digest(), 0)


class Timed:
    """A tier whose calls are timed.

    Attributes:
        seconds: of each call. Nobody else runs in the engine meanwhile.
    """

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.seconds = array("d")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.tier, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds.append(time.perf_counter() - start)

        return timed


class Driver:
    """One engine's tier.

    Attributes:
        counts: what happened; `wrong` must stay away.
        announced: keys that events have told of as stored, and not as removed.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        nbytes: int,
        slots: int,
        first: int,
        hot: Sequence[int],
        seed: int,
        restarted: bool = False,
    ) -> None:
        """Open the tier.

        Args:
            options: of the tier.
            nbytes: of a block.
            slots: rows of its memory.
            first: the number of its first key.
            hot: the numbers of the keys that it asks for all the time.
            seed: of what it asks for.
            restarted: whether another one has stored the hot ones before.
        """
        config = offloading_config(
            worker_kv_bytes_per_block=nbytes, enable_kv_cache_events=True
        )
        self.rows = Rows(config, slots, shared=True)
        self.tier: Any = make_tier(self.rows, {"enable_kv_events": True, **options})
        self.rows.unlink()  # who is killed leaves nothing; movers have it open
        self.counts: Counter[str] = Counter()
        self.announced: set[OffloadKey] = set()
        self._base = np.random.default_rng(7).integers(0, 2**63, nbytes // 8, np.uint64)
        self._words = self.rows.array[:, :nbytes].view(np.uint64)
        self._chance = random.Random(seed)
        self._free = list(range(slots))
        self._jobs: dict[int, tuple[str, Sequence[int], Sequence[int]]] = {}
        self._number = 0
        self._next = first
        self._hot = frozenset(hot)
        self._again: deque[int] = deque(() if restarted else hot)
        self._stored: set[int] = set(hot if restarted else ())
        self._known: deque[int] = deque()
        self._request: ReqContext | None = None
        self._asked: dict[int, LookupResult | None] = {}

    @property
    def busy(self) -> bool:
        """Whether any job has not ended."""
        return bool(self._jobs)

    def step(self, *, store: bool = True) -> None:
        """One step of a scheduler."""
        for result in self.tier.get_finished_jobs():
            self._ended(result)
        self._ask()
        while store and len(self._free) >= 2 * JOB_KEYS:
            self._store()
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        for event in self.tier.take_events():
            keys = set(event.keys)
            if event.removed:
                self.counts["removed events"] += len(keys)
                self.counts["false events"] += len(keys - self.announced)
                self.announced -= keys
            else:
                self.counts["stored events"] += len(keys)  # maybe again
                self.announced |= keys

    def _store(self) -> None:
        numbers = []
        for _ in range(JOB_KEYS):
            if self._again:
                numbers.append(self._again.popleft())
            else:
                numbers.append(self._next)
                self._next += 1
        slots = [self._free.pop() for _ in numbers]
        for number, slot in zip(numbers, slots, strict=True):
            np.multiply(self._base, np.uint64(2 * number + 1), out=self._words[slot])
        self._submit("store", numbers, slots)

    def _submit(self, operation: str, numbers: Sequence[int], slots: Sequence[int]) -> None:
        self._number += 1
        self._jobs[self._number] = (operation, numbers, slots)
        keys = [key_of(number) for number in numbers]
        submit(self.tier, self._number, operation, keys, list(slots))

    def _ended(self, result: Any) -> None:
        operation, numbers, slots = self._jobs.pop(result.job_id)
        done = set(result.successful_keys or ())
        for number, slot in zip(numbers, slots, strict=True):
            there = key_of(number) in done
            self.counts[f"{operation} {'done' if there else 'failed'}"] += 1
            if there and operation == "load":
                expected = self._base * np.uint64(2 * number + 1)
                self.counts["wrong"] += not np.array_equal(expected, self._words[slot])
            if there and operation == "store":
                self._note_stored(number)
            elif not there and number in self._hot:
                self._again.append(number)
        self._free += slots

    def _note_stored(self, number: int) -> None:
        """Remember it, and as many others as is worth their memory."""
        self._stored.add(number)
        if number not in self._hot:
            self._known.append(number)
            if len(self._known) > KNOWN:
                self._stored.discard(self._known.popleft())

    def _ask(self) -> None:
        """Go on with the request, or begin another one."""
        if self._request is None:
            self._number += 1
            self._request = ReqContext(str(self._number))
            self.tier.on_new_request(self._request)
            others = self._chance.choices(self._known, k=ASKED) if self._known else []
            self._asked = dict.fromkeys([*self._hot, *others])
        for number, told in self._asked.items():
            if told is None:
                found = self.tier.lookup(key_of(number), self._request)
                if found is not LookupResult.RETRY:
                    self._asked[number] = found
        if None in self._asked.values():
            return
        hits = []
        for number, told in self._asked.items():
            hot = number in self._hot
            hit = told is LookupResult.HIT
            if number in self._stored:
                self.counts[f"{'hot' if hot else 'other'} {'hit' if hit else 'miss'}"] += 1
            if hit:
                hits.append(number)
            elif hot and number in self._stored:
                self._again.append(number)  # as an engine does: computed, and stored
                self._stored.discard(number)
        self._chance.shuffle(hits)
        stored, loaded = self.counts["store done"], self.counts["load done"]
        wanted = ASKED if loaded < LOADS * stored + ASKED else 0
        hits = hits[: min(wanted, len(self._free))]
        if hits:
            self._submit("load", hits, [self._free.pop() for _ in hits])
        self.tier.on_request_finished(self._request)
        self._request = None

    def close(self) -> None:
        """End the tier, once all jobs have."""
        self.tier.shutdown()
