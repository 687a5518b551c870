"""Jobs over movers on real threads and sockets. Nothing here waits for a time to pass,
except for a deadline.
"""

import asyncio
import itertools
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from work import (
    DONE,
    NAME,
    PATIENCE,
    Work,
    descriptors,
    end,
    ended,
    job,
    key,
    let_arrive,
    running,
    succeeded,
    threads_alive,
    until,
)

from kvstore import jobs
from kvstore.arrays import make_proof
from kvstore.capacity import Room
from kvstore.errors import InvalidInputError
from kvstore.job import NO_ROOM, Job, Outcome
from kvstore.jobs import DIED, NO_ROOM_IN_TIME, PART_KEYS, JobRunner
from kvstore.links import DEEP, MAX_PAUSE, Link
from kvstore.mover import LOADS_PER_STORE, WAITED, Mover
from kvstore.parts import (
    FAILED,
    INVALID,
    MAX_MESSAGE_BYTES,
    UNKNOWN,
    UPKEEP_SECONDS,
    Answer,
    Hint,
    Operation,
    Part,
    Reply,
)
from kvstore.paths import MAX_KEY_BYTES
from kvstore.processes import ThreadMover

UPKEEP: tuple[Operation, ...] = ("sweep", "collect", "touch")


@pytest.fixture
def work() -> Iterator[Work]:
    """Work whose gate is closed; it is opened in the end, whatever happens."""
    work = Work()
    yield work
    work.gate.set()


@pytest.fixture
def works() -> Iterator[list[Work]]:
    works = [Work() for _ in range(3)]
    yield works
    for work in works:
        work.gate.set()


