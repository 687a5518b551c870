"""A loopback TCP proxy whose wire can be cut, dead, slow or long, and be whole again.

    with wire(server.endpoint) as line:
        line.be("held")

whole   every byte goes on at once
cut     connections are reset, and new ones are refused
dead    nothing passes, and nobody answers who wants to connect: the packets are lost
held    connections are taken, and nothing passes: the server hangs
slow    every connection passes `SLOW` bytes in a second, each way
long    what is asked arrives `LONG` seconds later

What was under way in `dead` and `held` goes on when the wire is whole again.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

HOST = "127.0.0.1"
SLOW = 1 << 16
STEPS = 8  # pieces of a second's bytes
LONG = 0.2
FILL = 8
"""Connections that fill a queue which takes none: the kernel then drops who knocks."""

Mode = Literal["whole", "cut", "dead", "held", "slow", "long"]


class Wire:
    """Attributes:
    endpoint: the proxy's own address, which never changes.
    server: the host and port behind it, which may.
    """

    def __init__(self, server: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._mode: Mode = "cut"
        self._open = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._full: list[socket.socket] = []
        self._ends: set[asyncio.StreamWriter] = set()
        with socket.socket() as holder:
            holder.bind((HOST, 0))
            self._port = int(holder.getsockname()[1])
        self.endpoint = f"http://{HOST}:{self._port}"
        self.lead_to(server)

    def lead_to(self, server: str) -> None:
        """New connections go to this endpoint."""
        url = urlsplit(server)
        assert url.hostname
        assert url.port
        self.server = (url.hostname, url.port)

    def be(self, mode: Mode) -> None:
        """From now on, connections that are there included."""
        asyncio.run_coroutine_threadsafe(self._be(mode), self._loop).result(10)

    def run(self) -> None:
        """The loop's thread."""
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stop(self) -> None:
        self.be("cut")
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _be(self, mode: Mode) -> None:
        self._mode = mode
        if mode in ("dead", "held"):
            self._open.clear()
        else:
            self._open.set()
        while self._full:
            self._full.pop().close()
        if mode in ("cut", "dead"):
            if self._listener is not None:
                self._listener.close()
                self._listener = None
        elif self._listener is None:
            self._listener = await asyncio.start_server(self._accept, HOST, self._port)
        if mode == "cut":
            for end in tuple(self._ends):
                reset(end)
        elif mode == "dead":
            self._take_none()

    def _take_none(self) -> None:
        """Listen, and have the queue of those who knock full."""
        self._full = [socket.socket() for _ in range(1 + FILL)]
        listener, *fill = self._full
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, self._port))
        listener.listen(0)
        for knocking in fill:
            knocking.setblocking(False)
            knocking.connect_ex((HOST, self._port))

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._ends.add(writer)
        behind = None
        try:
            await self._open.wait()
            server, behind = await asyncio.open_connection(*self.server)
            self._ends.add(behind)
            await asyncio.gather(
                self._pump(reader, behind, asks=True),
                self._pump(server, writer, asks=False),
            )
        except OSError:
            reset(writer)  # the server is not there, or one end has gone
        finally:
            for end in filter(None, (writer, behind)):
                self._ends.discard(end)
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
    ) -> None:
        last = 0.0
        while data := await reader.read(SLOW // STEPS if self._mode == "slow" else 1 << 16):
            await self._open.wait()
            if self._mode == "slow":
                await asyncio.sleep(len(data) / SLOW)
            elif self._mode == "long" and asks and self._loop.time() - last > LONG:
                await asyncio.sleep(LONG)
            last = self._loop.time()
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


def reset(end: asyncio.StreamWriter) -> None:
    """Close without a word: the kernel sends RST."""
    with suppress(OSError):
        raw = end.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


@contextmanager
def wire(server: str) -> Iterator[Wire]:
    """A whole wire to the server at this endpoint."""
    line = Wire(server)
    thread = threading.Thread(target=line.run, daemon=True)
    thread.start()
    try:
        line.be("whole")
        yield line
    finally:
        line.stop()
        thread.join(10)
