"""`FsspecClient`: any fsspec filesystem. The only user of fsspec in the package.

An asynchronous filesystem (s3fs, gcsfs, adlfs) is called on fsspec's own event loop with a
timeout. A synchronous one (memory, SFTP) is called on the thread at hand, and has none.
What fails in the first tenth of it is tried again, whatever the backend does by itself.

A synchronous one that is not in memory may have real folders: those that a write misses are
made, and those that a removal leaves empty go. And it may take one call at a time only, as
SFTP does, whose answers would go to whoever reads first.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.config import conf
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from kvstore.buffers import scatter
from kvstore.client import (
    ABSENT,
    EXTRAS,
    RANGE_NOT_SATISFIABLE,
    SOMEBODY_WAS_FIRST,
    delete_each,
)
from kvstore.errors import InvalidInputError
from kvstore.fsspec_errors import absent, refused, status, transient
from kvstore.listing import Found, walk
from kvstore.retries import FIRST_TRIES, persist
from kvstore.storage_options import checked
from kvstore.urls import safe_url

_S3 = ("s3", "s3a")

_WALKED = 4
"""Levels that are listed one folder at a time: from a namespace's to the fan-outs. What a
fan-out holds comes in one answer: a request for each of its blocks would be too many."""

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""Where backends tell when a file was written. There is no common name."""


def environment() -> Mapping[str, Any]:
    """What fsspec's own configuration says, by protocol.

    Each of fsspec's filesystems reads it by itself, e.g. from `FSSPEC_S3_ENDPOINT_URL`.
    """
    return conf  # type: ignore[no-any-return]  # fsspec has no types


def environment_options(protocol: str) -> dict[str, Any]:
    """What it says of S3 or Google, by either of the protocol's names; else nothing."""
    options: dict[str, Any] = {}
    for name, extra in EXTRAS.items():
        if extra == EXTRAS.get(protocol):
            options |= environment().get(name, {})
    return options


