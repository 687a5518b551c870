"""How many blocks there are, and since when they were not used. Lists only."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstore.offline.shares import Share
from kvstore.offline.sizes import Sizes
from kvstore.records import Record
from kvstore.survey import StoredBlock, stored_blocks
from kvstore.upkeep import Upkeep

AGES = (
    (3600.0, "an hour"),
    (6 * 3600.0, "6 hours"),
    (86_400.0, "a day"),
    (7 * 86_400.0, "7 days"),
    (30 * 86_400.0, "30 days"),
    (90 * 86_400.0, "90 days"),
)
"""The ends of the classes of ages, in seconds and in words; one more class has no end."""

_ENDS = tuple(seconds for seconds, _ in AGES)
_NONE = (0,) * (len(AGES) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census(Record):
    """Of some blocks, as they are listed.

    Attributes:
        sizes: how many, how large, how old.
        ages: how many whole blocks are in each class of `AGES`, and above the last.
    """

    sizes: Sizes = Sizes()  # noqa: RUF009  # it is frozen
    ages: tuple[int, ...] = _NONE

    @property
    def blocks(self) -> int:
        """Whole ones."""
        return self.sizes.blocks

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return self.sizes.nbytes

    @classmethod
    def of(cls, blocks: Iterable[StoredBlock], now: float) -> Census:
        """Count blocks as they go by; `now` is in seconds since the epoch."""
        ages = list(_NONE)

        def noted() -> Iterator[StoredBlock]:
            for block in blocks:
                if not block.orphan:
                    ages[bisect.bisect_right(_ENDS, now - block.used)] += 1
                yield block

        return cls(sizes=Sizes.of(noted()), ages=tuple(ages))

    def __add__(self, other: Census) -> Census:
        """Of both."""
        ages = tuple(a + b for a, b in zip(self.ages, other.ages, strict=True))
        return Census(sizes=self.sizes + other.sizes, ages=ages)


@dataclass(frozen=True, slots=True)
class Count:
    """The census of a share. A task for `run`.

    Attributes:
        filesystem: the root's.
        now: seconds since the epoch from which ages are counted.
    """

    filesystem: Upkeep
    now: float

    def __call__(self, share: Share) -> Census:
        """List the share's blocks. Raises `StorageError`."""
        blocks = stored_blocks(self.filesystem, share.group, share.first, share.stop)
        return Census.of(blocks, self.now)
