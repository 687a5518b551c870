"""`Trials`: the jobs by which a tier finds out whether storage is back. No I/O.

Each is of keys that were asked for while a circuit was open, or that failed before. For
their ends nobody waits.

Locking: none; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvstore.health import Health
from kvstore.job import OWN, Job, Outcome
from kvstore.parts import NO_SLOT
from kvstore.transfer import FAILURES


class Trials:
    """For the circuits of one `Health`."""

    def __init__(self, health: Health, *, lookup_timeout: float, io_timeout: float) -> None:
        """Timeouts are the seconds that a lookup, and a load, may wait."""
        self._health = health
        self._lookup_timeout = lookup_timeout
        self._io_timeout = io_timeout
        self._given_up: bytes | None = None
        self._not_loaded: bytes | None = None

    def note_given_up(self, key: bytes) -> None:
        """Somebody asked for this key, and storage was not asked."""
        self._given_up = key

    def note_load(self, outcome: Outcome) -> None:
        """A load has ended."""
        ended = zip(outcome.job.keys, outcome.words, strict=True)
        failed = (key for key, word in ended if word in FAILURES)
        self._not_loaded = next(failed, self._not_loaded)

    def due(self) -> Iterable[Job]:
        """The lookup and the load that are due."""
        if self._given_up is not None and self._health.lookups.take_trial():
            seconds = self._lookup_timeout
            yield Job(OWN, "lookup", (self._given_up,), (), seconds=seconds, trial=True)
        if self._health.loads.take_trial():
            # What failed, and what was given up last, in case that only the first fails.
            keys = [key for key in (self._not_loaded, self._given_up) if key is not None]
            slots, seconds = [NO_SLOT] * len(keys), self._io_timeout
            yield Job(OWN, "load", keys, slots, seconds=seconds, trial=True)

    def store(self, job: Job) -> Job | None:
        """What to try of a store while stores are given up, if anything: its first key. If
        that hangs it has one thread, and loads the others.
        """
        if not job.keys or not self._health.stores.take_trial():
            return None
        keys, slots, hints = job.keys[:1], job.slots[:1], job.hints[:1]
        return replace(job, keys=keys, slots=slots, hints=hints, trial=True)
