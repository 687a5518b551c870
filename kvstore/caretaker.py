"""`Caretaker`: which upkeep of a root is due, as an engine sees it. No I/O.

It has movers do three things, for which nobody waits: a sweep at the start, and after a
mover was lost; a collection where the root has limits; and touches, which keep blocks that
are used. A touch is a write: while writes are given up none is made.

Locking: none; one thread at a time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.capacity import Room
from kvstore.collector import Collected
from kvstore.job import Job, Outcome
from kvstore.seldom import Seldom

logger = logging.getLogger(__name__)

UPKEEP = -2
"""Number of all jobs of upkeep."""

UPKEEP_KEY = b"upkeep"
"""A job has keys; a sweep or a collection has no other."""

TOUCH_SECONDS, BUCKET_TOUCH_SECONDS = 60.0, 3600.0
"""How often a used block is touched: a system call in a folder, and a PUT in a bucket."""

TOUCHES_PER_LIFE = 4
"""How often at least, while as much is stored as removes what nobody uses."""

MAX_TOUCHED = 262_144
"""Keys that are remembered as touched, or to be touched; of more, those are touched again,
and these only if they are used once more.
"""


class Caretaker:
    """Of one root, for one engine."""

    def __init__(
        self,
        submit: Callable[[Job], None],
        room: Room,
        *,
        limited: bool,
        touch_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have the root swept.

        Args:
            submit: has a mover do a job.
            room: tells when to look at what the root holds.
            limited: whether the root has limits: else nothing is collected or touched.
            touch_seconds: for how long a block counts as used without another touch.
            clock: seconds, never back.
        """
        self._submit = submit
        self._room = room
        self._limited = limited
        self._touch_seconds = touch_seconds
        self._touched = Recent(touch_seconds, clock=clock)
        self._untouched: list[bytes] = []
        self._seldom = Seldom(clock=clock)
        self._stored: set[bytes] = set()  # since a collection began
        self.sweep()

    def sweep(self) -> None:
        """Have removed what dead writers left."""
        self._submit(Job(UPKEEP, "sweep", (UPKEEP_KEY,), ()))

    def note_used(self, keys: Iterable[bytes]) -> None:
        """These blocks were found, or served from a faster tier."""
        if self._limited:
            room = MAX_TOUCHED - len(self._untouched)
            self._untouched += filter(self._touched.add, itertools.islice(keys, room))

    def note_stored(self, keys: Iterable[bytes]) -> None:
        """The store of these has ended, whatever a collection removed before it."""
        if self._limited:
            self._stored.update(keys)

    def work(self, *, waiting: bool, given_up: bool) -> None:
        """Submit what is due.

        Args:
            waiting: whether stores wait for room.
            given_up: whether nothing is to be written just now.
        """
        if not self._limited:
            return
        if self._untouched and not given_up:
            keys, self._untouched = tuple(self._untouched), []
            self._submit(Job(UPKEEP, "touch", keys, ()))
        if self._room.take_look(waiting=waiting):
            self._stored.clear()
            self._submit(Job(UPKEEP, "collect", (UPKEEP_KEY,), ()))

    def ended(self, outcome: Outcome) -> Collected | None:
        """Learn from a job of upkeep. Returns what a collection did."""
        operation = outcome.job.operation
        problem = next(iter(outcome.problems.values()), None)
        collected = None
        if operation == "collect":
            collected = self._collected(outcome.reports)
            problem = problem or (collected and collected.problem)
        if problem is not None and (more := self._seldom.unsaid(operation)) is not None:
            logger.warning(
                "upkeep failed: %s: %s (and %d times since the last such line)",
                operation,
                problem,
                more,
            )
        return collected

    def _collected(self, reports: Sequence[object]) -> Collected | None:
        for report in reports:
            if isinstance(report, Collected):
                more = report.more and report.problem is None
                self._room.note_look(report.used, more=more)
                seconds = min(self._touch_seconds, report.age / TOUCHES_PER_LIFE)
                self._touched.set_seconds(seconds)
                gone = tuple(key for key in report.keys if key not in self._stored)
                return report._replace(keys=gone)
        self._room.note_look(None)
        return None


class Recent:
    """Keys of late, as far as memory is worth it: hashes, in two generations."""

    def __init__(self, seconds: float, *, clock: Callable[[], float]) -> None:
        """Args:
        seconds: a key is remembered for at least half and at most all of these.
        clock: seconds, never back.
        """
        self.set_seconds(seconds)
        self._clock = clock
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._since = clock()

    def set_seconds(self, seconds: float) -> None:
        """For how long keys are remembered from now on."""
        self._half = seconds / 2

    def add(self, key: bytes) -> bool:
        """Remember a key. Returns whether it was not known."""
        now = self._clock()
        if now - self._since > self._half or len(self._young) >= MAX_TOUCHED:
            self._old = self._young if now - self._since <= 2 * self._half else set()
            self._young = set()
            self._since = now
        hashed = hash(key)
        if hashed in self._young or hashed in self._old:
            return False
        self._young.add(hashed)
        return True
