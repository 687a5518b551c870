"""One mover behind its socket: what it is told, and what it answers."""

import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from work import DONE, NAME, PATIENCE, Work, end, key, threads_alive, until

from kvstore import mover
from kvstore.mover import MAX_PROBLEM, MAX_PROBLEMS, WAITED, Mover
from kvstore.parts import (
    FAILED,
    LATE,
    MAX_MESSAGE_BYTES,
    NEWS_SECONDS,
    NO_SLOT,
    READY,
    UNKNOWN,
    Answer,
    Hint,
    Operation,
    Part,
    Perform,
    Reply,
)


class Engine:
    """The other end of a mover's socket, and the thread that serves."""

    def __init__(self, perform: Perform, *, threads: int = 1, lookups: int = 1) -> None:
        self.wanted = True
        self.asked: Counter[str] = Counter()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE)
        mover = Mover(
            theirs,
            perform,
            threads=threads,
            lookups=lookups,
            name=NAME,
            still_wanted=self.still_wanted,
        )
        self.reader = threading.Thread(target=mover.serve)
        self.reader.start()

    def still_wanted(self) -> bool:
        """Counts by threads who asks: whoever answers does, for each try."""
        self.asked[threading.current_thread().name] += 1
        return self.wanted

    def send(
        self,
        number: int,
        *numbers: int,
        operation: Operation = "load",
        seconds: float = 600,
        hints: Sequence[Hint] = (),
    ) -> None:
        """A part whose keys and slots follow from `numbers`."""
        keys = [key(n) for n in numbers]
        slots = [] if operation == "lookup" else [n * 10 for n in numbers]
        part = Part(number, operation, keys, slots, hints, time.monotonic() + seconds)
        self.channel.send(pickle.dumps(tuple(part)))

    def reply(self) -> Reply | None:
        """The next one; None at the end."""
        message = self.channel.recv(MAX_MESSAGE_BYTES)
        return Reply(*pickle.loads(message)) if message else None

    def finish(self) -> None:
        self.channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.channel.close()
        self.reader.join(PATIENCE)
        assert not self.reader.is_alive()


@contextmanager
def serving(perform: Perform, *, threads: int = 1, lookups: int = 1) -> Iterator[Engine]:
    """A mover that has said that it is ready."""
    engine = Engine(perform, threads=threads, lookups=lookups)
    try:
        assert engine.reply() == Reply(READY, (), (), {})
        yield engine
    finally:
        if isinstance(perform, Work):
            perform.gate.set()
        engine.close()


