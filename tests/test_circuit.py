"""When storage is not asked, and when it is again."""

import logging
from collections.abc import Sequence

import pytest

from kvstore.blocks import Stored
from kvstore.circuit import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, QUIET_SECONDS, Circuit
from kvstore.health import Health
from kvstore.job import NO_ROOM, Job, Outcome
from kvstore.parts import FAILED, INVALID, LATE, Operation
from kvstore.seldom import LOG_SECONDS
from kvstore.transfer import ABSENT, DAMAGED, FOUND, LOADED, REFUSED, TIMEOUT

OPERATIONS: tuple[Operation, ...] = ("lookup", "load", "store")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    return Circuit("loads", "s3://bucket/kv", clock=clock)


def test_it_opens_after_failures_in_a_row(circuit: Circuit) -> None:
    opened = []
    for _ in range(FAILURES):
        circuit.note(0, 1, "no route")
        opened.append(circuit.open)
    assert opened == [False] * (FAILURES - 1) + [True]
    assert circuit.reason == "no route"


def test_an_answer_in_between_keeps_it_closed(circuit: Circuit, clock: Clock) -> None:
    for _ in range(20):
        circuit.note(0, FAILURES - 1)
        circuit.note(1, 7)
        clock.now += 1
    assert not circuit.open


def test_who_is_only_busy_stays_closed(circuit: Circuit, clock: Clock) -> None:
    """Keys wait too long while others succeed."""
    circuit.note(1, 0)
    clock.now += QUIET_SECONDS / 2
    circuit.note(0, 100)
    assert not circuit.open
    clock.now += QUIET_SECONDS / 2
    circuit.note(0, 1)
    assert circuit.open


def test_one_trial_at_a_time_after_pauses_that_grow(circuit: Circuit, clock: Clock) -> None:
    circuit.note(0, FAILURES)
    pause = FIRST_PAUSE
    for _ in range(8):
        assert not circuit.take_trial()
        clock.now += pause - 0.01
        assert not circuit.take_trial()
        clock.now += 0.02
        assert circuit.take_trial()
        clock.now += 100
        assert not circuit.take_trial()  # it has not ended
        circuit.note(0, 1, trial=True)
        pause = min(LONGEST_PAUSE, 2 * pause)
    assert pause == LONGEST_PAUSE
    clock.now += LONGEST_PAUSE
    assert circuit.take_trial()
    circuit.note(1, 0)
    assert not circuit.open
    assert not circuit.take_trial()


def test_jobs_that_were_under_way_are_no_trial(circuit: Circuit, clock: Clock) -> None:
    circuit.note(0, FAILURES)
    circuit.note(0, 50)
    clock.now += FIRST_PAUSE
    assert circuit.take_trial()
    circuit.note(0, 50)  # which began before the trial
    clock.now += 10 * FIRST_PAUSE
    assert not circuit.take_trial()  # the first is still out
    circuit.note(0, 1, trial=True)
    clock.now += 2 * FIRST_PAUSE
    assert circuit.take_trial()


def test_one_that_opens_again_at_once_waits_longer(circuit: Circuit, clock: Clock) -> None:
    circuit.note(0, FAILURES)
    clock.now += FIRST_PAUSE
    circuit.take_trial()
    circuit.note(0, 1, trial=True)
    clock.now += 2 * FIRST_PAUSE
    circuit.take_trial()
    circuit.note(1, 0)
    clock.now += QUIET_SECONDS
    circuit.note(0, FAILURES)
    clock.now += FIRST_PAUSE
    assert not circuit.take_trial()
    clock.now += FIRST_PAUSE
    assert circuit.take_trial()
    circuit.note(1, 0)
    clock.now += LONGEST_PAUSE + 0.1  # well for long: it begins anew
    circuit.note(0, FAILURES)
    clock.now += FIRST_PAUSE
    assert circuit.take_trial()


