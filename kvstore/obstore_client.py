"""`ObstoreClient`: S3 and Google Cloud Storage by obstore. The only user of obstore.

obstore works in Rust, without Python's lock, and keeps its connections. Its calls block,
and are made on the thread at hand. Its errors tell by class what kvstore must know, except
the server's status and a timeout, which only their text has.

A request takes no longer than the timeout: an attempt may take nine tenths of it, and what
failed sooner (5xx, 429, no connection) is tried again only in the first tenth.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from kvstore.buffers import scatter
from kvstore.client import EXTRAS, RANGE_NOT_SATISFIABLE, REFUSED, SOMEBODY_WAS_FIRST
from kvstore.errors import InvalidInputError
from kvstore.gcs_options import gcs_arguments
from kvstore.s3_options import s3_arguments

_FIRST_TRIES = 0.1
"""Part of the timeout in which a failed attempt may be followed by another."""

_CHUNK = 1 << 18
"""Bytes that are copied to the buffers at once. Plain HTTP comes in such pieces by itself;
the 16 KiB records of TLS are joined first, since a step through Python costs more."""

_STATUS = re.compile(r"status code: (\d{3})")
_SAID = re.compile(r"<Message>(.*?)</Message>|\"message\":\s*\"(.*?)\"", re.DOTALL)
_REASON = re.compile(r"(?:message|error): \"(.*?)\"|(InvalidCertificate)")
"""Where the first line ends in "error sending request"."""


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
            seconds=(1 - _FIRST_TRIES) * timeout
        )
        arguments["retry_config"] = _retries(_FIRST_TRIES * timeout)
        self._obstore = obstore
        self._store = (S3Store if extra == "s3" else GCSStore)(bucket, **arguments)

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes, in one request for a range."""
        try:
            with _translated():
                result = self._range(path, limit)
                return bytes(result.bytes())
        except _EmptyObject:
            return b""

    def get_into(self, path: str, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` as the bytes arrive: one copy over plain HTTP, two over TLS."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        try:
            with _translated():
                result = self._range(path, wanted + 1)
                start, stop = result.range
                length: int = stop - start
                if length == wanted:
                    scatter(result.stream(_CHUNK), buffers)
        except _EmptyObject:
            return 0
        return length

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
        with _translated():
            self._obstore.delete(self._store, self._at(path))

    def _range(self, path: str, limit: int) -> Any:
        return self._obstore.get(self._store, self._at(path), options={"range": (0, limit)})

    def _put(self, path: str, data: bytes, mode: str) -> None:
        with _translated():
            # One PUT for any size: the parts of a multipart upload would be more requests.
            self._obstore.put(
                self._store, self._at(path), data, mode=mode, use_multipart=False
            )

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if self._root else path


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


class _EmptyObject(Exception):
    """An object without bytes has no range."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """obstore's errors as the builtins that `Client` names.

    Their text goes on for a screen. What the server said is kept, or the first lines.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        told = _STATUS.search(text)
        status = int(told[1]) if told else None
        name = type(error).__name__
        if status == RANGE_NOT_SATISFIABLE:
            raise _EmptyObject from error
        cause = _cause(text, status)
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text:
            raise FileNotFoundError(cause) from error
        if name == "AlreadyExistsError" or status in SOMEBODY_WAS_FIRST:
            raise FileExistsError(cause) from error
        if name in ("PermissionDeniedError", "UnauthenticatedError") or status in REFUSED:
            raise PermissionError(cause) from error
        if "TimedOut" in text or "kind: Timeout" in text:
            raise TimeoutError("no answer in time") from error
        raise OSError(cause) from error


def _cause(text: str, status: int | None) -> str:
    if status is not None and (said := _SAID.search(text)):
        return f"HTTP {status}: {said[1] or said[2]}"
    summary, _, details = text.partition("Debug source:")
    reason = _REASON.search(details)
    return " ".join(summary.split()) + (f": {reason[1] or reason[2]}" if reason else "")
