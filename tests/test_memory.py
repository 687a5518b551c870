"""What one process remembers of its blocks: bounded, and never a wrong answer."""

import signal
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import in_child
from strategies import unhurried

from kvstore.arrays import Proof, make_proof
from kvstore.blocks import Stored
from kvstore.codecs import CODECS
from kvstore.memory import Memory, _Proofs, _Table

proofs = st.builds(make_proof, st.integers(0, 2**32 - 1), st.sampled_from(CODECS))
hashes = st.integers(-(2**63), 2**63 - 1)


def key(number: int) -> bytes:
    return number.to_bytes(36)


# ---- the table of proofs


@given(st.lists(st.tuples(hashes | st.integers(-3, 3), proofs | st.none())))
@unhurried
def test_the_last_proof_of_a_hash_is_told(steps: list[tuple[int, Proof | None]]) -> None:
    table = _Proofs()
    model: dict[int, Proof] = {}
    for hashed, proof in steps:
        if proof is None:
            table.drop(hashed)
            model.pop(hashed, None)
        else:
            table.put(hashed, proof)
            model[hashed] = proof
    for hashed in {hashed for hashed, _ in steps}:
        assert table.get(hashed) == (model.get(hashed) if hashed else None)


@pytest.mark.parametrize("hashed", [0, 1, -1, 2**63 - 1, -(2**63), 2048, -2048])
def test_what_was_never_put_is_not_there(hashed: int) -> None:
    table = _Proofs()
    assert table.get(hashed) is None
    table.drop(hashed)
    table.put(hashed, make_proof(0, "none"))
    assert table.get(hashed) == (None if hashed == 0 else make_proof(0, "none"))
    table.drop(hashed)
    assert table.get(hashed) is None


def test_a_table_doubles_and_keeps_what_it_has() -> None:
    table = _Table()
    hashes = [n * _Proofs.TABLES for n in range(1, 400)]
    for n, hashed in enumerate(hashes):
        table.put(hashed, n)
        assert 2 * table._used <= len(table._hashes)
    kept = [table.get(hashed) for hashed in hashes]
    assert kept == list(range(399))
    assert table._used == 399


def test_hashes_that_share_a_bucket_make_room_for_the_newest() -> None:
    table = _Table()
    step = _Proofs.TABLES * _Table.LIMIT  # the same bucket at every size
    for n in range(1, 100):
        table.put(n * step, n)
        assert table.get(n * step) == n
    assert table._used == _Table.BUCKET
    found = [table.get(n * step) for n in range(1, 100)]
    assert sum(value is not None for value in found) == _Table.BUCKET
    assert all(value in (None, n) for n, value in enumerate(found, 1))


def test_a_table_has_its_limit_and_takes_the_newest_even_so() -> None:
    table = _Table()
    for n in range(1, 4 * _Table.LIMIT):
        table.put(n * _Proofs.TABLES, n)
        assert table.get(n * _Proofs.TABLES) == n
    assert len(table._hashes) == _Table.LIMIT
    assert table._used <= _Table.LIMIT


