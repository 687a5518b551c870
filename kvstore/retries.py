"""A request is made again after a failure that another attempt may not meet.

Never after an absence, a refusal or a timeout: these are answers, or have had their time.
Every request of ours may be made twice. A PUT writes the same bytes again; a DELETE may
find nothing more, and a conditional write its own object, which both are answers.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

FIRST_TRIES = 0.1
"""Part of a request's time in which a failed attempt may be followed by another."""

TRIES = 10


class TransientError(ConnectionError):
    """The connection, or what came over it, broke: another attempt may do better."""


def persist(
    request: Callable[[], Result],
    transient: Callable[[Exception], bool],
    *,
    seconds: float,
) -> Result:
    """Make a request, again where that may help, after waits that grow.

    Args:
        request: makes one attempt.
        transient: whether another attempt may do better after a failure.
        seconds: no attempt begins later than this.

    Raises:
        Exception: what the last attempt raised.
    """
    begun = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return request()
        except Exception as error:
            # Those that failed together come back apart.
            wait = seconds / 30 * 2 ** (attempt - 1) * random.uniform(0.5, 1)
            late = time.monotonic() + wait > begun + seconds
            if late or attempt >= TRIES or not transient(error):
                raise
        time.sleep(wait)
    raise AssertionError("unreachable")
