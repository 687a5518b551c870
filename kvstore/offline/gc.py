"""Remove blocks until limits hold, the least recently used first: once, and exactly.

`Collector` keeps an engine's root within limits by samples, for as long as the engine runs.
This is for whoever wants it now, on any part of a root, and first wants to know what would
go. It lists two or three times and keeps nothing of the blocks that go by: the first time
their bytes by age, in steps of about a hundredth of the age. What is older than the limit
allows goes the second time. Of the step in which the limit lies, only as much goes as must,
share after share, the third time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.collector import BATCH, is_unused
from kvstore.errors import StorageError
from kvstore.offline.shares import Share, Unfinished
from kvstore.records import Record
from kvstore.survey import StoredBlock, stored_blocks
from kvstore.upkeep import Upkeep

HALF_SECONDS = 3600.0
"""Age at which half a block is nobody's write any more, and goes in any case."""

_STEPS = 100
"""Per factor e of age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may stay.

    Attributes:
        now: seconds since the epoch, by the storage's clock.
        max_age: seconds since a block was last used; None for any.
        dry_run: whether to remove nothing, and tell what would be.
    """

    now: float
    max_age: float | None = None
    dry_run: bool = False

    def step(self, block: StoredBlock) -> int:
        """How old a block is, in steps: the older, the higher."""
        return int(_STEPS * math.log1p(max(0.0, self.now - block.used)))

    def is_over(self, block: StoredBlock) -> bool:
        """Whether a block must go, however much room there is."""
        age = self.now - block.used
        if block.orphan and age > HALF_SECONDS:
            return True
        return self.max_age is not None and not block.orphan and age > self.max_age


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Of some shares, before anything is removed.

    Attributes:
        blocks, nbytes: all that lies there, of the blocks that may stay.
        steps: bytes that may be removed, by the age of their blocks.
    """

    blocks: int = 0
    nbytes: int = 0
    steps: Mapping[int, int]

    def __add__(self, other: Weight) -> Weight:
        """Of both."""
        return Weight(
            blocks=self.blocks + other.blocks,
            nbytes=self.nbytes + other.nbytes,
            steps=Counter(self.steps) + Counter(other.steps),
        )

    def cut(self, max_bytes: int) -> int | None:
        """The step in which the limit lies: all that is older goes, and some of it. None if
        nothing must go.
        """
        excess = self.nbytes - max_bytes
        if excess <= 0:
            return None
        step = 0
        for step in sorted(self.steps, reverse=True):
            excess -= self.steps[step]
            if excess <= 0:
                return step
        return step


@dataclass(frozen=True, slots=True)
class Weigh:
    """How old how many bytes of a share are. A task for `run`."""

    filesystem: Upkeep
    rules: Rules

    def __call__(self, share: Share) -> Weight:
        """List the share's blocks. Raises `StorageError`."""
        blocks = nbytes = 0
        steps: Counter[int] = Counter()
        for block in _blocks(self.filesystem, share):
            if self.rules.is_over(block):
                continue
            blocks += 1
            nbytes += block.nbytes
            if not block.orphan:  # or somebody is writing the other half
                steps[self.rules.step(block)] += block.nbytes
        return Weight(blocks=blocks, nbytes=nbytes, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Record):
    """What became of some shares.

    Attributes:
        blocks, nbytes: all that was there.
        expired, evicted, halves: blocks that were removed because they are too old, for
            want of room, and because half of their files were missing.
        freed: bytes that were removed.
        evicted_bytes: of these, for want of room.
        edge: bytes of the step in which the limit lies.
    """

    blocks: int = 0
    nbytes: int = 0
    expired: int = 0
    evicted: int = 0
    halves: int = 0
    freed: int = 0
    evicted_bytes: int = 0
    edge: int = 0

    def __add__(self, other: Removed) -> Removed:
        """Of both."""
        ours, theirs = self.to_dict(), other.to_dict()
        return Removed(**{name: ours[name] + theirs[name] for name in ours})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Remove what must go in any case, and all that is older than a step. A task for `run`.

    Attributes:
        filesystem: the root's.
        rules: what may stay.
        cut: the step; None where there is room.
    """

    filesystem: Upkeep
    rules: Rules
    cut: int | None = None

    def __call__(self, share: Share) -> Removed:
        """List the share's blocks and remove some. Raises `Unfinished`."""
        return _sum(self._steps(share))

    def _steps(self, share: Share) -> Iterator[Removed]:
        batch: list[StoredBlock] = []
        for block in _blocks(self.filesystem, share):
            edge = 0
            if self.rules.is_over(block) or self._is_older(block):
                batch.append(block)
            elif not block.orphan and self.rules.step(block) == self.cut:
                edge = block.nbytes
            yield Removed(blocks=1, nbytes=block.nbytes, edge=edge)
            if len(batch) == BATCH:
                yield from _remove(self.filesystem, self.rules, batch)
                batch = []
        yield from _remove(self.filesystem, self.rules, batch)

    def _is_older(self, block: StoredBlock) -> bool:
        if self.cut is None or block.orphan:
            return False
        return self.rules.step(block) > self.cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """Remove blocks of one step, as many bytes as each share must give. A task for `run`.

    They go as they are listed: their ages are too near for a sort, which would have to hold
    all of them.

    Attributes:
        filesystem: the root's.
        rules: what may stay.
        cut: the step.
        quotas: bytes, by share.
    """

    filesystem: Upkeep
    rules: Rules
    cut: int
    quotas: Mapping[Share, int]

    def __call__(self, share: Share) -> Removed:
        """List the share's blocks and remove some. Raises `Unfinished`."""
        return _sum(self._steps(share))

    def _steps(self, share: Share) -> Iterator[Removed]:
        edge = (
            block
            for block in _blocks(self.filesystem, share)
            if not block.orphan and self.rules.step(block) == self.cut
        )
        quota = self.quotas[share]
        while quota > 0 and (batch := list(_first(edge, quota))):
            for removed in _remove(self.filesystem, self.rules, batch):
                quota -= removed.freed
                yield removed


