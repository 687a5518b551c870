"""`ObstoreClient`: S3 and Google Cloud Storage by obstore. The only user of obstore.

obstore works in Rust, without Python's lock, and keeps its connections. Its calls block,
and are made on the thread at hand.

A request takes no longer than the timeout. An attempt may take eight tenths of it. What
failed sooner (5xx, 429, no connection, half a body) is tried again by obstore for a tenth.
It does not where that could do something twice, nor where half an answer looks whole: there
another tenth is ours to begin in.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from kvstore.buffers import scatter
from kvstore.client import EXTRAS, delete_each
from kvstore.errors import InvalidInputError
from kvstore.fsspec_client import FsspecClient
from kvstore.gcs_options import gcs_arguments
from kvstore.listing import Found
from kvstore.obstore_errors import EmptyObject, odd_name, translated
from kvstore.retries import FIRST_TRIES, TransientError, persist
from kvstore.s3_options import s3_arguments

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHUNK = 1 << 18
"""Bytes that are copied to the buffers at once. Plain HTTP comes in such pieces by itself;
the 16 KiB records of TLS are joined first, since a step through Python costs more."""

_PAGE = 1000
"""Objects in one answer to a listing, and in one request that deletes: what S3 allows."""

_HALF = "fewer bytes came than the answer had announced"
_MORE = "more bytes came than the answer had announced"

_process: int | None = None
"""Where obstore's threads are, once a request has started them."""


def of_another_process() -> bool:
    """Whether obstore's threads are in the process that this one was forked from.

    They are made once, by the first request, and a child can neither use them nor make
    others: its requests would hang, and could crash its parent.
    """
    if _process in (None, os.getpid()):
        return False
    logger.warning(
        "this process was forked from one that uses obstore, which cannot be used here: "
        "requests go through fsspec and cost several times the CPU. Start processes by "
        "spawn or forkserver instead"
    )
    return True


