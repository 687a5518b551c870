"""`Circuit`: after repeated failures, do not ask at all for a while. Pure, no I/O.

While storage is dead, each request that asks it would wait for a deadline. An open circuit
answers for it at once. Now and then one trial is let through, for which nobody waits, and
its success closes the circuit again.

Locking: none; one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FAILURES = 5
"""Keys that fail in a row, with none between that ends otherwise, and open it."""

QUIET_SECONDS = 1.0
"""For so long nothing may have succeeded: who is only busy lets some keys be late."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a trial; twice as many after each trial that fails."""


class Circuit:
    """Closed at first.

    Attributes:
        open: whether to do without.
        reason: what the last failure said.
    """

    def __init__(
        self, what: str, place: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        what: what is tried, for the log, e.g. `loads`.
        place: where, without credentials.
        clock: seconds, never back.
        """
        self.open = False
        self.reason = ""
        self._what = what
        self._place = place
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._trial_at = 0.0
        self._opened = self._closed = float("-inf")
        self._succeeded = float("-inf")

    def take_trial(self) -> bool:
        """Whether a trial is due. Its end must be noted as such; until then no other is."""
        if not self.open or self._clock() < self._trial_at:
            return False
        self._trial_at = float("inf")
        return True

    def note(
        self, succeeded: int, failed: int, reason: str = "", *, trial: bool = False
    ) -> None:
        """So many keys succeeded, and so many failed. Both are 0 for what shows neither.
        `trial` says whether it is the end of one, and not of what began before.
        """
        now = self._clock()
        if succeeded:
            self._failures = 0
            self._succeeded = now
            self.close()
            return
        self._failures += failed
        self.reason = reason or self.reason
        if self.open and trial:
            if failed:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            self._trial_at = now + self._pause
        quiet = now - self._succeeded >= QUIET_SECONDS
        if not self.open and quiet and self._failures >= FAILURES:
            self._open(now)

    def _open(self, now: float) -> None:
        # One that has hardly closed goes on with the pause that it had reached.
        if now - self._closed > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self.open = True
        self._opened = now
        self._trial_at = now + self._pause
        logger.warning(
            "given up until a trial succeeds: %s of %s: %s",
            self._what,
            self._place,
            self.reason,
        )

    def close(self) -> None:
        """Do not do without any longer. Where nothing has succeeded since, the next failure
        opens it again.
        """
        if not self.open:
            return
        now = self._clock()
        self.open = False
        self._closed = now
        logger.warning(
            "works again after %.0f s: %s of %s",
            now - self._opened,
            self._what,
            self._place,
        )
