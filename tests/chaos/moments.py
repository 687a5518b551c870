"""Kill a writer at random moments, start it again, and look at every block."""

import argparse
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from servers import seaweedfs

from chaos.blocks import LAYOUT, Findings, Ledger, damage, key, payload
from chaos.steps import SCENARIOS, Steps, kill_at_every_step
from kvstore import DamagedBlockError
from kvstore.collector import Collector, Limits
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root
from kvstore.upkeep import Upkeep

KILLS = Path(__file__).with_name("kills.py")
"""The command, as which a writer runs too."""

FIRST, LAST = 0.0005, 0.030
"""Seconds after the beginning of a store in which its writer is killed."""

ORPHAN_SECONDS = 10.0
"""Age at which half a block is nobody's: that of an engine with an `io_timeout` of 1."""

DAY = 86_400.0

BLOCK = re.compile(r"/[0-9a-f]{3}/[0-9a-f]{72}$")
"""The end of a block's folder."""

STORES = 6
"""Up to so many stores are done before the one that may be killed."""


def write(root: Root, first: int) -> None:
    """Store, damage, repair and delete blocks from number `first` on, until killed."""
    store = root.open(LAYOUT)
    buffer = bytearray(store.layout.nbytes)

    def say(word: str, number: int) -> None:
        os.write(sys.stdout.fileno(), f"{word} {number}\n".encode())  # whole or not at all

    for number in range(first, first + 10_000):
        say("store", number)
        store.store(key(number), payload(number))
        say("stored", number)
        if number % 3 == 2:
            say("damage", number)
            damage(root, store, number)
            try:
                store.load(key(number), buffer)
            except DamagedBlockError:
                store.store(key(number), payload(number))
                say("stored", number)
        if number % 5 == 4:
            say("delete", number)
            store.delete(key(number))
            say("deleted", number)


def run_killed(root: Root, first: int, moment: random.Random, ledger: Ledger) -> set[int]:
    """Run a writer and kill it. Returns the numbers of the blocks that it spoke of."""
    command = [sys.executable, str(KILLS), root.url, "--write-from", str(first)]
    command += ["--storage-options", json.dumps(dict(root.storage_options))]
    spoken = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        stores = moment.randrange(STORES)
        for line in writer.stdout:
            word, number = line.split()
            ledger.note(word, int(number))
            spoken.add(int(number))
            if word == "store" and stores >= 0:
                stores -= 1
                if stores < 0:
                    time.sleep(moment.uniform(FIRST, LAST))
                    writer.kill()
    if writer.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended by itself, with {writer.returncode}")
    return spoken


def leftovers(root: Root) -> list[str]:
    """What lies among the temporary names: files, and folders that writers have begun."""
    folder = Path(root.url, TEMPORARY)
    if "://" not in root.url:
        return [str(path.relative_to(folder)) for path in folder.glob("*/*")]
    return [name for name in root.files() if f"/{TEMPORARY}/" in name]


def halves(root: Root) -> int:
    """Blocks of which half is there: a chunk without a document, or the other way round."""
    blocks: dict[str, set[str]] = {}
    for name in root.files():
        folder, _, file = name.rpartition("/")
        blocks.setdefault(folder, set()).add(file)
    chunks = sum("c.0" in files and "zarr.json" not in files for files in blocks.values())
    return chunks + sum(
        files == {"zarr.json"} and BLOCK.search(folder) is not None
        for folder, files in blocks.items()
    )


def tidy(root: Root) -> int:
    """What the upkeep of an engine that starts anew removes, where there are limits.

    Returns:
        The halves that went. They go by age: it waits until all are old enough.
    """
    if halves(root):
        time.sleep(ORPHAN_SECONDS + 2)  # the storage tells whole seconds
    collector = Collector(
        Upkeep(root.url, root.storage_options), Limits(None, DAY, ORPHAN_SECONDS)
    )
    collector.sweep()
    gone = 0
    while True:
        told = collector.collect()
        assert told.problem is None, told.problem
        gone += told.orphans
        if not told.more:
            return gone


def kill_at_random(root: Root, kills: int, seed: int) -> tuple[Findings, int]:
    """Returns what was found of the blocks, and how much is left that is no block, once
    what sweeps and collects has done so.
    """
    moment, ledger, last = random.Random(seed), Ledger(), Findings()
    first, left, swept, remained = 0, 0, 0, 0
    for kill in range(kills):
        spoken = run_killed(root, first, moment, ledger)
        found = Findings()
        found.look(root.open(LAYOUT, read_only=True), ledger, spoken)
        if found.faults:
            print(f"kill {kill}, blocks {min(spoken)} to {max(spoken)}: {found}")
        left += len(leftovers(root))
        swept += Upkeep(root.url, root.storage_options).sweep()
        remained += len(leftovers(root))
        first = max(spoken) + 1
    reader = root.open(LAYOUT, read_only=True)
    last.look(reader, ledger, sorted(ledger.numbers()))
    print(
        f"{kills} kills; blocks: {len(ledger.numbers())} begun, {len(ledger.there)} "
        f"reported as stored, {last.healthy} served, {last.absent} absent, "
        f"{last.repairable} damaged on purpose and not repaired yet"
    )
    print(
        f"faults: {len(last.wrong)} served wrong, {len(last.lost)} lost, "
        f"{len(last.returned)} returned, {len(last.torn)} torn"
    )
    print(f"temporaries: {left} left by kills, {swept} writers swept, {remained} remained")
    half = halves(root)
    gone, rest = tidy(root), halves(root)
    print(f"halves of blocks: {half} left by kills, {gone} collected, {rest} remained")
    after = Findings()
    after.look(reader, ledger, sorted(ledger.numbers()))
    if after != last:
        raise RuntimeError(f"the collection has changed blocks: {last}, then {after}")
    return last, remained + rest


@contextmanager
def place(where: str, storage_options: str) -> Iterator[Root]:
    """A fresh root at `where`."""
    if where != "seaweedfs":
        yield Root(f"{where.rstrip('/')}/{uuid.uuid4().hex}", json.loads(storage_options))
        return
    with tempfile.TemporaryDirectory() as folder, seaweedfs(Path(folder)) as server:
        yield Root(f"{server.url}/kills", server.storage_options)


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("where", help="a folder, a URL, or seaweedfs")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage-options", default="{}", help="JSON")
    parser.add_argument("--write-from", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Each block that is damaged on purpose would be a line.
    logging.getLogger("kvstore").setLevel(logging.ERROR)
    if options.write_from is not None:
        write(Root(options.where, json.loads(options.storage_options)), options.write_from)
        return 0
    with place(options.where, options.storage_options) as root:
        steps = Steps()
        if "://" not in root.url:
            for number, (scenario, fsync) in enumerate(product(SCENARIOS, (False, True))):
                folder = Path(root.url, f"steps-{number}")
                kill_at_every_step(folder, scenario, steps, fsync=fsync)
            print(steps)
        found, remained = kill_at_random(root, options.kills, options.seed)
    return 1 if found.faults or remained or steps.faults else 0
