"""Checks that write to a root, and how fast it takes blocks and gives them.

They write below `.kvstore-tmp` only, and leave nothing: what they wrote goes also when an
exception ends them, and so do folders that were not there before. What a killed process
leaves there is swept like a writer's, in a bucket when it is a day old: see `Upkeep.sweep`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore import scratch
from kvstore.errors import DamagedBlockError, FormatError, StorageError
from kvstore.offline.checks import Check, failing, of_folder, ok, warn
from kvstore.offline.folder import acting_checks
from kvstore.offline.group import StoredGroup
from kvstore.offline.root import Root
from kvstore.offline.speed import AT_ONCE, BLOCKS, Speed, Trial, timed
from kvstore.offline.words import bytes_text
from kvstore.paths import DOCUMENT
from kvstore.scratch import TEMPORARY
from kvstore.upkeep import Upkeep

SLOW = 50e6
"""Bytes a second below which encoding pays, whatever it costs."""

SMALL = 256 << 10
"""Bytes of blocks that say nothing of it: they are slow everywhere."""

SKEW = 30.0
"""Seconds by which clocks may differ unnoticed."""


def write_checks(filesystem: Upkeep, seconds: float) -> Iterator[Check]:
    """Write, read and delete; blocks are stored for so many seconds, or 64 of them.

    Raises:
        Failed: a check on which the others build.
    """
    with _traceless(filesystem):
        with failing("write and delete"):
            filesystem.probe()
        yield ok("write and delete", "a probe was written, read and removed")
        # As a folder's name whose writer may be dead: if this is killed, it is swept.
        place = f"{TEMPORARY}/{secrets.token_hex(8)}-0"
        with _tidied(filesystem, place, ("condition", DOCUMENT)):
            yield _conditional(filesystem, place)
            yield from _clock(filesystem, place)
            if filesystem.local:
                with of_folder("folder"):
                    yield from acting_checks(f"{folder_of(filesystem)}/{place}")
            yield from _speeds(Trial(filesystem, place), seconds)


def folder_of(filesystem: Upkeep) -> str:
    """The path of a local root."""
    return filesystem.url.removeprefix("file://")


def _speeds(trial: Trial, seconds: float) -> Iterator[Check]:
    try:
        for name, measure in (
            ("store", functools.partial(trial.store, seconds)),
            ("load", trial.load),
            ("delete", trial.delete),
        ):
            with failing(name):
                speed = measure()
            yield _told(name, speed)
    finally:
        trial.tidy()


def _conditional(filesystem: Upkeep, place: str) -> Check:
    name = f"{place}/condition"
    with failing("conditional write"):
        filesystem.create(name, b"first")
        filesystem.create(name, b"second")
        found = filesystem.read(name, 16)
    if found == b"first":
        return ok("conditional write", "honoured: the first writer of a document stays")
    return warn(
        "conditional write",
        "not honoured: the last writer of a document stays",
        "Engines read a namespace's document again before they rely on it. Let one engine "
        "make a namespace before others start.",
    )


def _clock(filesystem: Upkeep, place: str) -> Iterator[Check]:
    with failing("clock"):
        before = time.time()
        filesystem.create(f"{place}/{DOCUMENT}", b"{}")
        after = time.time()
    try:
        told = [f.modified for f in filesystem.files(place) if f.path.endswith(DOCUMENT)]
    except StorageError:
        return  # who may not list is told elsewhere
    if not told:
        return
    # Many storages tell whole seconds.
    ahead = max(0.0, told[0] - after) - max(0.0, before - 1 - told[0])
    found = "the storage's is like this machine's"
    if abs(ahead) > 2:
        found = f"the storage's is {abs(ahead):,.0f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) > SKEW:
        yield warn(
            "clock", found, "Set this machine's clock: S3 refuses what is 15 minutes off."
        )
    else:
        yield ok("clock", found)


@contextlib.contextmanager
def _tidied(filesystem: Upkeep, place: str, names: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    finally:
        if filesystem.local:
            scratch.remove(f"{folder_of(filesystem)}/{place}")
        else:
            with contextlib.suppress(StorageError):
                filesystem.delete(place, names)


@contextlib.contextmanager
def _traceless(filesystem: Upkeep) -> Iterator[None]:
    """Remove folders afterwards that are not there now, but for those in use by then."""
    if not filesystem.local:
        yield
        return
    root = Path(folder_of(filesystem))
    with of_folder("folder"):
        made = [f for f in (root / TEMPORARY, root, *root.parents) if not f.exists()]
    try:
        yield
    finally:
        scratch.leave(str(root))
        for folder in made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def load_checks(root: Root) -> Iterator[Check]:
    """How fast blocks are read that are there. Raises `Failed`."""
    for place in root.places():
        try:
            group = root.read_group(place)
        except FormatError:
            continue
        with failing("load"):
            keys = [block.key.hex() for block in itertools.islice(group.blocks(), BLOCKS)]
            if keys:
                yield _loaded(group, keys)
                return
    yield ok("load", "there is no block to read")


def _loaded(group: StoredGroup, keys: list[str]) -> Check:
    damaged = []

    def load(key: str) -> None:
        try:
            group.load(bytes.fromhex(key))
        except DamagedBlockError as error:
            damaged.append(str(error))

    speed = timed(load, keys, group.layout.nbytes)
    if damaged:
        return warn("load", f"{len(damaged)} damaged: {damaged[0]}", "Run kvstore verify.")
    return _told("load", speed)


def _told(name: str, speed: Speed) -> Check:
    size = bytes_text(speed.nbytes / max(1, speed.blocks))
    slow = speed.rate < SLOW and speed.nbytes >= SMALL * speed.blocks > 0
    rate = f"{speed.rate / 1e6:,.0f} MB/s"
    if name == "delete":
        slow, rate = False, f"{speed.blocks / max(speed.seconds, 1e-9):,.0f} a second"
    found = (
        f"{speed.blocks} blocks of {size}, {AT_ONCE} at once: {rate}; "
        f"median {speed.median * 1e3:,.1f} ms, slowest {speed.slowest * 1e3:,.1f} ms"
    )
    if slow:
        return warn(
            name, found, 'Slow: "codec": "zstd" makes blocks smaller, or move it nearer.'
        )
    return ok(name, found)
