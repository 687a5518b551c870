"""`Upkeep`: a `Filesystem` that also lists, and removes much at once.

For whoever tidies up below a root. What opens, looks up, loads and stores never lists.

Threads: as `Filesystem`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Generator, Sequence

from kvstore import listing, scratch
from kvstore.client import delete_blocks
from kvstore.errors import StorageError
from kvstore.filesystem import Filesystem
from kvstore.listing import Found

_ELSEWHERE = frozenset(("", ".", ".."))
"""Names that lead elsewhere as part of a path."""

MAX_LEFTOVERS = 1024
"""Objects among the temporary names that a sweep looks at: they may be without end."""


class Upkeep(Filesystem):
    """One root URL, as a `Filesystem`."""

    def folders(self, path: str) -> list[str]:
        """The names of the folders directly below `path`, sorted; none if it is absent.

        A bucket may hold what leads elsewhere as a path, such as `..`: that is no folder.
        """
        with self._errors("list", path):
            if self.local:
                names = listing.folders(self._folder, path)
            else:
                names = self._client.folders(path)
        hidden = _ELSEWHERE if path else _ELSEWHERE | {scratch.TEMPORARY}
        return [name for name in names if name not in hidden and "/" not in name]

    def links(self, path: str) -> list[str]:
        """The names of the symbolic links to folders directly below `path`, sorted. They
        are not among `folders`, and nothing behind them is among `files`.
        """
        with self._errors("list", path):
            return listing.links(self._folder, path) if self.local else []

    def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
        """Every file below `path`, on all levels, as storage tells of them one by one.

        They come in the order of their paths. (An object store may have an order of its
        own: then it is that one, here and for `after`.) What is written or removed
        meanwhile may be among them or not.

        Args:
            path: a folder. If it is absent, there are none.
            after: relative to the root; only files beyond it are listed, so that a listing
                can go on where another has stopped.

        Raises:
            StorageError: at any step. A listing that ends without it is whole.
        """
        with self._errors("list", path):
            if self.local:
                found = listing.files(self._folder, path, after)
            else:
                found = self._client.files(path, after)
            for file in found:
                if path or not file.path.startswith(f"{scratch.TEMPORARY}/"):
                    yield file

    def occupied(self, path: str) -> bool:
        """Whether anything is left at a folder's path, also if no listing shows it.

        A bucket has no more than it lists.
        """
        return self.local and os.path.lexists(self._at(path))

    def delete_many(
        self, blocks: Sequence[tuple[str, Sequence[str]]]
    ) -> tuple[list[str], StorageError | None]:
        """Remove blocks, as `delete` does one: all commit marks go before any other file.

        Args:
            blocks: the folder and the names of each.

        Returns:
            The folders of the blocks that are gone now, and the first failure, if there
            was any. A block that is not among them is as it was, or has lost its commit
            mark and not all the rest, or was not tried any more.
        """
        if not self.local:
            removed, problem = delete_blocks(self._client, blocks)
            return removed, self._translated(problem, "delete in", "") if problem else None
        removed, failed = [], []
        for path, names in blocks:
            try:
                self.delete(path, names)
            except StorageError as error:
                failed.append(error)
            else:
                removed.append(path)
        return removed, failed[0] if failed else None

    def sweep(self) -> int:
        """Remove what dead writers left among the temporary names: in a folder see
        `scratch.sweep`, elsewhere objects that are older than a day.

        Returns:
            How many writers' folders, or objects, were removed; 0 where the root is only
            read. What could not be removed is for the next sweep.

        Raises:
            StorageError: the root is no local folder, and could not be listed.
        """
        if self.read_only:
            return 0
        if self.local:
            return scratch.sweep(self._folder)
        places = (path.rpartition("/") for path in self.leftovers())
        removed, _ = self.delete_many([(folder, (name,)) for folder, _, name in places])
        return len(removed)

    def leftovers(self) -> list[str]:
        """What `sweep` would remove, relative to the root, sorted; nothing is written.
        Raises as `sweep`.
        """
        if self.local:
            names = scratch.abandoned(self._folder)
            return [f"{scratch.TEMPORARY}/{name}" for name in names]
        before = time.time() - scratch.ABANDONED_SECONDS
        return sorted(
            file.path
            for file in itertools.islice(self.files(scratch.TEMPORARY), MAX_LEFTOVERS)
            if file.modified < before and not _ELSEWHERE.intersection(file.path.split("/"))
        )
