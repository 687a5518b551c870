"""`FsspecClient`: any fsspec filesystem. The only user of fsspec in the package.

An asynchronous filesystem (s3fs, gcsfs, adlfs) is called on fsspec's own event loop with a
timeout. A synchronous one (memory, SFTP) is called on the thread at hand, and has none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.config import conf

from kvstore.buffers import scatter
from kvstore.client import EXTRAS, RANGE_NOT_SATISFIABLE, REFUSED, SOMEBODY_WAS_FIRST
from kvstore.errors import InvalidInputError
from kvstore.storage_options import checked
from kvstore.urls import safe_url

_S3 = ("s3", "s3a")


def environment_options(protocol: str) -> dict[str, Any]:
    """What fsspec's own configuration says of a protocol and of its other name.

    Each of fsspec's filesystems reads it by itself, e.g. from `FSSPEC_S3_ENDPOINT_URL`.
    """
    options: dict[str, Any] = {}
    for name, extra in EXTRAS.items():
        if extra == EXTRAS.get(protocol):
            options |= conf.get(name, {})
    return options


class FsspecClient:
    """One root in an fsspec filesystem.

    Attributes:
        root: the root without its protocol, as the filesystem names it.
    """

    def __init__(
        self, protocol: str, url: str, options: Mapping[str, Any] | None, *, timeout: float
    ) -> None:
        """Connects to nothing yet.

        Raises:
            InvalidInputError: no package for the protocol, or an option is misspelt.
            Exception: whatever the filesystem's class raises.
        """
        cls = _filesystem_class(protocol, safe_url(url))
        given = copy.deepcopy(checked(cls, options))
        if protocol in _S3:
            # botocore's own limit of 10 would queue transfers beside lookups.
            config = given.get("config_kwargs") or {}
            given["config_kwargs"] = {"max_pool_connections": 64, **config}
        self._timeout = timeout
        self._fs: AbstractFileSystem = cls(**{**cls._get_kwargs_from_urls(url), **given})
        self.root = str(cls._strip_protocol(url)).rstrip("/")

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes, in one request for a range."""
        try:
            data: bytes = self._call("cat_file", path, start=0, end=limit)
        except Exception as error:
            if _status(error) == RANGE_NOT_SATISFIABLE:
                return b""  # an object without bytes has no first byte
            raise
        return data

    def get_into(self, path: str, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers`: the bytes come as one object and are copied."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = self.get(path, wanted + 1)
        if len(data) == wanted:
            scatter((data,), buffers)
        return len(data)

    def put(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object whole."""
        self._call("pipe_file", path, b"".join(parts))

    def create(self, path: str, data: bytes) -> None:
        """Write an object whole, unless there is one, as far as the backend can."""
        try:
            self._call("pipe_file", path, data, mode="create")
        except Exception as error:
            if _status(error) in SOMEBODY_WAS_FIRST:
                raise FileExistsError(str(error)) from error
            raise

    def delete(self, path: str) -> None:
        """Remove an object."""
        self._call("rm_file", path)

    def _call(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        """One fsspec operation on exactly one object: no `*` is a glob here."""
        where = f"{self.root}/{path}"
        try:
            if not isinstance(self._fs, AsyncFileSystem):
                return getattr(self._fs, method)(where, *arguments, **options)
            coroutine = getattr(self._fs, f"_{method}")

            async def answered() -> tuple[Any]:
                return (await coroutine(where, *arguments, **options),)

            # fsspec's sync returns None for a request that was cancelled.
            answer = sync(self._fs.loop, answered, timeout=self._timeout)
        except Exception as error:
            if isinstance(error, PermissionError) or _status(error) not in REFUSED:
                raise
            raise PermissionError(f"{type(error).__name__}: {error}") from error
        if answer is None:
            raise ConnectionAbortedError("the request was cancelled")
        return answer[0]


def _status(error: BaseException | None) -> int | None:
    """The server's status below a backend's error, if it answered at all."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):  # botocore's, below s3fs's
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:  # gcsfs's
            status = getattr(error, "code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _filesystem_class(protocol: str, shown: str) -> type[AbstractFileSystem]:
    try:
        cls: type[AbstractFileSystem] = get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        hint = f"pip install 'kvstore-zarr[{extra}]'" if extra else str(error)
        raise InvalidInputError(
            f"url: no package for {protocol}:// is installed, found {shown!r}: {hint}"
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"url: expected a protocol that fsspec knows (file, memory, s3, gs, …), "
            f"found {shown!r}"
        ) from error
    return cls