class FsspecClient:
    """One root in an fsspec filesystem.

    Attributes:
        root: the root without its protocol, as the filesystem names it.
    """

    def __init__(
        self,
        protocol: str,
        url: str,
        options: Mapping[str, Any] | None,
        *,
        timeout: float,
        anew: bool = False,
    ) -> None:
        """Connects to nothing yet. With `anew`, no instance that fsspec keeps is used.

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
        in_memory = issubclass(cls, MemoryFileSystem)
        self._has_folders = not in_memory and not issubclass(cls, AsyncFileSystem)
        # Those in memory are where the files are. One that takes turns is nobody else's.
        if self._has_folders or (anew and not in_memory):
            given["skip_instance_cache"] = True
        self._timeout = timeout
        try:
            self._fs: AbstractFileSystem = cls(**cls._get_kwargs_from_urls(url) | given)
        except ImportError as error:  # some look for their library only now
            raise _no_package(protocol, safe_url(url), error) from error
        self.root = str(cls._strip_protocol(url)).rstrip("/")
        self._turn = threading.Lock() if self._has_folders else contextlib.nullcontext()

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes, in one request for a range."""
        try:
            data: bytes = self._call("cat_file", self._at(path), start=0, end=limit)
        except Exception as error:
            if status(error) == RANGE_NOT_SATISFIABLE:
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
        self._write(path, b"".join(parts))

    def create(self, path: str, data: bytes) -> None:
        """Write an object whole, unless there is one, as far as the backend can."""
        try:
            self._write(path, data, mode="create")
        except Exception as error:
            if status(error) in SOMEBODY_WAS_FIRST:
                raise FileExistsError(str(error)) from error
            raise

    def delete(self, path: str) -> None:
        """Remove an object, and the folder that it leaves empty."""
        where = self._at(path)
        self._call("rm_file", where)
        if self._has_folders:
            folder = where.rpartition("/")[0]
            with contextlib.suppress(Exception):  # the object is gone all the same
                # Hadoop's would remove one that is not empty too.
                if not self._call("ls", folder, detail=False):
                    self._call("rmdir", folder)

    def folders(self, path: str) -> list[str]:
        """The names of the folders directly below a folder."""
        start = f"{path}/" if path else ""
        listed = self._inside(start, "ls")
        return sorted({name[len(start) : -1] for name, found in listed if found is None})

    def files(self, path: str, after: str) -> Iterator[Found]:
        """Every file below a folder, in the order of paths."""
        return walk(
            path,
            after,
            lambda folder: self._inside(
                folder, "find" if folder.count("/") >= _WALKED else "ls"
            ),
        )

    def delete_many(self, paths: Sequence[str]) -> tuple[set[str], Exception | None]:
        """Remove objects, by a request for each: fsspec's own would take `*` for more."""
        return delete_each(self, paths)

    def _inside(self, folder: str, method: str) -> Iterator[tuple[str, Found | None]]:
        """What lies in a folder, or with `find` the files on all levels below it: so no
        server can lead anybody ever deeper.
        """
        # Filesystems keep what they have listed, and would keep all of it.
        self._fs.invalidate_cache()
        try:
            listed = self._call(method, self._at(folder).rstrip("/"), detail=True)
        except ABSENT:
            return
        finally:
            self._fs.invalidate_cache()
        start = f"{self.root}/{folder}".lstrip("/")
        for told in listed.values() if isinstance(listed, Mapping) else listed:
            name = str(told["name"]).lstrip("/")
            below = name.removeprefix(start)
            if below == name or not below:
                continue  # the folder itself, which some keep as an object
            if told["type"] == "directory" and method == "ls":
                yield f"{folder}{below}/", None
            elif told["type"] == "file":
                yield f"{folder}{below}", _found(f"{folder}{below}", told)

    def _write(self, path: str, data: bytes, **options: Any) -> None:
        where = self._at(path)
        folder = where.rpartition("/")[0]
        try:
            self._call("pipe_file", where, data, **options)
        except Exception as error:
            # There are many words for a folder that is not there.
            known = not self._has_folders or isinstance(error, FileExistsError)
            if known or self._call("isdir", folder):
                raise
            self._make(folder)
            self._call("pipe_file", where, data, **options)

    def _make(self, folder: str) -> None:
        """Make a folder, and those above it. Not the first: that may be a bucket."""
        above = folder.rpartition("/")[0]
        if "/" in above.strip("/") and not self._call("isdir", above):
            self._make(above)
        try:
            self._call("mkdir", folder, create_parents=False)
        except Exception:
            if not self._call("isdir", folder):  # or another writer was first
                raise

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _call(self, method: str, where: str, *arguments: Any, **options: Any) -> Any:
        """One fsspec operation on exactly one path: no `*` is a glob here."""
        until = time.monotonic() + self._timeout

        def attempt() -> Any:
            if not isinstance(self._fs, AsyncFileSystem):
                with self._turn:
                    return getattr(self._fs, method)(where, *arguments, **options)
            coroutine = getattr(self._fs, f"_{method}")

            async def answered() -> tuple[Any]:
                return (await coroutine(where, *arguments, **options),)

            # fsspec's sync returns None for a request that was cancelled.
            left = max(until - time.monotonic(), 0.001)  # 0 would be no limit at all
            answer = sync(self._fs.loop, answered, timeout=left)
            if answer is None:
                raise ConnectionAbortedError("the request was cancelled")
            return answer[0]

        try:
            return persist(attempt, transient, seconds=FIRST_TRIES * self._timeout)
        except (PermissionError, *ABSENT):
            raise
        except Exception as error:
            if refused(error):
                raise PermissionError(f"{type(error).__name__}: {error}") from error
            if absent(error):
                raise FileNotFoundError(str(error)) from error
            raise


def _found(path: str, told: Mapping[str, Any]) -> Found:
    """A file, by what its backend tells of it."""
    for value in map(told.get, _TIMES):
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.replace(tzinfo=value.tzinfo or UTC).timestamp()
        if isinstance(value, int | float) and isinstance(told["size"], int):
            return Found(path, told["size"], float(value))
    raise OSError(
        f"expected the size and the time of change of {path!r}, found {sorted(told)}: "
        "this filesystem's blocks cannot be told old from new"
    )


def _filesystem_class(protocol: str, shown: str) -> type[AbstractFileSystem]:
    try:
        cls: type[AbstractFileSystem] = get_filesystem_class(protocol)
    except ImportError as error:
        raise _no_package(protocol, shown, error) from error
    except ValueError as error:
        raise InvalidInputError(
            f"url: expected a protocol that fsspec knows (file, memory, s3, gs, …), "
            f"found {shown!r}"
        ) from error
    return cls


def _no_package(protocol: str, shown: str, error: ImportError) -> InvalidInputError:
    extra, known = EXTRAS.get(protocol), known_implementations.get(protocol, {})
    words = known.get("err") or str(error)
    hint = f"pip install 'kvstore-zarr[{extra}]'" if extra else words
    return InvalidInputError(
        f"url: no package for {protocol}:// is installed, found {shown!r}: {hint}"
    )
