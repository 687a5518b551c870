"""`Hits`: says it once if blocks are stored for long, asked for, and never found.

Such a tier looks healthy: nothing fails, and all of it is in vain. Names that change with
each start, or a filter of stores and one of lookups that never meet, do that.

Locking: none, since vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvstore.blocks import Stored
from kvstore.job import Outcome
from kvstore.transfer import FAILURES, FOUND

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds since the first answer in which a hit may come."""

LOOKUPS = 1000
"""Answers that must have come in them."""


class Hits:
    """Counts until the first hit, or until it has said that there is none."""

    def __init__(self, place: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is counted.

        Args:
            place: the root, without credentials.
            clock: seconds, never back.
        """
        self._place = place
        self._clock = clock
        self._first: float | None = None
        self._lookups = 0
        self._stored = 0
        self._done = False

    def job_ended(self, outcome: Outcome) -> None:
        """Count a job's keys. A failure is no answer."""
        if self._done:
            return
        words = outcome.words
        if outcome.job.operation == "store":
            self._stored += sum(map(words.count, Stored))
        elif outcome.job.operation == "lookup":
            self._done = FOUND in words
            self._lookups += len(words) - sum(map(words.count, FAILURES))
            self._judge()

    def recalled(self, found: bool) -> None:
        """A lookup was answered from memory."""
        self._done = self._done or found
        self._lookups += 1

    def _judge(self) -> None:
        if self._done or not self._lookups:
            return
        now = self._clock()
        if self._first is None:
            self._first = now
        if now - self._first < PATIENCE or self._lookups < LOOKUPS or not self._stored:
            return
        self._done = True
        logger.warning(
            "no hit among %d lookups in %.0f s, while %d blocks were stored in %s: see "
            '"Is it working?" in docs/operations.md',
            self._lookups,
            now - self._first,
            self._stored,
            self._place,
        )
