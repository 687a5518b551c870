"""Verdicts of lookups: what a request was told stays true for it."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvstore.arrays import Proof, make_proof
from kvstore.job import Job, Outcome
from kvstore.transfer import ABSENT, DAMAGED, FAILURES, FOUND
from kvstore.vllm.lookups import ABSENT_SECONDS, MAX_FAILED, Lookups

A, B = b"a", b"b"
PROOF = make_proof(7, "none")
OTHER = make_proof(8, "zstd")


def tell(lookups: Lookups, keys: Sequence[bytes], proofs: Sequence[Proof | None]) -> None:
    """From memory. A key without a proof is not there."""
    for key, proof in zip(keys, proofs, strict=True):
        lookups.tell(key, proof is not None, proof)


def answer(
    lookups: Lookups,
    keys: Sequence[bytes],
    proofs: Sequence[Proof | None],
    *,
    missing: str = ABSENT,
) -> dict[bytes, str]:
    """From storage. A key without a proof is not there. Returns what of it counts."""
    words = [missing if proof is None else FOUND for proof in proofs]
    job = Job(-1, "lookup", keys, ())
    told = lookups.answer(Outcome(job, words, proofs, {}, 0.1))
    return dict(zip(told.job.keys, told.words, strict=True))


@pytest.fixture
def lookups() -> Iterator[Lookups]:
    """None of these tests may leave anything behind."""
    lookups = Lookups(5.0)
    yield lookups
    for request in list(lookups._requests):
        lookups.forget(request)
    answer(lookups, in_flight := list(lookups._verdicts), [None] * len(in_flight))
    assert not lookups._verdicts
    assert not lookups._holders
    assert not lookups._requests


def test_a_key_is_sent_for_once_and_told_to_all(lookups: Lookups) -> None:
    assert lookups.ask(A, "r") is None
    assert lookups.ask(A, "s") is None
    assert lookups.ask(B, "s") is None
    assert lookups.take_new() == [A, B]
    assert lookups.take_new() == []
    assert lookups.ask(A, "r") is None
    answer(lookups, [A, B], [PROOF, None])
    for request in ("r", "s", "later"):
        assert lookups.ask(A, request) is True
        assert lookups.ask(B, request) is False
    assert lookups.take_new() == []
    assert lookups.proof(A) == PROOF
    assert lookups.proof(B) is None
    assert lookups.proof(b"never asked") is None


def test_a_verdict_holds_while_a_request_lives(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.ask(B, "r")
    lookups.take_new()
    answer(lookups, [A, B], [PROOF, None])
    answer(lookups, [A, B], [None, PROOF])
    answer(lookups, [A, B], [OTHER, OTHER])
    assert (lookups.ask(A, "r"), lookups.ask(B, "r")) == (True, False)
    assert lookups.proof(A) == PROOF


def test_a_hit_may_come_without_a_proof(lookups: Lookups) -> None:
    """From a folder, where the load proves the block."""
    lookups.ask(A, "r")
    lookups.take_new()
    lookups.tell(A, there=True, proof=None)
    assert lookups.ask(A, "r") is True
    assert lookups.proof(A) is None
    lookups.tell(A, there=True, proof=PROOF)  # it has been told
    assert lookups.proof(A) is None
    lookups.mark_miss([A])
    assert lookups.ask(A, "r") is False


def test_what_is_told_while_a_lookup_is_under_way_stays(lookups: Lookups) -> None:
    """From memory, before the answer from storage is there."""
    lookups.ask(A, "r")
    lookups.ask(B, "r")
    assert lookups.take_new() == [A, B]
    answer(lookups, [A, B], [PROOF, None])
    assert (lookups.ask(A, "r"), lookups.ask(B, "r")) == (True, False)
    answer(lookups, [A, B], [None, PROOF])  # the answer
    assert (lookups.ask(A, "r"), lookups.ask(B, "r")) == (True, False)


def test_what_is_told_at_once_is_not_sent_for(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.ask(B, "r")
    tell(lookups, [A], [PROOF])
    assert lookups.take_new() == [B]


def test_a_failed_load_makes_a_hit_a_miss(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    answer(lookups, [A], [PROOF])
    lookups.mark_miss([A, B])
    assert lookups.ask(A, "r") is False
    assert lookups.proof(A) is None
    assert lookups.ask(A, "s") is False  # for a moment, for everybody
    assert lookups.ask(B, "s") is False


def test_a_failed_load_leaves_a_lookup_that_is_under_way(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    lookups.mark_miss([A])
    assert lookups.ask(A, "r") is None
    answer(lookups, [A], [PROOF])
    assert lookups.ask(A, "r") is True


def test_a_key_is_asked_anew_when_its_last_request_is_finished(lookups: Lookups) -> None:
    for request in ("r", "s"):
        lookups.ask(A, request)
    lookups.take_new()
    answer(lookups, [A], [None])
    lookups.forget("r")
    assert lookups.ask(A, "t") is False
    lookups.forget("s")
    lookups.forget("t")
    lookups.forget("t")  # once more, or never heard of
    lookups.forget("u")
    assert lookups.ask(A, "r") is None
    assert lookups.take_new() == [A]


def test_a_request_that_finishes_while_its_lookup_is_under_way(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    lookups.forget("r")
    assert lookups.ask(A, "s") is None
    assert lookups.take_new() == []  # the one that is under way will do
    answer(lookups, [A], [PROOF])
    assert lookups.ask(A, "s") is True
    lookups.ask(B, "t")
    lookups.take_new()
    lookups.forget("t")
    answer(lookups, [B], [PROOF])
    assert lookups.ask(B, "s") is None  # nobody had waited, so nothing was kept
    assert lookups.take_new() == [B]


def test_a_request_that_is_told_and_finishes_within_a_step(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    tell(lookups, [A], [PROOF])
    lookups.forget("r")
    assert lookups.take_new() == []


def test_a_request_that_comes_again_within_a_step_is_sent_for_once(
    lookups: Lookups,
) -> None:
    for _ in range(3):
        lookups.ask(A, "r")
        tell(lookups, [A], [PROOF])
        lookups.forget("r")
    lookups.ask(A, "r")
    assert lookups.take_new() == [A]


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
def timed(clock: Clock) -> Lookups:
    return Lookups(5.0, clock=clock)


def test_a_key_of_which_nothing_is_known_in_time_is_a_miss(
    timed: Lookups, clock: Clock
) -> None:
    timed.ask(A, "r")
    assert timed.take_new() == [A]
    clock.now += 3
    timed.ask(B, "r")
    assert timed.take_new() == [B]
    clock.now += 1.9
    assert timed.take_late() == 0
    assert timed.ask(A, "r") is None
    clock.now += 0.1
    assert timed.take_late() == 1
    assert (timed.ask(A, "r"), timed.ask(B, "r")) == (False, None)
    answer(timed, [A, B], [PROOF, PROOF])  # too late for one, in time for the other
    assert (timed.ask(A, "r"), timed.ask(B, "r")) == (False, True)
    clock.now += 5
    assert timed.take_late() == 0


def test_a_key_that_is_asked_for_again_has_all_the_time_again(
    timed: Lookups, clock: Clock
) -> None:
    """Or what all requests begin with would be late whenever it is on its way."""
    timed.ask(A, "r")
    assert timed.take_new() == [A]
    answer(timed, [A], [PROOF])
    timed.forget("r")
    clock.now += 4.9
    timed.ask(A, "s")
    assert timed.take_new() == [A]
    clock.now += 0.2
    assert timed.take_late() == 0
    assert timed.ask(A, "s") is None
    clock.now += 4.8
    assert timed.take_late() == 1
    assert timed.ask(A, "s") is False


def test_an_old_absence_is_not_told_to_a_request_that_comes_later(
    timed: Lookups, clock: Clock
) -> None:
    timed.ask(A, "r")
    timed.take_new()
    answer(timed, [A], [None])
    clock.now += ABSENT_SECONDS
    assert timed.ask(A, "soon") is False
    clock.now += 0.1
    assert timed.ask(A, "r") is False  # it was told
    assert timed.ask(A, "later") is None
    assert timed.ask(A, "r") is False  # it still is
    assert timed.take_new() == [A]
    answer(timed, [A], [PROOF])  # another engine has stored it
    assert (timed.ask(A, "later"), timed.ask(A, "r")) == (True, False)


def test_a_block_that_is_stored_is_found_by_the_next_request(timed: Lookups) -> None:
    timed.ask(A, "r")
    timed.take_new()
    answer(timed, [A], [None])
    timed.mark_stored([A, B])
    assert timed.ask(A, "r") is False
    assert timed.ask(A, "s") is None
    assert timed.take_new() == [A]


def test_what_could_not_be_loaded_is_a_miss_for_a_moment(
    timed: Lookups, clock: Clock
) -> None:
    """Else each request would find it, and wait for a load that fails."""
    timed.mark_miss([A, B])
    assert timed.ask(A, "r") is False
    assert timed.take_new() == []
    timed.mark_stored([B])
    assert timed.ask(B, "r") is None
    clock.now += ABSENT_SECONDS + 0.1
    assert timed.ask(A, "s") is None
    assert timed.take_new() == [B, A]


@pytest.mark.parametrize("waits", [True, False], ids=["who asked waits", "it has gone"])
def test_what_is_late_is_a_miss_until_its_answer(
    timed: Lookups, clock: Clock, waits: bool
) -> None:
    """Else each request would wait as long for a key that is never answered."""
    timed.ask(A, "r")
    timed.ask(B, "r")
    assert timed.take_new() == [A, B]
    if not waits:
        timed.forget("r")
    clock.now += 5
    assert timed.take_late() == 2
    timed.forget("r")
    for request in ("s", "t"):
        assert (timed.ask(A, request), timed.ask(B, request)) == (False, False)
        timed.forget(request)
        clock.now += ABSENT_SECONDS + 0.1
    assert timed.take_new() == []
    timed.mark_stored([B])
    assert answer(timed, [A], [PROOF]) == {}  # it was counted as late
    assert (timed.ask(A, "u"), timed.ask(B, "u")) == (None, True)
    assert timed.take_new() == [A]


def test_a_lookup_that_nobody_waited_for_is_late_too(timed: Lookups, clock: Clock) -> None:
    """Else who asks after its deadline would wait as long as storage hangs."""
    timed.ask(A, "gone")
    timed.take_new()
    timed.forget("gone")
    clock.now += 5
    assert timed.take_late() == 1
    assert timed.ask(A, "r") is False
    assert timed.take_new() == []
    assert timed.take_late() == 0


@pytest.mark.parametrize("word", sorted(FAILURES))
def test_a_failure_is_told_to_whoever_waits_and_to_nobody_else(
    lookups: Lookups, word: str
) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    assert answer(lookups, [A], [None], missing=word) == {A: word}
    assert lookups.ask(A, "r") is False
    assert lookups.ask(A, "s") is None
    assert lookups.ask(A, "r") is False
    assert lookups.take_new() == [A]


def test_what_is_not_to_be_found_out_now_may_be_asked_again(lookups: Lookups) -> None:
    """As while a circuit is open."""
    lookups.ask(A, "r")
    lookups.tell(A, None)
    assert lookups.ask(A, "r") is False
    assert lookups.take_new() == []
    assert lookups.ask(A, "s") is None
    assert lookups.take_new() == [A]


@pytest.mark.parametrize("missing", [ABSENT, DAMAGED])
@pytest.mark.parametrize("waits", [True, False], ids=["who asked waits", "it has gone"])
def test_a_lookup_does_not_overrule_a_store_that_ended_before_it(
    lookups: Lookups, missing: str, waits: bool
) -> None:
    """It looked before the block was there."""
    lookups.ask(A, "r")
    assert lookups.take_new() == [A]
    if not waits:
        lookups.forget("r")
    lookups.mark_stored([A])
    assert lookups.ask(A, "r") is True
    assert lookups.ask(A, "s") is True
    assert answer(lookups, [A], [None], missing=missing) == {A: FOUND}
    assert (lookups.ask(A, "r"), lookups.ask(A, "s")) == (True, True)
    for request in ("r", "s"):
        lookups.forget(request)
    assert lookups.ask(A, "t") is None  # the next lookup is another
    assert lookups.take_new() == [A]
    assert answer(lookups, [A], [None], missing=missing) == {A: missing}
    assert lookups.ask(A, "t") is False


def test_the_answer_to_a_trial_is_no_lookups(timed: Lookups, clock: Clock) -> None:
    """One of the same key may be under way."""
    timed.ask(A, "r")
    timed.take_new()
    job = Job(-1, "lookup", [A], (), trial=True)
    outcome = Outcome(job, [FOUND], [PROOF], {}, 0.1)
    assert timed.answer(outcome) == outcome
    assert timed.ask(A, "r") is True
    clock.now += 5
    assert timed.take_late() == 1


def test_no_more_failed_keys_are_kept_than_are_worth_it(timed: Lookups) -> None:
    keys = [n.to_bytes(4, "big") for n in range(MAX_FAILED + 2)]
    timed.mark_miss(keys)
    assert timed.ask(keys[1], "r") is None
    assert timed.ask(keys[2], "r") is False


class Model(RuleBasedStateMachine):
    """Against a dictionary: what each living request was told of each key."""

    keys = st.sampled_from([bytes([n]) for n in range(4)])
    requests = st.sampled_from(["r", "s", "t"])

    def __init__(self) -> None:
        super().__init__()
        self.lookups = Lookups(5.0)
        self.told: dict[tuple[str, bytes], bool] = {}
        self.asked: set[tuple[str, bytes]] = set()
        self.flights: list[list[bytes]] = []
        self.awaited: set[bytes] = set()
        self.marked: set[bytes] = set()

    @rule(key=keys, request=requests)
    def ask(self, key: bytes, request: str) -> None:
        verdict = self.lookups.ask(key, request)
        self.asked.add((request, key))
        before = self.told.get((request, key))
        if before is not None:
            assert verdict == before or (before and not verdict and key in self.marked)
        if verdict is not None:
            self.told[request, key] = verdict
        assert (self.lookups.proof(key) is not None) == bool(verdict)

    @rule()
    def send(self) -> None:
        keys = self.lookups.take_new()
        assert len(keys) == len(set(keys))
        assert self.awaited.isdisjoint(keys)
        self.awaited.update(keys)
        if keys:
            self.flights.append(keys)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.flights) - 1))
        keys = self.flights.pop(index)
        self.awaited.difference_update(keys)
        there = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
        answer(self.lookups, keys, [PROOF if is_there else None for is_there in there])

    @rule(key=keys, there=st.booleans())
    def remember(self, key: bytes, there: bool) -> None:
        if any(asked == key for _, asked in self.asked):
            self.awaited.discard(key)
            tell(self.lookups, [key], [OTHER if there else None])

    @rule(key=keys)
    def fail_to_load(self, key: bytes) -> None:
        self.lookups.mark_miss([key])
        self.marked.add(key)

    @rule(request=requests)
    def finish(self, request: str) -> None:
        self.lookups.forget(request)
        self.asked = {pair for pair in self.asked if pair[0] != request}
        self.told = {pair: v for pair, v in self.told.items() if pair[0] != request}

    @invariant()
    def nothing_is_kept_without_a_request_or_a_flight(self) -> None:
        held = {key for _, key in self.asked}
        in_flight = {key for flight in self.flights for key in flight}
        new = set(self.lookups._new)
        assert self.lookups._verdicts.keys() <= held | in_flight | new
        assert self.lookups._holders.keys() == held

    def teardown(self) -> None:
        """Whatever happened, every request gets its verdict in the end."""
        for request, key in self.asked:
            self.lookups.ask(key, request)
        self.send()
        for flight in self.flights:
            answer(self.lookups, flight, [None] * len(flight))
        for request, key in self.asked:
            assert self.lookups.ask(key, request) is not None


def test_any_order_of_calls_keeps_what_was_told() -> None:
    run_state_machine_as_test(
        Model, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )
