"""`Link`: our end of one mover's socket, and the parts that it has not answered.

Never waits, but a moment for the end of a mover that has closed its socket. A mover that
ends is started again by the next `revive`, after a pause that grows while it keeps ending.
Locking: none; `JobRunner` calls under its lock.
"""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.parts import (
    AWAITED,
    MAX_MESSAGE_BYTES,
    READY,
    UPKEEP_SECONDS,
    Operation,
    Part,
    Reply,
)

logger = logging.getLogger(__name__)

MAX_PAUSE = 60.0
"""Seconds before a mover that keeps ending is started again."""

END_SECONDS = 1.0
"""How long a process that has closed its socket may take to be gone: it never does."""


DEEP = 2
"""A job stays whole while every mover has so many times its keys to do: each part costs the
calling thread a message and a reply, and nobody would be done sooner."""


class Launched(Protocol):
    """Where a mover runs."""

    def start(self) -> socket.socket:
        """Start it; returns our end of its socket. May be called again after its end."""

    def kill(self) -> bool:
        """End it now. Returns whether that is possible."""

    def join(self, seconds: float) -> bool:
        """Wait for its end, so long at most. Returns whether it has ended."""

    def close(self) -> None:
        """Let go of what a start needs: there will be none."""


class Link:
    """One mover, started at once.

    Attributes:
        mover: where it runs.
        up: whether it has been started and has not ended.
        ready: whether it has said since its start that it takes parts.
        late: whether anything that it has was found late since its start.
        killed: whether it was killed for that; it may take a while to be gone.
        parts: what it has not answered, by number, oldest first.
        keys: how many keys these are.
    """

    def __init__(self, mover: Launched) -> None:
        """Start the mover."""
        self.mover = mover
        self.up = False
        self.ready = False
        self.late = False
        self.killed = False
        self.parts: dict[int, Part] = {}
        self.keys = 0
        self._channel: socket.socket | None = None
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._unsent: deque[bytes] = deque()
        self._pause = 0.0
        self._not_before = 0.0
        self.revive()

    def fileno(self) -> int:
        """The socket's number, for `select`; -1 while there is none."""
        return -1 if self._channel is None else self._channel.fileno()

    def revive(self) -> bool:
        """Start the mover if it has ended and its pause is over. Returns whether it did."""
        now = time.monotonic()
        if self.up or now < self._not_before:
            return False
        self._pause = min(MAX_PAUSE, 2 * self._pause or 1.0)
        self._not_before = now + self._pause
        try:
            self._channel = self.mover.start()
        except Exception as error:  # no memory, process, descriptor or thread is left
            logger.warning(
                "a process that transfers blocks cannot be started: %s: %s",
                type(error).__name__,
                str(error),  # the error itself would keep a mover's memory mapped
            )
            return False
        self._channel.setblocking(False)
        self.up, self.ready, self.late, self.killed = True, False, False, False
        return True

    def send(self, part: Part) -> bool:
        """Hand a part over, now or when the mover has read what it has. Returns False if
        no message can hold it.
        """
        message = pickle.dumps(tuple(part))
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        self.parts[part.number] = part
        self.keys += len(part.keys)
        self._unsent.append(message)
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._unsent and self._channel is not None:
            try:
                self._channel.send(self._unsent[0])
            except OSError:
                return  # no room yet; or it has ended, as `replies` will find
            self._unsent.popleft()

    def replies(self) -> Iterator[tuple[Part, Reply]]:
        """What the mover has answered. After that, `up` tells whether it has ended."""
        while self._channel is not None:
            try:
                length = self._channel.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once, of parts that it left unread: its replies follow
            except OSError:
                length = 0
            if not length:
                self.up = False
                return
            reply = Reply(*pickle.loads(self._buffer[:length]))
            if reply.number == READY:
                self.ready = True
                continue
            self._pause = 0.0
            part = self.parts.get(reply.number)
            if part is None:
                continue  # news of what has ended before it was sent
            if reply.last:
                del self.parts[reply.number]
                self.keys -= len(part.keys)
            yield part, reply

    def hanging(self, now: float, grace: float) -> tuple[Operation, float] | None:
        """What should have ended so many seconds ago, once since the mover's start.

        Args:
            now: by `time.monotonic`.
            grace: seconds past its deadline that a key may run; of upkeep, for which
                nobody waits, one may for `UPKEEP_SECONDS`.
        """
        for part in () if self.late else self.parts.values():
            seconds = grace if part.operation in AWAITED else UPKEEP_SECONDS
            if now >= part.deadline + seconds:
                self.late = True
                return part.operation, seconds
        return None

    def finish(self) -> None:
        """Tell the mover that no part will follow."""
        if self._channel is not None:
            self._channel.shutdown(socket.SHUT_WR)

    def close(self) -> list[Part]:
        """Let go of a mover that has ended. Returns what it has not answered."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.mover.kill()
        self.mover.join(END_SECONDS)
        lost = list(self.parts.values())
        self.parts, self.keys = {}, 0
        self._unsent.clear()
        return lost


def shares(links: Sequence[Link], count: int) -> Iterator[tuple[Link, int]]:
    """How many of `count` keys each mover gets: as many more as it has less to do."""
    idlest = min(links, key=lambda link: link.keys)
    if idlest.keys >= DEEP * count:
        links = [idlest]
    # Whoever has more than its share even so comes first, and is not counted again.
    rest = sorted(links, key=lambda link: link.keys, reverse=True)
    while rest:
        level = (count + sum(link.keys for link in rest)) / len(rest)
        link = rest.pop(0)
        share = min(count, max(0, round(level - link.keys))) if rest else count
        count -= share
        yield link, share
