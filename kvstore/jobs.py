"""`JobRunner`: jobs in, outcomes out. Knows nothing of blocks.

A job is data (operation, keys, slots), so that where it runs is no business of whoever
submits it: its keys are dealt out in parts to movers, behind sockets. Nothing here waits
for a mover but the start, `drain` and `shutdown`, and there is no thread: `submit` and
`finished` cost the calling thread a system call or two for each mover.

Every job ends and is reported once; one of lookups maybe in parts, each key once, so that
nobody waits for the slowest. A mover that is late by `grace` seconds, or with upkeep by
half an hour, is killed if it is a process; whatever a mover had when it ended is reported
as failed, after its end, since nothing may touch a slot after its job was reported.

Locking: `_lock` guards everything, so any thread may call any method.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvstore.capacity import Room
from kvstore.errors import InvalidInputError
from kvstore.job import NO_ROOM, Job, Outcome, Running
from kvstore.links import Launched, Link, shares
from kvstore.parts import FAILED, INVALID, NEWS_SECONDS, Part, Reply

logger = logging.getLogger(__name__)

PART_KEYS = 512
"""Keys of a part, so that its message stays below `mover.MAX_MESSAGE_BYTES`."""

START_SECONDS = 60.0

DIED = "the process that transferred it ended"

TOO_LONG = "its keys are too long"

NO_ROOM_IN_TIME = "there was no room for it in time"


class JobRunner:
    """Runs jobs until `shutdown`."""

    def __init__(
        self,
        movers: Sequence[Launched],
        *,
        deadline: float,
        grace: float,
        room: Room | None = None,
    ) -> None:
        """Start the movers, and wait until they are ready.

        Args:
            movers: at least one.
            deadline: seconds after which keys that wait are given up, unless their job
                says less.
            grace: seconds that a key may run after that, before its mover is killed.
            room: tells how many stores may go; the others wait here.

        Raises:
            InvalidInputError: a mover did not start.
        """
        self._deadline = deadline
        self._grace = grace
        self._room = room or Room(None, 1)
        self._held: deque[tuple[Running, int]] = deque()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Running, int]] = {}
        self._number = 0
        self._open = 0
        self._finished: list[Outcome] = []
        self._looking: list[Running] = []  # jobs of lookups
        self._stopping = False
        self._looked_after = 0.0
        self._poller = select.poll()
        self._links: list[Link] = []
        self._by_number: dict[int, Link] = {}
        try:
            for mover in movers:
                self._links.append(link := Link(mover))
                if link.up:
                    self._register(link)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            for mover in movers[len(self._links) :]:
                mover.close()
            raise

    def submit(self, job: Job) -> None:
        """Deal a job out. One whose keys, slots and hints do not match fails as a whole."""
        count = len(job.keys)
        running = Running(job, time.monotonic())
        slots, hints = len(job.slots), len(job.hints)
        fits = job.operation not in ("load", "store") or count == slots
        with self._lock:
            self._open += job.awaited
            if not fits or hints not in (0, count):
                running.words = [INVALID] * count
                running.problems[0] = f"{count} keys for {slots} slots and {hints} hints"
            elif job.operation == "store":
                running.parts += 1  # until all its keys have had their turn
                self._held.append((running, 0))
                self._release()
                return
            else:
                if job.operation == "lookup":
                    self._looking.append(running)
                self._deal(running, 0, count)
            if not running.parts:
                self._end(running)

    @property
    def waiting(self) -> bool:
        """Whether any store waits for room."""
        return bool(self._held)

    def finished(self) -> list[Outcome]:
        """The jobs that ended since the last call, each reported once."""
        with self._lock:
            self._poll(0)
            finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Block until every job but upkeep has ended. Nothing touches a slot afterwards;
        stores that wait for room are given up.
        """
        with self._lock:
            self._give_up_held(before=float("inf"))
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
            self._give_up_held(before=float("inf"))
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

    def _deal(self, running: Running, start: int, stop: int) -> None:
        """Give each mover its share of these keys."""
        up = [] if self._stopping else [link for link in self._links if link.up]
        links = [link for link in up if link.ready and not link.killed] or up
        if not links:
            self._fail(running, start, stop, "nothing runs that could transfer it")
            return
        for link, count in shares(links, stop - start):
            for first in range(start, start + count, PART_KEYS):
                self._send(link, running, first, min(start + count, first + PART_KEYS))
            start += count

    def _release(self) -> None:
        """Let go as many of the stores that wait as there is room for."""
        while self._held:
            running, start = self._held[0]
            count = len(running.job.keys)
            taken = self._room.take(count - start)
            if taken:
                self._deal(running, start, start + taken)
            if start + taken < count:
                self._held[0] = (running, start + taken)
                return
            self._held.popleft()
            self._settled(running)

    def _give_up_held(self, *, before: float) -> None:
        """End stores that had to wait past their deadline; they are in its order."""
        while self._held and self._held[0][0].started + self._deadline <= before:
            running, start = self._held.popleft()
            running.fail(start, len(running.words), NO_ROOM, NO_ROOM_IN_TIME)
            self._settled(running)

    def _send(self, link: Link, running: Running, start: int, stop: int) -> None:
        job = running.job
        self._number += 1
        part = Part(
            self._number,
            job.operation,
            job.keys[start:stop],
            job.slots[start:stop],
            job.hints[start:stop],
            running.started + min(job.seconds, self._deadline),
        )
        if link.send(part):
            running.parts += 1
            self._running[part.number] = (running, start)
        else:
            self._fail(running, start, stop, TOO_LONG)

    def _poll(self, milliseconds: int) -> None:
        """Take every reply that is there, and send what there was no room for."""
        self._release()
        for link in self._links:
            link.flush()
        for number, _ in self._poller.poll(milliseconds):
            link = self._by_number[number]
            for part, reply in link.replies():
                self._settle(part, reply)
            if not link.up:
                self._ended(link)
        now = time.monotonic()
        for running in self._looking:
            if now - running.started > NEWS_SECONDS and (news := running.news()):
                self._finished.append(news)
        if now - self._looked_after > 1.0:
            self._looked_after = now
            self._look_after(now)

    def _settle(self, part: Part, reply: Reply) -> None:
        """A part has ended, or some of its lookups; with the last part the job has."""
        running, start = self._running[part.number]
        running.take(start, reply)
        if reply.last:
            self._part_ended(part)

    def _part_ended(self, part: Part) -> None:
        running, _ = self._running.pop(part.number)
        if part.operation == "store":
            self._room.note_ended(len(part.keys))
        self._settled(running)

    def _fail(self, running: Running, start: int, stop: int, problem: str) -> None:
        """These keys go nowhere."""
        running.fail(start, stop, FAILED, problem)
        if running.job.operation == "store":
            self._room.note_ended(stop - start)

    def _settled(self, running: Running) -> None:
        running.parts -= 1
        if not running.parts:
            self._end(running)

    def _end(self, running: Running) -> None:
        self._finished.append(running.outcome())
        if running in self._looking:
            self._looking.remove(running)
        self._open -= running.job.awaited

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
            slow = any(link.up and not link.ready for link in self._links)
            others = f"took more than {START_SECONDS:.0f} s" if slow else "did not live"
            raise InvalidInputError(
                f"processes: expected {len(self._links)} to start, found {ready}; the "
                f"others {others}, and what they said is above. "
                'Set "processes": 0 to transfer on threads of the engine instead.'
            )

    def _look_after(self, now: float) -> None:
        """Once a second: start again what ended, kill what hangs, give up what waits."""
        self._give_up_held(before=now)
        for link in self._links:
            if not self._stopping and link.revive():
                self._register(link)
            if (hanging := link.hanging(now, self._grace)) is None:
                continue
            link.killed = link.mover.kill()
            fate = "its process is killed" if link.killed else "nothing can end its thread"
            logger.warning("a %s is %.0f s late: %s", *hanging, fate)

    def _ended(self, link: Link) -> None:
        """A mover is gone, and with it whatever it had."""
        number, keys = link.fileno(), link.keys
        self._poller.unregister(number)
        del self._by_number[number]
        link.up = False
        for part in link.close():
            running, start = self._running[part.number]
            running.fail(start, start + len(part.keys), FAILED, DIED)
            self._part_ended(part)
        if not link.ready:
            logger.warning("a process that transfers blocks ended before it was ready")
        elif not self._stopping:
            logger.warning(
                "a process that transfers blocks has ended and is started again; the %d "
                "blocks that it had count as failed",
                keys,
            )
