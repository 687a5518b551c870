"""`Filesystem`: the few storage operations that kvstore needs, over any fsspec URL.

The only user of fsspec. Every error of a backend is translated here; absence is an answer
(`None`), and nothing but a plain "not found" counts as absence.

Local folders and object stores differ in this file only: in how a block is published, and
in that a local file is read straight into the caller's buffer. Nothing here lists a
folder or bucket.

Threads: every method may be called from any thread. A `Filesystem` keeps no state that
changes, and fsspec's own instances are safe to share between threads.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.asyn import AsyncFileSystem, sync

from kvstore import local
from kvstore.errors import (
    InvalidInputError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.storage_options import checked, secret_strings
from kvstore.urls import parse_url, safe_url

Result = TypeVar("Result")
Files = Sequence[tuple[str, Iterable[memoryview | bytes]]]
"""Names and contents. Parts are asked for in order, one file after the other, once."""

_ABSENT = (FileNotFoundError, NotADirectoryError)

MAX_TIMEOUT = 86_400
"""Seconds; some waits of Python's overflow beyond any sensible time."""

_RANGE_NOT_SATISFIABLE = 416
_SOMEBODY_WAS_FIRST = (409, 412)
"""What servers answer to a conditional write that comes second, or at the same time."""

_S3 = ("s3", "s3a")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Which extra of this package brings a protocol's client."""