def done(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
    return Answer(DONE)


# ---- what runs


def test_every_key_is_run_with_its_own_slot(work: Work) -> None:  # A23
    work.gate.set()
    slots = np.array([7, 2, 900], np.int32)
    keys = (key(5), key(1), key(3))
    with running(work) as runner:
        runner.submit(Job(1, "store", keys, slots.tolist()))
        runner.drain()
    assert work.calls == [("store", k, s) for k, s in zip(keys, (7, 2, 900), strict=True)]


def test_every_key_is_run_with_its_own_hint() -> None:
    told: list[tuple[bytes, Hint]] = []

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        told.append((key, hint))
        return Answer(DONE)

    with running(perform) as runner:
        runner.submit(Job(1, "load", (key(1), key(2)), (0, 1), (7, None)))
        runner.submit(Job(2, "store", (key(3), key(4)), (0, 1), (True, False)))
        runner.submit(Job(3, "store", (key(5),), (0,)))
        runner.drain()
    assert told == [
        (key(1), 7),
        (key(2), None),
        (key(3), True),
        (key(4), False),
        (key(5), None),
    ]


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
        let_arrive(runner)
        work.gate.set()
        runner.drain()
    assert work.keys == [key(n) for n in (0, 3, 4, 1, 2)]


def test_a_load_is_next_even_after_a_store_has_begun(work: Work) -> None:
    with running(work) as runner:
        runner.submit(job(0, 0, 1, 2, operation="store"))
        work.wait_for(1)
        runner.submit(job(1, 3, operation="load"))
        let_arrive(runner)
        work.gate.set()
        runner.drain()
        order = [outcome.job.job_id for outcome in runner.finished()]
    assert work.keys == [key(n) for n in (0, 3, 1, 2)]
    assert order == [1, 0]


def test_a_store_has_its_turn_now_and_then(work: Work) -> None:
    with running(work) as runner:
        runner.submit(job(0, 0))
        work.wait_for(1)
        runner.submit(job(1, 100, 101, operation="store"))
        runner.submit(job(2, *range(1, 2 * LOADS_PER_STORE + 1)))
        let_arrive(runner)
        work.gate.set()
        runner.drain()
    turns = [n for n, (operation, _, _) in enumerate(work.calls) if operation == "store"]
    assert turns[1] - turns[0] == LOADS_PER_STORE + 1


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_keys_run_at_once_and_no_more(threads: int) -> None:
    together = threading.Barrier(threads)
    lock = threading.Lock()
    at_once: list[int] = []
    now = 0

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        nonlocal now
        with lock:
            now += 1
            at_once.append(now)
        together.wait(PATIENCE)  # passes only with all threads inside
        with lock:
            now -= 1
        return Answer(DONE)

    with running(perform, threads=threads) as runner:
        runner.submit(job(1, *range(4 * threads)))
        runner.drain()
        [outcome] = runner.finished()
    assert len(succeeded(outcome)) == 4 * threads
    assert max(at_once) == threads


def test_lookups_do_not_wait_for_transfers(work: Work) -> None:
    with running(work) as runner:
        runner.submit(job(1, 1, 2))
        work.wait_for(1)
        runner.submit(Job(2, "lookup", (key(3), key(4)), ()))
        [outcome] = ended(runner, 1)
        assert outcome.job.job_id == 2
        assert outcome.words == [DONE, DONE]


@pytest.mark.parametrize("lookups", [1, 3])
def test_neither_lookups_nor_collections_wait_for_touches(work: Work, lookups: int) -> None:
    """In a bucket a touch is a write, and writes may hang while reads do not."""

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        return work(operation, key, slot, hint) if operation == "touch" else Answer(DONE)

    with running(perform, lookups=lookups) as runner:
        runner.submit(Job(-2, "touch", tuple(map(key, range(9))), ()))
        work.wait_for(1)
        runner.submit(Job(-2, "collect", (key(0),), ()))
        runner.submit(Job(2, "lookup", (key(3), key(4)), ()))
        outcomes = ended(runner, 2)
        assert {o.job.operation for o in outcomes} == {"collect", "lookup"}
        work.gate.set()


# ---- how jobs end


def test_an_outcome_names_the_job_and_what_succeeded(work: Work) -> None:
    work.gate.set()
    submitted = job(7, 1, 2)
    with running(work) as runner:
        runner.submit(submitted)
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.job is submitted
    assert outcome.words == [DONE, DONE]
    assert not outcome.problems
    assert 0 <= outcome.seconds < PATIENCE


def test_exactly_the_keys_that_succeeded_are_told(work: Work) -> None:  # A27, A47
    work.failing = frozenset((key(2), key(3)))
    work.gate.set()
    with running(work, threads=2) as runner:
        runner.submit(job(1, 1, 2, 3, 4, 5))
        runner.drain()
        [outcome] = runner.finished()
    assert succeeded(outcome) == (key(1), key(4), key(5))
    assert outcome.problems == {1: "it was told to", 2: "it was told to"}


def test_keys_are_told_in_the_jobs_order_however_they_end() -> None:
    first_may_end = threading.Event()

    def perform(operation: Operation, key_: bytes, slot: int, hint: Hint) -> Answer:
        if key_ == key(1):
            return end(first_may_end.wait(PATIENCE))
        first_may_end.set()
        return end(key_ == key(2))

    with running(perform, threads=2) as runner:
        runner.submit(job(1, 1, 2, 3))
        runner.drain()
        [outcome] = runner.finished()
    assert succeeded(outcome) == (key(1), key(2))


def test_an_empty_job_ends_at_once(work: Work) -> None:  # A23
    with running(work) as runner:
        runner.submit(job(1))
        runner.submit(Job(2, "lookup", (), ()))
        outcomes = runner.finished()
    assert [(o.job.job_id, o.words, o.proofs, o.problems) for o in outcomes] == [
        (1, [], [], {}),
        (2, [], [], {}),
    ]
    assert work.calls == []


@pytest.mark.parametrize(
    ("keys", "slots"),
    [
        pytest.param(3, 2, id="A46-more-keys"),
        pytest.param(2, 3, id="A46-more-slots"),
        pytest.param(1, 0, id="A46-no-slots"),
        pytest.param(0, 1, id="A46-no-keys"),
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
        assert outcome.words == [INVALID] * keys
        assert outcome.proofs == [None] * keys
        assert outcome.problems == {0: f"{keys} keys for {slots} slots and 0 hints"}
        runner.submit(job(2, 1))
        runner.drain()
        assert [succeeded(o) for o in runner.finished()] == [(key(1),)]


@pytest.mark.parametrize("operation", ["load", "store", "lookup"])
@pytest.mark.parametrize("hints", [1, 3])
def test_keys_and_hints_that_do_not_match_fail_as_a_whole(
    work: Work, operation: Operation, hints: int
) -> None:
    with running(work) as runner:
        runner.submit(Job(1, operation, (key(1), key(2)), (1, 2), (None,) * hints))
        runner.drain()
        [outcome] = runner.finished()
    assert work.calls == []
    assert outcome.words == [INVALID] * 2
    assert outcome.problems == {0: f"2 keys for 2 slots and {hints} hints"}


class Panic(BaseException):
    """As a backend that is written in Rust raises it."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("x"),
        OSError(5, "EIO"),
        TimeoutError(),
        asyncio.CancelledError(),
        Panic(),
        SystemExit(1),
    ],
    ids=repr,
)
def test_what_is_raised_fails_its_key_alone(  # A13
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def perform(operation: Operation, key_: bytes, slot: int, hint: Hint) -> Answer:
        if key_ == key(2):
            raise error
        return Answer(DONE)

    with running(perform) as runner:
        threads = threads_alive()
        runner.submit(job(1, 1, 2, 3))
        runner.submit(job(2, 4))
        runner.drain()
        outcomes = {outcome.job.job_id: outcome for outcome in runner.finished()}
        assert threads_alive() == threads
    assert succeeded(outcomes[1]) == (key(1), key(3))
    assert outcomes[1].problems == {1: f"{type(error).__name__}: {error}"}
    assert succeeded(outcomes[2]) == (key(4),)
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_each_job_is_reported_once_to_whoever_asks() -> None:
    told: list[Outcome] = []
    lock = threading.Lock()
    everything = threading.Event()

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        return end(slot % 20 == 0)

    def poll(runner: JobRunner) -> None:
        while not everything.is_set():
            outcomes = runner.finished()
            with lock:
                told.extend(outcomes)
                if len(told) >= 300:
                    everything.set()

    def submit(runner: JobRunner, first: int) -> None:
        operations: Iterator[Operation] = itertools.cycle(("load", "store", "lookup"))
        for i in range(first, first + 100):
            runner.submit(job(i, *range(i % 4), operation=next(operations)))

    with running(perform, perform, threads=2) as runner:
        threads = [threading.Thread(target=poll, args=(runner,)) for _ in range(2)]
        threads += [
            threading.Thread(target=submit, args=(runner, first)) for first in (0, 100, 200)
        ]
        for thread in threads:
            thread.start()
        assert everything.wait(PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        runner.drain()
        assert runner.finished() == []
    assert Counter(outcome.job.job_id for outcome in told) == Counter(range(300))
    for outcome in told:
        expected = [k for i, k in enumerate(outcome.job.keys) if i % 2 == 0]
        assert succeeded(outcome) == tuple(expected)


# ---- parts


def test_a_job_is_dealt_to_all_movers_evenly(works: list[Work]) -> None:
    with running(*works) as runner:
        runner.submit(job(1, *range(30)))
        for work in works:
            work.gate.set()
        runner.drain()
    assert [len(work.calls) for work in works] == [10, 10, 10]
    assert sorted(k for work in works for k in work.keys) == [key(n) for n in range(30)]


def test_a_mover_that_has_more_to_do_gets_less(works: list[Work]) -> None:
    slow, *quick = works
    for work in quick:
        work.gate.set()
    with running(*works) as runner:
        runner.submit(job(1, *range(300)))

        def only_the_slow_one_has_some() -> bool:
            runner.finished()
            return [link.keys for link in runner._links] == [100, 0, 0]

        until(only_the_slow_one_has_some)
        slow.wait_for(1)  # its thread may come to its first key later than the others end
        for work in works:
            work.calls.clear()
        runner.submit(job(2, *range(10)))
        [outcome] = ended(runner, 1)
        assert outcome.job.job_id == 2
        assert [len(work.calls) for work in quick] == [5, 5]
        assert slow.calls == []  # it still holds its first
        runner.submit(job(3, *range(500)))
        slow.gate.set()
        runner.drain()
    assert [len(work.calls) - 5 for work in quick] == [200, 200]


@pytest.mark.parametrize("count", [PART_KEYS, PART_KEYS + 1, 10_000])
@pytest.mark.parametrize("movers", [1, 3])
def test_a_big_job_is_split_and_its_answers_keep_their_order(
    count: int, movers: int
) -> None:
    keys = tuple(n.to_bytes(MAX_KEY_BYTES) for n in range(count))
    proofs = tuple(make_proof(2**32 - 1 - n, "blosc") for n in range(count))

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        assert isinstance(hint, int)
        return Answer(str(slot), hint, f"problem {slot}" * 1000)

    with running(*[perform] * movers, threads=2) as runner:
        runner.submit(Job(1, "load", keys, range(count), proofs))
        runner.drain()
        [outcome] = runner.finished()
    assert outcome.words == [str(n) for n in range(count)]
    assert outcome.proofs == list(proofs)
    assert 0 in outcome.problems
    for n, problem in outcome.problems.items():
        assert problem.startswith(f"problem {n}p")


def test_keys_that_no_message_can_hold_fail_alone(work: Work) -> None:
    work.gate.set()
    long = Job(1, "load", (key(1), bytes(MAX_MESSAGE_BYTES)), (0, 1))
    with running(work) as runner:
        runner.submit(long)
        runner.submit(
            Job(2, "store", [bytes(96)] * PART_KEYS + [bytes(999_999)], range(513))
        )
        runner.submit(job(3, 3))
        runner.drain()
        first, second, third = sorted(runner.finished(), key=lambda o: o.job.job_id)
    assert succeeded(first) == ()
    assert first.problems == {0: "its keys are too long"}
    assert len(succeeded(second)) == PART_KEYS
    assert second.problems == {PART_KEYS: "its keys are too long"}
    assert succeeded(third) == (key(3),)


@dataclass
class Fake:
    """A mover whose other end is the test's.

    Attributes:
        ends: the mover's end of each start.
        refusals: how many more starts fail, and with what.
        stubborn: whether it lives on when it is killed.
    """

    ready: bool = True
    ends: list[socket.socket] = field(default_factory=list)
    refusals: int = 0
    refusal: Exception = field(
        default_factory=lambda: OSError(11, "Resource temporarily unavailable")
    )
    closed: bool = False
    stubborn: bool = False

    def start(self) -> socket.socket:
        if self.refusals:
            self.refusals -= 1
            raise self.refusal
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends.append(theirs)
        if self.ready:
            self.reply(0)
        return ours

    def reply(self, number: int, *words: str) -> None:
        self.say(Reply(number, words, [None] * len(words), {}))

    def say(self, reply: Reply) -> None:
        self.ends[-1].send(pickle.dumps(tuple(reply)))

    def take(self) -> Part:
        self.ends[-1].settimeout(PATIENCE)
        return Part(*pickle.loads(self.ends[-1].recv(MAX_MESSAGE_BYTES)))

    def kill(self) -> bool:
        if self.stubborn:
            return True
        for channel in self.ends:
            channel.close()
        return True

    def join(self, seconds: float) -> bool:
        return all(channel.fileno() < 0 for channel in self.ends)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    fakes = [Fake(), Fake()]
    yield fakes
    for fake in fakes:
        fake.stubborn = False
        fake.kill()


def test_a_job_stays_whole_while_every_mover_has_enough_to_do(fakes: list[Fake]) -> None:
    runner = JobRunner(fakes, deadline=600, grace=0)
    runner.submit(job(1, *range(2 * DEEP * 10)))
    assert [len(fake.take().keys) for fake in fakes] == [DEEP * 10] * 2
    runner.submit(job(2, *range(10)))
    assert sorted(len(link.parts) for link in runner._links) == [1, 2]
    runner.submit(job(3, *range(40)))
    assert sum(len(link.parts) for link in runner._links) == 5  # dealt to both
    for fake in fakes:
        fake.kill()
    runner.shutdown()


def test_a_mover_that_does_not_read_holds_nobody_up(fakes: list[Fake]) -> None:
    fake = fakes[0]
    keys = [n.to_bytes(MAX_KEY_BYTES) for n in range(PART_KEYS)]
    runner = JobRunner([fake], deadline=600, grace=600)
    for i in range(40):  # some 2 MB, ten times what the socket holds
        runner.submit(Job(i, "store", keys, range(PART_KEYS)))
    assert runner.finished() == []
    # When it reads on, nothing is lost, in order.
    mover = Mover(fake.ends[-1], done, threads=1, lookups=1, name=NAME)
    thread = threading.Thread(target=mover.serve)
    thread.start()
    runner.drain()
    assert [o.job.job_id for o in runner.finished()] == list(range(40))
    runner.shutdown()
    thread.join(PATIENCE)
    assert threads_alive() == []


def test_replies_that_nobody_reads_hold_nobody_up() -> None:
    count = 5000  # a socket holds some hundreds
    with running(done, done, threads=2) as runner:
        for i in range(count):
            runner.submit(job(i, i))
        runner.drain()
        outcomes = runner.finished()
    assert sorted(o.job.job_id for o in outcomes) == list(range(count))
    assert all(len(succeeded(outcome)) == 1 for outcome in outcomes)


def test_lookups_that_ended_are_reported_though_others_of_their_job_take_long(
    fakes: list[Fake],
) -> None:
    """Within one mover, and of another one. Each key once."""
    runner = JobRunner(fakes, deadline=600, grace=600)
    runner.submit(Job(5, "lookup", tuple(map(key, range(6))), ()))
    slow, quick = (fake.take() for fake in fakes)
    fakes[1].reply(quick.number, *[DONE] * 3)
    first = Reply(slow.number, [UNKNOWN, FAILED, DONE], [None] * 3, {1: "EIO"}, (), False)
    fakes[0].say(first)
    outcomes = ended(runner, 1)
    while sum(len(outcome.words) for outcome in outcomes) < 5:
        outcomes += ended(runner, 1)
    assert all(outcome.job.job_id == 5 for outcome in outcomes)
    told = {k: w for o in outcomes for k, w in zip(o.job.keys, o.words, strict=True)}
    assert told == {
        slow.keys[1]: FAILED,
        slow.keys[2]: DONE,
        **dict.fromkeys(quick.keys, DONE),
    }
    [(outcome, i)] = [(o, i) for o in outcomes for i in o.problems]
    assert (outcome.job.keys[i], outcome.problems[i]) == (slow.keys[1], "EIO")
    fakes[0].reply(slow.number, DONE, FAILED, DONE)
    fakes[0].say(first)  # news that its end has overtaken
    [last] = ended(runner, 1)
    assert (last.job.keys, last.words) == ([slow.keys[0]], [DONE])
    runner.drain()
    assert runner.finished() == []
    for fake in fakes:
        fake.kill()
    runner.shutdown()


def test_of_lookups_that_are_lost_only_those_fail_that_were_not_told(
    fakes: list[Fake],
) -> None:
    fake = fakes[0]
    runner = JobRunner([fake], deadline=600, grace=600)
    runner.submit(Job(5, "lookup", (key(1), key(2), key(3)), ()))
    number = fake.take().number
    fake.say(Reply(number, [DONE, UNKNOWN, UNKNOWN], [None] * 3, {}, (), False))
    [told] = ended(runner, 1)
    assert (told.job.keys, told.words) == ([key(1)], [DONE])
    fake.kill()
    [lost] = ended(runner, 1)
    assert (lost.job.keys, lost.words) == ([key(2), key(3)], [FAILED, FAILED])
    assert lost.problems == {0: DIED}
    fake.kill()
    runner.shutdown()


# ---- the deadline


def occupied(runner: JobRunner, work: Work, first: Job | None = None) -> None:
    """A job, 1 if it is not given, holds its only thread at the gate with its first key;
    the second one waits.
    """
    while True:
        runner.submit(first or job(1, 1, 2))
        while not work.started.acquire(timeout=0.001):
            if runner.finished():  # a slow machine: even the first key waited too long
                break
        else:
            return


def test_keys_that_wait_past_the_deadline_fail_without_running(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupied(runner, work)
        runner.submit(job(2, 3, 4))
        [outcome] = ended(runner, 1)
        assert outcome.job.job_id == 2
        assert succeeded(outcome) == ()
        assert set(outcome.problems.values()) == {WAITED}
    assert work.keys == [key(1)]


def test_a_job_whose_key_still_runs_is_not_reported(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupied(runner, work)
        runner.submit(job(2, 3))
        [outcome] = ended(runner, 1)  # so that the deadline of job 1 has passed as well
        assert outcome.job.job_id == 2
        assert runner.finished() == []
        work.gate.set()
        [outcome] = ended(runner, 1)
    assert outcome.job.job_id == 1
    assert succeeded(outcome) == (key(1),)
    assert outcome.problems == {1: WAITED}
    assert work.keys == [key(1)]


def test_loads_stores_and_lookups_that_wait_are_all_given_up(work: Work) -> None:
    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        return work("load" if operation == "lookup" else operation, key, slot, hint)

    with running(perform, deadline=0.02) as runner:
        occupied(runner, work)
        occupied(runner, work, Job(4, "lookup", (key(5),), ()))
        runner.submit(job(2, 3, operation="store"))
        runner.submit(job(3, 4, operation="load"))
        runner.submit(Job(5, "lookup", (key(6),), ()))
        outcomes = ended(runner, 3)
        assert {outcome.job.job_id for outcome in outcomes} == {2, 3, 5}
        work.gate.set()
    assert work.keys == [key(1), key(5)]


def test_a_runner_works_on_after_a_deadline(work: Work) -> None:
    with running(work, deadline=0.02) as runner:
        occupied(runner, work)
        runner.submit(job(2, 3))
        ended(runner, 1)
        work.gate.set()
        ended(runner, 1)
        until(lambda: _succeeds(runner))


def _succeeds(runner: JobRunner) -> bool:
    """Whether a new job does; a slow machine may let it wait past the deadline."""
    runner.submit(job(3, 3))
    [outcome] = ended(runner, 1)
    return succeeded(outcome) == (key(3),)


def test_a_thread_that_hangs_is_told_once(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    with running(work, deadline=0.02, grace=0.02) as runner:
        occupied(runner, work)

        def found() -> bool:
            assert runner.finished() == []
            return bool(caplog.records)

        until(found)
        runner._look_after(runner._looked_after + 100)
        work.gate.set()
        [outcome] = ended(runner, 1)
    assert succeeded(outcome) == (key(1),)
    assert [r.getMessage() for r in caplog.records] == [
        "a load is 0 s late: nothing can end its thread"
    ]


# ---- movers that end


def test_what_a_mover_had_when_it_ended_has_failed(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    runner = JobRunner(fakes, deadline=600, grace=600)
    runner.submit(job(1, 1, 2, 3, 4))
    first, second = (fake.take() for fake in fakes)
    fakes[0].kill()
    assert runner.finished() == []
    fakes[1].reply(second.number, *[DONE] * 2)
    [outcome] = ended(runner, 1)
    assert succeeded(outcome) == tuple(second.keys)
    [problem] = outcome.problems.items()
    assert problem == (outcome.job.keys.index(first.keys[0]), DIED)
    assert [r.getMessage() for r in caplog.records] == [
        "a process that transfers blocks has ended and is started again; the 2 blocks "
        "that it had count as failed"
    ]
    for fake in fakes:
        fake.kill()
    runner.shutdown()


def test_what_a_mover_said_before_its_end_is_heard(fakes: list[Fake]) -> None:
    fake = fakes[0]
    runner = JobRunner([fake], deadline=600, grace=600)
    runner.submit(job(1, 1))
    runner.submit(job(2, 2))
    fake.reply(fake.take().number, DONE)
    fake.kill()  # with the second part unread, which resets the connection
    outcomes = ended(runner, 2)
    assert [(o.job.job_id, succeeded(o)) for o in outcomes] == [(1, (key(1),)), (2, ())]
    runner.shutdown()


def test_while_nothing_runs_a_job_fails_at_once(fakes: list[Fake]) -> None:
    fake = fakes[0]
    runner = JobRunner([fake], deadline=600, grace=600)
    fake.refusals = 1000
    fake.kill()

    def fails() -> bool:
        runner.submit(job(1, 1))
        [outcome] = ended(runner, 1)
        assert succeeded(outcome) == ()
        return outcome.problems == {0: "nothing runs that could transfer it"}

    until(fails)
    runner.shutdown()


def test_a_mover_that_cannot_be_started_again_is_tried_again(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake = fakes[0]
    runner = JobRunner([fake], deadline=600, grace=600)
    fake.refusals = 1
    fake.kill()
    until(lambda: runner.finished() or len(fake.ends) == 2)
    assert "cannot be started: BlockingIOError: [Errno 11] Resource temp" in caplog.text
    runner.submit(job(1, 1))
    fake.reply(fake.take().number, DONE)
    [outcome] = ended(runner, 1)
    assert succeeded(outcome) == (key(1),)
    fake.kill()
    runner.shutdown()


def test_a_start_may_raise_anything(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake = fakes[0]
    runner = JobRunner([fake], deadline=600, grace=600)
    fake.refusals, fake.refusal = 1, TypeError("sequence item 0")
    fake.kill()
    until(lambda: runner.finished() or len(fake.ends) == 2)
    assert "cannot be started: TypeError: sequence item 0" in caplog.text
    fake.kill()
    runner.shutdown()


def test_a_mover_that_is_slow_to_be_ready_stops_the_start(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "START_SECONDS", 0.0)
    fakes[0].ready = False
    with pytest.raises(InvalidInputError, match="the others took more than 0 s, and what"):
        JobRunner(fakes, deadline=600, grace=0)
    assert all(fake.closed for fake in fakes)


def test_a_mover_that_is_starting_again_gets_nothing_while_others_are_ready(
    fakes: list[Fake],
) -> None:
    runner = JobRunner(fakes, deadline=600, grace=600)
    fakes[0].ready = False
    fakes[0].kill()
    until(lambda: runner.finished() or len(fakes[0].ends) == 2)
    runner.submit(job(1, 1, 2, 3))
    assert fakes[1].take().keys == (key(1), key(2), key(3))
    fakes[0].reply(0)
    until(lambda: runner.finished() or all(link.ready for link in runner._links))
    runner.submit(job(2, 4, 5, 6))
    assert fakes[0].take().keys == (key(4), key(5), key(6))
    for fake in fakes:
        fake.kill()
    runner.shutdown()


def test_a_mover_that_was_killed_gets_nothing_while_another_is_up(
    fakes: list[Fake],
) -> None:
    runner = JobRunner(fakes, deadline=600, grace=600)
    fakes[0].stubborn = True
    runner.submit(job(1, 1, 2))
    fakes[0].take()
    fakes[1].reply(fakes[1].take().number, DONE)
    assert runner.finished() == []
    runner._look_after(time.monotonic() + 2000)
    runner.submit(job(2, *range(3, 9)))
    assert fakes[1].take().keys == tuple(key(n) for n in range(3, 9))
    fakes[0].stubborn = False
    for fake in fakes:
        fake.kill()
    runner.shutdown()


def test_upkeep_that_takes_its_time_has_nobody_killed(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep or a collection may be slow, and the mover has loads as well."""
    fake = fakes[0]
    runner = JobRunner([fake], deadline=60, grace=60)
    for operation in UPKEEP:
        runner.submit(Job(-2, operation, (key(1),), ()))
        fake.take()
    runner._look_after(time.monotonic() + 60 + UPKEEP_SECONDS - 10)
    assert not caplog.records
    runner.submit(job(1, 1))
    runner._look_after(time.monotonic() + 130)
    assert "a load is 60 s late: its process is killed" in caplog.text
    runner.shutdown()


@pytest.mark.parametrize("operation", UPKEEP)
def test_upkeep_that_hangs_is_ended_and_has_failed(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture, operation: Operation
) -> None:
    """Else its owner would wait for good, and with a collection every store."""
    runner = JobRunner(fakes[:1], deadline=60, grace=60)
    runner.submit(Job(-2, operation, (key(1),), ()))
    fakes[0].take()
    runner._look_after(time.monotonic() + 60 + UPKEEP_SECONDS + 1)
    [outcome] = ended(runner, 1)
    assert outcome.job.operation == operation
    assert (outcome.words, outcome.problems) == ([FAILED], {0: DIED})
    assert f"a {operation} is 1800 s late: its process is killed" in caplog.messages
    runner.shutdown()


def test_stores_that_find_no_room_in_time_were_not_tried(fakes: list[Fake]) -> None:
    """Whether their deadline passes, or nobody may touch a slot any more."""
    room = Room(1000, 10)
    runner = JobRunner(fakes[:1], deadline=600, grace=600, room=room)
    runner.submit(job(1, 1, 2, operation="store"))
    runner._look_after(time.monotonic() + 700)
    runner.submit(job(2, 3, operation="store"))
    runner.drain()
    outcomes = runner.finished()
    assert [outcome.words for outcome in outcomes] == [[NO_ROOM] * 2, [NO_ROOM]]
    assert all(outcome.problems == {0: NO_ROOM_IN_TIME} for outcome in outcomes)
    fakes[0].kill()
    runner.shutdown()


def test_pauses_before_a_restart_grow_until_a_part_is_answered(fakes: list[Fake]) -> None:
    fake = fakes[0]
    link = Link(fake)
    pauses = []
    for _ in range(8):
        pauses.append(link._pause)
        fake.kill()
        list(link.replies())
        assert not link.up
        link.close()
        assert not link.revive()
        link._not_before = 0.0  # its pause is over
        assert link.revive()
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE]
    assert link.send(Part(7, "load", (key(1),), (1,), (), 1e9))
    fake.reply(7, DONE)
    [(part, _)] = link.replies()
    assert part.number == 7
    assert link._pause == 0
    fake.kill()
    link.close()


def test_a_start_that_fails_stops_with_its_remedy(fakes: list[Fake]) -> None:
    fakes[0].refusals = 1000
    with pytest.raises(InvalidInputError) as caught:
        JobRunner(fakes, deadline=600, grace=0)
    assert str(caught.value) == (
        "processes: expected 2 to start, found 1; the others did not live, and what they "
        'said is above. Set "processes": 0 to transfer on threads of the engine instead.'
    )
    assert all(fake.closed for fake in fakes)
    assert all(fake.join(0) for fake in fakes)


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


def test_what_a_mover_said_before_it_was_killed_is_heard(fakes: list[Fake]) -> None:
    runner = JobRunner(fakes[:1], deadline=600, grace=0)
    runner.submit(job(1, 1))
    fakes[0].reply(fakes[0].take().number, DONE)
    runner.shutdown()
    [outcome] = runner.finished()
    assert succeeded(outcome) == (key(1),)


def test_drain_without_jobs_returns_at_once(work: Work) -> None:
    with running(work) as runner:
        runner.drain()
        assert runner.finished() == []


def test_shutdown_gives_up_what_waits_and_waits_for_what_runs(work: Work) -> None:
    mover = ThreadMover(work, threads=1, lookups=1, name=NAME)
    runner = JobRunner([mover], deadline=600, grace=600)
    runner.submit(job(1, 1, 2))
    runner.submit(job(2, 3, operation="store"))
    work.wait_for(1)
    thread = threading.Thread(target=runner.shutdown)
    thread.start()
    until(lambda: runner._finished)  # what waited was given up, so shutdown has begun
    assert [outcome.job.job_id for outcome in runner._finished] == [2]
    assert thread.is_alive()

    work.gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    first, second = sorted(runner.finished(), key=lambda o: o.job.job_id)
    assert succeeded(first) == (key(1),)
    assert succeeded(second) == ()
    assert work.keys == [key(1)]
    assert threads_alive() == []

    runner.submit(job(3, 4))  # too late
    [outcome] = runner.finished()
    assert (outcome.job.job_id, succeeded(outcome)) == (3, ())


def test_a_thread_that_hangs_is_left_behind_and_its_job_never_reported(work: Work) -> None:
    mover = ThreadMover(work, threads=1, lookups=1, name=NAME)
    runner = JobRunner([mover], deadline=600, grace=0.01)
    runner.submit(job(1, 1))
    work.wait_for(1)
    runner.shutdown()
    assert runner.finished() == []
    assert threads_alive() != []
    work.gate.set()
    until(lambda: threads_alive() == [])
    runner.drain()
    [outcome] = runner.finished()
    assert succeeded(outcome) == (key(1),)


def test_no_thread_and_no_file_is_left_after_shutdown(work: Work) -> None:
    work.gate.set()
    before = descriptors()
    mover = ThreadMover(work, threads=4, lookups=2, name=NAME)
    runner = JobRunner([mover], deadline=600, grace=600)
    assert sorted(threads_alive()) == [*(f"{NAME}-{i}" for i in range(8)), f"{NAME}-reader"]
    runner.submit(job(1, *range(20)))
    runner.drain()
    runner.shutdown()
    assert threads_alive() == []
    assert descriptors() == before


def test_shutdown_twice_is_once(work: Work) -> None:
    mover = ThreadMover(work, threads=2, lookups=1, name=NAME)
    runner = JobRunner([mover], deadline=600, grace=600)
    runner.shutdown()
    runner.shutdown()
    runner.drain()
    assert threads_alive() == []
