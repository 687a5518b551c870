"""Blocks whose bytes follow from their numbers, and what must be found of them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore import BlockStore, DamagedBlockError, Layout
from kvstore.testing import Root

NBYTES = 600 << 10
"""Three writes, and a little more than the page cache takes at once."""

LAYOUT = Layout.of_bytes(NBYTES, dtype="float16", reason="blocks to be killed over")


def key(number: int, fan_out: int = 0xABC) -> bytes:
    """A key in the given fan-out."""
    return (fan_out << 276 | number).to_bytes(36, "big")


def payload(number: int) -> bytes:
    """What a block holds: no two blocks share a part of it."""
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(NBYTES)


def damage(root: Root, store: BlockStore, number: int) -> None:
    """Change a byte of a block's chunk behind kvstore's back."""
    url = f"{store.block_url(key(number))}/c.0"
    data = bytearray(root.read(url))
    data[NBYTES // 2] ^= 1
    root.write(url, bytes(data))


@dataclass
class Ledger:
    """What is known of each block from what its writer said before it was killed.

    Attributes:
        there: blocks that were reported as stored: they must be found.
        gone: blocks that were reported as deleted: they must not be.
        hurt: blocks that were damaged on purpose, and not yet repaired.
        unsure: blocks of which something was begun.
    """

    there: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    hurt: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)

    def note(self, word: str, number: int) -> None:
        """Take down one line of a writer: what it begins, or what it has done."""
        for numbers in (self.there, self.gone, self.unsure):
            numbers.discard(number)
        if word == "stored":
            self.hurt.discard(number)
            self.there.add(number)
        elif word == "deleted":
            self.hurt.discard(number)
            self.gone.add(number)
        else:
            self.unsure.add(number)
            if word == "damage":
                self.hurt.add(number)

    def numbers(self) -> set[int]:
        """Every block that was ever spoken of."""
        return self.there | self.gone | self.unsure


@dataclass
class Findings:
    """What was found of blocks, and what must never be.

    Attributes:
        healthy, absent: blocks that were loaded, and that were not there.
        repairable: blocks that were damaged on purpose, and are.
        wrong: blocks that were served with other bytes than theirs.
        lost: blocks that were reported as stored, and are not there.
        returned: blocks that were reported as deleted, and are there.
        torn: blocks that nobody damaged on purpose, and are damaged.
    """

    healthy: int = 0
    absent: int = 0
    repairable: int = 0
    wrong: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)

    @property
    def faults(self) -> int:
        """Blocks of which something is wrong."""
        return len(self.wrong | self.lost | self.returned | self.torn)

    def look(self, store: BlockStore, ledger: Ledger, numbers: Iterable[int]) -> None:
        """Load blocks, and compare each with what must be found of it."""
        buffer = bytearray(NBYTES)
        for number in numbers:
            try:
                found = store.load(key(number), buffer)
            except DamagedBlockError:
                if number in ledger.hurt:
                    self.repairable += 1
                else:
                    self.torn.add(number)
                continue
            if not found:
                self.absent += 1
                if number in ledger.there:
                    self.lost.add(number)
                continue
            self.healthy += 1
            if buffer != payload(number):
                self.wrong.add(number)
            if number in ledger.gone:
                self.returned.add(number)