class Filesystem:
    """One root URL. Paths are relative to the root, with `/` between parts.

    Attributes:
        url: the root in one spelling, without credentials.
        local: whether the root is a folder of this machine.
        shared: whether other processes see the same root.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: any fsspec URL, or a bare local path.
            storage_options: what the URL's fsspec filesystem takes.
            timeout: seconds that one request to an object store may take.

        Raises:
            InvalidInputError: the URL or an option cannot be used.
            StorageError: the backend refused to be set up.
        """
        protocol, root = parse_url(url)
        cls = _filesystem_class(protocol, safe_url(root))
        options = copy.deepcopy(checked(cls, storage_options))
        if protocol in _S3:
            # botocore's own limit of 10 would queue transfers beside lookups.
            config = options.get("config_kwargs") or {}
            options["config_kwargs"] = {"max_pool_connections": 64, **config}
        self.url = safe_url(root)
        self.local = protocol == "file"
        self.shared = protocol != "memory"
        if not 0 < timeout <= MAX_TIMEOUT:
            raise InvalidInputError(
                f"timeout: expected seconds, more than 0 and at most {MAX_TIMEOUT}, found "
                f"{timeout}"
            )
        self._timeout = timeout
        self._secrets = tuple(secret_strings(options))
        with self._errors("connect to", ""):
            self._fs: AbstractFileSystem = cls(
                **{**cls._get_kwargs_from_urls(root), **options}
            )
            self._root = str(cls._strip_protocol(root)).rstrip("/")

    def place(self, path: str) -> str:
        """The URL of `path`, for messages."""
        return f"{self.url}/{path}" if path else self.url

    def exists(self, path: str) -> bool:
        """Whether a file is there. For local roots only."""
        try:
            os.stat(self._at(path))
        except _ABSENT:
            return False
        except OSError:
            with self._errors("read", path):
                raise
        return True

    def read(self, path: str, limit: int) -> bytes | None:
        """A small file's first `limit` bytes, in one request; None if it is absent."""
        if not self.local:
            return self._fetch(path, limit)
        try:
            return local.read(self._at(path), limit)
        except _ABSENT:
            return None
        except OSError:
            with self._errors("read", path):
                raise

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """Fill `buffers` in turn with a file's bytes, in one request.

        Returns:
            The bytes that the file holds, maybe counted no further than one more than the
            buffers do; None if it is absent. Unless that is exactly what the buffers
            hold, their contents are undefined.
        """
        if self.local:
            try:
                return local.read_into(self._at(path), buffers)
            except _ABSENT:
                return None
            except OSError:
                with self._errors("read", path):
                    raise
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = self._fetch(path, wanted + 1)
        if data is None or len(data) != wanted:
            return None if data is None else len(data)
        view, start = memoryview(data), 0
        for buffer in buffers:
            buffer[:] = view[start : start + buffer.nbytes]
            start += buffer.nbytes
        return wanted

    def create(self, path: str, data: bytes) -> None:
        """Write a small file whole, unless there is one: whoever comes first stays.

        A backend without a conditional write may let the last one stay, so read it again
        before relying on it.
        """
        with self._errors("write", path):
            if self.local:
                local.create(self._root, path, data)
                return
            try:
                self._call("pipe_file", self._at(path), data, mode="create")
            except FileExistsError:
                return
            except Exception as error:
                if _http_status(error) not in _SOMEBODY_WAS_FIRST:
                    raise

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """Make a block visible, whole or not at all.

        Local: its folder is built under a temporary name, then renamed. Object store: one
        PUT for each file in the given order, the last being the commit mark. Two writers
        of one path both succeed.

        Args:
            path: the block's folder.
            files: name and parts of each file; the document that commits the block last.
            replace: put this block in the place of a damaged one. Otherwise a local block
                that is already there stays.

        Returns:
            Whether it is this block that is there now; False if another writer was first.
        """
        with self._errors("write", path):
            if self.local:
                return local.publish(self._root, path, files, replace=replace)
            for name, parts in files:
                self._call("pipe_file", f"{self._at(path)}/{name}", b"".join(parts))
            return True

    def delete(self, path: str, names: Sequence[str]) -> None:
        """Remove a block, if it is there; its commit mark, the last name, goes first."""
        with self._errors("delete", path):
            if self.local:
                local.discard(self._root, path)
                return
            for name in reversed(names):
                self._remove(f"{path}/{name}")

    def probe(self) -> None:
        """Prove that the root can be written, read and deleted from, or raise.

        A local root that does not exist is made.
        """
        with self._errors("write below", ""):
            if self.local:
                local.probe(self._root)
                return
            path = f"{local.TEMPORARY}/{secrets.token_hex(8)}"
            self._call("pipe_file", self._at(path), b"kvstore")
            try:
                found = self._fetch(path, 16)
            finally:
                self._remove(path)
        if found != b"kvstore":
            raise StorageError(self.url, "read back from", f"found {found!r}")

    # ---- calling the backend

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _fetch(self, path: str, limit: int) -> bytes | None:
        """One request: the first `limit` bytes."""

        def fetch() -> bytes:
            try:
                data: bytes = self._call("cat_file", self._at(path), start=0, end=limit)
            except Exception as error:
                if _http_status(error) == _RANGE_NOT_SATISFIABLE:
                    return b""  # an object without bytes has no first byte
                raise
            return data

        return self._unless_absent(path, fetch)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(*_ABSENT):
            self._call("rm_file", self._at(path))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """One fsspec operation on exactly one object: no `*` is a glob here."""
        if not isinstance(self._fs, AsyncFileSystem):
            return getattr(self._fs, method)(*arguments, **options)
        coroutine = getattr(self._fs, f"_{method}")

        async def answered() -> tuple[Any]:
            return (await coroutine(*arguments, **options),)

        # fsspec's sync returns None for a request that was cancelled.
        answer = sync(self._fs.loop, answered, timeout=self._timeout)
        if answer is None:
            raise ConnectionAbortedError("the request was cancelled")
        return answer[0]

    def _unless_absent(self, path: str, read: Callable[[], Result]) -> Result | None:
        with self._errors("read", path):
            try:
                return read()
            except _ABSENT:
                return None

    @contextlib.contextmanager
    def _errors(self, action: str, path: str) -> Iterator[None]:
        """Translate a backend's error into ours, most specific first.

        Backends raise far more than `OSError` (botocore, aiohttp and gcsfs each have
        their own), so whatever else it is, it is an error of storage, never an absence.
        """
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            kind = StorageError
            if isinstance(error, PermissionError) or _http_status(error) in (401, 403):
                kind = StorageAccessError
            elif isinstance(error, TimeoutError):
                kind = StorageTimeoutError
            cause = str(error) or "no answer in time"
            if not isinstance(error, OSError):
                cause = f"{type(error).__name__}: {cause}"
            masked = cause
            for secret in self._secrets:
                masked = masked.replace(secret, "***")
            translated = kind(self.place(path), action, masked)
            # A traceback would show the backend's own words, secret and all.
            raise translated from (error if masked == cause else None)


def _http_status(error: BaseException | None) -> int | None:
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
        extra = _EXTRAS.get(protocol)
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
