"""`Health`: whether storage answers, as far as the last jobs tell.

Lookups, loads and stores fail apart, and each has a circuit: a full disk still serves
loads, and a network that is too slow for a block still answers lookups. What fails while a
circuit is closed is told in the log, one line for an operation in ten seconds; while it is
open there are only trials, and nothing is told until one succeeds.

Locking: none; one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvstore.blocks import Stored
from kvstore.circuit import Circuit
from kvstore.job import Outcome
from kvstore.parts import INVALID, Operation
from kvstore.seldom import Seldom
from kvstore.transfer import ABSENT, DAMAGED, FAILURES, FOUND, LOADED

logger = logging.getLogger(__name__)

_SHOWS: Mapping[Operation, Sequence[str]] = {
    "lookup": (FOUND, ABSENT, DAMAGED),
    "load": (LOADED, DAMAGED),
    "store": (Stored.STORED, Stored.REPAIRED),
}
"""Words of what succeeded. Where a load finds nothing to read, or a store nothing to write,
it says nothing of how reading and writing fare.
"""


class Health:
    """Attributes:
    lookups, loads, stores: their circuits.
    """

    def __init__(
        self,
        place: str,
        lookup_timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        place: the root, without credentials.
        lookup_timeout: seconds after which an answer to a lookup is of no use.
        clock: seconds, never back.
        """
        self.lookups = Circuit("lookups", place, clock=clock)
        self.loads = Circuit("loads", place, clock=clock)
        self.stores = Circuit("stores", place, clock=clock)
        self._circuits: Mapping[Operation, Circuit] = {
            "lookup": self.lookups,
            "load": self.loads,
            "store": self.stores,
        }
        self._lookup_timeout = lookup_timeout
        self._seldom = Seldom(clock=clock)

    @property
    def reads_open(self) -> bool:
        """Whether not to look up nor to load: the one is of no use without the other."""
        return self.lookups.open or self.loads.open

    def note(self, outcome: Outcome) -> None:
        """Learn from a job that storage was asked."""
        operation, words = outcome.job.operation, outcome.words
        succeeded = sum(map(words.count, _SHOWS[operation]))
        failed = sum(map(words.count, FAILURES))
        wrong = words.count(INVALID)  # storage was not asked
        reason = _reason(outcome)
        if operation == "load" and outcome.job.trial and set(words) == {ABSENT}:
            self.loads.close()  # nothing is left to try: a request's load will tell
            return
        if operation == "lookup" and outcome.seconds > self._lookup_timeout:
            succeeded, failed, reason = 0, len(words), self._no_answer
        self._note(operation, succeeded, failed, wrong, reason, trial=outcome.job.trial)

    def note_late(self, keys: int) -> None:
        """So many lookups were not answered in time."""
        self._note("lookup", 0, keys, 0, self._no_answer, trial=False)

    @property
    def _no_answer(self) -> str:
        return f"no answer within {self._lookup_timeout:g} s"

    def _note(
        self,
        operation: Operation,
        succeeded: int,
        failed: int,
        wrong: int,
        reason: str,
        *,
        trial: bool,
    ) -> None:
        circuit = self._circuits[operation]
        if failed and not circuit.open:
            self._tell(operation, failed, succeeded + failed, reason)
        circuit.note(succeeded, failed - wrong, reason, trial=trial)

    def _tell(self, operation: Operation, failed: int, keys: int, reason: str) -> None:
        untold = self._seldom.unsaid(operation, failed)
        if untold is not None:
            logger.warning(
                "%s of %d of %d blocks failed, and %d since the last such line; the "
                "first: %s",
                operation,
                failed,
                keys,
                untold,
                reason,
            )


def _reason(outcome: Outcome) -> str:
    """What the first key that failed said: others may have problems too, as damage."""
    words, problems = outcome.words, sorted(outcome.problems.items())
    # A job whose slots have no keys has a problem too.
    said = (problem for i, problem in problems if FAILURES.intersection(words[i : i + 1]))
    return next(said, "no reason was given")
