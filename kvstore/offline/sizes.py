"""How many blocks there are, how large, and since when they were not used. Lists only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.offline.shares import Share
from kvstore.records import Record
from kvstore.survey import FAN_OUTS, StoredBlock, stored_blocks
from kvstore.upkeep import Upkeep

SAMPLE = 2048
"""Blocks after which `estimate` looks at no more fan-outs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Record):
    """Of some blocks, as they are listed.

    Attributes:
        blocks: those that have all their files.
        halves: those of which half is missing; see `verify`.
        nbytes: of all files, documents included.
        oldest, newest: when the block that was used longest ago, and last, was used: in
            seconds since the epoch by the storage's clock. None without blocks.
    """

    blocks: int = 0
    halves: int = 0
    nbytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    @classmethod
    def of(cls, blocks: Iterable[StoredBlock]) -> Sizes:
        """Count blocks as they go by."""
        count = halves = nbytes = 0
        oldest, newest = float("inf"), float("-inf")
        for block in blocks:
            count += not block.orphan
            halves += block.orphan
            nbytes += block.nbytes
            oldest, newest = min(oldest, block.used), max(newest, block.used)
        if not count + halves:
            return cls()
        return cls(blocks=count, halves=halves, nbytes=nbytes, oldest=oldest, newest=newest)

    def __add__(self, other: Sizes) -> Sizes:
        """Of both."""
        return Sizes(
            blocks=self.blocks + other.blocks,
            halves=self.halves + other.halves,
            nbytes=self.nbytes + other.nbytes,
            oldest=min(_known(self.oldest, other.oldest), default=None),
            newest=max(_known(self.newest, other.newest), default=None),
        )

    def times(self, factor: float) -> Sizes:
        """What so many times the blocks would be."""
        return Sizes(
            blocks=round(self.blocks * factor),
            halves=round(self.halves * factor),
            nbytes=round(self.nbytes * factor),
            oldest=self.oldest,
            newest=self.newest,
        )


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


@dataclass(frozen=True, slots=True)
class Measure:
    """The sizes of one share. A task for `run`."""

    filesystem: Upkeep

    def __call__(self, share: Share) -> Sizes:
        """List the share's blocks. Raises `StorageError`."""
        blocks = stored_blocks(self.filesystem, share.group, share.first, share.stop)
        return Sizes.of(blocks)


def estimate(filesystem: Upkeep, group: str) -> tuple[Sizes, bool]:
    """A group's sizes, from a sample of its fan-outs where there are many blocks.

    Keys are hashes, so some fan-outs are a fair sample: of 2,048 blocks, the count is
    within 5 % nineteen times out of twenty.

    Returns:
        The sizes, and whether they are exact.

    Raises:
        StorageError: storage failed.
    """
    found, covered, step = Sizes(), 0, 16
    while covered < FAN_OUTS and found.blocks < SAMPLE:
        stop = min(FAN_OUTS, covered + step)
        found += Sizes.of(stored_blocks(filesystem, group, covered, stop))
        covered, step = stop, 2 * step
    return found.times(FAN_OUTS / covered), covered == FAN_OUTS
