"""`Seldom`: what happens again and again is said now and then. Pure, no I/O.

Locking: none; its owner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOG_SECONDS = 10.0
"""Between two lines of one topic."""


class Seldom:
    """Nothing has been said at first."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds, never back."""
        self._clock = clock
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def unsaid(self, topic: str, count: int = 1) -> int | None:
        """How many were not said since the last line of this topic, and a line may be said
        now of these; None if it is too soon, and these count as not said.
        """
        now = self._clock()
        if now - self._said.get(topic, float("-inf")) < LOG_SECONDS:
            self._unsaid[topic] = self._unsaid.get(topic, 0) + count
            return None
        self._said[topic] = now
        return self._unsaid.pop(topic, 0)
