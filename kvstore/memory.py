"""`Memory`: what one process has learnt of its blocks. Bounded, and never needed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from kvstore.arrays import Proof


class Memory:
    """Proofs, damage and fan-out folders that were seen, and counts of what happened.

    A forgotten entry costs a request, never a wrong answer. Locking: one lock guards
    everything, so any thread may call any method.
    """

    LIMIT = 65_536
    """Keys that are remembered for each purpose; the oldest go first."""

    DAMAGE_SECONDS = 60.0
    """How long damage is believed: another engine may repair the block."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._lock = threading.Lock()
        self._proofs: dict[bytes, Proof] = {}
        self._damaged: dict[bytes, float] = {}
        self._fan_outs: set[str] = set()
        self._counts: Counter[str] = Counter()

    def remember(self, key: bytes, proof: Proof) -> None:
        """The block's document was read, and this is what it vouches for."""
        with self._lock:
            _put(self._proofs, key, proof, self.LIMIT)

    def recall(self, key: bytes) -> Proof | None:
        """The proof that was remembered. Used once: the block may be replaced."""
        with self._lock:
            return self._proofs.pop(key, None)

    def was_damaged_lately(self, key: bytes) -> bool:
        """Whether it is worth no look: the block was found damaged a moment ago."""
        with self._lock:
            found = self._damaged.get(key)
        return found is not None and time.monotonic() - found < self.DAMAGE_SECONDS

    def is_damaged(self, key: bytes) -> bool:
        """Whether the block did not hold its proof and was not repaired since."""
        with self._lock:
            return key in self._damaged

    def note_damage(self, key: bytes) -> None:
        """The block did not hold its proof."""
        with self._lock:
            self._counts["damaged"] += 1
            self._proofs.pop(key, None)
            _put(self._damaged, key, time.monotonic(), self.LIMIT)

    def note_stored(self, key: bytes, *, repaired: bool) -> None:
        """The block was published, maybe in the place of a damaged one."""
        with self._lock:
            self._counts["repaired" if repaired else "stored"] += 1
            self._damaged.pop(key, None)

    def note_loaded(self, key: bytes) -> None:
        """The block was read and proved, so whatever was damaged is repaired."""
        with self._lock:
            self._counts["loaded"] += 1
            self._damaged.pop(key, None)

    def forget(self, key: bytes) -> None:
        """The block was deleted."""
        with self._lock:
            self._proofs.pop(key, None)
            self._damaged.pop(key, None)

    def knows_fan_out(self, fan_out: str) -> bool:
        """Whether the fan-out folder's document was written."""
        with self._lock:
            return fan_out in self._fan_outs

    def note_fan_out(self, fan_out: str) -> None:
        """The fan-out folder's document is there."""
        with self._lock:
            self._fan_outs.add(fan_out)

    def forget_fan_outs(self) -> None:
        """Somebody removed folders."""
        with self._lock:
            self._fan_outs.clear()

    def counts(self) -> dict[str, int]:
        """Blocks stored, repaired, loaded and found damaged."""
        with self._lock:
            names = ("stored", "repaired", "loaded", "damaged")
            return {name: self._counts[name] for name in names}


def _put(memory: dict[bytes, Any], key: bytes, value: Any, limit: int) -> None:
    """Keep the newest `limit` entries."""
    memory.pop(key, None)
    if len(memory) >= limit:
        memory.pop(next(iter(memory)))
    memory[key] = value
