"""`Survey`: the blocks below a root, some fan-outs at a time, in all its namespaces.

Keys are hashes, so the blocks of any fan-outs are a fair sample of all. Nothing is kept of
them: a survey knows only where it is.

Threads: one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from kvstore.arrays import MAX_DOCUMENT_BYTES, group_attributes
from kvstore.errors import FormatError, InvalidInputError, StorageError
from kvstore.listing import Found
from kvstore.paths import CHUNK, DOCUMENT, FAN_OUT_DIGITS, block_key
from kvstore.upkeep import Upkeep

FAN_OUTS = 16**FAN_OUT_DIGITS

SAMPLE = 4096
"""Blocks that one look is after: all of them, where there are no more."""

MAX_FILES = 1_000_000
"""Files of one listing: far more than a fan-out has. A server could go on for ever."""

WIDE_FILES = 8 * SAMPLE
"""Files of the fan-outs that are listed at once: where more are, fewer fan-outs are."""

LOOK_SECONDS = 600.0
"""After which a look that has not seen enough is given up."""

MAX_FOLDERS = 100_000
"""Folders below the root, or of all ranks, or of all groups: for the same reason."""

GROUPS_SECONDS = 60.0
"""For how long the groups below the root are taken for known."""

_NUMBER = "(?:0|[1-9][0-9]*)"
BELOW_NAMESPACE = (re.compile(f"r{_NUMBER}"), re.compile(f"g{_NUMBER}"))


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as it was listed.

    Attributes:
        path: its folder, relative to the root.
        names: of its files; the document, if there is one, is the last.
        nbytes: of all its files.
        used: when it was last used, in seconds since the epoch by the storage's clock.
    """

    path: str
    names: tuple[str, ...]
    nbytes: int
    used: float

    @property
    def key(self) -> bytes:
        """The engine's key, as the path tells it."""
        return bytes.fromhex(self.path.rpartition("/")[2])

    @property
    def orphan(self) -> bool:
        """Half a block: killed writers leave a chunk, and touches that come too late a
        document.
        """
        return self.names[-1] != DOCUMENT or len(self.names) == 1


class _TooManyFilesError(StorageError):
    """A listing is longer than it may be."""


def stored_blocks(
    filesystem: Upkeep,
    group: str,
    first: int = 0,
    stop: int = FAN_OUTS,
    *,
    max_files: int | None = None,
) -> Generator[StoredBlock, None, None]:
    """A group's blocks in the fan-outs from `first` to before `stop`, as they are listed.

    Nothing is kept of those that went by. What lies there and is no block is left out.

    Args:
        filesystem: the root.
        group: the group's folder, relative to the root.
        first: a fan-out, from 0.
        stop: the fan-out behind the last, up to `FAN_OUTS`.
        max_files: more than these are an error.

    Raises:
        StorageError: at any step, also where storage lists in no order. A listing that ends
            without it is whole.
    """
    last = f"{stop:03x}" if stop < FAN_OUTS else "g"
    skip = len(group) + 1
    # Behind all of the fan-out before: SeaweedFS goes on behind the one that is named.
    before = f"{group}/{first - 1:03x}g" if first else ""

    def folder(file: Found) -> str:
        fan_out, _, rest = file.path[skip:].partition("/")
        return f"{fan_out}/{rest.partition('/')[0]}"

    listed = f"{group}/{first:03x}"
    with contextlib.closing(bounded_files(filesystem, group, before, max_files)) as files:
        for path, found in itertools.groupby(files, key=folder):
            if path >= last:
                return
            try:
                block_key(path)
            except InvalidInputError:
                continue  # a fan-out's document, or somebody else's
            if block := _block(f"{group}/{path}", found):
                require_ascending(filesystem, listed, block.path)
                listed = block.path
                yield block


def stored_block(filesystem: Upkeep, path: str) -> StoredBlock | None:
    """One block as it is listed now; None if nothing of it is there.

    Args:
        filesystem: the root.
        path: the block's folder, relative to the root.

    Raises:
        StorageError: it could not be listed.
    """
    with contextlib.closing(bounded_files(filesystem, path, "", MAX_FILES)) as files:
        return _block(path, files)


def require_ascending(filesystem: Upkeep, before: str, path: str) -> None:
    """Raise `StorageError` where a block's folder is listed behind one that sorts after it:
    then the files of one block may be listed apart, and each would look like half a block.
    """
    if path <= before:
        raise StorageError(
            filesystem.url,
            "list",
            f"expected paths that ascend, found {path} behind {before}. Storage that lists "
            "in no order, such as a directory bucket of S3 Express, cannot be used here",
        )


def bounded_files(
    filesystem: Upkeep, path: str, after: str, limit: int | None
) -> Generator[Found, None, None]:
    """As `Upkeep.files`; more than `limit` are a `StorageError`."""
    with contextlib.closing(filesystem.files(path, after=after)) as files:
        for number, file in enumerate(files):
            if number == limit:
                problem = f"expected at most {limit} files"
                raise _TooManyFilesError(filesystem.place(path), "list", problem)
            yield file


def _is_ours(name: str) -> bool:
    """Whether a file of this name, in a block's folder, is the block's. Any other is
    somebody's, whose name may be anything.
    """
    return name == DOCUMENT or CHUNK.fullmatch(name) is not None


