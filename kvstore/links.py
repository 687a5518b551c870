"""`Link`: our end of one mover's socket, and the parts that it has not answered.

Never waits. A mover that ends is started again by the next `revive`, after a pause that
grows while it keeps ending. Locking: none; `JobRunner` calls under its lock.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvstore.mover import MAX_MESSAGE_BYTES, READY, Part, Reply

MAX_PAUSE = 60.0
"""Seconds before a mover that keeps ending is started again."""


class Launched(Protocol):
    """Where a mover runs."""

    def start(self) -> socket.socket:
        """Start it; returns our end of its socket. May be called again after its end."""

    def kill(self) -> None:
        """End it now, if that is possible."""

    def join(self, seconds: float) -> bool:
        """Wait for its end, so long at most. Returns whether it has ended."""


class Link:
    """One mover, started at once.

    Attributes:
        mover: where it runs.
        up: whether it has been started and has not ended.
        ready: whether it has ever said that it takes parts.
        parts: what it has not answered, by number, oldest first.
        keys: how many keys these are.
    """

    def __init__(self, mover: Launched) -> None:
        """Start the mover."""
        self.mover = mover
        self.up = False
        self.ready = False
        self.parts: dict[int, Part] = {}
        self.keys = 0
        self._channel: socket.socket
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._unsent: deque[bytes] = deque()
        self._pause = 0.0
        self._not_before = 0.0
        self.revive()

    def fileno(self) -> int:
        """The socket's number, for `select`."""
        return self._channel.fileno()

    def revive(self) -> bool:
        """Start the mover if it has ended and its pause is over. Returns whether it did."""
        now = time.monotonic()
        if self.up or now < self._not_before:
            return False
        self._pause = min(MAX_PAUSE, 2 * self._pause or 1.0)
        self._not_before = now + self._pause
        self._channel = self.mover.start()
        self._channel.setblocking(False)
        self.up = True
        return True

    def send(self, part: Part) -> None:
        """Hand a part over, now or when the mover has read what it has."""
        self.parts[part.number] = part
        self.keys += len(part.keys)
        self._unsent.append(pickle.dumps(tuple(part)))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._unsent:
            try:
                self._channel.send(self._unsent[0])
            except OSError:
                return  # no room yet; or it has ended, as `replies` will find
            self._unsent.popleft()

    def replies(self) -> Iterator[tuple[Part, Reply]]:
        """What the mover has answered. After that, `up` tells whether it has ended."""
        while True:
            try:
                length = self._channel.recv_into(self._buffer)
            except BlockingIOError:
                return
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
            part = self.parts.pop(reply.number)
            self.keys -= len(part.keys)
            yield part, reply

    def finish(self) -> None:
        """Tell the mover that no part will follow."""
        self._channel.shutdown(socket.SHUT_WR)

    def close(self) -> list[Part]:
        """Let go of a mover that has ended. Returns what it has not answered."""
        self._channel.close()
        self.mover.join(0)
        lost = list(self.parts.values())
        self.parts, self.keys = {}, 0
        self._unsent.clear()
        return lost
