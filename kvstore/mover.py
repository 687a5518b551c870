"""`Mover`: moves blocks between rows and storage, in a process of its own or on threads.

It takes parts of jobs from one end of a socket and answers there: the same code whether
the other end is in this process or in the engine's. Loads go before stores, since a request
waits for a load and nothing waits for a store, but a store has its turn now and then.
Lookups have threads of their own, so have touches, which are writes and may hang while
lookups do not, and the other upkeep: one each.

A part is answered when all its keys have ended; of lookups, what has ended is told before
if others take long. Keys that still wait when the part's deadline passes are answered as
failed without running; a key that runs is waited for, since nothing may touch a slot after
its part was answered.

Locking: `_lock` guards the queues and the counts inside every `_Running`, and is never held
while a key runs.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from kvstore.arrays import Proof
from kvstore.parts import (
    FAILED,
    LATE,
    MAX_MESSAGE_BYTES,
    NEWS_SECONDS,
    NO_SLOT,
    READY,
    UNKNOWN,
    Answer,
    Operation,
    Part,
    Perform,
    Reply,
)

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 8
"""Keys of a part whose problems are told in words."""

MAX_PROBLEM = 2000
"""Characters of one."""

WAITED = "it waited too long for its turn"

LOADS_PER_STORE = 8
"""Loads that may go before a store that waits."""

LOOK_SECONDS = 1
"""How often a mover looks for what has waited too long, and whether it is still wanted."""

Turn = Callable[[], Operation | None]
"""Whose turn it is, of the operations that a thread serves; None if nothing waits."""


@dataclass(slots=True, eq=False)
class _Running:
    part: Part
    words: list[str]
    proofs: list[Proof | None]
    pending: int
    told: int  # how many keys were still pending when something was told
    news_at: float
    problems: dict[int, str] = field(default_factory=dict)
    reports: list[object] = field(default_factory=list)

    def end(self, index: int, answer: Answer) -> None:
        """A key has ended."""
        self.words[index], self.proofs[index] = answer.word, answer.proof
        if answer.problem is not None and len(self.problems) < MAX_PROBLEMS:
            self.problems[index] = answer.problem[:MAX_PROBLEM]
        if answer.report is not None:
            self.reports.append(answer.report)
        self.pending -= 1

    def reply(self) -> Reply:
        """What is known so far. Once all keys have ended it is the last."""
        words, proofs, problems = list(self.words), list(self.proofs), dict(self.problems)
        last = not self.pending
        reports = tuple(self.reports)
        return Reply(self.part.number, words, proofs, problems, reports, last)


class Mover:
    """Serves one socket until its other end is closed."""

    def __init__(
        self,
        channel: socket.socket,
        perform: Perform,
        *,
        threads: int,
        lookups: int,
        name: str,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the threads.

        Args:
            channel: a socket that keeps messages apart (`SOCK_SEQPACKET`).
            perform: does one key of a part. Called from several threads at once.
            threads: how many keys of loads and stores run at once.
            lookups: how many keys of lookups run at once; 1 runs a part's without pause.
            name: the threads' name, for debuggers.
            still_wanted: asked every second; False is as good as a closed end, and then
                nothing is waited for.
        """
        self._channel = channel
        self._channel.settimeout(LOOK_SECONDS)
        self._perform = perform
        self._still_wanted = still_wanted
        self._lookups = lookups
        self._lock = threading.Lock()
        self._queues: dict[Operation, deque[tuple[_Running, range]]] = {
            operation: deque() for operation in get_args(Operation)
        }
        transfer, look, touch, upkeep = (threading.Condition(self._lock) for _ in range(4))
        self._ready: dict[Operation, threading.Condition] = {
            "load": transfer,
            "store": transfer,
            "lookup": look,
            "touch": touch,
            "sweep": upkeep,
            "collect": upkeep,
        }
        self._looking: list[_Running] = []
        self._streak = 0
        self._stopping = False
        crew = [(transfer, self._transfer_turn)] * threads
        crew += [(look, partial(self._first, "lookup"))] * lookups
        crew += [(touch, partial(self._first, "touch"))]
        crew += [(upkeep, partial(self._first, "sweep", "collect"))]
        self._threads = [
            threading.Thread(target=self._work, args=who, name=f"{name}-{i}", daemon=True)
            for i, who in enumerate(crew)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # as where the system has no thread left
            self._stop()
            raise

    def serve(self) -> None:
        """Take parts until the other end closes; then give up what waits, and wait for
        what runs.
        """
        buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        self._send(Reply(READY, (), (), {}))
        try:
            while self._still_wanted():
                if poller.poll(1000 * (NEWS_SECONDS if self._looking else LOOK_SECONDS)):
                    length = self._channel.recv_into(buffer)
                    if not length:
                        break
                    self._take(Part(*pickle.loads(buffer[:length])))
                now = time.monotonic()
                self._tell_news(now)
                self._give_up(before=now)
        except OSError:
            logger.debug("the other end is gone", exc_info=True)
        finally:
            self._stop()

    def _take(self, part: Part) -> None:
        count = len(part.keys)
        news_at = time.monotonic() + NEWS_SECONDS
        running = _Running(part, [UNKNOWN] * count, [None] * count, count, count, news_at)
        if not count:
            self._send(running.reply())
            return
        queue = self._queues[part.operation]
        step = count if part.operation == "lookup" and self._lookups == 1 else 1
        tasks = [(running, range(i, i + step)) for i in range(0, count, step)]
        with self._lock:
            queue.extend(tasks)
            if part.operation == "lookup":
                self._looking.append(running)
            self._ready[part.operation].notify(len(tasks))

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
        self._give_up(before=float("inf"))
        with self._lock:
            for ready in self._ready.values():
                ready.notify_all()
        for thread in self._threads:
            while thread.is_alive() and self._still_wanted():
                thread.join(LOOK_SECONDS)
        self._channel.close()

    def _give_up(self, *, before: float) -> None:
        """End the keys that wait past their deadline; queues are in deadline order."""
        for queue in self._queues.values():
            while True:
                with self._lock:
                    if not queue or queue[0][0].part.deadline > before:
                        break
                    running, indices = queue.popleft()
                for i in indices:
                    self._end(running, i, Answer(LATE, problem=WAITED))

    def _tell_news(self, now: float) -> None:
        """Answer those parts of lookups of which some keys have ended, and others not."""
        with self._lock:
            told = []
            for running in self._looking:
                if running.news_at <= now and running.pending < running.told:
                    running.news_at, running.told = now + NEWS_SECONDS, running.pending
                    told.append(running.reply())
        for reply in told:
            self._send(reply)

    # ---- threads

    def _work(self, ready: threading.Condition, turn: Turn) -> None:
        while (task := self._next(ready, turn)) is not None:
            self._run(*task)

    def _next(
        self, ready: threading.Condition, turn: Turn
    ) -> tuple[_Running, range] | None:
        with self._lock:
            while not self._stopping:
                if (operation := turn()) is not None:
                    return self._queues[operation].popleft()
                ready.wait()
        return None

    def _transfer_turn(self) -> Operation | None:
        """Whose turn it is: loads go first, but never keep every store waiting."""
        loads, stores = self._queues["load"], self._queues["store"]
        if loads and (not stores or self._streak < LOADS_PER_STORE):
            self._streak += 1
            return "load"
        self._streak = 0
        return "store" if stores else None

    def _first(self, *operations: Operation) -> Operation | None:
        return next((name for name in operations if self._queues[name]), None)

    def _run(self, running: _Running, indices: range) -> None:
        part = running.part
        for i in indices:
            late = time.monotonic() >= part.deadline
            answer = Answer(LATE, problem=WAITED) if late else self._one(part, i)
            self._end(running, i, answer)

    def _one(self, part: Part, index: int) -> Answer:
        try:
            slot = part.slots[index] if part.slots else NO_SLOT
            hint = part.hints[index] if part.hints else None
            return self._perform(part.operation, part.keys[index], slot, hint)
        except BaseException as error:  # whatever it is, the part must end
            logger.exception("%s of a block failed unexpectedly", part.operation)
            return Answer(FAILED, problem=f"{type(error).__name__}: {error}")

    def _end(self, running: _Running, index: int, answer: Answer) -> None:
        """One more key has ended; with the last one the part is answered."""
        with self._lock:
            running.end(index, answer)
            if running.pending:
                return
            if running.part.operation == "lookup":
                self._looking.remove(running)
        self._send(running.reply())

    def _send(self, reply: Reply) -> None:
        message = pickle.dumps(tuple(reply))
        try:
            while self._still_wanted():
                with contextlib.suppress(TimeoutError):  # the other end does not read
                    self._channel.send(message)
                    return
        except OSError:
            logger.debug("nobody is left to be answered", exc_info=True)