def quotas_of(edges: Mapping[Share, int], excess: int) -> dict[Share, int]:
    """Which shares must give how much of the step in which the limit lies.

    Args:
        edges: bytes that each share has of it.
        excess: bytes that must go.
    """
    asked: dict[Share, int] = {}
    for share, nbytes in edges.items():
        if excess <= 0:
            break
        if nbytes:
            asked[share] = min(nbytes, excess)
            excess -= nbytes
    return asked


def _blocks(filesystem: Upkeep, share: Share) -> Iterator[StoredBlock]:
    return stored_blocks(filesystem, share.group, share.first, share.stop)


def _first(blocks: Iterator[StoredBlock], nbytes: int) -> Iterator[StoredBlock]:
    """Blocks in turn until there are so many bytes, and no more than a batch."""
    for count, block in enumerate(blocks, 1):
        yield block
        nbytes -= block.nbytes
        if nbytes <= 0 or count == BATCH:
            return


def _is_alone(filesystem: Upkeep, half: StoredBlock) -> bool:
    """Whether nothing else lies in the folder of half a block: its other file by now, or
    another version's chunk, which has another name.
    """
    ours = {f"{half.path}/{name}" for name in half.names}
    return ours.issuperset(file.path for file in filesystem.files(half.path))


def _sum(steps: Iterator[Removed]) -> Removed:
    told = Removed()
    try:
        for removed in steps:
            told += removed
    except StorageError as error:
        raise Unfinished(told, error) from error
    return told


def _remove(
    filesystem: Upkeep, rules: Rules, blocks: Sequence[StoredBlock]
) -> Iterator[Removed]:
    """Remove blocks that nobody has used since they were listed.

    Yields once what was removed. Raises `StorageError` behind that.
    """
    blocks = [b for b in blocks if not b.orphan or _is_alone(filesystem, b)]
    problem = None
    if not rules.dry_run:
        blocks = [block for block in blocks if is_unused(filesystem, block)]
        gone, problem = filesystem.delete_many([(b.path, b.names) for b in blocks])
        paths = set(gone)
        blocks = [block for block in blocks if block.path in paths]
    halves = [block for block in blocks if block.orphan]
    evicted = [block for block in blocks if not rules.is_over(block)]
    yield Removed(
        expired=len(blocks) - len(halves) - len(evicted),
        evicted=len(evicted),
        halves=len(halves),
        freed=sum(block.nbytes for block in blocks),
        evicted_bytes=sum(block.nbytes for block in evicted),
    )
    if problem is not None:
        raise problem