def _block(path: str, files: Iterable[Found]) -> StoredBlock | None:
    """A block by the files in its folder; None if none of them is a block's."""
    named = ((file.path[len(path) + 1 :], file) for file in files)
    ours = {name: file for name, file in named if _is_ours(name)}
    if not ours:
        return None
    nbytes = sum(file.nbytes for file in ours.values())
    newest = max(file.modified for file in ours.values())
    document = ours.pop(DOCUMENT, None)
    return StoredBlock(
        path,
        (*ours, DOCUMENT) if document else tuple(ours),
        nbytes,
        document.modified if document else newest,
    )


def is_namespace(filesystem: Upkeep, folder: str) -> bool:
    """Whether a folder below the root has a namespace's document. Any other folder may be
    somebody's, however its files are called: nothing below it is removed.

    Raises:
        StorageError: storage failed.
    """
    path = f"{folder}/{DOCUMENT}"
    try:
        document = filesystem.read(path, MAX_DOCUMENT_BYTES + 1)
        if document is None:
            return False
        return "config" in group_attributes(document, place=filesystem.place(path))
    except FormatError:
        return False


class Survey:
    """Of one root. It begins anywhere, and goes round.

    Attributes:
        width: how many fan-outs to look at, for about a sample.
    """

    def __init__(self, filesystem: Upkeep, namespaces: Iterable[str] = ()) -> None:
        """Looks at nothing yet.

        Args:
            filesystem: the root.
            namespaces: folders that are known as namespaces, whatever becomes of their
                documents. Others are by `is_namespace`.
        """
        self.width = 4
        self._filesystem = filesystem
        self._namespaces = set(namespaces)
        self._cursor = secrets.randbelow(FAN_OUTS)  # engines begin apart
        self._groups: list[str] = []
        self._groups_known = float("-inf")

    def look(self) -> tuple[list[StoredBlock], float]:
        """Blocks, about a sample of them, and which share of all fan-outs holds them.

        It sees as many however slow storage is: fewer would tell no more than a guess.

        Raises:
            StorageError: the root could not be listed, or not in time.
        """
        end = time.monotonic() + LOOK_SECONDS
        blocks: list[StoredBlock] = []
        covered = 0
        while covered < FAN_OUTS and len(blocks) < SAMPLE:
            if time.monotonic() > end:
                problem = f"found only {len(blocks)} blocks within {LOOK_SECONDS:g} s"
                raise StorageError(self._filesystem.url, "list", problem)
            found, width = self.stripe(min(self.width, FAN_OUTS - covered))
            blocks += found
            covered += width
            if len(blocks) < SAMPLE // 2:
                self.width = min(FAN_OUTS, 4 * self.width)
        if len(blocks) > 2 * SAMPLE:
            self.width = max(1, self.width // 4)
        return blocks, covered / FAN_OUTS

    def stripe(self, width: int) -> tuple[list[StoredBlock], int]:
        """All blocks of the next so many fan-outs, in every group, and of how many fan-outs
        these are: of fewer, where so many hold more than `WIDE_FILES`.

        Raises:
            StorageError: the root could not be listed.
        """
        first = self._cursor
        while True:
            self._cursor = (first + width) % FAN_OUTS  # also behind what cannot be listed
            try:
                return self._blocks(first, width), width
            except _TooManyFilesError:
                if width == 1:
                    raise
            width = self.width = max(1, width // 4)

    def _blocks(self, first: int, width: int) -> list[StoredBlock]:
        stop = first + width
        ranges = [(first, min(stop, FAN_OUTS)), (0, stop - FAN_OUTS)]
        left = min(MAX_FILES, WIDE_FILES)
        blocks: list[StoredBlock] = []
        for group, (start, end) in itertools.product(self._known_groups(), ranges):
            if start < end:
                limit = left if width > 1 else MAX_FILES
                found = list(
                    stored_blocks(self._filesystem, group, start, end, max_files=limit)
                )
                blocks += found
                left -= sum(len(block.names) for block in found)
        return blocks

    def _known_groups(self) -> list[str]:
        now = time.monotonic()
        if now - self._groups_known > GROUPS_SECONDS:
            paths = [name for name, _ in self._inside([""]) if self._is_namespace(name)]
            for pattern in BELOW_NAMESPACE:
                inside = self._inside(paths)
                paths = [path for path, name in inside if pattern.fullmatch(name)]
            self._groups, self._groups_known = paths, now
        return self._groups

    def _inside(self, folders: Iterable[str]) -> list[tuple[str, str]]:
        """The folders directly below some folders: their paths and names."""
        inside: list[tuple[str, str]] = []
        for folder in folders:
            names = self._filesystem.folders(folder)
            start = f"{folder}/" if folder else ""
            inside += [(f"{start}{name}", name) for name in names]
            if len(inside) > MAX_FOLDERS:
                problem = f"expected at most {MAX_FOLDERS} folders"
                raise StorageError(self._filesystem.place(folder), "list", problem)
        return inside

    def _is_namespace(self, folder: str) -> bool:
        if folder not in self._namespaces and is_namespace(self._filesystem, folder):
            self._namespaces.add(folder)  # it stays one
        return folder in self._namespaces
