"""Which upkeep is due."""

import pytest

from kvstore import caretaker
from kvstore.capacity import IDLE_SECONDS, Room
from kvstore.caretaker import TOUCHES_PER_LIFE, UPKEEP, Caretaker, Recent
from kvstore.collector import Collected
from kvstore.job import Job, Outcome
from kvstore.jobs import DIED
from kvstore.parts import FAILED
from kvstore.seldom import LOG_SECONDS
from kvstore.transfer import REFUSED

KEYS = (b"a", b"b")
SECONDS = 60.0


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Care:
    """A caretaker, and what it has submitted."""

    def __init__(self, *, limited: bool = True) -> None:
        self.clock = Clock()
        self.jobs: list[Job] = []
        self.room = Room(100_000, 100, clock=self.clock)
        self.taker = Caretaker(
            self.jobs.append,
            self.room,
            limited=limited,
            touch_seconds=SECONDS,
            clock=self.clock,
        )
        assert self.submitted() == ["sweep"]

    def submitted(self, *, given_up: bool = False) -> list[str]:
        """The operations since the last call, after a step."""
        self.taker.work(waiting=False, given_up=given_up)
        operations = [job.operation for job in self.jobs]
        assert all(job.job_id == UPKEEP for job in self.jobs)
        self.jobs.clear()
        return [name for name in operations if name != "collect"]

    def look(self, **told: float) -> None:
        """A collection ends."""
        job = Job(UPKEEP, "collect", (b"upkeep",), ())
        report = Collected(0, **told)  # type: ignore[arg-type]  # of one field
        outcome = Outcome(job, ["kept up"], [None], {}, 0.1, (report,))
        assert self.taker.ended(outcome) == report

    def use(self) -> list[str]:
        """Blocks are found."""
        self.taker.note_used(KEYS)
        return self.submitted()


def test_a_used_block_is_touched_now_and_then() -> None:
    care = Care()
    assert care.use() == ["touch"]
    assert care.use() == []
    care.clock.now += SECONDS / 2 - 1
    assert care.use() == []
    care.clock.now += SECONDS
    assert care.use() == ["touch"]


def test_no_touch_is_made_while_writes_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is used meanwhile is touched afterwards, as far as memory is worth it."""
    monkeypatch.setattr(caretaker, "MAX_TOUCHED", len(KEYS))
    care = Care()
    care.taker.note_used(KEYS)
    care.taker.note_used((b"c",))
    for _ in range(3):
        assert care.submitted(given_up=True) == []
    care.taker.work(waiting=False, given_up=False)
    [job] = care.jobs
    assert (job.operation, job.keys) == ("touch", KEYS)
    care.taker.note_used((b"c",))
    assert care.submitted() == ["touch"] * 2


def test_failures_of_upkeep_are_told_once_in_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    care = Care()
    touch = Job(UPKEEP, "touch", KEYS, ())
    sweep = Job(UPKEEP, "sweep", (b"upkeep",), ())
    for job in (touch, touch, sweep, touch):
        care.taker.ended(Outcome(job, [REFUSED], [None], {0: "HTTP 403"}, 0.1))
    care.clock.now += LOG_SECONDS
    care.taker.ended(Outcome(touch, [REFUSED], [None], {0: "HTTP 403"}, 0.1))
    assert [record.getMessage() for record in caplog.records] == [
        "upkeep failed: touch: HTTP 403 (and 0 times since the last such line)",
        "upkeep failed: sweep: HTTP 403 (and 0 times since the last such line)",
        "upkeep failed: touch: HTTP 403 (and 2 times since the last such line)",
    ]


def test_what_is_stored_while_a_collection_runs_was_not_removed_by_it() -> None:
    """It may have been before, by the same collection; the store ended after that."""
    care = Care()  # its first collection runs
    care.taker.note_stored((b"a",))
    collect = Job(UPKEEP, "collect", (b"upkeep",), ())
    for gone in ((b"b",), KEYS):
        report = (Collected(0, keys=KEYS),)
        outcome = Outcome(collect, ["kept up"], [None], {}, 0.1, report)
        told = care.taker.ended(outcome)
        assert told is not None
        assert told.keys == gone
        care.clock.now += IDLE_SECONDS
        care.taker.work(waiting=False, given_up=False)  # the next one


def test_where_blocks_go_soon_they_are_touched_sooner() -> None:
    care = Care()
    care.use()
    care.look(age=TOUCHES_PER_LIFE * 2.0)
    care.clock.now += 3.0
    assert care.use() == ["touch"]
    care.look()  # it is not full any more
    care.clock.now += SECONDS / 2 - 1
    assert care.use() == []


def test_without_limits_nothing_is_touched_or_collected() -> None:
    care = Care(limited=False)
    assert care.use() == []
    care.taker.work(waiting=True, given_up=False)
    assert care.jobs == []


def test_a_lost_collection_is_a_look_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    care = Care()  # its first collection runs
    job = Job(UPKEEP, "collect", (b"upkeep",), ())
    assert care.taker.ended(Outcome(job, [FAILED], [None], {0: DIED}, 0.1)) is None
    assert care.room.used is None
    assert f"upkeep failed: collect: {DIED}" in caplog.text
    care.taker.work(waiting=True, given_up=False)
    assert not care.jobs  # in a second, not at once
    care.clock.now += 1.0
    care.taker.work(waiting=True, given_up=False)
    assert [job.operation for job in care.jobs] == ["collect"]


def test_keys_are_remembered_for_half_the_time_at_least() -> None:
    clock = Clock()
    recent = Recent(10.0, clock=clock)
    assert recent.add(b"a")
    for _ in range(3):
        clock.now += 1.6
        assert not recent.add(b"a")
    clock.now += 5.3
    assert recent.add(b"b")
    clock.now += 5.1
    assert recent.add(b"a")
