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
from kvstore.vllm.lookups import Lookups

A, B = b"a", b"b"
PROOF = make_proof(7, "none")
OTHER = make_proof(8, "zstd")


def tell(lookups: Lookups, keys: Sequence[bytes], proofs: Sequence[Proof | None]) -> None:
    """A key without a proof is not there."""
    for key, proof in zip(keys, proofs, strict=True):
        lookups.tell(key, proof is not None, proof)


@pytest.fixture
def lookups() -> Iterator[Lookups]:
    """None of these tests may leave anything behind."""
    lookups = Lookups()
    yield lookups
    for request in list(lookups._requests):
        lookups.forget(request)
    tell(lookups, in_flight := list(lookups._verdicts), [None] * len(in_flight))
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
    tell(lookups, [A, B], [PROOF, None])
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
    tell(lookups, [A, B], [PROOF, None])
    tell(lookups, [A, B], [None, PROOF])
    tell(lookups, [A, B], [OTHER, OTHER])
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
    tell(lookups, [A, B], [PROOF, None])
    assert (lookups.ask(A, "r"), lookups.ask(B, "r")) == (True, False)
    tell(lookups, [A, B], [None, PROOF])  # the answer
    assert (lookups.ask(A, "r"), lookups.ask(B, "r")) == (True, False)


def test_what_is_told_at_once_is_not_sent_for(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.ask(B, "r")
    tell(lookups, [A], [PROOF])
    assert lookups.take_new() == [B]


def test_a_failed_load_makes_a_hit_a_miss(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    tell(lookups, [A], [PROOF])
    lookups.mark_miss([A, B])
    assert lookups.ask(A, "r") is False
    assert lookups.proof(A) is None
    assert lookups.ask(B, "s") is None  # a key that nobody asked for is no miss


def test_a_failed_load_leaves_a_lookup_that_is_under_way(lookups: Lookups) -> None:
    lookups.ask(A, "r")
    lookups.take_new()
    lookups.mark_miss([A])
    assert lookups.ask(A, "r") is None
    tell(lookups, [A], [PROOF])
    assert lookups.ask(A, "r") is True


def test_a_key_is_asked_anew_when_its_last_request_is_finished(lookups: Lookups) -> None:
    for request in ("r", "s"):
        lookups.ask(A, request)
    lookups.take_new()
    tell(lookups, [A], [None])
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
    tell(lookups, [A], [PROOF])
    assert lookups.ask(A, "s") is True
    lookups.ask(B, "t")
    lookups.take_new()
    lookups.forget("t")
    tell(lookups, [B], [PROOF])
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


class Model(RuleBasedStateMachine):
    """Against a dictionary: what each living request was told of each key."""

    keys = st.sampled_from([bytes([n]) for n in range(4)])
    requests = st.sampled_from(["r", "s", "t"])

    def __init__(self) -> None:
        super().__init__()
        self.lookups = Lookups()
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
        tell(self.lookups, keys, [PROOF if is_there else None for is_there in there])

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
            tell(self.lookups, flight, [None] * len(flight))
        for request, key in self.asked:
            assert self.lookups.ask(key, request) is not None


def test_any_order_of_calls_keeps_what_was_told() -> None:
    run_state_machine_as_test(
        Model, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )
