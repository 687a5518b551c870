"""`Copy`: a group's blocks to another root, byte by byte, each proved on its way.

    root, destination = Root("/mnt/kv"), Upkeep("s3://bucket/kv")
    groups = {group.path: group for group in root.groups()}
    destination.probe()
    for group in groups.values():
        claim(group, destination)
    task = Copy(groups=groups, destination=destination)
    for group in groups.values():
        for share in group.shares():
            print(share, task(share))

Namespaces keep their names. What is there already stays: a key's blocks are
interchangeable, whoever wrote them. So what was interrupted is gone on with by doing it
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvstore.arrays import MAX_DOCUMENT_BYTES, group_document
from kvstore.errors import DamagedBlockError, InvalidInputError, StorageError
from kvstore.offline.faults import LISTED
from kvstore.offline.group import StoredGroup
from kvstore.offline.place import Within
from kvstore.offline.shares import Share
from kvstore.offline.whole import WholeBlocks
from kvstore.paths import DOCUMENT
from kvstore.records import Record
from kvstore.survey import StoredBlock, stored_blocks
from kvstore.upkeep import Upkeep


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Record):
    """What became of some blocks.

    Attributes:
        copied: blocks that are at the destination now, and were not.
        repaired: those of them that were there damaged.
        kept: blocks that were there.
        damaged: blocks of the source that do not hold their proof: left out.
        gone: blocks that were listed and are none: removed meanwhile, or never committed.
        nbytes: of the copied ones' files.
        left_out: what is wrong with damaged ones, sorted; of many, some.
    """

    copied: int = 0
    repaired: int = 0
    kept: int = 0
    damaged: int = 0
    gone: int = 0
    nbytes: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.copied + self.kept + self.damaged + self.gone

    @property
    def there(self) -> int:
        """Those that are at the destination."""
        return self.copied + self.kept

    def __add__(self, other: Copied) -> Copied:
        """Of both."""
        return Copied(
            copied=self.copied + other.copied,
            repaired=self.repaired + other.repaired,
            kept=self.kept + other.kept,
            damaged=self.damaged + other.damaged,
            gone=self.gone + other.gone,
            nbytes=self.nbytes + other.nbytes,
            left_out=tuple(sorted(self.left_out + other.left_out)[:LISTED]),
        )


def compare(group: StoredGroup, destination: Upkeep) -> None:
    """Compare a group's documents with those below another root, where there are any.

    Args:
        group: what is to be copied.
        destination: opened with `read_only`, so that nothing is written.

    Raises:
        LayoutMismatchError: with every field that differs.
        FormatError: a document below `destination` cannot be read.
        StorageError: storage failed.
    """
    group.below(destination).claim()


def claim(group: StoredGroup, destination: Upkeep) -> None:
    """Copy a group's documents to another root, and compare those that are there.

    Raises:
        LayoutMismatchError, FormatError, StorageError: as `compare`.
    """
    rank = group.path.rpartition("/")[0]
    for path in (group.namespace, rank, group.path):
        name = f"{path}/{DOCUMENT}"
        if destination.read(name, 1) is not None:
            continue
        document: bytes | None = group_document()  # a rank's
        if path != rank:
            # As it is, so that who wrote the blocks stays recorded.
            document = group.filesystem.read(name, MAX_DOCUMENT_BYTES + 1)
        if document is not None:
            destination.create(name, document, fsync=True)
    group.below(destination).claim()


def destination_root(found: tuple[Upkeep, Within], namespaces: list[str]) -> Upkeep:
    """The root to copy to.

    Args:
        found: what `locate` told of the URL.
        namespaces: the folders of those that are copied.

    Raises:
        InvalidInputError: the URL is not a root's.
    """
    root, within = found
    last = root.url.rpartition("/")[2]
    if within.namespace is None and last not in namespaces:
        return root
    below = root.url.rpartition("/")[0] if within.namespace is None else root.url
    raise InvalidInputError(
        f"destination: expected a root, found {root.place(within.path)}. Namespaces, "
        f"groups and blocks keep their names: name the root, {below}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copies a share. A task for `run`; doing it again does no harm.

    Attributes:
        groups: those to be copied, by path; claimed at the destination.
        destination: the root.
        key: the only block that is meant; None for all.
        verify: read back, and prove, what is at the destination: what was there too.
        dry_run: only tell. Damage of the source is not seen.
    """

    groups: Mapping[str, StoredGroup]
    destination: Upkeep
    key: bytes | None = None
    verify: bool = False
    dry_run: bool = False

    def __call__(self, share: Share) -> Copied:
        """Copy what is not there.

        Raises:
            StorageError: storage failed, or does not give back what it took.
            LayoutMismatchError: as `Blocks.store`.
        """
        group = self.groups[share.group]
        source = WholeBlocks(group.filesystem, group.below(group.filesystem))
        target = WholeBlocks(self.destination, group.below(self.destination))
        there = _Listing(
            stored_blocks(self.destination, share.group, share.first, share.stop)
        )
        done = Copied()
        for block in group.blocks(share.first, share.stop):
            if self.key in (None, block.key):
                done += self._copy(source, target, block, there.find(block.path))
        return done

    def _copy(
        self,
        source: WholeBlocks,
        target: WholeBlocks,
        block: StoredBlock,
        listed: StoredBlock | None,
    ) -> Copied:
        key = block.key
        damaged = False
        try:
            if target.looks_healthy(key, listed) and self._holds(target, key):
                return Copied(kept=1)
        except DamagedBlockError:
            damaged = True
        if self.dry_run:
            return Copied(copied=1, repaired=int(damaged), nbytes=block.nbytes)
        try:
            whole = source.take(key)
        except DamagedBlockError as error:
            return Copied(damaged=1, left_out=(str(error),))
        if whole is None:
            return Copied(gone=1)
        if not target.give(key, whole, replace=damaged):
            return Copied(kept=1)
        self._require_back(target, key)
        return Copied(copied=1, repaired=int(damaged), nbytes=whole.nbytes)

    def _holds(self, target: WholeBlocks, key: bytes) -> bool:
        """Whether a block that looks healthy is there. Raises `DamagedBlockError`."""
        return not self.verify or target.take(key) is not None

    def _require_back(self, target: WholeBlocks, key: bytes) -> None:
        try:
            self._holds(target, key)
        except DamagedBlockError as error:
            raise StorageError(error.place, "read back", error.problem) from error


class _Listing:
    """Blocks in the order of their paths, asked for in that order: one is kept."""

    def __init__(self, blocks: Iterator[StoredBlock]) -> None:
        self._blocks = blocks
        self._next = next(blocks, None)

    def find(self, path: str) -> StoredBlock | None:
        """The block at `path`, if it was listed."""
        while self._next is not None and self._next.path < path:
            self._next = next(self._blocks, None)
        found = self._next
        return found if found is not None and found.path == path else None
