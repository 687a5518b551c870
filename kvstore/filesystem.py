"""`Filesystem`: the few storage operations that kvstore needs, over any fsspec URL.

Every error of a backend is translated here; absence is an answer (`None`), and nothing
but a plain "not found" counts as absence.

Local folders and other storage differ in this file only: in how a block is published, and
in that a local file is read straight into the caller's buffer. Which client talks to a
storage that is not local makes no difference here. Nothing here lists a folder or bucket.

Threads: every method may be called from any thread. A `Filesystem` keeps no state that
changes, and neither does a client.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from kvstore import local
from kvstore.client import EXTRAS, Client
from kvstore.errors import (
    InvalidInputError,
    KVStoreError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.fsspec_client import FsspecClient, environment_options
from kvstore.obstore_client import ObstoreClient
from kvstore.storage_options import secret_strings
from kvstore.urls import parse_url, safe_url

Result = TypeVar("Result")
ClientName = Literal["obstore", "fsspec"]
Files = Sequence[tuple[str, Iterable[memoryview | bytes]]]
"""Names and contents. Parts are asked for in order, one file after the other, once."""

_ABSENT = (FileNotFoundError, NotADirectoryError)

MAX_TIMEOUT = 86_400
"""Seconds; some waits of Python's overflow beyond any sensible time."""


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
        client: ClientName = "obstore",
        timeout: float = 30.0,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: any fsspec URL, or a bare local path.
            storage_options: what the URL's fsspec filesystem takes.
            client: what talks to S3 and Google Cloud Storage: `obstore`, or the URL's
                own `fsspec` filesystem. Other URLs are always fsspec's.
            timeout: seconds that one request to an object store may take.

        Raises:
            InvalidInputError: the URL or an option cannot be used.
            StorageError: the backend refused to be set up.
        """
        protocol, root = parse_url(url)
        self.url = safe_url(root)
        self.local = protocol == "file"
        self.shared = protocol != "memory"
        self._made_of = (root, storage_options, client, timeout)
        if client not in (choices := get_args(ClientName)):
            raise InvalidInputError(f"client: expected one of {choices}, found {client!r}")
        if not 0 < timeout <= MAX_TIMEOUT:
            raise InvalidInputError(
                f"timeout: expected seconds, more than 0 and at most {MAX_TIMEOUT}, found "
                f"{timeout}"
            )
        if not isinstance(storage_options, Mapping | None):
            raise InvalidInputError(
                f"storage_options: expected an object, found "
                f"{type(storage_options).__name__}"
            )
        options = dict(storage_options or {})
        by_obstore = client == "obstore" and protocol in EXTRAS
        if by_obstore:
            options = environment_options(protocol) | options
        self._secrets = tuple(secret_strings(options))
        with self._errors("connect to", ""):
            self._client: Client
            if by_obstore:
                self._client = ObstoreClient(protocol, root, options, timeout=timeout)
            else:
                self._client = FsspecClient(protocol, root, options, timeout=timeout)
        self._folder = root.removeprefix("file://").rstrip("/")

    def __reduce__(self) -> tuple[Callable[..., Filesystem], tuple[Any, ...]]:
        """Pickles as what it was made of, credentials included; a client has sockets."""
        root, storage_options, client, timeout = self._made_of
        made = functools.partial(Filesystem, client=client, timeout=timeout)
        return made, (root, storage_options)

    def place(self, path: str) -> str:
        """The URL of `path`, for messages."""
        return f"{self.url}/{path}" if path else self.url

    def exists(self, path: str) -> bool:
        """Whether a file is there. For local roots only."""
        return self._unless_absent(path, lambda: os.stat(self._at(path))) is not None

    def read(self, path: str, limit: int) -> bytes | None:
        """A small file's first `limit` bytes, in one request; None if it is absent."""
        if self.local:
            return self._unless_absent(path, lambda: local.read(self._at(path), limit))
        return self._unless_absent(path, lambda: self._client.get(path, limit))

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """Fill `buffers` in turn with a file's bytes, in one request.

        Returns:
            The bytes that the file holds, maybe counted no further than one more than the
            buffers do; None if it is absent. Unless that is exactly what the buffers
            hold, their contents are undefined.
        """
        if self.local:
            return self._unless_absent(
                path, lambda: local.read_into(self._at(path), buffers)
            )
        return self._unless_absent(path, lambda: self._client.get_into(path, buffers))

    def create(self, path: str, data: bytes) -> None:
        """Write a small file whole, unless there is one: whoever comes first stays.

        A backend without a conditional write may let the last one stay, so read it again
        before relying on it.
        """
        with self._errors("write", path):
            if self.local:
                local.create(self._folder, path, data)
                return
            with contextlib.suppress(FileExistsError):
                self._client.create(path, data)

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
                return local.publish(self._folder, path, files, replace=replace)
            for name, parts in files:
                self._client.put(f"{path}/{name}", parts)
            return True

    def delete(self, path: str, names: Sequence[str]) -> None:
        """Remove a block, if it is there; its commit mark, the last name, goes first."""
        with self._errors("delete", path):
            if self.local:
                local.discard(self._folder, path)
                return
            for name in reversed(names):
                with contextlib.suppress(*_ABSENT):
                    self._client.delete(f"{path}/{name}")

    def probe(self) -> None:
        """Prove that the root can be written, read and deleted from, or raise.

        A local root that does not exist is made.
        """
        with self._errors("write below", ""):
            if self.local:
                local.probe(self._folder)
                return
            path = f"{local.TEMPORARY}/{secrets.token_hex(8)}"
            self._client.put(path, [b"kvstore"])
            try:
                found = self.read(path, 16)
            finally:
                with contextlib.suppress(*_ABSENT):
                    self._client.delete(path)
        if found != b"kvstore":
            raise StorageError(self.url, "read back from", f"found {found!r}")

    # ---- calling the backend

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def _unless_absent(self, path: str, read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except _ABSENT:
            return None
        except Exception:
            # Entered here only: every block is read so, and few reads fail.
            with self._errors("read", path):
                raise

    @contextlib.contextmanager
    def _errors(self, action: str, path: str) -> Iterator[None]:
        """Translate a backend's error into ours, most specific first.

        Backends raise far more than `OSError` (botocore, aiohttp and gcsfs each have
        their own), so whatever else it is, it is an error of storage, never an absence.
        """
        try:
            yield
        except KVStoreError:
            raise
        except Exception as error:
            kind = StorageError
            if isinstance(error, PermissionError):
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
