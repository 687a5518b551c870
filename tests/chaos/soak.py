"""The command: `python tests/chaos/soak.py`, on a folder; with `--s3` on a real server.

An engine's tier stores and loads without pause below a root that is full, while its storage
fails and lies to it and its movers are killed one after the other. It prints what engine
and movers take and what is left of blocks that were not finished, each as the median of a
while near the start, in the middle and at the end.

Ends with 1 if any of it has grown, if a load told other bytes, or if the next start would
leave anything.
"""

import argparse
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # not this folder: the package is `chaos`

from work import movers_of  # noqa: E402  # path first

from chaos.moments import halves, leftovers, tidy  # noqa: E402  # likewise
from kvstore.store import BlockStore  # noqa: E402  # likewise
from kvstore.testing import Root, open_on  # noqa: E402  # likewise
from kvstore.testing.faults import FaultyFilesystem  # noqa: E402  # likewise
from kvstore.testing.plans import FAILURES, LIES, RandomFaults  # noqa: E402  # likewise

MIB = 1 << 20
SLOTS = 32
STEP_SECONDS = 0.002

SLACK = {"MiB": 16.0, "files": 4.0, "threads": 1.0, "left": 16.0}
"""By how much a figure may differ between start and end. What is left includes the blocks
that are being written."""


@dataclass(slots=True, kw_only=True)
class Soak:
    """What is to happen.

    Attributes:
        root: an empty one.
        seconds: how long.
        limit: `max_bytes`.
        kill_seconds: between two kills of a mover, on average.
        rate: the share of the operations on storage that have a fault.
        samples: what was there, once a second.
    """

    root: Root
    seconds: float
    limit: int = 64 * MIB
    nbytes: int = MIB // 4
    processes: int = 2
    kill_seconds: float = 8.0
    rate: float = 0.02
    seed: int = 1
    samples: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """All of it. Returns what was counted."""
        from chaos.driver import Driver

        options = {
            "url": self.root.url,
            "storage_options": dict(self.root.storage_options),
            "max_bytes": self.limit,
            "processes": self.processes,
            "io_timeout": 15.0,
        }
        left = self._left()  # once before, so that what it needs is there from the start
        with self._faulty():
            driver = Driver(
                options,
                nbytes=self.nbytes,
                slots=SLOTS,
                first=1 << 40,
                hot=range(8),
                seed=self.seed,
            )
        chance = random.Random(self.seed)
        start = sampled = time.monotonic()
        due = start + self.kill_seconds
        while (now := time.monotonic()) < start + self.seconds or driver.busy:
            driver.step(store=now < start + self.seconds)
            if now > due and (running := movers_of(os.getpid())):
                os.kill(chance.choice(running), signal.SIGKILL)
                driver.counts["killed"] += 1
                due = now + self.kill_seconds * chance.uniform(0.5, 1.5)
            if now > sampled + 1:
                sampled = now
                left = self._left() if "://" not in self.root.url else left
                self.samples.append({**taken(), "left": left})
            time.sleep(STEP_SECONDS)
        driver.close()
        driver.counts["left by kills and faults"] = self._left()
        driver.counts["left by the next start"] = self._left_at_last()
        return dict(driver.counts)

    @contextmanager
    def _faulty(self) -> Iterator[None]:
        """The tier's storage fails and lies once it is open, to each mover by one plan."""

        def stores(options: Any, config: Any, layout: Any, groups: Any) -> Any:
            faulty = FaultyFilesystem(self.root.filesystem())
            opened: Mapping[int, BlockStore] = {0: open_on(faulty, layout)}
            faulty.plan = RandomFaults(self.seed, self.rate, kinds=(*FAILURES, *LIES))
            return opened

        with mock.patch("kvstore.vllm.opened._open_stores", stores):
            yield

    def _left(self) -> int:
        return len(leftovers(self.root)) + halves(self.root)

    def _left_at_last(self) -> int:
        tidy(self.root)
        return self._left()

    def figures(self) -> dict[str, list[float]]:
        """Each near the start, in the middle and at the end."""
        count = len(self.samples)
        width = max(1, count // 6)
        begins = (min(width // 2, count - 1), count // 2, count - width)
        windows = [self.samples[begin : begin + width] for begin in begins]
        told: dict[str, list[float]] = {}
        for name in self.samples[0]:
            typical = max if name.startswith("mover") else statistics.median
            told[name] = [typical([there[name] for there in window]) for window in windows]
        return told

    def problems(self, counts: Mapping[str, float]) -> list[str]:
        """What must not be."""
        found = [
            f"{name}: {counts[name]:.0f}"
            for name in ("wrong", "false events", "left by the next start")
            if counts.get(name)
        ]
        for name, (start, _, end) in self.figures().items():
            if end > start + SLACK[name.rpartition(" ")[2]]:
                found.append(f"{name} has grown from {start:.1f} to {end:.1f}")
        return found


def taken() -> dict[str, float]:
    """What this process takes, and the largest of its movers."""
    me = os.getpid()
    running = movers_of(me)

    def largest(figure: Callable[[int], float]) -> float:
        return max(map(figure, running), default=0.0)

    return {
        "engine MiB": _mib(me),
        "engine files": _files(me),
        "engine threads": _threads(me),
        "mover MiB": largest(_mib),
        "mover files": largest(_files),
        "mover threads": largest(_threads),
    }


def _mib(pid: int) -> float:
    return float(_told(pid, "VmRSS") or 0) / 1024


def _threads(pid: int) -> float:
    return float(_told(pid, "Threads") or 0)


def _files(pid: int) -> float:
    try:
        return float(len(os.listdir(f"/proc/{pid}/fd")))
    except OSError:
        return 0.0  # it has ended


def _told(pid: int, name: str) -> str | None:
    """The first word of a line of a process's status; None once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    told = dict(line.partition(":")[::2] for line in lines)
    return told[name].split()[0] if name in told else None


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the root is made; a temporary one else")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kill-seconds", type=float, default=8, help="between two kills")
    parser.add_argument("--rate", type=float, default=0.02, help="of faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="on SeaweedFS, not on a folder")
    told = parser.parse_args()
    logging.disable(logging.WARNING)  # of damage and failures, which are meant
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(dir=told.folder, prefix="kvstore-soak-")
        folder = Path(stack.enter_context(place))
        root = Root(str(folder / "kv"))
        if told.s3:
            from servers import seaweedfs

            (folder / "server").mkdir()
            server = stack.enter_context(seaweedfs(folder / "server"))
            root = Root(f"{server.url}/soak", server.storage_options)
        soak = Soak(
            root=root,
            seconds=60 * told.minutes,
            kill_seconds=told.kill_seconds,
            rate=told.rate,
            seed=told.seed,
        )
        counts = soak.run()
        for name, count in sorted(counts.items()):
            print(f"{name:28}{count:12,.0f}")
        print(f"{'':28}{'start':>12}{'middle':>12}{'end':>12}")
        for name, figures in soak.figures().items():
            print(f"{name:28}" + "".join(f"{figure:12.1f}" for figure in figures))
        found = soak.problems(counts)
        print("\n".join(found) or "as it should be")
        return bool(found)


if __name__ == "__main__":
    sys.exit(main())
