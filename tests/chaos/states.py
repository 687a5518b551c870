"""What `outages.py` does to a bucket behind a wire and to a folder, an engine on each."""

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import fsspec
from engine import connector
from servers import BUCKET, seaweedfs
from smollm2 import smollm2
from work import movers_of, until

from chaos import folders
from chaos.asked import (
    BLOCKS,
    IO_TIMEOUT,
    LOOKUP_TIMEOUT,
    MAY_WAIT,
    Asked,
    Cold,
    Row,
    State,
    prompt,
)
from chaos.dialogue import Dialogue, engine
from chaos.wire import Mode, Wire, wire

BLOCK_BYTES = 30 * 3 * 32 * 128 * 2  # layers, heads, tokens, K and V, bfloat16
ROWS = 64  # of the CPU tier
MOUNT_BYTES = 200 << 20
STATES = 7  # at most, of one storage

ASKED, MOVED = ("lookups", "stores"), ("loads", "stores")
"""What is given up where nothing answers, and where only what is small does."""


@dataclass(frozen=True)
class Seed:
    """What an engine that ended has computed.

    Attributes:
        known: prompts whose blocks are in storage.
        folder: a root with their blocks.
        cold: the answers to these and to the new ones.
    """

    known: range
    folder: Path
    cold: Cold


def seed(folder: Path, *, states: int) -> Seed:
    """Have an engine compute every answer that so many states ask for, and store what is
    to be known.
    """
    known, new = range(2 + 3 * states), range(50, 51 + 2 * states)
    root, copy = folder / "all", folder / "known"
    answers: dict[int, list[int]] = {}
    seconds: list[float] = []

    def compute(number: int) -> None:
        said = asked.ask([prompt(number)])
        assert said.cached == [0]
        answers[number] = said.tokens[0]
        seconds.append(said.seconds)

    with engine(smollm2(), connector(str(root)), folder / "seed.log") as asked:
        asked.poke()
        for number in known:
            compute(number)
        until(lambda: len(list(root.glob("*/r0/g0/*/*/zarr.json"))) == len(known) * BLOCKS)
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".kvstore-tmp"))
        for number in new:
            compute(number)
    assert len(set(map(tuple, answers.values()))) == len(answers)
    return Seed(known, copy, Cold(answers, median(seconds)))


def transfer_config(url: str, **options: Any) -> dict[str, Any]:
    return connector(
        url,
        cpu_bytes_to_use=ROWS * BLOCK_BYTES,
        io_timeout=IO_TIMEOUT,
        lookup_timeout=LOOKUP_TIMEOUT,
        processes=2,
        **options,
    )


# ---- a bucket


@contextmanager
def being(line: Wire, mode: Mode) -> Iterator[None]:
    line.be(mode)
    try:
        yield
    finally:
        line.be("whole")


@contextmanager
def bucket(place: Path, seeded: Seed) -> Iterator[tuple[Asked, list[State]]]:
    """An engine on SeaweedFS, and the states that its wire and its server can be in."""
    (place / "server").mkdir()
    with ExitStack() as running, ExitStack() as life:
        server = running.enter_context(seaweedfs(place / "server"))
        filesystem = fsspec.filesystem("s3", **server.storage_options)
        filesystem.put(f"{seeded.folder}/", f"{BUCKET}/outage/", recursive=True)
        line = life.enter_context(wire(server.endpoint))
        options = {**server.storage_options, "endpoint_url": line.endpoint}
        config = transfer_config(f"{server.url}/outage", storage_options=options)
        dialogue = life.enter_context(engine(smollm2(), config, place / "engine.log"))

        @contextmanager
        def stopped() -> Iterator[None]:
            running.close()
            yield
            again = running.enter_context(seaweedfs(place / "server"))
            line.lead_to(again.endpoint)

        broken = ("lookup/other",), ("store/other",)
        silent = ("lookup/timeout", "lookup/late"), ("store/timeout",)
        slow = ("load/timeout",), ("store/timeout",)
        yield (
            Asked(dialogue, seeded.cold, seeded.known),
            [
                State("long", partial(being, line, "long"), serves=True),
                State("cut", partial(being, line, "cut"), fails=broken, gives_up=ASKED),
                State("stopped", stopped, fails=broken, gives_up=ASKED),
                State("held", partial(being, line, "held"), fails=silent, gives_up=ASKED),
                State("dead", partial(being, line, "dead"), fails=silent, gives_up=ASKED),
                State(
                    "slow",
                    partial(being, line, "slow"),
                    fails=slow,
                    gives_up=MOVED,
                    rounds=3,
                ),
            ],
        )


