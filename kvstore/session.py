"""`Session`: a client that is made anew where the one at hand has had its day.

Two things end a client's life. Its credentials may have expired, while the environment, a
profile or the machine's metadata has new ones: a refusal then makes the session build
another client, once a minute at most, and ask once more. If there are none any more, it
stays a refusal: storage's, and not of how anything is called. And the process may have
forked: neither obstore's threads nor fsspec's live on in a child, whose calls would hang.

A child must not even let go of its parent's clients. Both wait for sockets at one place in
the kernel, which the processes share: what a child closes there, its parent never hears
of, and what a child opens there crashes its parent.

Threads: any, at once. `_lock` is held only while a client is made after a refusal; it is
another one in a child, where nobody would release it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from kvstore.client import Client
from kvstore.listing import Found

Result = TypeVar("Result")

RENEWAL = 60.0
"""Seconds between two clients that are made after refusals."""

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_parents: list[Client] = []
os.register_at_fork(after_in_child=lambda: _parents.extend(_clients))


class Session:
    """Has the methods of `Client`, and does by a client what each of them says."""

    def __init__(self, make: Callable[[bool], Client], *, renewable: bool) -> None:
        """Makes the first client.

        Args:
            make: makes a client. If it is told so, of nothing that is remembered.
            renewable: whether another client could have other credentials.
        """
        self._make = make
        self._renewable = renewable
        self._lock = threading.Lock()
        self._renewed = -RENEWAL
        self._process = os.getpid()
        self._client = self._made(False)

    def get(self, path: str, limit: int) -> bytes:
        """As `Client.get`."""
        return self._ask(lambda client: client.get(path, limit))

    def get_into(self, path: str, buffers: Sequence[memoryview]) -> int:
        """As `Client.get_into`."""
        return self._ask(lambda client: client.get_into(path, buffers))

    def put(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """As `Client.put`."""
        data = b"".join(parts)  # they are told once only
        self._ask(lambda client: client.put(path, (data,)))

    def create(self, path: str, data: bytes) -> None:
        """As `Client.create`."""
        self._ask(lambda client: client.create(path, data))

    def delete(self, path: str) -> None:
        """As `Client.delete`."""
        self._ask(lambda client: client.delete(path))

    def folders(self, path: str) -> list[str]:
        """As `Client.folders`."""
        return self._ask(lambda client: client.folders(path))

    def files(self, path: str, after: str) -> Iterator[Found]:
        """As `Client.files`."""
        client = self._current()
        try:
            for found in client.files(path, after):
                yield found
                after = found.path
        except PermissionError as refusal:
            renewed = self._renew(client, refusal)
        else:
            return
        yield from renewed.files(path, after)

    def delete_many(self, paths: Sequence[str]) -> tuple[set[str], Exception | None]:
        """As `Client.delete_many`."""
        client = self._current()
        gone, problem = client.delete_many(paths)
        if not isinstance(problem, PermissionError):
            return gone, problem
        try:
            renewed = self._renew(client, problem)
        except PermissionError as refusal:
            return gone, refusal
        more, problem = renewed.delete_many([p for p in paths if p not in gone])
        return gone | more, problem

    def _ask(self, request: Callable[[Client], Result]) -> Result:
        client = self._current()
        try:
            return request(client)
        except PermissionError as refusal:
            renewed = self._renew(client, refusal)
        return request(renewed)

    def _current(self) -> Client:
        if self._process != os.getpid():
            # Two threads of a child may both come here: one of the clients is let go.
            self._lock = threading.Lock()
            self._client = self._made(True)
            self._process = os.getpid()
        return self._client

    def _renew(self, refused: Client, refusal: PermissionError) -> Client:
        """The client to ask after a refusal.

        Raises:
            PermissionError: the refusal, if there is no other client.
        """
        with self._lock:
            if self._client is not refused:
                return self._client  # another thread has met a refusal too
            now = time.monotonic()
            if not self._renewable or now < self._renewed + RENEWAL:
                raise refusal
            self._renewed = now
            try:
                self._client = self._made(True)
            except Exception as error:
                problem = f"{refusal}; and no other client could be made: {error}"
                raise PermissionError(problem) from refusal
            return self._client

    def _made(self, anew: bool) -> Client:
        client = self._make(anew)
        _clients.add(client)
        return client
