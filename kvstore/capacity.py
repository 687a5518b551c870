"""`Room`: how much an engine may store before the next look at what a root holds. Pure.

What a root holds is found by a `Collector` now and then, and all engines of the root store
meanwhile. So each stores no more than a step of the limit between two looks, and waits
with the rest: nobody waits for a store. Nothing is stored before the first look.

Locking: none; its owner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.errors import InvalidInputError

LOW = 0.92
"""Part of the limit down to which the least recently used are removed."""

STEP = 0.04
"""Part of the limit that one engine may store between two looks: two engines that do so
at once just reach it, and four 1.08 of it.
"""

MIN_STEPS = 2
"""Blocks that a step must hold at least."""

IDLE_SECONDS = 30.0
"""After which a look is due, whatever was stored."""

REST_SECONDS, FAILED_SECONDS = 0.02, 1.0
"""Between two looks; and after one that failed."""


def require_room(max_bytes: int, block_bytes: int) -> None:
    """Raise `InvalidInputError` where a limit is too small for its blocks."""
    least = int(MIN_STEPS * block_bytes / STEP) + 1
    if max_bytes < least:
        raise InvalidInputError(
            f"max_bytes: expected at least {least}, which is {MIN_STEPS / STEP:.0f} blocks "
            f"of {block_bytes} bytes, found {max_bytes}"
        )


class Room:
    """Room for blocks, by their number. Without a limit there always is.

    Attributes:
        used: bytes that the root holds, as the last look found; None before.
    """

    def __init__(
        self,
        max_bytes: int | None,
        block_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        max_bytes: the limit, if there is one.
        block_bytes: what one block takes, its documents included.
        clock: seconds, never back.

        Raises:
            InvalidInputError: the limit is less than some blocks.
        """
        if max_bytes is not None:
            require_room(max_bytes, block_bytes)
        self.used: int | None = None
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._clock = clock
        self._step = 0 if max_bytes is None else int(STEP * max_bytes / block_bytes)
        self._left = 0
        self._running = 0  # taken, and not ended
        self._unseen = 0  # what the look that runs, or ran last, may have missed
        self._looking = False
        self._soonest = self._latest = float("-inf")

    def take(self, blocks: int) -> int:
        """How many of so many blocks may be stored now."""
        if self._max_bytes is None:
            return blocks
        taken = min(blocks, self._left)
        self._left -= taken
        self._running += taken
        self._unseen += taken
        return taken

    def note_ended(self, blocks: int) -> None:
        """So many of those that were taken are stored, or have failed."""
        if self._max_bytes is not None:
            self._running -= blocks

    def take_look(self, *, waiting: bool) -> bool:
        """Whether a look is due. Its end must be noted; until then no other is.

        Args:
            waiting: whether any block waits for room.
        """
        open_ = self._left + self._running
        half_gone = self._max_bytes is not None and 2 * open_ <= self._step
        wanted = half_gone and (waiting or self._unseen > 0)
        if self._looking or self._clock() < (self._soonest if wanted else self._latest):
            return False
        self._looking = True
        self._unseen = self._running
        return True

    def note_look(self, used: int | None, *, more: bool = False) -> None:
        """A look has ended.

        Args:
            used: bytes that the root held; None if it could not tell.
            more: whether it had no time to remove enough.
        """
        now = self._clock()
        self._looking = False
        self._soonest = now if more else now + REST_SECONDS
        self._latest = now if more else now + IDLE_SECONDS
        if used is None:
            self._soonest = now + FAILED_SECONDS
            return
        self.used = used
        if self._max_bytes is not None:
            free = self._max_bytes - used - self._unseen * self._block_bytes
            room = min(self._step - self._running, free // self._block_bytes)
            self._left = max(0, room)
