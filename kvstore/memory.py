"""`Memory`: what one process has learnt of its blocks. Bounded, and never needed."""

from __future__ import annotations

import os
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence

from kvstore.arrays import Proof
from kvstore.blocks import Stored

_WELL = frozenset(("loaded", *Stored))
"""Words of keys whose blocks are healthy now."""


class Memory:
    """Proofs and damage that were seen, and counts of what happened.

    A forgotten entry costs a request, never a wrong answer. Locking: one lock guards
    everything, so any thread may call any method. In a child of a fork it knows nothing.
    """

    DAMAGED = 65_536
    """Damaged keys that are remembered; the oldest go first."""

    DAMAGE_SECONDS = 60.0
    """How long damage is believed: another engine may repair the block."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._begin()
        _memories.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._proofs = _Proofs()
        self._damaged: dict[bytes, float] = {}
        self._counts: Counter[str] = Counter()

    def remember(self, key: bytes, proof: Proof) -> None:
        """The block's document was read, and this is what it vouches for."""
        with self._lock:
            self._proofs.put(hash(key), proof)

    def recall(self, key: bytes) -> Proof | None:
        """The proof that was remembered, if any. The block may have been replaced."""
        with self._lock:
            return self._proofs.get(hash(key))

    @property
    def has_damage(self) -> bool:
        """Whether any block is remembered as damaged."""
        return bool(self._damaged)

    def was_damaged_lately(self, key: bytes) -> bool:
        """Whether it is worth no look: the block was found damaged a moment ago."""
        found = self._damaged.get(key)  # one step, so it needs no lock
        return found is not None and time.monotonic() - found < self.DAMAGE_SECONDS

    def is_damaged(self, key: bytes) -> bool:
        """Whether the block did not hold its proof and was not repaired since."""
        with self._lock:
            return key in self._damaged

    def note_damage(self, key: bytes) -> None:
        """The block did not hold its proof."""
        with self._lock:
            self._counts["damaged"] += 1
            self._proofs.drop(hash(key))
            self._damaged.pop(key, None)
            if len(self._damaged) >= self.DAMAGED:
                self._damaged.pop(next(iter(self._damaged)))
            self._damaged[key] = time.monotonic()

    def note_stored(self, key: bytes, stored: Stored) -> None:
        """A store ended well: the block is there, and healthy."""
        self.note_many((key,), (stored,))

    def note_loaded(self, key: bytes) -> None:
        """The block was read and proved, so whatever was damaged is repaired."""
        self.note_many((key,), ("loaded",))

    def note_many(self, keys: Sequence[bytes], words: Sequence[str]) -> None:
        """How many keys ended at once: `loaded`, `stored`, `repaired`, or otherwise."""
        with self._lock:
            self._counts.update(words)
            self._counts["damaged"] -= words.count("damaged")  # `note_damage` counts them
            if not self._damaged and Stored.REPAIRED not in words:
                return
            for key, word in zip(keys, words, strict=True):
                if word == Stored.REPAIRED:
                    # The damage may have been found by the store itself.
                    self._counts["damaged"] += key not in self._damaged
                    self._proofs.drop(hash(key))
                if word in _WELL:
                    self._damaged.pop(key, None)

    def forget(self, key: bytes) -> None:
        """The block is not there, or not any more."""
        with self._lock:
            self._proofs.drop(hash(key))
            self._damaged.pop(key, None)

    def counts(self) -> dict[str, int]:
        """Blocks stored, repaired, loaded and found damaged."""
        with self._lock:
            names = ("stored", "repaired", "loaded", "damaged")
            return {name: self._counts[name] for name in names}


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a child, after a fork: a thread that is not here may have held a lock, in the
    midst of what the lock guards.
    """
    for memory in _memories:
        memory._begin()


os.register_at_fork(after_in_child=_begin_anew)


class _Proofs:
    """Proofs by the hashes of keys, 16 bytes a place, in many small tables.

    Many, so that none takes long to double: that may happen on the calling thread.
    """

    TABLES = 2048

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # those that have ever held a proof

    def get(self, hashed: int) -> Proof | None:
        table = self._tables.get(hashed % self.TABLES)
        return table.get(hashed) if table else None

    def put(self, hashed: int, proof: Proof) -> None:
        number = hashed % self.TABLES
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = _Table()
        table.put(hashed, proof)

    def drop(self, hashed: int) -> None:
        if table := self._tables.get(hashed % self.TABLES):
            table.drop(hashed)


class _Table:
    """A hash table of buckets; where one is full, the newest entry takes a place in it.

    It doubles when half full, so an entry costs 32 to 64 bytes. A bucket may be full before
    that: so far from the limit too, some 3 of 1,000 entries are forgotten early.
    """

    BUCKET = 4

    LIMIT = 2048
    """Places of the largest table: of all tables together, 64 MiB."""

    def __init__(self, places: int = 2 * BUCKET) -> None:
        self._hashes = array("q", bytes(8 * places))
        self._proofs = array("Q", bytes(8 * places))
        self._used = 0

    def _bucket(self, hashed: int) -> range:
        first = hashed // _Proofs.TABLES * self.BUCKET % len(self._hashes)
        return range(first, first + self.BUCKET)

    def _find(self, hashed: int) -> int | None:
        for place in self._bucket(hashed) if hashed else ():  # 0 marks an empty place
            if self._hashes[place] == hashed:
                return place
        return None

    def get(self, hashed: int) -> Proof | None:
        place = self._find(hashed)
        return None if place is None else self._proofs[place]

    def put(self, hashed: int, proof: Proof) -> None:
        if not hashed:
            return
        if 2 * self._used >= len(self._hashes) < self.LIMIT:
            self._double()
        place = self._find(hashed)
        if place is None:
            place = self._room(hashed)
        self._hashes[place] = hashed
        self._proofs[place] = proof

    def _room(self, hashed: int) -> int:
        bucket = self._bucket(hashed)
        for place in bucket:
            if not self._hashes[place]:
                self._used += 1
                return place
        return bucket[self._used % self.BUCKET]

    def drop(self, hashed: int) -> None:
        place = self._find(hashed)
        if place is not None:
            self._hashes[place] = 0
            self._used -= 1

    def _double(self) -> None:
        larger = _Table(2 * len(self._hashes))
        for hashed, proof in zip(self._hashes, self._proofs, strict=True):
            larger.put(hashed, proof)
        self._hashes, self._proofs, self._used = (
            larger._hashes,
            larger._proofs,
            larger._used,
        )