def test_one_line_for_each_change(
    circuit: Circuit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        circuit.note(0, FAILURES, "HTTP 503")
    clock.now += 7
    circuit.take_trial()
    circuit.note(0, 1, "HTTP 503", trial=True)
    circuit.note(1, 0)
    circuit.note(1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "given up until a trial succeeds: loads of s3://bucket/kv: HTTP 503",
        "works again after 7 s: loads of s3://bucket/kv",
    ]


# ---- health


LOOKUP_TIMEOUT = 5.0


def outcome(
    operation: Operation,
    words: Sequence[str],
    *problems: str,
    trial: bool = False,
    seconds: float = 0.1,
) -> Outcome:
    """`problems` are those of the first keys."""
    keys = [bytes([n]) * 36 for n in range(len(words))]
    job = Job(1, operation, keys, range(len(keys)), trial=trial)
    return Outcome(job, words, [None] * len(words), dict(enumerate(problems)), seconds)


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health("/kv", LOOKUP_TIMEOUT, clock=clock)


@pytest.mark.parametrize("word", [FAILED, LATE, TIMEOUT, REFUSED])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_lookups_loads_and_stores_fail_apart(
    health: Health, word: str, operation: Operation
) -> None:
    health.note(outcome(operation, [word] * FAILURES, "disk full"))
    circuits = (health.lookups, health.loads, health.stores)
    found = {
        name for name, circuit in zip(OPERATIONS, circuits, strict=True) if circuit.open
    }
    assert found == {operation}
    assert health.reads_open == (operation != "store")


def test_answers_to_lookups_do_not_hide_that_loads_fail(
    health: Health, clock: Clock
) -> None:
    """A network that is too slow for blocks answers what is small."""
    for _ in range(FAILURES):
        health.note(outcome("lookup", [FOUND] * 5))
        health.note(outcome("load", [TIMEOUT]))
    assert health.loads.open
    clock.now += FIRST_PAUSE
    assert health.loads.take_trial()
    health.note(outcome("lookup", [FOUND] * 5))
    assert health.reads_open
    health.note(outcome("load", [TIMEOUT, LOADED]))
    assert not health.reads_open


@pytest.mark.parametrize(
    ("operation", "word", "failure"),
    [
        ("load", ABSENT, TIMEOUT),
        ("store", Stored.KEPT, FAILED),
        ("store", NO_ROOM, FAILED),
    ],
    ids=["nothing to read", "nothing to write", "no room to write"],
)
def test_what_moved_nothing_shows_nothing(
    health: Health, operation: Operation, word: str, failure: str
) -> None:
    """Neither does it keep a circuit closed, nor close it."""
    circuit = health.loads if operation == "load" else health.stores
    for _ in range(FAILURES):
        health.note(outcome(operation, [failure]))
        health.note(outcome(operation, [word] * 5))
    assert circuit.open
    health.note(outcome(operation, [word] * 5))
    assert circuit.open


@pytest.mark.parametrize("word", [Stored.KEPT, NO_ROOM])
def test_a_store_that_writes_nothing_is_a_trial_of_nothing(
    health: Health, clock: Clock, word: str
) -> None:
    """Nor does it make the pause longer."""
    health.note(outcome("store", [FAILED] * FAILURES))
    for _ in range(3):
        assert health.stores.open
        clock.now += FIRST_PAUSE
        assert health.stores.take_trial()
        health.note(outcome("store", [word], trial=True))


def test_a_trial_that_finds_nothing_to_load_leaves_it_to_a_request(
    health: Health, clock: Clock
) -> None:
    """All blocks may have been removed: else a healthy storage would be left alone for as
    long as nobody asks for what is there.
    """
    is_open = []
    for seconds, trial, after in (
        (FIRST_PAUSE, [ABSENT, TIMEOUT], []),  # what failed is there, and fails
        (2 * FIRST_PAUSE, [ABSENT, ABSENT], [TIMEOUT]),  # one is enough
        (2 * FIRST_PAUSE, [ABSENT, ABSENT], [LOADED]),  # it has gone on with its pause
    ):
        if not health.loads.open:
            health.note(outcome("load", [TIMEOUT] * FAILURES))
        clock.now += seconds - 0.01
        assert not health.loads.take_trial()
        clock.now += 0.02
        assert health.loads.take_trial()
        health.note(outcome("load", trial, trial=True))
        is_open.append(health.reads_open)
        health.note(outcome("load", after))
        is_open.append(health.reads_open)
    assert is_open == [True, True, False, True, False, False]
    clock.now += QUIET_SECONDS
    health.note(outcome("load", [TIMEOUT] * (FAILURES - 1)))
    assert not health.reads_open


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_was_asked_for_wrongly_says_nothing_of_storage(
    health: Health, operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    health.note(outcome(operation, [INVALID] * 100, "no row has the number 99"))
    assert not health.reads_open
    assert not health.stores.open
    assert f"{operation} of 100 of 100 blocks failed" in caplog.text


@pytest.mark.parametrize("operation", ["load", "store"])
def test_a_job_without_keys_says_nothing(health: Health, operation: Operation) -> None:
    health.note(Outcome(Job(1, operation, (), (7,)), [], [], {0: "0 keys"}, 0.0))
    assert not health.reads_open
    assert not health.stores.open


@pytest.mark.parametrize("word", [ABSENT, DAMAGED, LOADED])
def test_absence_and_damage_are_answers(health: Health, word: str) -> None:
    for _ in range(10):
        health.note(outcome("load", [word] * 100, "a bit flipped"))
    assert not health.loads.open


def test_lookups_that_are_late_are_told_and_open_it(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    health.note_late(FAILURES)
    assert health.lookups.open
    assert health.lookups.reason == "no answer within 5 s"
    assert caplog.records[0].getMessage() == (
        "lookup of 5 of 5 blocks failed, and 0 since the last such line; the first: no "
        "answer within 5 s"
    )


def test_an_answer_that_comes_too_late_is_no_success(health: Health, clock: Clock) -> None:
    late = LOOKUP_TIMEOUT + 0.1
    health.note(outcome("lookup", [FOUND] * FAILURES, seconds=late))
    assert health.lookups.open
    clock.now += FIRST_PAUSE
    assert health.lookups.take_trial()
    health.note(outcome("lookup", [FOUND], trial=True, seconds=late))
    clock.now += FIRST_PAUSE
    assert not health.lookups.take_trial()  # it has failed, and the pause is longer
    clock.now += FIRST_PAUSE
    assert health.lookups.take_trial()
    health.note(outcome("lookup", [FOUND], trial=True, seconds=LOOKUP_TIMEOUT))
    assert not health.lookups.open


def test_the_reason_is_a_failures(health: Health) -> None:
    """A block that is damaged has a problem as well, and is an answer."""
    words = [DAMAGED, *[REFUSED] * FAILURES]
    health.note(outcome("load", words, "a bit flipped", "HTTP 403"))
    for _ in range(FAILURES):
        health.note(outcome("load", [REFUSED], "HTTP 403"))
    assert health.loads.reason == "HTTP 403"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_told_of_trials_that_fail(
    health: Health, clock: Clock, operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    circuits = dict(
        zip(OPERATIONS, (health.lookups, health.loads, health.stores), strict=True)
    )
    health.note(outcome(operation, [FAILED] * FAILURES, "HTTP 503"))
    told = len(caplog.records)
    for _ in range(600):
        clock.now += 1.0
        if circuits[operation].take_trial():
            health.note(outcome(operation, [FAILED], "HTTP 503", trial=True))
    assert len(caplog.records) == told == 2


def test_failures_are_told_once_in_ten_seconds(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        health.note(outcome("load", [FAILED, LOADED], "EIO"))
        health.note(outcome("store", [REFUSED, "stored"], "EACCES"))
    clock.now += LOG_SECONDS
    health.note(outcome("load", [FAILED, LOADED], "EIO"))
    assert [record.getMessage() for record in caplog.records] == [
        "load of 1 of 2 blocks failed, and 0 since the last such line; the first: EIO",
        "store of 1 of 2 blocks failed, and 0 since the last such line; the first: EACCES",
        "load of 1 of 2 blocks failed, and 2 since the last such line; the first: EIO",
    ]
