"""What the tests of jobs and movers share: keys, work that can be held, and patience."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.job import Job, Outcome
from kvstore.jobs import JobRunner
from kvstore.parts import FAILED, Answer, Hint, Operation, Perform
from kvstore.processes import ThreadMover
from kvstore.scratch import TEMPORARY

PATIENCE = 20.0
"""Seconds after which a test gives up; no test that passes waits so long."""

NAME = "test-mover"
DONE = "done"

"""How a key ended; see `mover.Perform`."""


def key(number: int) -> bytes:
    return number.to_bytes(4)


def job(job_id: int, *numbers: int, operation: Operation = "load") -> Job:
    """A job whose keys and slots follow from `numbers`."""
    return Job(job_id, operation, tuple(map(key, numbers)), tuple(n * 10 for n in numbers))


def end(succeeds: bool) -> Answer:
    return Answer(DONE) if succeeds else Answer(FAILED, problem="it was told to")


def succeeded(outcome: Outcome) -> tuple[bytes, ...]:
    """The keys of a job that ended well."""
    assert len(outcome.proofs) == len(outcome.job.keys)
    ended = zip(outcome.job.keys, outcome.words, strict=True)
    return tuple(key for key, word in ended if word == DONE)


@dataclass
class Work:
    """A `perform` that notes its calls and can be held at a gate. Lookups pass: one that
    was answered shows that what was sent before it has arrived.

    Attributes:
        gate: no call passes it while it is closed.
        started: released once for each call that has begun.
        calls: what was asked for, in the order of beginning.
        failing: keys that do not succeed.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    calls: list[tuple[Operation, bytes, int]] = field(default_factory=list)
    failing: frozenset[bytes] = frozenset()

    def __call__(self, operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        if operation == "lookup":
            return Answer(DONE)
        self.calls.append((operation, key, slot))
        self.started.release()
        assert self.gate.wait(PATIENCE)
        return end(key not in self.failing)

    @property
    def keys(self) -> list[bytes]:
        return [key for _, key, _ in self.calls]

    def wait_for(self, calls: int) -> None:
        """Until so many more calls have begun."""
        for _ in range(calls):
            assert self.started.acquire(timeout=PATIENCE)


@contextmanager
def running(
    *performs: Perform,
    threads: int = 1,
    lookups: int = 1,
    deadline: float = 600.0,
    grace: float = 600.0,
) -> Iterator[JobRunner]:
    """A runner over one mover on threads for each of `performs`."""
    movers = [
        ThreadMover(perform, threads=threads, lookups=lookups, name=f"{NAME}-{i}")
        for i, perform in enumerate(performs)
    ]
    runner = JobRunner(movers, deadline=deadline, grace=grace)
    try:
        yield runner
    finally:
        for perform in performs:
            if isinstance(perform, Work):
                perform.gate.set()
        runner.shutdown()


def until(condition: Callable[[], object]) -> None:
    """Poll until `condition` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def ended(runner: JobRunner, count: int) -> list[Outcome]:
    """The next outcomes, `count` of them."""
    outcomes: list[Outcome] = []

    def enough() -> bool:
        outcomes.extend(runner.finished())
        return len(outcomes) >= count

    until(enough)
    return outcomes


def let_arrive(runner: JobRunner) -> None:
    """Until a runner's only mover has taken all that was submitted."""
    runner.submit(Job(-1, "lookup", (key(0),), ()))
    [outcome] = ended(runner, 1)
    assert outcome.job.job_id == -1


def threads_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(NAME)]


def movers_of(engine: int) -> list[int]:
    """The processes of movers that an engine has started, by what they are told."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            told = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        # Theirs are the numbers of a socket, a task and the engine.
        if any(b"kvstore.processes" in word for word in told) and (
            told[-2] == str(engine).encode()
        ):
            found.append(int(folder.name))
    return found


def descriptors() -> dict[str, str]:
    """The open files of this process, but for the folders of temporary names, which are
    held to its end.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed them
        if f"/{TEMPORARY}/" not in target:
            found[name] = target
    return found
