"""`Client`: the five requests that kvstore makes of a storage that is no local folder.

Each is one request for exactly one object, answered within the timeout or failed. There
is no listing, no HEAD and no rename. Paths are relative to the client's root, with `/`
between parts, and are names: nothing in them is a pattern.

What a client raises is for `filesystem.py` to translate:

    FileNotFoundError, NotADirectoryError   there is no such object: an answer
    FileExistsError                         `create` came second: an answer
    PermissionError                         the server refused
    TimeoutError                            no answer in time
    any other exception                     a failure

Threads: every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The object stores' protocols, and which extra of this package brings their clients."""

RANGE_NOT_SATISFIABLE = 416
SOMEBODY_WAS_FIRST = (409, 412)
"""What servers answer to a conditional write that comes second, or at the same time."""
REFUSED = (401, 403)


class Client(Protocol):
    """A root in a storage. Made without a request."""

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of an object; fewer if it holds fewer."""

    def get_into(self, path: str, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` in turn with an object's bytes.

        Returns:
            The bytes that the object holds, counted no further than one more than the
            buffers do. Unless that is exactly what they hold, their contents are
            undefined.
        """

    def put(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object whole from its parts, over one that is there.

        The parts are not read again after the return, whatever became of the request.
        """

    def create(self, path: str, data: bytes) -> None:
        """Write a small object whole, unless there is one."""

    def delete(self, path: str) -> None:
        """Remove an object. One that is absent is no failure, or a FileNotFoundError."""