# ---- a folder


@contextmanager
def folder(place: Path, seeded: Seed) -> Iterator[tuple[Asked, list[State]]]:
    """An engine on a small file system, if one can be mounted, and its states."""
    with ExitStack() as life:
        try:
            mount = life.enter_context(folders.mounted(place / "mount", MOUNT_BYTES))
        except folders.CannotMount:
            mount = None
        root = (mount or place) / "kv"
        shutil.copytree(seeded.folder, root)
        config = transfer_config(str(root))
        dialogue = life.enter_context(engine(smollm2(), config, place / "engine.log"))
        states = list(_of_folder(root, dialogue))
        if mount is not None:
            states += _of_mount(mount)
        yield Asked(dialogue, seeded.cold, seeded.known), states


_NO_STORES = (("store/other",),)


def _of_mount(mount: Path) -> Iterator[State]:
    for name, begin in (("full", folders.full), ("read-only", folders.read_only)):
        yield State(
            name, partial(begin, mount), serves=True, fails=_NO_STORES, gives_up=("stores",)
        )


def _of_folder(root: Path, dialogue: Dialogue) -> Iterator[State]:
    def movers() -> list[int]:
        return movers_of(dialogue.pid)

    @contextmanager
    def limited(kind: int, value: int) -> Iterator[None]:
        with folders.limited(kind, value, [dialogue.pid, *movers()]):
            yield

    yield State(
        "quota",
        partial(limited, resource.RLIMIT_FSIZE, BLOCK_BYTES // 2),
        serves=True,
        fails=_NO_STORES,
        gives_up=("stores",),
    )
    yield State(
        "no more files",
        partial(limited, resource.RLIMIT_NOFILE, 3),
        fails=(("load/other",), ("store/other",)),
        gives_up=MOVED,
    )
    yield State(
        "moved away", partial(folders.moved, root), fails=_NO_STORES, gives_up=("stores",)
    )
    yield State(
        "movers hang",
        partial(folders.frozen, movers),
        fails=(("lookup/late", "lookup/other"),),
        gives_up=("lookups",),
    )
    yield State("movers killed", partial(folders.killed, movers))


# ---- for people

HEAD = (
    "State",
    "Requests",
    "Answers",
    "Median wait, s",
    "Longest wait, s",
    "Hits again after, s",
    "Stores again after, s",
    "Failed blocks",
    "Blocks not tried",
)


def line_of(row: Row) -> str:
    def told(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in counts.items())

    cells = (
        row.state,
        len(row.waits),
        row.answers,
        f"{median(row.waits):.1f}",
        f"{max(row.waits):.1f}",
        f"{row.hits_after:.1f}",
        f"{row.stores_after:.1f}",
        told(row.failed),
        told(row.not_tried),
    )
    return table_row(*cells)


def table_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


OUTAGES = {"s3": bucket, "folder": folder}


def show(where: str, scratch: Path, seeded: Seed, names: Collection[str]) -> list[str]:
    """Print what comes of the states of one storage. Returns the problems."""
    place = scratch / where
    place.mkdir()
    begun = time.monotonic()
    with OUTAGES[where](place, seeded) as (asked, states):
        print(
            f"\n{where}: cold, a request takes {seeded.cold.seconds:.1f} s; it may wait "
            f"{MAY_WAIT:.1f} s more\n\n{table_row(*HEAD)}"
        )
        print(table_row(*["---"] * len(HEAD)))
        print(line_of(asked.rows[0]), flush=True)
        for state in states:
            if not names or state.name in names:
                print(line_of(asked.during(state)), flush=True)
    print(f"\n{time.monotonic() - begun:.0f} s. The log of kvstore:\n")
    modules = ("circuit", "health", "jobs", "links", "caretaker")
    for line in asked.engine.lines(*(f"[{name}.py:" for name in modules)):
        print(line.partition(" WARNING ")[2])
    return [problem for row in asked.rows for problem in row.problems]


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("where", nargs="?", choices=OUTAGES, help="both if left out")
    parser.add_argument("--states", default="", help="their names, with commas; else all")
    options = parser.parse_args()
    names = [name for name in options.states.split(",") if name]
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        print("An engine computes the answers ...", flush=True)
        seeded = seed(Path(scratch), states=STATES)
        for where in [options.where] if options.where else OUTAGES:
            problems += show(where, Path(scratch), seeded, names)
    print(*problems, sep="\n")
    return int(bool(problems))