class ObstoreClient:
    """One root in a bucket."""

    def __init__(
        self, protocol: str, url: str, options: Mapping[str, Any], *, timeout: float
    ) -> None:
        """Reads credentials; makes no request of the storage.

        Raises:
            InvalidInputError: a package is missing, or an option cannot be honoured.
            Exception: whatever botocore, google-auth or obstore raises.
        """
        extra = EXTRAS[protocol]
        bucket, _, self._root = url.partition("://")[2].partition("/")
        try:
            # Only here: most users of kvstore open no bucket.
            import obstore
            from obstore.store import GCSStore, S3Store

            arguments = (
                s3_arguments(bucket, options) if extra == "s3" else gcs_arguments(options)
            )
        except ImportError as error:
            raise InvalidInputError(
                f"url: {protocol}:// needs the package {error.name}, which is not "
                f"installed: pip install 'kvstore-zarr[{extra}]'. Or choose another "
                'client with "client": "fsspec".'
            ) from error
        arguments["client_options"]["timeout"] = timedelta(
            seconds=(1 - 2 * FIRST_TRIES) * timeout
        )
        arguments["retry_config"] = _retries(FIRST_TRIES * timeout)
        self._first_tries = FIRST_TRIES * timeout
        self._timeout = timeout
        self._obstore = obstore
        self._store = (S3Store if extra == "s3" else GCSStore)(bucket, **arguments)
        self._bulk = None
        if extra == "s3":
            # Not for single objects: that would be a POST, for what a DELETE does.
            arguments["config"]["disable_bulk_delete"] = False
            self._bulk = S3Store(bucket, **arguments)
        self._made_of = (protocol, url, options, timeout)

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes, in one request for a range."""

        def attempt() -> bytes:
            result = self._range(path, limit)
            start, stop = result.range
            pieces, missing = [], stop - start
            for piece in result.stream(_CHUNK):
                missing -= len(piece)
                if missing < 0:  # it need not end where it was announced
                    raise OSError(_MORE)
                pieces.append(piece)
            if missing:
                raise TransientError(_HALF)
            return b"".join(pieces)

        try:
            return self._persist(attempt)
        except EmptyObject:
            return b""

    def get_into(self, path: str, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` as the bytes arrive: one copy over plain HTTP, two over TLS."""
        wanted = sum(buffer.nbytes for buffer in buffers)

        def attempt() -> int:
            result = self._range(path, wanted + 1)
            start, stop = result.range
            length: int = stop - start
            if length == wanted:
                try:
                    scatter(result.stream(_CHUNK), buffers)
                except ValueError as error:
                    raise TransientError(f"of an answer, {error}") from error
            return length

        try:
            return self._persist(attempt)
        except EmptyObject:
            return 0

    def put(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object whole.

        obstore would send the parts from where they lie, but may still do so after a
        request has failed. So they are joined: one copy, and no other.
        """
        self._put(path, b"".join(parts), "overwrite")

    def create(self, path: str, data: bytes) -> None:
        """Write an object whole, unless there is one: a conditional write."""
        self._put(path, data, "create")

    def delete(self, path: str) -> None:
        """Remove an object."""
        self._persist(lambda: self._obstore.delete(self._store, self._at(path)))

    def folders(self, path: str) -> list[str]:
        """The names of the folders directly below a folder.

        A server may go on for ever, and obstore with it. So this call can be ended: by
        asyncio, on a thread of its own, since the one at hand may have a loop.
        """

        async def listing() -> Any:
            where = self._at(path) or None
            async with asyncio.timeout(self._timeout):
                return await self._obstore.list_with_delimiter_async(self._store, where)

        try:
            with ThreadPoolExecutor(1) as pool:
                listed = self._persist(lambda: pool.submit(asyncio.run, listing()).result())
        except OSError as error:
            if not odd_name(error):
                raise
            return self._by_fsspec().folders(path)
        return sorted(str(name).rpartition("/")[2] for name in listed["common_prefixes"])

    def files(self, path: str, after: str) -> Iterator[Found]:
        """Every file below a folder, 1,000 in one answer."""
        last = after
        pages: Iterator[list[Found]] | None = None

        def page() -> list[Found] | None:
            nonlocal pages
            pages = pages or self._pages(path, last)
            try:
                return next(pages, None)
            except Exception:
                pages = None  # another attempt goes on from where the last page ended
                raise

        try:
            while found := self._persist(page):
                yield from found
                last = found[-1].path
        except OSError as error:
            if not odd_name(error):
                raise
            yield from self._by_fsspec().files(path, last)

    def _pages(self, path: str, after: str) -> Iterator[list[Found]]:
        skip = len(self._at("x")) - 1
        pages = self._obstore.list(
            self._store,
            self._at(path) or None,
            offset=self._at(after) if after else None,
            chunk_size=_PAGE,
        )
        for page in pages:
            yield [
                Found(told["path"][skip:], told["size"], told["last_modified"].timestamp())
                for told in page
            ]

    def delete_many(self, paths: Sequence[str]) -> tuple[set[str], Exception | None]:
        """Remove objects: S3 takes 1,000 in one request, Google one."""
        if self._bulk is None:
            return delete_each(self, paths)
        gone: set[str] = set()
        for start in range(0, len(paths), _PAGE):
            batch = paths[start : start + _PAGE]
            names = [self._at(path) for path in batch]
            try:
                self._persist(lambda names=names: self._obstore.delete(self._bulk, names))  # type: ignore[misc]  # of a lambda's default
            except TimeoutError as error:
                return gone, error
            except Exception:
                # One of them failed, or the server knows no such request.
                these, problem = delete_each(self, batch)
                gone |= these
                if problem is not None:
                    return gone, problem
            else:
                gone.update(batch)
        return gone, None

    def _by_fsspec(self) -> FsspecClient:
        """Who can list what obstore has no path for, such as `a//b`, by one such name.

        It finds all in the order of paths, and so goes on where obstore has stopped.
        """
        protocol, url, options, timeout = self._made_of
        return FsspecClient(protocol, url, options, timeout=timeout)

    def _range(self, path: str, limit: int) -> Any:
        return self._obstore.get(self._store, self._at(path), options={"range": (0, limit)})

    def _put(self, path: str, data: bytes, mode: str) -> None:
        # One PUT for any size: the parts of a multipart upload would be more requests.
        self._persist(
            lambda: self._obstore.put(
                self._store, self._at(path), data, mode=mode, use_multipart=False
            )
        )

    def _persist(self, request: Callable[[], Result]) -> Result:
        global _process
        _process = os.getpid()

        def attempt() -> Result:
            with translated():
                return request()

        return persist(
            attempt,
            lambda error: isinstance(error, TransientError),
            seconds=self._first_tries,
        )

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".strip("/")


def _retries(seconds: float) -> dict[str, Any]:
    """No attempt begins after `seconds`: the last wait begins before half of them."""
    return {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=seconds / 2),
        "backoff": {
            "init_backoff": timedelta(seconds=seconds / 30),
            "max_backoff": timedelta(seconds=seconds / 2),
            "base": 2,
        },
    }
