"""`JobRunner`: jobs in, outcomes out. Knows nothing of blocks.

A job is data (operation, keys, slots), so that where it runs is no business of whoever
submits it: its keys are dealt out in parts to movers, behind sockets. Nothing here ever
waits for a mover but `start`, `drain` and `shutdown`, and there is no thread: `submit` and
`finished` cost the calling thread a system call for each mover.

Every job ends and is reported once. A mover that is late by `grace` seconds is killed if it
is a process; whatever a mover had when it ended is reported as failed, after its end, since
nothing may touch a slot after its job was reported.

Locking: `_lock` guards everything, so any thread may call any method.
"""

from __future__ import annotations

import logging
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import InvalidInputError
from kvstore.mover import (
    FAILED,
    MAX_MESSAGE_BYTES,
    READY,
    Answer,
    Hint,
    Operation,
    Part,
    Reply,
)

logger = logging.getLogger(__name__)

PART_KEYS = 512
"""Keys of a part, so that its message stays below `MAX_MESSAGE_BYTES`."""

START_SECONDS = 60.0

MAX_PAUSE = 60.0
"""Seconds before a mover that keeps ending is started again."""

DIED = "the process that transferred it ended"


class Launched(Protocol):
    """Where a mover runs."""

    def start(self) -> socket.socket:
        """Start it; returns our end of its socket. May be called again after its end."""

    def kill(self) -> None:
        """End it now, if that is possible."""

    def join(self, seconds: float) -> bool:
        """Wait for its end, so long at most. Returns whether it has ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: `operation` on each of `keys`, whose bytes lie in the slot beside it.

    `hints` are handed to the mover: one for each key, or none at all.
    """

    job_id: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]
    hints: Sequence[Hint] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: an answer for each key, what went wrong with some of them, by their
    index, and its seconds.
    """

    job: Job
    answers: Sequence[Answer]
    problems: Mapping[int, str]
    seconds: float


@dataclass(slots=True)
class _Running:
    job: Job
    started: float
    pending: int
    answers: list[Answer]
    problems: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Link:
    """One mover, and the parts that it has not answered."""

    mover: Launched
    channel: socket.socket | None = None
    open: dict[int, tuple[_Running, Part, int]] = field(default_factory=dict)
    unsent: deque[bytes] = field(default_factory=deque)
    keys: int = 0
    pause: float = 0.0
    not_before: float = 0.0
    ready: bool = False


class JobRunner:
    """Runs jobs until `shutdown`."""

    def __init__(
        self, movers: Sequence[Launched], *, deadline: float, grace: float
    ) -> None:
        """Start the movers.

        Args:
            movers: at least one.
            deadline: seconds after which keys that wait are given up.
            grace: seconds that a key may run after that, before its mover is killed.

        Raises:
            InvalidInputError: a process did not start.
        """
        self._deadline = deadline
        self._grace = grace
        self._lock = threading.Lock()
        self._poller = select.poll()
        self._links = [_Link(mover) for mover in movers]
        self._by_descriptor: dict[int, _Link] = {}
        self._number = 0
        self._finished: list[Outcome] = []
        self._open = 0
        self._stopping = False
        self._checked = 0.0
        for link in self._links:
            self._start(link)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while any(link.channel and not link.ready for link in self._links):
            with self._lock:
                self._poll(100)
            if time.monotonic() > end:
                break
        if not all(link.ready for link in self._links):
            ready = sum(link.ready for link in self._links)
            self.shutdown()
            raise InvalidInputError(
                f"processes: expected {len(self._links)} to start within "
                f"{START_SECONDS:.0f} s, found {ready}; what the others said is above. "
                'Set "processes": 0 to transfer on threads of the engine instead.'
            )

    def submit(self, job: Job) -> None:
        """Deal a job out. One whose keys and slots do not match fails as a whole."""
        count = len(job.keys)
        running = _Running(job, time.monotonic(), 0, [(FAILED, None)] * count)
        fits = job.operation == "lookup" or count == len(job.slots)
        with self._lock:
            self._open += 1
            links = [link for link in self._links if self._is_up(link)]
            if not fits:
                running.problems[0] = f"{count} keys for {len(job.slots)} slots"
            elif not links:
                running.problems[0] = "no process runs that could transfer it"
            elif count:
                self._deal(running, links)
            if not running.pending:
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

        One that has not ended `grace` seconds later is killed, if it is a process.
        """
        with self._lock:
            self._stopping = True
            links = [link for link in self._links if link.channel is not None]
            for link in links:
                assert link.channel is not None
                link.channel.shutdown(socket.SHUT_WR)
            end = time.monotonic() + self._grace
            while any(link.channel for link in links) and time.monotonic() < end:
                self._poll(100)
            for link in links:
                if link.channel is not None:
                    link.mover.kill()
            for link in links:
                link.mover.join(self._grace)
                if link.channel is not None:
                    self._ended(link)

    # ---- under the lock

    def _deal(self, running: _Running, links: list[_Link]) -> None:
        """Give each mover its share: as much more as it has less than the others."""
        job = running.job
        count = len(job.keys)
        links.sort(key=lambda link: link.keys)
        start = 0
        for position, link in enumerate(links):
            rest = links[position:]
            level = (count - start + sum(other.keys for other in rest)) / len(rest)
            stop = min(count, start + max(0, round(level - link.keys)))
            if position == len(links) - 1:
                stop = count
            for first in range(start, stop, PART_KEYS):
                self._send(link, running, first, min(stop, first + PART_KEYS))
            start = stop

    def _send(self, link: _Link, running: _Running, start: int, stop: int) -> None:
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
        running.pending += 1
        link.open[part.number] = (running, part, start)
        link.keys += stop - start
        link.unsent.append(pickle.dumps(tuple(part)))
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        while link.unsent and link.channel is not None:
            try:
                link.channel.send(link.unsent[0])
            except BlockingIOError:
                return  # its buffer is full: the next call goes on
            except OSError:
                return  # it has ended, as `_poll` will find
            link.unsent.popleft()

    def _poll(self, milliseconds: int) -> None:
        """Take every reply that is there."""
        for descriptor, _ in self._poller.poll(milliseconds):
            link = self._by_descriptor.get(descriptor)
            while link is not None and link.channel is not None:
                try:
                    message = link.channel.recv(MAX_MESSAGE_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    message = b""
                if not message:
                    self._ended(link)
                    break
                self._answered(link, Reply(*pickle.loads(message)))
        now = time.monotonic()
        if now - self._checked > 1.0:
            self._checked = now
            self._look_after(now)

    def _look_after(self, now: float) -> None:
        """Send what waits, start again what ended, and kill what hangs."""
        for link in self._links:
            self._flush(link)
            self._is_up(link)
            if not link.open:
                continue
            oldest = next(iter(link.open.values()))[1]
            if now > oldest.deadline + self._grace:
                logger.warning(
                    "a transfer hangs for more than %.0f s: its process is killed",
                    self._deadline + self._grace,
                )
                link.mover.kill()

    def _answered(self, link: _Link, reply: Reply) -> None:
        if reply.number == READY:
            link.ready = True
            return
        running, part, start = link.open.pop(reply.number)
        link.keys -= len(part.keys)
        link.pause = 0.0
        running.answers[start : start + len(part.keys)] = reply.answers
        for i, problem in reply.problems.items():
            running.problems[start + i] = problem
        running.pending -= 1
        if not running.pending:
            self._end(running)

    def _end(self, running: _Running) -> None:
        seconds = time.monotonic() - running.started
        self._finished.append(
            Outcome(running.job, running.answers, running.problems, seconds)
        )
        self._open -= 1

    # ---- movers come and go

    def _start(self, link: _Link) -> None:
        link.channel = link.mover.start()
        link.channel.setblocking(False)
        descriptor = link.channel.fileno()
        self._by_descriptor[descriptor] = link
        self._poller.register(descriptor, select.POLLIN)

    def _is_up(self, link: _Link) -> bool:
        """Whether a mover runs, started again if it is time."""
        if link.channel is None and not self._stopping:
            now = time.monotonic()
            if now >= link.not_before:
                link.pause = min(MAX_PAUSE, 2 * link.pause or 1.0)
                link.not_before = now + link.pause
                self._start(link)
        return link.channel is not None and not self._stopping

    def _ended(self, link: _Link) -> None:
        """A mover is gone, and with it whatever it had."""
        assert link.channel is not None
        descriptor = link.channel.fileno()
        self._poller.unregister(descriptor)
        del self._by_descriptor[descriptor]
        link.channel.close()
        link.channel = None
        link.unsent.clear()
        if not self._stopping:
            logger.warning(
                "a process that transfers blocks has ended and is started again; %d "
                "blocks that it had count as failed",
                link.keys,
            )
        link.keys = 0
        lost, link.open = link.open, {}
        for running, _, start in lost.values():
            running.problems[start] = DIED
            running.pending -= 1
            if not running.pending:
                self._end(running)
        link.mover.join(0)
