"""What goes wrong, and when: faults, and plans of them for `kvstore.testing.faults`. Pure.

Threads: a plan may be asked from any thread. A copy in another process begins again.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvstore.errors import StorageAccessError, StorageError, StorageTimeoutError

Operation = Literal[
    "exists", "read", "read_into", "create", "publish", "delete", "touch", "probe"
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

Kind = Literal["before", "after", "half", "flipped", "short", "long", "stale"]
"""What a fault does: the operation fails `before` it did anything, `after` it took effect,
or `half` way; or it ends well, and a read told bytes of which one bit is `flipped`, too few
(`short`), too many (`long`), or what was there one change ago (`stale`)."""

FAILURES: tuple[Kind, ...] = ("before", "after", "half")
LIES: tuple[Kind, ...] = ("flipped", "short", "long", "stale")

KINDS: Mapping[Operation, tuple[Kind, ...]] = {
    "exists": ("before",),
    "read": ("before", *LIES),
    "read_into": ("before", "after", *LIES),
    "create": ("before", "after"),
    "publish": FAILURES,
    "delete": FAILURES,
    "touch": FAILURES,
    "probe": ("before", "after"),
}
"""The kinds that make a difference to each operation."""

CAUSES: Mapping[type[StorageError], str] = {
    StorageError: "HTTP 503: Please reduce your request rate.",
    StorageTimeoutError: "no answer in time",
    StorageAccessError: "HTTP 403: Access Denied.",
}
"""What a backend's failures become, and what they then say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one operation.

    Attributes:
        kind: what it does, where the operation can have that; else it fails `before`.
        error: what a failure raises.
        at: where in the bytes a lie lies: from 0, the first, to 1, which is behind all.
    """

    kind: Kind
    error: type[StorageError] = StorageError
    at: float = 0.5


Plan = Callable[[Operation], Fault | None]
"""Asked once for each operation, from any thread: what goes wrong with it, if anything."""


class PlannedFaults:
    """The n-th call of an operation, counted from 1, has its fault; others have none."""

    def __init__(self, faults: Mapping[tuple[Operation, int], Fault]) -> None:
        self._faults = dict(faults)
        self._calls: Counter[Operation] = Counter()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as what it was made of."""
        return type(self), (self._faults,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._faults})"

    def __call__(self, operation: Operation) -> Fault | None:
        """What goes wrong with the next call of `operation`."""
        with self._lock:
            self._calls[operation] += 1
            return self._faults.get((operation, self._calls[operation]))


class RandomFaults:
    """Faults by chance: the same ones for one seed, if the calls come in one order."""

    def __init__(
        self,
        seed: int,
        rate: float | Mapping[Operation, float],
        *,
        kinds: Sequence[Kind] = (*FAILURES, *LIES),
    ) -> None:
        """`rate` is the share of calls that have a fault, of all or of each operation."""
        self._made_of = (seed, rate, tuple(kinds))
        self._rates = rate if isinstance(rate, Mapping) else dict.fromkeys(OPERATIONS, rate)
        self._kinds = {
            operation: [kind for kind in able if kind in kinds]
            for operation, able in KINDS.items()
        }
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as what it was made of."""
        seed, rate, kinds = self._made_of
        return functools.partial(type(self), kinds=kinds), (seed, rate)

    def __repr__(self) -> str:
        seed, rate, kinds = self._made_of
        return f"{type(self).__name__}({seed}, {rate}, kinds={kinds})"

    def __call__(self, operation: Operation) -> Fault | None:
        """What goes wrong with the next call of `operation`."""
        kinds = self._kinds[operation]
        with self._lock:
            if not kinds or self._random.random() >= self._rates.get(operation, 0):
                return None
            return Fault(
                kind=self._random.choice(kinds),
                error=self._random.choice(list(CAUSES)),
                at=self._random.random(),
            )
