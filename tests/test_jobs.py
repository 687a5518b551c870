"""Jobs on real threads. Nothing here waits for a time to pass, except for a deadline."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.jobs import Job, JobRunner, Operation, Outcome

PATIENCE = 20.0
"""Seconds after which a test gives up; no test that passes waits so long."""

NAME = "test-jobs"
Run = Callable[[Operation, bytes, int], bool]


def key(number: int) -> bytes:
    return number.to_bytes(4)


def job(job_id: int, *numbers: int, operation: Operation = "load") -> Job:
    """A job whose keys and slots follow from `numbers`."""
    return Job(job_id, operation, tuple(map(key, numbers)), tuple(n * 10 for n in numbers))


@dataclass
class Work:
    """A `run` that notes its calls and can be held at a gate.

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

    def __call__(self, operation: Operation, key: bytes, slot: int) -> bool:
        self.calls.append((operation, key, slot))
        self.started.release()
        assert self.gate.wait(PATIENCE)
        return key not in self.failing

    @property
    def keys(self) -> list[bytes]:
        return [key for _, key, _ in self.calls]

    def wait_for(self, calls: int) -> None:
        """Until so many more calls have begun."""
        for _ in range(calls):
            assert self.started.acquire(timeout=PATIENCE)


@pytest.fixture
def work() -> Iterator[Work]:
    """Work whose gate is closed; it is opened in the end, whatever happens."""
    work = Work()
    yield work
    work.gate.set()


@contextmanager
def running(run: Run, *, threads: int = 1, deadline: float = 600.0) -> Iterator[JobRunner]:
    runner = JobRunner(run, threads=threads, deadline=deadline, name=NAME)
    try:
        yield runner
    finally:
        if isinstance(run, Work):
            run.gate.set()
        runner.shutdown()


def until(condition: Callable[[], bool]) -> None:
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


def threads_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(NAME)]


# ---- what runs


def test_every_key_is_run_with_its_own_slot(work: Work) -> None:  # A23
    work.gate.set()
    slots = np.array([7, 2, 900], np.int32)
    keys = (key(5), key(1), key(3))
    with running(work) as runner:
        runner.submit(Job(1, "store", keys, slots.tolist()))
        runner.drain()
    assert work.calls == [("store", k, s) for k, s in zip(keys, (7, 2, 900), strict=True)]


def test_jobs_of_one_kind_run_in_the_order_of_submission(work: Work) -> None:
    work.gate.set()
    with running(work) as runner:
        for i in range(5):
            runner.submit(job(i, 2 * i, 2 * i + 1))
        runner.drain()
        assert [o.job.job_id for o in runner.finished()] == [0, 1, 2, 3, 4]
    assert work.keys == [key(n) for n in range(10)]


def test_loads_go_before_stores_that_wait(work: Work) -> None:
    with running(work) as runner:
        runner.submit(job(0, 0, operation="store"))
        work.wait_for(1)  # the only thread is busy now
        runner.submit(job(1, 1, 2, operation="store"))
        runner.submit(job(2, 3, 4, operation="load"))
        work.gate.set()
        runner.drain()
    assert work.keys == [key(n) for n in (0, 3, 4, 1, 2)]


def test_a_load_is_next_even_after_a_store_has_begun(work: Work) -> None:
    with running(work) as runner:
        runner.submit(job(0, 0, 1, 2, operation="store"))
        work.wait_for(1)
        runner.submit(job(1, 3, operation="load"))
        work.gate.set()
        runner.drain()
        order = [outcome.job.job_id for outcome in runner.finished()]
    assert work.keys == [key(n) for n in (0, 3, 1, 2)]
    assert order == [1, 0]


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_keys_run_at_once_and_no_more(threads: int) -> None:
    together = threading.Barrier(threads)
    lock = threading.Lock()
    at_once: list[int] = []
    now = 0

    def run(operation: Operation, key: bytes, slot: int) -> bool:
        nonlocal now
        with lock:
            now += 1
            at_once.append(now)
        together.wait(PATIENCE)  # passes only with all threads inside
        with lock:
            now -= 1
        return True

    with running(run, threads=threads) as runner:
        runner.submit(job(1, *range(4 * threads)))
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.success
    assert max(at_once) == threads


# ---- how jobs end


def test_an_outcome_names_the_job_and_what_succeeded(work: Work) -> None:
    work.gate.set()
    submitted = job(7, 1, 2)
    with running(work) as runner:
        runner.submit(submitted)
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.job is submitted
    assert outcome.succeeded == submitted.keys
    assert outcome.success
    assert 0 <= outcome.seconds < PATIENCE


