"""`Root`: what lies under a URL, for those who look at a cache without an engine.

It reads documents, and lists. What is listed streams by: nothing here grows with the number
of blocks.

Threads: every method may be called from any thread. Pickles, credentials included, so that
other machines can do a part of the work.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.arrays import recorded_config
from kvstore.collector import clock_skew
from kvstore.errors import FormatError, InvalidInputError, shown
from kvstore.filesystem import ClientName
from kvstore.offline.group import StoredGroup, read_document, read_layout
from kvstore.offline.place import Within, locate
from kvstore.paths import DOCUMENT, group_path
from kvstore.survey import BELOW_NAMESPACE
from kvstore.urls import safe_url

_NONE = "expected the document of a group, found none"

_ANY = re.compile(".*", re.DOTALL)

MAX_TOLD = 5
"""Groups that a message names, where one was meant."""


class Root:
    """All namespaces under a URL, or the part that the URL names.

    Attributes:
        filesystem: the root's.
        within: which part of it is meant.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        client: ClientName = "obstore",
        timeout: float = 30.0,
        read_only: bool = True,
    ) -> None:
        """Find the root of `url`; see `locate` for arguments and errors."""
        self._given = safe_url(os.fspath(url))
        self.filesystem, self.within = locate(
            url, storage_options, client=client, timeout=timeout, read_only=read_only
        )

    def now(self) -> float:
        """Seconds since the epoch, by the storage's clock: where it has one of its own, and
        may be written to, a small file tells that. Raises `StorageError`.
        """
        own = not self.filesystem.local and not self.filesystem.read_only
        return time.time() + (clock_skew(self.filesystem) if own else 0.0)

    def namespaces(self) -> list[str]:
        """The folders of the namespaces, sorted: all folders directly below the root."""
        if self.within.namespace is not None:
            return [self.within.namespace]
        return self.filesystem.folders("")

    def places(self) -> Iterator[Within]:
        """Every KV group that has a folder, whether or not its documents can be read."""
        for namespace in self.namespaces():
            for rank in self._numbers(namespace, 0, self.within.rank):
                folder = f"{namespace}/r{rank}"
                for group in self._numbers(folder, 1, self.within.group):
                    yield Within(namespace, rank, group)

    def links(self) -> list[str]:
        """Symbolic links in the place of a namespace, rank or group that is meant, which
        engines follow and `places` leaves out. Raises `StorageError`.
        """
        filesystem, found, starts = self.filesystem, [], [""]
        meant = filter(None, self.within.path.split("/")[:3])
        for pattern, only in itertools.zip_longest((_ANY, *BELOW_NAMESPACE), meant):
            below = re.compile(re.escape(only)) if only else pattern
            for folder in starts:
                start = f"{folder}/" if folder else ""
                names = filter(below.fullmatch, filesystem.links(folder))
                found += [f"{start}{name}" for name in names]
            starts = [
                f"{folder}/{name}".removeprefix("/")
                for folder in starts
                for name in filter(below.fullmatch, filesystem.folders(folder))
            ]
        return found

    def require_places(self) -> list[Within]:
        """All of `places`.

        Raises:
            InvalidInputError: there is none, or a block is meant that is not there.
            StorageError: storage failed.
        """
        found, one = list(self.places()), self.within.key is not None
        if not found or (one and not any(self.filesystem.files(self.within.path))):
            expected = "a block" if one else "KV groups"
            raise InvalidInputError(
                f"url: expected {expected}, found none at {shown(self._given)}"
            )
        return found

    def groups(self) -> Iterator[StoredGroup]:
        """Every KV group, by its documents.

        Raises:
            FormatError: a document is missing, or cannot be read. Use `places` and
                `read_group` to go on behind it.
            StorageError: storage failed.
        """
        for place in self.places():
            yield self.read_group(place)

    def readable(self) -> tuple[dict[str, StoredGroup], list[str]]:
        """The groups by their paths, and of those whose documents are missing or cannot be
        read, why. Raises as `require_places`.
        """
        groups, unreadable = {}, []
        for place in self.require_places():
            try:
                groups[place.path] = self.read_group(place)
            except FormatError as error:
                unreadable.append(str(error))
        return groups, unreadable

    def only_group(self) -> StoredGroup:
        """The one KV group that is meant.

        Raises:
            InvalidInputError: there is none, there are several, or a block is meant.
            FormatError, StorageError: as `groups`.
        """
        if self.within.key is not None:
            raise InvalidInputError(
                "url: expected a namespace or group, found a block at "
                f"{self.filesystem.place(self.within.path)}"
            )
        places = list(itertools.islice(self.places(), MAX_TOLD))
        if len(places) != 1:
            found = ", ".join(place.path for place in places) or "none"
            raise InvalidInputError(
                f"url: expected one KV group at {self.filesystem.place(self.within.path)}, "
                f"found {found}. Name a group, e.g. {self.filesystem.url}/NAMESPACE/r0/g0"
            )
        return self.read_group(places[0])

    def read_group(self, place: Within) -> StoredGroup:
        """What the documents of a namespace and its KV group record.

        Raises:
            FormatError: one is missing, or cannot be read.
            StorageError: storage failed.
        """
        namespace, rank, group = place.namespace, place.rank, place.group
        if namespace is None or rank is None or group is None:
            raise ValueError(f"expected the place of a group, found {place}")
        document, where = read_document(self.filesystem, namespace), self._place(namespace)
        if document is None:
            raise FormatError(where, _NONE)
        config = recorded_config(document, place=where)
        folder = group_path(namespace, rank, group)
        layout = read_layout(self.filesystem, folder)
        if layout is None:
            raise FormatError(self._place(folder), _NONE)
        return StoredGroup(self.filesystem, namespace, rank, group, config, layout)

    def _place(self, folder: str) -> str:
        return self.filesystem.place(f"{folder}/{DOCUMENT}")

    def _numbers(self, folder: str, level: int, only: int | None) -> list[int]:
        pattern = BELOW_NAMESPACE[level]
        names = filter(pattern.fullmatch, self.filesystem.folders(folder))
        return sorted(n for n in (int(name[1:]) for name in names) if only in (None, n))