def odd(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
    return end(key[-1] % 2 == 1)


def test_a_part_is_answered_once_key_by_key() -> None:
    with serving(odd, threads=3) as engine:
        engine.send(5, 1, 2, 3)
        reply = engine.reply()
        engine.finish()
        assert engine.reply() is None
    assert reply is not None
    assert reply.number == 5
    assert reply.words == [DONE, FAILED, DONE]
    assert reply.proofs == [None] * 3
    assert reply.problems == {1: "it was told to"}


def test_problems_are_told_of_the_first_few_and_cut() -> None:
    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        return Answer(FAILED, problem="\U0001f4a5" * 100_000)

    with serving(perform) as engine:
        engine.send(1, *range(512))
        reply = engine.reply()
    assert reply is not None
    assert reply.words == [FAILED] * 512
    assert reply.problems == dict.fromkeys(range(MAX_PROBLEMS), "💥" * MAX_PROBLEM)


@pytest.mark.parametrize(("lookups", "at_once"), [(1, 1), (3, 3)])
def test_lookups_of_a_part_run_in_one_go_or_spread(lookups: int, at_once: int) -> None:
    seen: list[tuple[str, bytes]] = []
    together = threading.Barrier(at_once)

    def perform(operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        assert slot == NO_SLOT
        seen.append((threading.current_thread().name, key))
        together.wait(PATIENCE)
        return Answer(DONE)

    with serving(perform, lookups=lookups) as engine:
        engine.send(1, *range(6), operation="lookup")
        assert engine.reply() == Reply(1, [DONE] * 6, [None] * 6, {})
    assert len({name for name, _ in seen}) == at_once
    if lookups == 1:
        assert [k for _, k in seen] == [key(n) for n in range(6)]


@pytest.mark.parametrize("lookups", [1, 3])
def test_lookups_that_ended_are_told_though_another_takes_long(lookups: int) -> None:
    """Each of them once or more often, and all of them with the last reply."""
    gate = threading.Event()

    def perform(operation: Operation, key_: bytes, slot: int, hint: Hint) -> Answer:
        if key_ == key(3):
            gate.wait(PATIENCE)
        return end(key_[-1] % 2 == 1)

    with serving(perform, lookups=lookups) as engine:
        engine.send(1, 1, 2, 3, operation="lookup")
        told = engine.reply()
        assert told is not None
        assert (told.number, told.last) == (1, False)
        assert told.words == [DONE, FAILED, UNKNOWN]
        assert told.problems == {1: "it was told to"}
        gate.set()
        assert engine.reply() == Reply(1, [DONE, FAILED, DONE], [None] * 3, told.problems)


def test_of_what_is_no_lookup_nothing_is_told_before_its_end() -> None:
    """A row is nobody else's until then."""
    work = Work()
    with serving(work, threads=2) as engine:
        engine.send(1, 1, 2)
        work.wait_for(2)
        time.sleep(2 * NEWS_SECONDS)
        work.gate.set()
        reply = engine.reply()
        assert reply is not None
        assert reply.last


def test_keys_that_come_too_late_are_not_run() -> None:
    work = Work()
    with serving(work) as engine:
        engine.send(1, 1, 2, seconds=0)
        assert engine.reply() == Reply(1, [LATE] * 2, [None] * 2, {0: WAITED, 1: WAITED})
        engine.send(2, 3, 4, operation="lookup", seconds=0)
        assert engine.reply() == Reply(2, [LATE] * 2, [None] * 2, {0: WAITED, 1: WAITED})
    assert work.calls == []


def test_a_reply_waits_until_the_other_end_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "LOOK_SECONDS", 0.02)
    count = 2000  # a socket holds some hundreds
    work = Work()
    work.gate.set()
    with serving(work) as engine:
        for number in range(1, count + 1):
            engine.send(number, 1)
        # More tries than answers: one found no room for so long that it was tried again.
        until(lambda: engine.asked[f"{NAME}-0"] > len(work.calls))
        for number in range(1, count + 1):
            assert engine.reply() == Reply(number, [DONE], [None], {})


def test_a_part_with_too_few_hints_costs_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(odd) as engine:
        engine.send(1, 1, 3, hints=(None,))
        reply = engine.reply()
        assert reply is not None
        assert reply.words == [DONE, FAILED]
        assert reply.problems == {1: "IndexError: tuple index out of range"}
        engine.send(2, 1)
        assert engine.reply() == Reply(2, [DONE], [None], {})
    [record] = caplog.records
    assert "failed unexpectedly" in record.getMessage()


@pytest.mark.parametrize("operation", ["load", "store", "lookup"])
def test_an_empty_part_is_answered(operation: Operation) -> None:
    with serving(odd) as engine:
        engine.send(1, operation=operation)
        assert engine.reply() == Reply(1, [], [], {})
        engine.send(2, 1)
        assert engine.reply() == Reply(2, [DONE], [None], {})


@pytest.mark.parametrize("how", ["finish", "close"])
def test_at_the_end_what_waits_is_given_up_and_what_runs_is_waited_for(how: str) -> None:
    work = Work()
    engine = Engine(work)
    engine.reply()
    engine.send(1, 1, 2)
    engine.send(2, 3)
    work.wait_for(1)
    if how == "finish":
        engine.finish()
        assert engine.reply() == Reply(2, [LATE], [None], {0: WAITED})
    else:
        engine.channel.close()
    assert engine.reader.is_alive()
    work.gate.set()
    if how == "finish":
        assert engine.reply() == Reply(1, [DONE, LATE], [None, None], {1: WAITED})
        assert engine.reply() is None
        assert work.keys == [key(1)]
    engine.close()
    assert threads_alive() == []


def test_a_mover_that_nobody_wants_ends_while_its_socket_is_open() -> None:
    """As when a fork of the engine outlives it."""
    engine = Engine(odd)
    engine.reply()
    engine.wanted = False
    assert engine.reply() is None
    engine.close()
    until(lambda: threads_alive() == [])


def test_a_mover_that_nobody_wants_ends_although_nobody_reads_its_replies() -> None:
    engine = Engine(odd, threads=2)
    for number in range(1, 5000):  # it reads on while its replies wait
        engine.send(number, 1)
    engine.wanted = False
    engine.reader.join(PATIENCE)
    assert not engine.reader.is_alive()
    until(lambda: threads_alive() == [])
    engine.close()


def test_a_mover_that_nobody_wants_does_not_wait_for_a_key_that_hangs() -> None:
    work = Work()
    engine = Engine(work)
    engine.reply()
    engine.send(1, 1)
    work.wait_for(1)
    engine.wanted = False
    engine.reader.join(PATIENCE)
    assert not engine.reader.is_alive()
    work.gate.set()
    engine.close()
    until(lambda: threads_alive() == [])
