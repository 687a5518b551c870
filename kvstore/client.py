"""`Client`: the requests that kvstore makes of a storage that is no local folder.

Blocks need five, `get` to `delete`: each is one request for exactly one object, answered
within the timeout or failed. There is no HEAD and no rename. Only who tidies up lists, and
deletes many at once; there the timeout is for each request, and for a list of folders as a
whole. Paths are relative to the
client's root, with `/` between parts, and are names: nothing in them is a pattern.

What a client raises is for `filesystem.py` to translate:

    FileNotFoundError, NotADirectoryError   there is no such object: an answer
    FileExistsError                         `create` came second: an answer
    PermissionError                         the server refused
    TimeoutError                            no answer in time
    any other exception                     a failure

Threads: every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstore.listing import Found

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The object stores' protocols, and which extra of this package brings their clients."""

RANGE_NOT_SATISFIABLE = 416
SOMEBODY_WAS_FIRST = (409, 412)
"""What servers answer to a conditional write that comes second, or at the same time."""
REFUSED = (401, 403)
ABSENT = (FileNotFoundError, NotADirectoryError)

_DELETERS = 10
"""Requests at once, and failures after which no more are made."""


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

    def folders(self, path: str) -> list[str]:
        """The names of the folders directly below a folder; none if it is absent."""

    def files(self, path: str, after: str) -> Iterator[Found]:
        """Every file below a folder, beyond `after` in the order that storage has.

        An error on the way raises: what ends without one is whole. An absent folder has
        no files.
        """

    def delete_many(self, paths: Sequence[str]) -> tuple[set[str], Exception | None]:
        """Remove objects. One that is absent is no failure.

        Returns:
            Those that are gone now, and the first failure, if there was any.
        """


def delete_each(client: Client, paths: Sequence[str]) -> tuple[set[str], Exception | None]:
    """`Client.delete_many`, by one request for each object, some of them at once.

    Where many fail, storage does, and the rest is not tried.
    """
    gone: set[str] = set()
    problems: list[Exception] = []

    def delete(path: str) -> None:
        if len(problems) >= _DELETERS:
            return
        try:
            client.delete(path)
        except ABSENT:
            pass
        except Exception as error:
            problems.append(error)
            return
        gone.add(path)

    with ThreadPoolExecutor(_DELETERS) as pool:
        list(pool.map(delete, paths))
    return gone, problems[0] if problems else None


def delete_blocks(
    client: Client, blocks: Sequence[tuple[str, Sequence[str]]]
) -> tuple[list[str], Exception | None]:
    """Remove the files of many blocks: all commit marks, each the last of its names, first.

    Returns:
        The folders of the blocks that are gone, and the first failure, if there was any.
    """
    marks = [f"{path}/{names[-1]}" for path, names in blocks]
    gone, problem = client.delete_many(marks)
    others = [
        f"{path}/{name}"
        for (path, names), mark in zip(blocks, marks, strict=True)
        if mark in gone
        for name in names[:-1]
    ]
    more, later = client.delete_many(others)
    gone |= more
    removed = [
        path for path, names in blocks if all(f"{path}/{name}" in gone for name in names)
    ]
    return removed, problem or later
