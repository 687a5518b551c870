"""One of many processes on one root: it stores and loads its keys until each is there.

`main` does the task that a file holds, pickled. What it has done is in its diary, a line
for each key, so that one that comes in its place goes on from there.
"""

import logging
import os
import pickle
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.codecs import CODECS
from kvstore.errors import DamagedBlockError, FormatError, StorageError
from kvstore.store import BlockStore
from kvstore.testing import Root, open_on, sample_layout
from kvstore.testing.faults import FaultyFilesystem
from kvstore.testing.plans import Kind, RandomFaults

COUNTED = ("hits", "misses", "stored", "kept", "failed", "damaged", "struck")
"""What a line of a diary counts, after the key's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does.

    Attributes:
        root: where all of them work.
        process: its number, by which it has its codec.
        numbers: its keys; others may have them too.
        seed: of the order of its keys, and of its faults.
        rate: the share of its operations on storage that have a fault.
        kinds: of faults.
        diary: the file that says what is done.
    """

    root: Root
    process: int
    numbers: tuple[int, ...]
    seed: int
    rate: float
    kinds: tuple[Kind, ...]
    diary: Path


def key_of(number: int) -> bytes:
    """Spread over a few hundred fan-outs."""
    return (number * 2_654_435_761 % (1 << 32)).to_bytes(4) + number.to_bytes(4)


def payload_of(number: int) -> bytes:
    """The payload of a key, whoever stores it."""
    values = np.random.default_rng(number).integers(0, 16, sample_layout().nbytes)
    return values.astype(np.uint8).tobytes()


def done(diary: Path) -> dict[int, list[int]]:
    """Counts by key's number. A last line that its writer did not end is none."""
    if not diary.exists():
        return {}
    lines = diary.read_text().split("\n")[:-1]
    return {
        number: counts for number, *counts in (map(int, each.split()) for each in lines)
    }


def work(task: Task) -> None:
    """Until every key is there. Raises if a load tells other bytes."""
    faults = RandomFaults(task.seed, task.rate, kinds=task.kinds)
    faulty = FaultyFilesystem(task.root.filesystem(), faults)
    store = None
    while store is None:
        try:
            store = open_on(faulty, codec=CODECS[task.process % len(CODECS)])
        except (StorageError, FormatError):
            continue
    left = sorted(set(task.numbers) - done(task.diary).keys())
    random.Random(task.seed).shuffle(left)
    diary = os.open(task.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in left:
        before = faulty.struck.total()
        counts: Counter[str] = Counter()
        while not settled(store, number, counts):
            continue
        counts["struck"] = faulty.struck.total() - before
        line = (number, *(counts[name] for name in COUNTED))
        os.write(diary, f"{' '.join(map(str, line))}\n".encode())


def settled(store: BlockStore, number: int, counts: Counter[str]) -> bool:
    """Load a key; store it where it is not there. Whether a load has told it."""
    buffer = bytearray(store.layout.nbytes)
    try:
        if store.contains(key_of(number)) and store.load(key_of(number), buffer):
            assert buffer == payload_of(number), f"other bytes than those of {number}"
            counts["hits"] += 1
            return True
        counts["misses"] += 1
        stored = store.store(key_of(number), payload_of(number))
        counts["stored" if stored else "kept"] += 1
    except DamagedBlockError:
        counts["damaged"] += 1
        counts["stored"] += repaired(store, number)
    except (StorageError, FormatError):
        counts["failed"] += 1
    return False


def repaired(store: BlockStore, number: int) -> bool:
    """Whether a store has put the block right."""
    try:
        return store.store(key_of(number), payload_of(number))
    except (StorageError, FormatError):
        return False


def main() -> None:
    """Do the task that the file named on the command line holds."""
    logging.disable(logging.WARNING)  # of damage, which is meant
    work(pickle.loads(Path(sys.argv[1]).read_bytes()))
