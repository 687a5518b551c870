"""`JobRunner`: jobs in, outcomes out. Knows nothing of blocks.

A job is data (operation, keys, slots), so that where it runs is no business of whoever
submits it: its keys are dealt out in parts to movers, behind sockets. Nothing here waits
for a mover but the start, `drain` and `shutdown`, and there is no thread: `submit` and
`finished` cost the calling thread a system call or two for each mover.

Every job ends and is reported once. A mover that is late by `grace` seconds is killed if it
is a process; whatever a mover had when it ended is reported as failed, after its end, since
nothing may touch a slot after its job was reported.

Locking: `_lock` guards everything, so any thread may call any method.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.arrays import Proof
from kvstore.errors import InvalidInputError
from kvstore.links import Launched, Link
from kvstore.mover import FAILED, Hint, Operation, Part, Reply

logger = logging.getLogger(__name__)

PART_KEYS = 512
"""Keys of a part, so that its message stays below `mover.MAX_MESSAGE_BYTES`."""

DEEP = 2
"""A job stays whole while every mover has so many times its keys to do: each part costs the
calling thread a message and a reply, and nobody would be done sooner."""

START_SECONDS = 60.0

DIED = "the process that transferred it ended"

TOO_LONG = "its keys are too long"


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: `operation` on each of `keys`, whose bytes lie in the slot beside it.

    `hints` are handed to the mover: one for each key, or none. A lookup has no slots.
    """

    job_id: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]
    hints: Sequence[Hint] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: for each key a word and maybe a proof, as in `mover.Reply`; what
    went wrong with some of them, by their index; and its seconds.
    """

    job: Job
    words: Sequence[str]
    proofs: Sequence[Proof | None]
    problems: Mapping[int, str]
    seconds: float


@dataclass(slots=True)
class _Running:
    job: Job
    started: float
    words: list[str]
    proofs: list[Proof | None]
    parts: int = 0
    problems: dict[int, str] = field(default_factory=dict)


class JobRunner:
    """Runs jobs until `shutdown`."""

    def __init__(
        self, movers: Sequence[Launched], *, deadline: float, grace: float
    ) -> None:
        """Start the movers, and wait until they are ready.

        Args:
            movers: at least one.
            deadline: seconds after which keys that wait are given up.
            grace: seconds that a key may run after that, before its mover is killed.

        Raises:
            InvalidInputError: a mover did not start.
        """
        self._deadline = deadline
        self._grace = grace
        self._lock = threading.Lock()
        self._running: dict[int, tuple[_Running, int]] = {}
        self._number = 0
        self._open = 0
        self._finished: list[Outcome] = []
        self._stopping = False
        self._looked_after = 0.0
        self._poller = select.poll()
        self._links: list[Link] = []
        self._by_number: dict[int, Link] = {}
        for mover in movers:
            self._links.append(link := Link(mover))
            if link.up:
                self._register(link)
        self._wait_until_ready()

    def submit(self, job: Job) -> None:
        """Deal a job out. One whose keys and slots do not match fails as a whole."""
        count = len(job.keys)
        running = _Running(job, time.monotonic(), [FAILED] * count, [None] * count)
        fits = job.operation == "lookup" or count == len(job.slots)
        with self._lock:
            self._open += 1
            up = [] if self._stopping else [link for link in self._links if link.up]
            links = [link for link in up if link.ready] or up
            if not fits:
                running.problems[0] = f"{count} keys for {len(job.slots)} slots"
            elif not links:
                running.problems[0] = "nothing runs that could transfer it"
            else:
                self._deal(running, links)
            if not running.parts:
                self._end(running)

    def finished(self) -> list[Outcome]:
        """The jobs that ended since the last call, each reported once."""
        with self._lock:
            self._poll(0)
            finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Block until every job has ended. Nothing touches a slot after the return."""
        while True:
            with self._lock:
                self._poll(100 if self._open else 0)
                if not self._open:
                    return

    def shutdown(self) -> None:
        """Give up what waits, wait for what runs, and end the movers.

        One that has not ended `grace` seconds later is killed, if it is a process. A
        thread that hangs is left behind, and what it had is never reported.
        """
        with self._lock:
            self._stopping = True
            for link in self._links:
                if link.up:
                    link.finish()
            end = time.monotonic() + self._grace
            while any(link.up for link in self._links) and time.monotonic() < end:
                self._poll(100)
            for link in self._links:
                if link.up:
                    link.mover.kill()
            gone = [link for link in self._links if link.mover.join(self._grace)]
            self._poll(0)  # what they said before their end
            for link in gone:
                if link.up:
                    self._ended(link)
            for link in self._links:
                link.mover.close()

    # ---- under the lock

    def _deal(self, running: _Running, links: list[Link]) -> None:
        """Give each mover its share: as much more as it has less than the others."""
        count, start = len(running.job.keys), 0
        idlest = min(links, key=lambda link: link.keys)
        if idlest.keys >= DEEP * count:
            links = [idlest]
        # Whoever has more than its share even so comes first, and is not counted again.
        links.sort(key=lambda link: link.keys, reverse=True)
        for position, link in enumerate(links):
            rest = links[position:]
            level = (count - start + sum(other.keys for other in rest)) / len(rest)
            share = max(0, round(level - link.keys))
            stop = count if len(rest) == 1 else min(count, start + share)
            for first in range(start, stop, PART_KEYS):
                self._send(link, running, first, min(stop, first + PART_KEYS))
            start = stop

    def _send(self, link: Link, running: _Running, start: int, stop: int) -> None:
        job = running.job
        self._number += 1
        part = Part(
            self._number,
            job.operation,
            job.keys[start:stop],
            job.slots[start:stop],
            job.hints[start:stop],
            running.started + self._deadline,
        )
        if link.send(part):
            running.parts += 1
            self._running[part.number] = (running, start)
        else:
            running.problems[start] = TOO_LONG

    def _poll(self, milliseconds: int) -> None:
        """Take every reply that is there, and send what there was no room for."""
        for link in self._links:
            link.flush()
        for number, _ in self._poller.poll(milliseconds):
            link = self._by_number[number]
            for part, reply in link.replies():
                self._settle(part, reply)
            if not link.up:
                self._ended(link)
        now = time.monotonic()
        if now - self._looked_after > 1.0:
            self._looked_after = now
            self._look_after(now)

    def _settle(self, part: Part, reply: Reply) -> None:
        """A part has ended; with the last one the job has."""
        running, start = self._running.pop(part.number)
        stop = start + len(part.keys)
        running.words[start:stop] = reply.words
        running.proofs[start:stop] = reply.proofs
        for i, problem in reply.problems.items():
            running.problems[start + i] = problem
        running.parts -= 1
        if not running.parts:
            self._end(running)

    def _end(self, running: _Running) -> None:
        seconds = time.monotonic() - running.started
        self._finished.append(
            Outcome(running.job, running.words, running.proofs, running.problems, seconds)
        )
        self._open -= 1

    # ---- movers come and go

    def _register(self, link: Link) -> None:
        self._by_number[link.fileno()] = link
        self._poller.register(link, select.POLLIN)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while any(link.up and not link.ready for link in self._links):
            with self._lock:
                self._poll(100)
            if time.monotonic() > end:
                break
        ready = sum(link.ready for link in self._links)
        if ready < len(self._links):
            self.shutdown()
            raise InvalidInputError(
                f"processes: expected {len(self._links)} to start within "
                f"{START_SECONDS:.0f} s, found {ready}; what the others said is above. "
                'Set "processes": 0 to transfer on threads of the engine instead.'
            )

    def _look_after(self, now: float) -> None:
        """Once a second: start again what ended, and kill what hangs."""
        for link in self._links:
            if not self._stopping and link.revive():
                self._register(link)
            oldest = next(iter(link.parts.values()), None)
            if oldest is None or link.late or now < oldest.deadline + self._grace:
                continue
            link.late = True
            seconds = self._deadline + self._grace
            if link.mover.kill():
                logger.warning(
                    "a transfer takes more than %.0f s: its process is killed", seconds
                )
            else:
                logger.warning(
                    "a transfer takes more than %.0f s on a thread, which nothing can end",
                    seconds,
                )

    def _ended(self, link: Link) -> None:
        """A mover is gone, and with it whatever it had."""
        number, keys = link.fileno(), link.keys
        self._poller.unregister(number)
        del self._by_number[number]
        link.up = False
        for part in link.close():
            count = len(part.keys)
            lost = Reply(part.number, [FAILED] * count, [None] * count, {0: DIED})
            self._settle(part, lost)
        if not self._stopping:
            logger.warning(
                "a process that transfers blocks has ended and is started again; the %d "
                "blocks that it had count as failed",
                keys,
            )