def test_a_place_that_was_dropped_is_used_again() -> None:
    table = _Table()
    for _ in range(1000):
        table.put(5 * _Proofs.TABLES, 7)
        table.drop(5 * _Proofs.TABLES)
        table.drop(5 * _Proofs.TABLES)
    assert table._used == 0
    assert len(table._hashes) == len(_Table()._hashes)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_a_known_block_costs_at_most_100_bytes(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sample of the tables, each as full as it would be among all.
    part = count // 50_000
    monkeypatch.setattr(_Proofs, "TABLES", _Proofs.TABLES // part)
    count //= part
    before, _ = tracemalloc.get_traced_memory()
    memory = Memory()
    for n in range(count):
        memory.remember(n.to_bytes(36), make_proof(n % 2**32, "none"))
    after, _ = tracemalloc.get_traced_memory()
    assert (after - before) / count <= 100
    remembered = sum(
        memory.recall(n.to_bytes(36)) == make_proof(n, "none") for n in range(0, count, 97)
    )
    assert remembered >= 0.9 * len(range(0, count, 97))


# ---- damage


def test_damage_is_believed_for_a_while_and_known_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    memory.remember(key(1), make_proof(7, "none"))
    memory.note_damage(key(1))
    assert memory.was_damaged_lately(key(1))
    assert memory.is_damaged(key(1))
    assert memory.recall(key(1)) is None  # its proof proved nothing
    assert not memory.is_damaged(key(2))
    monkeypatch.setattr(Memory, "DAMAGE_SECONDS", 0.0)
    assert not memory.was_damaged_lately(key(1))
    assert memory.is_damaged(key(1))


@pytest.mark.parametrize("stored", Stored)
def test_a_store_ends_damage(stored: Stored) -> None:
    memory = Memory()
    memory.note_damage(key(1))
    memory.note_stored(key(1), stored)
    assert not memory.is_damaged(key(1))


def test_a_load_and_an_absence_end_damage() -> None:
    memory = Memory()
    for end in (memory.note_loaded, memory.forget):
        memory.note_damage(key(1))
        end(key(1))
        assert not memory.is_damaged(key(1))
        assert not memory.was_damaged_lately(key(1))


def test_an_absence_ends_a_proof_and_so_does_a_repair() -> None:
    memory = Memory()
    memory.remember(key(1), make_proof(1, "zstd"))
    memory.note_stored(key(1), Stored.KEPT)
    assert memory.recall(key(1)) == make_proof(1, "zstd")
    memory.note_stored(key(1), Stored.REPAIRED)
    assert memory.recall(key(1)) is None
    memory.remember(key(1), make_proof(1, "zstd"))
    memory.forget(key(1))
    assert memory.recall(key(1)) is None


def test_of_too_much_damage_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Memory, "DAMAGED", 3)
    memory = Memory()
    for n in (1, 2, 1, 3, 4):  # 1 was found damaged again, so 2 is the oldest
        memory.note_damage(key(n))
    assert [memory.is_damaged(key(n)) for n in range(1, 5)] == [True, False, True, True]
    assert memory.counts()["damaged"] == 5


# ---- forks


def test_a_child_goes_on_though_a_thread_of_its_parent_held_the_lock() -> None:
    memory = Memory()
    memory.remember(key(1), make_proof(1, "none"))
    memory.note_damage(key(2))

    def go_on() -> None:
        signal.alarm(20)
        assert memory.recall(key(1)) is None
        assert not memory.was_damaged_lately(key(2))
        memory.remember(key(1), make_proof(3, "none"))
        assert memory.recall(key(1)) == make_proof(3, "none")
        assert memory.counts() == {"stored": 0, "repaired": 0, "loaded": 0, "damaged": 0}

    with memory._lock:  # as if by another thread, in the midst of a change
        assert in_child(go_on) == 0
    assert memory.recall(key(1)) == make_proof(1, "none")


# ---- counts


def test_counts_are_of_what_happened() -> None:
    memory = Memory()
    assert memory.counts() == {"stored": 0, "repaired": 0, "loaded": 0, "damaged": 0}
    memory.note_stored(key(1), Stored.STORED)
    memory.note_stored(key(1), Stored.KEPT)
    memory.note_loaded(key(1))
    memory.note_damage(key(1))
    memory.note_stored(key(1), Stored.REPAIRED)
    memory.note_stored(key(2), Stored.REPAIRED)  # found damaged by the store itself
    assert memory.counts() == {"stored": 1, "repaired": 2, "loaded": 1, "damaged": 2}


def test_many_keys_may_be_noted_at_once() -> None:
    """As if each had been noted alone; a key that was not well stays damaged."""
    memory = Memory()
    for n in (1, 2, 3, 4):
        memory.note_damage(key(n))
    words = ["loaded", "stored", "repaired", "failed", "repaired", "kept", "absent"]
    words.append("damaged")  # which is noted by itself, since it is also told
    memory.note_many([key(n) for n in range(1, 9)], words)
    assert [n for n in range(1, 8) if memory.is_damaged(key(n))] == [4]
    # The fifth was found damaged by the store that repaired it.
    assert memory.counts() == {"stored": 1, "repaired": 2, "loaded": 1, "damaged": 5}


def test_threads_may_all_use_it() -> None:
    """What one has remembered, another may crowd out; it is never another block's proof."""
    memory = Memory()
    kept: list[Proof] = []
    wrong: list[Proof] = []

    def use(first: int) -> None:
        for n in range(first, first + 2000):
            memory.remember(key(n), make_proof(n, "blosc"))
            proof = memory.recall(key(n))
            if proof is not None:
                (kept if proof == make_proof(n, "blosc") else wrong).append(proof)
            memory.note_loaded(key(n))

    threads = [threading.Thread(target=use, args=(n * 10_000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(kept) >= 7900
    assert memory.counts()["loaded"] == 8000
