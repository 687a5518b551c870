"""How much an engine may store before the next look."""

import itertools
import random

import pytest

from kvstore import InvalidInputError
from kvstore.capacity import FAILED_SECONDS, IDLE_SECONDS, LOW, REST_SECONDS, STEP, Room

LIMIT, BLOCK = 100_000, 100
STEPS = int(STEP * LIMIT / BLOCK)


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
def room(clock: Clock) -> Room:
    return Room(LIMIT, BLOCK, clock=clock)


def test_without_a_limit_there_is_room(clock: Clock) -> None:
    room = Room(None, BLOCK, clock=clock)
    assert room.take(10**9) == 10**9
    assert room.take_look(waiting=False)  # what is there is worth knowing all the same
    room.note_look(5)
    assert not room.take_look(waiting=True)
    assert room.used == 5


def test_nothing_is_stored_before_the_first_look(room: Room) -> None:
    """Or engines that keep ending would let a full root grow by a step at each start."""
    assert room.take(1) == 0
    assert room.take_look(waiting=False)
    assert room.take(1) == 0  # it runs
    room.note_look(0)
    assert room.take(10 * STEPS) == STEPS


def test_a_step_and_then_a_look(room: Room, clock: Clock) -> None:
    assert room.take_look(waiting=False)
    room.note_look(0)
    assert room.take(STEPS // 2 - 1) == STEPS // 2 - 1
    clock.now += REST_SECONDS
    assert not room.take_look(waiting=False)
    assert room.take(STEPS) == STEPS - STEPS // 2 + 1
    assert room.take(1) == 0
    room.note_ended(STEPS)
    assert room.take_look(waiting=True)
    assert not room.take_look(waiting=True)  # it runs
    room.note_look(STEPS * BLOCK)
    assert room.take(10 * STEPS) == STEPS


def test_what_was_stored_during_a_look_counts(room: Room, clock: Clock) -> None:
    room.take_look(waiting=False)
    room.note_look(0)
    assert room.take(STEPS - 6) == STEPS - 6
    room.note_ended(STEPS - 6 - 2)
    clock.now += REST_SECONDS
    assert room.take_look(waiting=False)
    assert room.take(4) == 4
    room.note_ended(6)
    free = 10
    room.note_look(LIMIT - free * BLOCK)  # it may have missed the 2, and the 4
    assert room.take(STEPS) == free - 6


def test_what_is_being_stored_is_part_of_the_step(room: Room, clock: Clock) -> None:
    room.take_look(waiting=False)
    room.note_look(0)
    assert room.take(STEPS) == STEPS
    clock.now += IDLE_SECONDS - 0.1
    assert not room.take_look(waiting=True)  # it would find no room for more
    room.note_ended(STEPS // 2)
    assert room.take_look(waiting=True)
    room.note_look(0)
    assert room.take(STEPS) == STEPS // 2


@pytest.mark.parametrize(("writers", "most"), [(1, 0.96), (2, 1.0), (4, 1.08)])
def test_writers_that_store_all_they_may(writers: int, most: float) -> None:
    """Each in turn looks, removes down to `LOW`, and stores what it was granted by then."""
    chance = random.Random(writers)
    rooms = [Room(LIMIT, BLOCK, clock=itertools.count().__next__) for _ in range(writers)]
    there, highest = 0, 0
    for _ in range(3000):
        room = chance.choice(rooms)
        stored = room.take(chance.randrange(1, 2 * STEPS))
        there += stored
        highest = max(highest, there)
        room.note_ended(stored)
        if chance.random() < 0.7 and room.take_look(waiting=True):
            there = min(there, int(LOW * LIMIT / BLOCK))
            room.note_look(there * BLOCK)
    assert 0.95 < highest * BLOCK / LIMIT <= most + 1e-9


def test_a_full_root_has_no_room_until_some_goes(room: Room, clock: Clock) -> None:
    room.take_look(waiting=False)
    room.note_look(LIMIT + 1, more=True)
    assert room.take(1) == 0
    assert room.take_look(waiting=True)  # at once: there is more to remove
    room.note_look(LIMIT + 1)
    assert not room.take_look(waiting=True)
    clock.now += REST_SECONDS
    assert room.take_look(waiting=True)
    room.note_look(int(LOW * LIMIT))
    assert room.take(10 * STEPS) == STEPS


def test_who_idles_looks_now_and_then(room: Room, clock: Clock) -> None:
    room.take_look(waiting=False)
    room.note_look(0)
    clock.now += IDLE_SECONDS - 0.1
    assert not room.take_look(waiting=False)
    clock.now += 0.2
    assert room.take_look(waiting=False)


def test_a_look_that_failed_gives_no_room_and_is_tried_again(
    room: Room, clock: Clock
) -> None:
    room.take_look(waiting=True)
    room.note_look(0)
    assert room.take(10 * STEPS) == STEPS
    room.note_ended(STEPS)
    clock.now += REST_SECONDS
    assert room.take_look(waiting=True)
    room.note_look(None)
    assert room.take(1) == 0
    assert not room.take_look(waiting=True)
    clock.now += FAILED_SECONDS
    assert room.take_look(waiting=True)


def test_a_limit_holds_some_blocks() -> None:
    Room(50 * BLOCK + 1, BLOCK)
    with pytest.raises(InvalidInputError, match="max_bytes: expected at least 5001, which"):
        Room(50 * BLOCK, BLOCK)