def test_exactly_the_keys_that_succeeded_are_told(work: Work) -> None:  # A27, A47
    work.failing = frozenset((key(2), key(3)))
    work.gate.set()
    with running(work, threads=2) as runner:
        runner.submit(job(1, 1, 2, 3, 4, 5))
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.succeeded == (key(1), key(4), key(5))
    assert not outcome.success


def test_keys_are_told_in_the_jobs_order_however_they_end() -> None:
    first_may_end = threading.Event()

    def run(operation: Operation, key_: bytes, slot: int) -> bool:
        if key_ == key(1):
            return first_may_end.wait(PATIENCE)
        first_may_end.set()
        return True

    with running(run, threads=2) as runner:
        runner.submit(job(1, 1, 2))
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.succeeded == (key(1), key(2))


def test_an_empty_job_succeeds_at_once(work: Work) -> None:  # A23
    with running(work) as runner:
        runner.submit(job(1))
        [outcome] = runner.finished()
    assert outcome.success
    assert outcome.succeeded == ()
    assert work.calls == []


@pytest.mark.parametrize(
    ("keys", "slots"),
    [
        pytest.param(3, 2, id="A46-more-keys"),
        pytest.param(2, 3, id="A46-more-slots"),
        pytest.param(1, 0, id="A46-no-slots"),
        pytest.param(
            0,
            1,
            id="A46-no-keys",
        ),
    ],
)
def test_keys_and_slots_that_do_not_match_fail_as_a_whole(
    work: Work, keys: int, slots: int
) -> None:
    work.gate.set()
    with running(work) as runner:
        runner.submit(Job(1, "load", tuple(map(key, range(keys))), tuple(range(slots))))
        runner.drain()
        [outcome] = runner.finished()
        assert work.calls == []
        assert not outcome.success
        runner.submit(job(2, 1))
        runner.drain()
        assert [o.success for o in runner.finished()] == [True]


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("x"), OSError(5, "EIO"), TimeoutError()]
)
def test_a_run_that_raises_fails_its_key_alone(  # A13
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def run(operation: Operation, key_: bytes, slot: int) -> bool:
        if key_ == key(2):
            raise error
        return True

    with running(run) as runner:
        runner.submit(job(1, 1, 2, 3))
        runner.submit(job(2, 4))
        runner.drain()
        outcomes = {outcome.job.job_id: outcome for outcome in runner.finished()}
        assert len(threads_alive()) == 1
    assert outcomes[1].succeeded == (key(1), key(3))
    assert outcomes[2].success
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


class Panic(BaseException):
    """As a backend that is written in Rust raises it."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [asyncio.CancelledError(), Panic()])
def test_a_run_that_is_torn_down_fails_its_key_alone(error: BaseException) -> None:
    def run(operation: Operation, key: bytes, slot: int) -> bool:
        raise error

    with running(run) as runner:
        [thread] = [t for t in threading.enumerate() if t.name.startswith(NAME)]
        runner.submit(job(1, 1))
        outcomes: list[Outcome] = []

        def over() -> bool:
            alive = thread.is_alive()
            outcomes.extend(runner.finished())
            return bool(outcomes) or not alive

        until(over)
        assert [outcome.success for outcome in outcomes] == [False]
        assert thread.is_alive()


def test_each_job_is_reported_once_to_whoever_asks() -> None:
    told: list[Outcome] = []
    lock = threading.Lock()
    everything = threading.Event()

    def run(operation: Operation, key: bytes, slot: int) -> bool:
        return slot % 20 == 0

    def poll(runner: JobRunner) -> None:
        while not everything.is_set():
            outcomes = runner.finished()
            with lock:
                told.extend(outcomes)
                if len(told) >= 300:
                    everything.set()

    with running(run, threads=4) as runner:
        pollers = [threading.Thread(target=poll, args=(runner,)) for _ in range(2)]
        for poller in pollers:
            poller.start()
        operations: Iterator[Operation] = itertools.cycle(("load", "store"))
        for i in range(300):
            runner.submit(job(i, *range(i % 4), operation=next(operations)))
        assert everything.wait(PATIENCE)
        for poller in pollers:
            poller.join(PATIENCE)
        runner.drain()
        assert runner.finished() == []
    assert Counter(outcome.job.job_id for outcome in told) == Counter(range(300))


# ---- the deadline


def occupy(runner: JobRunner, work: Work) -> None:
    """Job 1 holds the only thread at the gate with its first key; the second one waits."""
    while True:
        runner.submit(job(1, 1, 2))
        while not work.started.acquire(timeout=0.001):
            if runner.finished():  # a slow machine: even the first key waited too long
                break
        else:
            return


def test_keys_that_wait_past_the_deadline_fail_without_running(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupy(runner, work)
        runner.submit(job(2, 3, 4))
        [outcome] = ended(runner, 1)
        assert outcome.job.job_id == 2
        assert outcome.succeeded == ()
        assert not outcome.success
    assert work.keys == [key(1)]


def test_a_job_whose_key_still_runs_is_not_reported(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupy(runner, work)
        runner.submit(job(2, 3))
        [outcome] = ended(runner, 1)  # so that the deadline of job 1 has passed as well
        assert outcome.job.job_id == 2
        assert runner.finished() == []
        work.gate.set()
        [outcome] = ended(runner, 1)
    assert outcome.job.job_id == 1
    assert outcome.succeeded == (key(1),)
    assert not outcome.success
    assert work.keys == [key(1)]


def test_loads_and_stores_that_wait_are_both_given_up(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupy(runner, work)
        runner.submit(job(2, 3, operation="store"))
        runner.submit(job(3, 4, operation="load"))
        outcomes = ended(runner, 2)
    assert {outcome.job.job_id for outcome in outcomes} == {2, 3}
    assert work.keys == [key(1)]


def test_a_runner_works_on_after_a_deadline(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupy(runner, work)
        runner.submit(job(2, 3))
        ended(runner, 1)
        work.gate.set()
        ended(runner, 1)
        until(lambda: _succeeds(runner))


def _succeeds(runner: JobRunner) -> bool:
    """Whether a new job does; a slow machine may let it wait past the deadline."""
    runner.submit(job(3, 3))
    [outcome] = ended(runner, 1)
    return outcome.success


# ---- drain and shutdown


def test_drain_returns_when_nothing_touches_a_slot_any_more(work: Work) -> None:
    drained = threading.Event()
    with running(work, threads=2) as runner:
        runner.submit(job(1, 1, 2, 3))
        runner.submit(job(2, 4, operation="store"))
        work.wait_for(2)

        def drain() -> None:
            runner.drain()
            drained.set()

        thread = threading.Thread(target=drain)
        thread.start()
        assert not drained.wait(0.02)
        work.gate.set()
        assert drained.wait(PATIENCE)
        thread.join()
        assert {outcome.job.job_id for outcome in runner.finished()} == {1, 2}
    assert len(work.calls) == 4


def test_drain_without_jobs_returns_at_once(work: Work) -> None:
    with running(work) as runner:
        runner.drain()
        assert runner.finished() == []


def test_shutdown_gives_up_what_waits_and_waits_for_what_runs(work: Work) -> None:
    runner = JobRunner(work, threads=1, deadline=600.0, name=NAME)
    runner.submit(job(1, 1, 2))
    runner.submit(job(2, 3, operation="store"))
    work.wait_for(1)
    thread = threading.Thread(target=runner.shutdown)
    thread.start()
    outcomes = ended(runner, 1)  # what waited was given up, so shutdown has begun
    assert [outcome.job.job_id for outcome in outcomes] == [2]
    assert thread.is_alive()

    runner.submit(job(3, 4))  # too late
    outcomes = ended(runner, 1)
    assert [(o.job.job_id, o.success) for o in outcomes] == [(3, False)]

    work.gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    [outcome] = runner.finished()
    assert (outcome.job.job_id, outcome.succeeded) == (1, (key(1),))
    assert work.keys == [key(1)]
    assert threads_alive() == []


def test_no_thread_is_left_after_shutdown(work: Work) -> None:
    work.gate.set()
    runner = JobRunner(work, threads=5, deadline=600.0, name=NAME)
    assert sorted(threads_alive()) == [f"{NAME}-{i}" for i in range(5)]
    runner.submit(job(1, *range(20)))
    runner.drain()
    runner.shutdown()
    assert threads_alive() == []


def test_shutdown_twice_is_once(work: Work) -> None:
    runner = JobRunner(work, threads=2, deadline=600.0, name=NAME)
    runner.shutdown()
    runner.shutdown()
    runner.drain()
    assert threads_alive() == []
