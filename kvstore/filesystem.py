"""`Filesystem`: the few storage operations that kvstore needs, over any fsspec URL.

Every error of a backend is translated here; absence is an answer (`None`), and nothing
but a plain "not found" counts as absence.

How local folders and other storage do their work differs in this file only: in how a block
is published, and in that a local file is read straight into the caller's buffer. Modules
above may ask for `local` and `shared`, to choose what is worth its cost. Which client talks
to a storage that is not local makes no difference here. Nothing here lists a folder or
bucket: that is `Upkeep`'s.

Threads: every method may be called from any thread, and in a process that was forked. A
`Filesystem` keeps no state that changes, but for its client: `Session` makes another one
after a fork, and after a refusal, in case that there are new credentials by now.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from kvstore import listing, local, scratch
from kvstore.client import ABSENT, EXTRAS, Client
from kvstore.errors import (
    FormatError,
    InvalidInputError,
    KVStoreError,
    StorageError,
    printable,
)
from kvstore.failures import settings_errors, storage_error
from kvstore.fsspec_client import FsspecClient, environment, environment_options
from kvstore.obstore_client import ObstoreClient, of_another_process
from kvstore.paths import DOCUMENT
from kvstore.records import MAX_NUMBER, parse
from kvstore.session import Session
from kvstore.storage_options import hold_credentials, secret_strings, storage_digest
from kvstore.urls import parse_url, safe_url

Result = TypeVar("Result")
ClientName = Literal["obstore", "fsspec"]
Files = Sequence[tuple[str, Iterable[memoryview | bytes]]]
"""Names and contents. Parts are asked for in order, one file after the other, once."""


class Filesystem:
    """One root URL. Paths are relative to the root, with `/` between parts.

    Attributes:
        url: the root in one spelling, without credentials.
        local: whether the root is a folder of this machine.
        shared: whether other processes see the same root.
        read_only: whether every call that would write is refused.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        client: ClientName = "obstore",
        timeout: float = 30.0,
        fsync: bool = False,
        read_only: bool = False,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: any fsspec URL, or a bare local path.
            storage_options: what the URL's fsspec filesystem takes.
            client: what talks to S3 and Google Cloud Storage: `obstore`, or the URL's
                own `fsspec` filesystem. Other URLs are always fsspec's.
            timeout: seconds that one request to an object store may take.
            fsync: whether a local block survives a power failure once it is published.
            read_only: whether to refuse every call that would write.

        Raises:
            InvalidInputError: the URL or an option cannot be used.
            StorageError: the backend refused to be set up.
        """
        protocol, root = parse_url(url)
        parse(fsync, bool, "fsync")
        parse(read_only, bool, "read_only")
        self.url = safe_url(root)
        self.local = protocol == "file"
        self.shared = protocol != "memory"
        self.read_only = read_only
        self._fsync = fsync
        self._made_of = functools.partial(
            type(self),
            root,
            storage_options,
            client=client,
            timeout=timeout,
            fsync=fsync,
            read_only=read_only,
        )
        if client not in (choices := get_args(ClientName)):
            raise InvalidInputError(f"client: expected one of {choices}, found {client!r}")
        if not 0 < parse(timeout, float, "timeout") <= MAX_NUMBER:
            raise InvalidInputError(
                f"timeout: expected seconds, more than 0 and at most {MAX_NUMBER}, found "
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
        around = environment().get(protocol, {}) | options
        self._storage = functools.partial(storage_digest, protocol, around)
        # An fsspec filesystem finds its own part of the environment, and may repeat it.
        self._secrets = tuple(secret_strings((environment(), options)))

        def make(anew: bool) -> Client:
            if by_obstore and not of_another_process():
                return ObstoreClient(protocol, root, options, timeout=timeout)
            return FsspecClient(protocol, root, options, timeout=timeout, anew=anew)

        with self._errors("connect to", ""), settings_errors(self.url, self._secrets):
            self._client = Session(make, renewable=not hold_credentials(options))
        self._folder = root.removeprefix("file://").rstrip("/")

    def __reduce__(self) -> tuple[Callable[..., Filesystem], tuple[Any, ...]]:
        """Pickles as what it was made of, credentials included; a client has sockets."""
        if not self.shared:
            raise InvalidInputError(
                f"url: expected storage that other processes see, found {self.url}"
            )
        return self._made_of, ()

    def place(self, path: str) -> str:
        """The URL of `path`, for messages: names that others have given may be odd."""
        return f"{self.url}/{printable(path)}" if path else self.url

    def storage(self) -> str:
        """What tells the storage from another one at the same URL, as a digest without
        credentials; empty for a folder.
        """
        return "" if self.local else self._storage()

    def exists(self, path: str) -> bool:
        """Whether a file is there: no link, folder or the like. For local roots only."""
        found = self._unless_absent(path, lambda: os.lstat(self._at(path)))
        return found is not None and stat.S_ISREG(found.st_mode)

    def read(self, path: str, limit: int) -> bytes | None:
        """A small file's first `limit` bytes, in one request; None if it is absent.

        Raises:
            FormatError: what lies there is no file, but a link, a pipe or the like.
        """
        if self.local:
            return self._unless_absent(path, lambda: local.read(self._at(path), limit))
        return self._unless_absent(path, lambda: self._client.get(path, limit))

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """Fill `buffers` in turn with a file's bytes, in one request.

        Returns:
            The bytes that the file holds, maybe counted no further than one more than the
            buffers do; None if it is absent. Unless that is exactly what the buffers
            hold, their contents are undefined.

        Raises:
            FormatError: as `read`.
        """
        if self.local:
            return self._unless_absent(
                path, lambda: local.read_into(self._at(path), buffers)
            )
        return self._unless_absent(path, lambda: self._client.get_into(path, buffers))

    def create(self, path: str, data: bytes, *, fsync: bool = False) -> None:
        """Write a small file whole, unless there is one: whoever comes first stays.

        A backend without a conditional write may let the last one stay, so read it again
        before relying on it. With `fsync` a local one is on the disk at the return, even
        where the root's blocks are not.
        """
        self.require_writable("create")
        with self._errors("write", path):
            if self.local:
                local.create(self._folder, path, data, fsync=fsync or self._fsync)
                return
            with contextlib.suppress(FileExistsError):
                self._client.create(path, data)

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """Make a block visible, whole or not at all.

        Local: its folder is built under a temporary name, then renamed. Object store: one
        PUT for each file in the given order, the last being the commit mark. Two writers
        of one path both succeed. If an `fsync` fails, the block may be there none the less.

        Args:
            path: the block's folder.
            files: name and parts of each file; the document that commits the block last.
            replace: put this block in the place of a damaged one. Otherwise a local block
                that is already there stays.

        Returns:
            Whether it is this block that is there now; False if another writer was first.
        """
        self.require_writable("publish")
        with self._errors("write", path):
            if self.local:
                return local.publish(
                    self._folder, path, files, replace=replace, fsync=self._fsync
                )
            for name, parts in files:
                self._client.put(f"{path}/{name}", parts)
            return True

    def delete(self, path: str, names: Sequence[str]) -> None:
        """Remove a block's files, if they are there; its commit mark, the last name, first.

        What else lies in its folder stays.
        """
        self.require_writable("delete")
        with self._errors("delete", path):
            if self.local:
                local.discard(self._folder, path, names)
                return
            for name in reversed(names):
                with contextlib.suppress(*ABSENT):
                    self._client.delete(f"{path}/{name}")

    def touch(self, path: str, document: bytes) -> None:
        """Note that a block was used now, for those who ask `files` what is old.

        Local: its document's time of change, unless it is another user's. Elsewhere the
        document is written again: if somebody deletes the block at this moment, a document
        without a chunk stays, which is a damaged block, and the next store's to repair.

        Args:
            path: the block's folder.
            document: what its document holds.
        """
        with self._errors("touch", path):
            if self.local:
                listing.touch(f"{self._at(path)}/{DOCUMENT}")
                return
            self._client.put(f"{path}/{DOCUMENT}", [document])

    def probe(self) -> None:
        """Prove that the root can be written, read and deleted from, or raise.

        A local root that does not exist is made. One that is only read is asked for a file
        that nobody writes: that it is absent is an answer, and all else an error.
        """
        if self.read_only:
            self.read(DOCUMENT, 1)
            return
        with self._errors("write below", ""):
            if self.local:
                local.probe(self._folder)
                return
            path = f"{scratch.TEMPORARY}/{secrets.token_hex(8)}"
            self._client.put(path, [b"kvstore"])
            try:
                found = self.read(path, 16)
            finally:
                with contextlib.suppress(*ABSENT):
                    self._client.delete(path)
        if found != b"kvstore":
            raise StorageError(self.url, "read back from", f"found {found!r}")

    def require_writable(self, call: str) -> None:
        """Raise `InvalidInputError` where the root is only read."""
        if self.read_only:
            raise InvalidInputError(
                f"read_only: {call} is refused, since {self.url} was opened with "
                "read_only. Open it without to write"
            )

    # ---- calling the backend

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def _translated(self, error: Exception, action: str, path: str) -> StorageError:
        secrets = None if self.local else self._secrets
        return storage_error(error, action, self.place(path), secrets)

    def _unless_absent(self, path: str, read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except ABSENT:
            return None
        except Exception as error:
            if self.local and (kind := local.kind(self._at(path))):
                raise FormatError(
                    self.place(path), f"expected a file, found {kind}"
                ) from error
            # Entered here only: every block is read so, and few reads fail.
            with self._errors("read", path):
                raise

    @contextlib.contextmanager
    def _errors(self, action: str, path: str) -> Iterator[None]:
        """Translate what a backend raises."""
        try:
            yield
        except KVStoreError:
            raise
        except Exception as error:
            translated = self._translated(error, action, path)
            raise translated from translated.__cause__
