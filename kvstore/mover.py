"""`Mover`: moves blocks between rows and storage, in a process of its own or on threads.

It takes parts of jobs from one end of a socket and answers there: the same code whether
the other end is in this process or in the engine's. Loads go before stores, since a request
waits for a load and nothing waits for a store, but a store has its turn now and then.
Lookups have threads of their own.

A part is answered when all its keys have ended. Keys that still wait when the part's
deadline passes are answered as failed without running; a key that runs is waited for,
since nothing may touch a slot after its part was answered.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvstore.arrays import Proof

logger = logging.getLogger(__name__)

Operation = Literal["lookup", "load", "store"]

Hint = Proof | bool | None
"""What the other end knows of a key: for a load its proof, for a store whether the block
is suspect."""


READY = 0
"""The number of the reply to nothing, which a mover sends when it can take parts."""

FAILED = "failed"
"""The word for a key that did not run, or whose storage failed."""

MAX_PROBLEMS = 8
"""Keys of a part whose problems are told in words."""

MAX_PROBLEM = 2000
"""Characters of one."""

LATE = "it waited too long for its turn"

LOADS_PER_STORE = 8
"""Loads that may go before a store that waits."""

MAX_MESSAGE_BYTES = 160 << 10
"""A message must fit into a socket's default buffer of 208 KiB."""

LOOK_SECONDS = 1
"""How often a mover looks for what has waited too long, and whether it is still wanted."""


class Part(NamedTuple):
    """Some keys of one job. `deadline` is by `time.monotonic`, one clock for a machine."""

    number: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]
    hints: Sequence[Hint]
    deadline: float


class Reply(NamedTuple):
    """How a part ended: for each key a word, and the proof of the block that is there now
    if it is known; and what went wrong with the first few.
    """

    number: int
    words: Sequence[str]
    proofs: Sequence[Proof | None]
    problems: Mapping[int, str]


Perform = Callable[[Operation, bytes, int, Hint], tuple[str, Proof | None, str | None]]
"""Does one key; returns its word, its proof, and what went wrong if anything did."""


@dataclass(slots=True)
class _Running:
    part: Part
    words: list[str]
    proofs: list[Proof | None]
    pending: int
    problems: dict[int, str] = field(default_factory=dict)


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
        self._transfer = threading.Condition(self._lock)
        self._lookup = threading.Condition(self._lock)
        self._queues: dict[Operation, deque[tuple[_Running, range]]] = {
            "lookup": deque(),
            "load": deque(),
            "store": deque(),
        }
        self._streak = 0
        self._stopping = False
        serve = [self._serve_transfers] * threads + [self._serve_lookups] * lookups
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{i}", daemon=True)
            for i, target in enumerate(serve)
        ]
        for thread in self._threads:
            thread.start()

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
                if poller.poll(1000 * LOOK_SECONDS):
                    length = self._channel.recv_into(buffer)
                    if not length:
                        break
                    self._take(Part(*pickle.loads(buffer[:length])))
                self._give_up(before=time.monotonic())
        except OSError:
            logger.debug("the other end is gone", exc_info=True)
        finally:
            self._stop()

    def _take(self, part: Part) -> None:
        count = len(part.keys)
        running = _Running(part, [FAILED] * count, [None] * count, count)
        queue = self._queues[part.operation]
        whole = part.operation == "lookup" and self._lookups == 1
        step = count if whole else 1
        tasks = [(running, range(i, i + step)) for i in range(0, count, step)]
        work = self._lookup if part.operation == "lookup" else self._transfer
        with self._lock:
            queue.extend(tasks)
            work.notify(len(tasks))

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
        self._give_up(before=float("inf"))
        with self._lock:
            self._transfer.notify_all()
            self._lookup.notify_all()
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
                self._settle(running, len(indices), dict.fromkeys(indices, LATE))

    # ---- threads

    def _serve_transfers(self) -> None:
        while (task := self._next(self._transfer, self._transfer_turn)) is not None:
            self._run(*task)

    def _serve_lookups(self) -> None:
        while (task := self._next(self._lookup, self._lookup_turn)) is not None:
            self._run(*task)

    def _next(
        self, work: threading.Condition, turn: Callable[[], Operation | None]
    ) -> tuple[_Running, range] | None:
        with self._lock:
            while not self._stopping:
                if (operation := turn()) is not None:
                    return self._queues[operation].popleft()
                work.wait()
        return None

    def _transfer_turn(self) -> Operation | None:
        """Whose turn it is: loads go first, but never keep every store waiting."""
        loads, stores = self._queues["load"], self._queues["store"]
        if loads and (not stores or self._streak < LOADS_PER_STORE):
            self._streak += 1
            return "load"
        self._streak = 0
        return "store" if stores else None

    def _lookup_turn(self) -> Operation | None:
        return "lookup" if self._queues["lookup"] else None

    def _run(self, running: _Running, indices: range) -> None:
        part = running.part
        problems: dict[int, str] = {}
        for i in indices:
            if time.monotonic() >= part.deadline:
                problems[i] = LATE
                continue
            running.words[i], running.proofs[i], problem = self._one(part, i)
            if problem is not None:
                problems[i] = problem
        self._settle(running, len(indices), problems)

    def _one(self, part: Part, index: int) -> tuple[str, Proof | None, str | None]:
        slot = part.slots[index] if part.slots else -1
        hint = part.hints[index] if part.hints else None
        try:
            return self._perform(part.operation, part.keys[index], slot, hint)
        except BaseException as error:  # whatever it is, the part must end
            logger.exception("%s of a block failed unexpectedly", part.operation)
            return FAILED, None, f"{type(error).__name__}: {error}"

    def _settle(self, running: _Running, keys: int, problems: Mapping[int, str]) -> None:
        """So many more keys have ended; with the last one the part is answered."""
        with self._lock:
            for i in list(problems)[: MAX_PROBLEMS - len(running.problems)]:
                running.problems[i] = problems[i][:MAX_PROBLEM]
            running.pending -= keys
            if running.pending:
                return
        self._send(
            Reply(running.part.number, running.words, running.proofs, running.problems)
        )

    def _send(self, reply: Reply) -> None:
        message = pickle.dumps(tuple(reply))
        try:
            while self._still_wanted():
                with contextlib.suppress(TimeoutError):  # the other end does not read
                    self._channel.send(message)
                    return
        except OSError:
            logger.debug("nobody is left to be answered", exc_info=True)
