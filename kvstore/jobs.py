"""`JobRunner`: transfers on worker threads. Submit, poll, drain. Knows nothing of blocks.

A job is data (operation, keys, slots), so that where it runs is this module's business
alone. Its keys run one by one on any free thread; loads go before stores, since a request
waits for a load and nothing waits for a store, but a store has its turn now and then.

A job ends when all its keys have. Keys that still wait when the job's deadline passes
fail without running; a key that runs is waited for, since nothing may touch a slot after
its job was reported. How long it can run is bounded by the timeout of each request.

Locking: `_lock` guards the queues, the counts inside every `_Running`, and `_finished`.
`submit` and `finished` hold it for a moment only, and never while a key runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

Operation = Literal["load", "store"]


LOADS_PER_STORE = 8
"""Loads that may go before a store that waits."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: `operation` on each of `keys`, whose bytes lie in the slot beside it."""

    job_id: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: the keys that succeeded, in the job's order, and its seconds."""

    job: Job
    succeeded: tuple[bytes, ...]
    seconds: float

    @property
    def success(self) -> bool:
        """Whether the job was well formed and every key succeeded."""
        return len(self.succeeded) == len(self.job.keys) == len(self.job.slots)


@dataclass(slots=True)
class _Running:
    job: Job
    deadline: float
    started: float
    pending: int
    succeeded: list[bool] = field(default_factory=list)


class JobRunner:
    """Runs jobs until `shutdown`. Any thread may call any method."""

    def __init__(
        self,
        run: Callable[[Operation, bytes, int], bool],
        *,
        threads: int,
        deadline: float,
        name: str,
    ) -> None:
        """Start the threads.

        Args:
            run: does one key of a job; True if it succeeded. Called from worker threads.
            threads: how many keys run at once.
            deadline: seconds after which a job's waiting keys are given up.
            name: the threads' name, for debuggers.
        """
        self._run = run
        self._deadline = deadline
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues: dict[Operation, deque[tuple[_Running, int]]] = {
            "load": deque(),
            "store": deque(),
        }
        self._streak = 0
        self._open = 0
        self._finished: list[Outcome] = []
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. A job whose keys and slots do not match fails as a whole."""
        now = time.monotonic()
        count = len(job.keys)
        queue = self._queues[job.operation]
        running = _Running(job, now + self._deadline, now, count, [False] * count)
        with self._lock:
            self._open += 1
            if not count or count != len(job.slots) or self._stopping:
                self._end(running)
                return
            queue.extend((running, i) for i in range(count))
            self._work.notify(count)

    def finished(self) -> list[Outcome]:
        """The jobs that ended since the last call, each reported once."""
        with self._lock:
            self._expire(time.monotonic())
            finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Block until every job has ended. Nothing touches a slot after the return."""
        with self._lock:
            while self._open:
                self._expire(time.monotonic())
                self._idle.wait(timeout=0.1)

    def shutdown(self) -> None:
        """Give up what waits, wait for what runs, and end the threads."""
        with self._lock:
            self._stopping = True
            self._expire(float("inf"))
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    # ---- worker threads

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            running, index = task
            job = running.job
            try:
                succeeded = self._run(job.operation, job.keys[index], job.slots[index])
            except BaseException:  # whatever it is, the job must end and the thread go on
                logger.exception("%s of a block failed unexpectedly", job.operation)
                succeeded = False
            with self._lock:
                running.succeeded[index] = succeeded
                self._settle(running)

    def _next(self) -> tuple[_Running, int] | None:
        with self._lock:
            while True:
                self._expire(time.monotonic())
                if (operation := self._turn()) is not None:
                    return self._queues[operation].popleft()
                if self._stopping:
                    return None
                self._work.wait()

    # ---- under the lock

    def _turn(self) -> Operation | None:
        """Whose turn it is: loads go first, but never keep every store waiting."""
        loads, stores = self._queues["load"], self._queues["store"]
        if loads and (not stores or self._streak < LOADS_PER_STORE):
            self._streak += 1
            return "load"
        self._streak = 0
        return "store" if stores else None

    def _expire(self, now: float) -> None:
        """Fail the keys that wait past their deadline; queues are in deadline order."""
        for queue in self._queues.values():
            expired = Counter[str]()
            while queue and queue[0][0].deadline <= now:
                running, _ = queue.popleft()
                expired[running.job.operation] += 1
                self._settle(running)
            for operation, keys in expired.items():
                logger.warning("%ss given up before they began: %d blocks", operation, keys)

    def _settle(self, running: _Running) -> None:
        running.pending -= 1
        if running.pending == 0:
            self._end(running)

    def _end(self, running: _Running) -> None:
        keys = running.job.keys
        ended = Outcome(
            running.job,
            tuple(k for k, ok in zip(keys, running.succeeded, strict=True) if ok),
            time.monotonic() - running.started,
        )
        self._finished.append(ended)
        self._open -= 1
        self._idle.notify_all()
