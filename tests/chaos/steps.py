"""Kill a writer before and after each system call that it makes, and amid each write.

The writer is a child of this process, by fork, which counts its own calls by wrapping the
functions of `os` that kvstore calls, and kills itself at the one it is told.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from processes import in_child

from chaos.blocks import LAYOUT, NBYTES, damage, key, payload
from kvstore import BlockStore, DamagedBlockError
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root
from kvstore.upkeep import Upkeep

CALLS = (
    "open",
    "close",
    "write",
    "fsync",
    "mkdir",
    "rmdir",
    "rename",
    "replace",
    "link",
    "unlink",
)
When = Literal["before", "amid", "after"]
Scenario = Literal["open", "store", "first in its fan-out", "repair", "delete"]
SCENARIOS: tuple[Scenario, ...] = (
    "open",
    "store",
    "first in its fan-out",
    "repair",
    "delete",
)
BYSTANDER = 0
"""A block that is there before, and must be there after."""


@dataclass
class Steps:
    """What came of it.

    Attributes:
        kills: by scenario and moment.
        calls: by name, how many were killed at.
        outcomes: what was found of the blocks that were worked on.
        left: kills that left temporaries.
        problems: what must never be, in words.
    """

    kills: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    left: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """How many problems there were."""
        return len(self.problems)

    def __str__(self) -> str:
        """A few lines."""
        return "\n".join(
            (
                f"{self.kills.total()} kills step by step: {_listed(self.kills)}",
                f"at calls: {_listed(self.calls)}",
                f"blocks: {_listed(self.outcomes)}",
                f"temporaries: left by {self.left} kills; faults: {self.faults}",
                *self.problems,
            )
        )


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.items())


def kill_at_every_step(
    folder: Path, scenario: Scenario, steps: Steps, *, fsync: bool
) -> Steps:
    """Kill a scenario's writer at each of its calls, in a fresh `folder`.

    Returns `steps`, in which it counts.
    """
    root = Root(str(folder / "root"))
    root.open(LAYOUT).store(key(BYSTANDER), payload(BYSTANDER))
    number = BYSTANDER
    for when in ("before", "amid", "after"):
        for call in count():
            number += 1
            there = Root(str(folder / str(number))) if scenario == "open" else root
            name = _killed(there, scenario, number, when, call, fsync=fsync)
            if name is None:
                break  # it makes no more calls than that
            steps.kills[f"{scenario} {when}"] += 1
            steps.calls[name] += 1
            problems = _problems(there, scenario, number, steps)
            steps.problems += [f"{scenario}, {when} {name}: {p}" for p in problems]
    return steps


def _killed(
    root: Root, scenario: Scenario, number: int, when: When, call: int, *, fsync: bool
) -> str | None:
    """Returns the name of the call at which the writer was killed; None if it ended."""
    reading, writing = os.pipe()

    def writer() -> None:
        work = _prepared(root, scenario, number, fsync=fsync)
        _wrap(writing, when, call)
        work()

    status = in_child(writer)
    os.close(writing)
    name = os.read(reading, 100).decode()
    os.close(reading)
    if status not in (0, -signal.SIGKILL) or (status == 0) == bool(name):
        raise RuntimeError(f"{scenario}: the writer ended with {status} at {name!r}")
    return name or None


def _prepared(
    root: Root, scenario: Scenario, number: int, *, fsync: bool
) -> Callable[[], object]:
    """The call that is to be killed; all that comes before it is done."""
    if scenario == "open":
        return lambda: root.open(LAYOUT, fsync=fsync)
    store = root.open(LAYOUT, fsync=fsync)
    name, block = _key(scenario, number), payload(number)
    if scenario in ("repair", "delete"):
        store.store(name, block)
    if scenario == "repair":
        damage(root, store, number)
        _load(store, name)
    return lambda: store.delete(name) if scenario == "delete" else store.store(name, block)


def _key(scenario: Scenario, number: int) -> bytes:
    return key(number, number) if scenario == "first in its fan-out" else key(number)


def _load(store: BlockStore, name: bytes) -> bytes | None:
    """A block's bytes; `b""` if it is damaged."""
    buffer = bytearray(NBYTES)
    try:
        return bytes(buffer) if store.load(name, buffer) else None
    except DamagedBlockError:
        return b""


def _wrap(telling: int, when: When, call: int) -> None:
    """Make this process kill itself at its `call`th call from now on."""
    calls, write = count(), os.write

    def wrapped(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def die() -> None:
            write(telling, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

        def function(*arguments: Any, **options: Any) -> Any:
            now = next(calls) == call
            if now and when == "before":
                die()
            if now and when == "amid":
                descriptor, data = arguments
                usual(descriptor, memoryview(data)[: len(data) // 2])
                die()
            try:
                return usual(*arguments, **options)
            finally:
                if now:
                    die()

        return function

    for name in CALLS if when != "amid" else ("write",):
        setattr(os, name, wrapped(name, getattr(os, name)))


def _problems(root: Root, scenario: Scenario, number: int, steps: Steps) -> list[str]:
    """Look at what a killed writer left, sweep, and go on where it ended."""
    problems = []
    name, block = _key(scenario, number), payload(number)
    reader = root.open(LAYOUT, read_only=True)
    found = _load(reader, name)
    steps.outcomes[{None: "absent", b"": "damaged"}.get(found, "served")] += 1
    if found and found != block:
        problems.append("served wrong")
    if found == b"" and scenario != "repair":
        problems.append("torn")
    if scenario != "open" and _load(reader, key(BYSTANDER)) != payload(BYSTANDER):
        problems.append("another block is not as it was")

    names = Path(root.url, TEMPORARY)
    steps.left += bool(list(names.glob("*/*")))
    Upkeep(root.url).sweep()
    if remained := [str(path) for path in names.glob("*/*")]:
        problems.append(f"remained after the sweep: {remained}")

    store = root.open(LAYOUT)
    _load(store, name)  # damage is repaired once it is known
    store.store(name, block)
    if _load(store, name) != block:
        problems.append("could not be stored again")
    return problems
