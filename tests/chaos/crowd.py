"""The command: `python tests/chaos/crowd.py`, on a folder.

Fills a root with many small blocks, and then looks at what that costs an engine with
`max_bytes`: its start, which must list nothing; a look, in seconds and bytes; and the
pauses of the thread that calls the tier, while movers look, store, load and remove.

Ends with 1 if a start lists, if a look takes too long or too much, if it misjudges what is
there, if a load told other bytes, or if the engine's thread waits for any of it.
"""

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # not this folder: the package is `chaos`

from chaos.soak import STEP_SECONDS, taken  # noqa: E402  # path first
from kvstore import Layout  # noqa: E402  # likewise
from kvstore.collector import Collected, Collector, Limits  # noqa: E402  # likewise
from kvstore.job import Outcome  # noqa: E402  # likewise
from kvstore.jobs import JobRunner  # noqa: E402  # likewise
from kvstore.testing import Root  # noqa: E402  # likewise
from kvstore.upkeep import Upkeep  # noqa: E402  # likewise

MIB = 1 << 20
LOOKS = 5

MOST = {
    "look, seconds": 4.0,
    "look, MiB": 16.0,
    "mover grows by MiB": 32.0,
    "pause, ms, 99.9 %": 50.0,
    "listings at the start": 0.0,
    "looks at the start": 0.0,
    "misjudged by %": 8.0,
    "wrong": 0.0,
}
"""What may be at most. A look ends its call after 2 seconds, and a removal may follow."""


@dataclass(slots=True, kw_only=True)
class Crowd:
    """What is to happen.

    Attributes:
        folder: of the root, which is empty.
        blocks: how many there are.
        nbytes: of each.
        seconds: how long an engine works there.
    """

    folder: Path
    blocks: int
    nbytes: int = 4096
    seconds: float = 60.0

    def run(self) -> dict[str, float]:
        """All of it. Returns figures by name."""
        told = {"blocks": float(self.blocks), **self._fill()}
        told |= self._look(told["bytes"])
        return {**told, **self._work(int(told["bytes"]))}

    def _fill(self) -> dict[str, float]:
        begun = time.monotonic()
        layout = Layout.of_bytes(self.nbytes, dtype="float16", reason="one of very many")
        store = Root(str(self.folder)).open(layout)
        payload = bytes(self.nbytes)
        for number in range(self.blocks):
            store.store(hashlib.sha256(number.to_bytes(8)).digest() + bytes(4), payload)
        files = Path(store.block_url(bytes(36)).removeprefix("file://")).parents[1]
        last = hashlib.sha256((self.blocks - 1).to_bytes(8)).digest() + bytes(4)
        one = files / last.hex()[:3] / last.hex()
        nbytes = self.blocks * sum(file.stat().st_size for file in one.iterdir())
        return {"bytes": nbytes, "fill, seconds": time.monotonic() - begun}

    def _look(self, nbytes: float) -> dict[str, float]:
        """What looks cost that remove nothing, and how wrong they are on average."""
        collector = Collector(Upkeep(self.folder), Limits(None, None, 1e9))
        seconds, found = [], []
        for _ in range(LOOKS):
            begun = time.monotonic()
            found.append(collector.collect().used)
            seconds.append(time.monotonic() - begun)
        tracemalloc.start()
        collector.collect()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return {
            "first look, seconds": seconds[0],
            "look, seconds": statistics.median(seconds),
            "look, MiB": peak / MIB,
            "misjudged by %": 100 * abs(statistics.mean(found) / nbytes - 1),
        }

    def _work(self, limit: int) -> dict[str, float]:
        """An engine starts on the full root, and works there."""
        from chaos.driver import Driver, Timed

        listed: list[str] = []
        looks: list[tuple[float, Collected]] = []
        sys.addaudithook(lambda event, told: listed.extend(self._below(event, told)))
        finished = JobRunner.finished

        def noted(jobs: JobRunner) -> list[Outcome]:
            outcomes = finished(jobs)
            for outcome in outcomes:
                reports = [told for told in outcome.reports if isinstance(told, Collected)]
                looks.extend((outcome.seconds, told) for told in reports)
            return outcomes

        with mock.patch.object(JobRunner, "finished", noted):
            listed.clear()
            begun = time.monotonic()
            driver = Driver(
                {"url": str(self.folder), "max_bytes": limit, "processes": 1},
                nbytes=self.nbytes,
                slots=32,
                first=1 << 40,
                hot=range(8),
                seed=1,
            )
            told: dict[str, float] = {"start, seconds": time.monotonic() - begun}
            driver.tier.get_finished_jobs()
            told["listings at the start"] = len(listed)
            time.sleep(1)  # it has had time for a look
            driver.tier.get_finished_jobs()
            told["looks at the start"] = len(looks)
            before = taken()["mover MiB"]
            driver.tier = timed = Timed(driver.tier)
            self._drive(driver)
            told["mover grows by MiB"] = taken()["mover MiB"] - before
            pauses = timed.seconds[:]  # its end may wait for a look
            driver.close()
        return {**told, **_figures(looks, pauses, driver.counts)}

    def _below(self, event: str, told: tuple[Any, ...]) -> Iterator[str]:
        """The folder below the root that is listed, by its name or its descriptor."""
        if event in ("os.scandir", "os.listdir"):
            [path] = told
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            if str(path).startswith(str(self.folder)):
                yield path

    def _drive(self, driver: Any) -> None:
        end = time.monotonic() + self.seconds
        while (storing := time.monotonic() < end) or driver.busy:
            driver.step(store=storing)
            time.sleep(STEP_SECONDS)


def _figures(
    looks: list[tuple[float, Collected]], pauses: Any, counts: Mapping[str, float]
) -> dict[str, float]:
    """What an engine at work has met."""
    pauses = sorted(pauses)
    return {
        "looks": len(looks),
        "look of an engine at work, seconds": statistics.median(s for s, _ in looks),
        "worst": max(s for s, _ in looks),
        "evicted": sum(told.evicted for _, told in looks),
        "stored": counts["store done"],
        "wrong": counts["wrong"],
        "pause, ms, median": 1000 * statistics.median(pauses),
        "pause, ms, 99.9 %": 1000 * pauses[int(0.999 * len(pauses))],
        "pause, ms, worst": 1000 * pauses[-1],
    }


def problems(told: Mapping[str, float]) -> list[str]:
    """What must not be."""
    return [
        f"{name}: {told[name]:.3f}, and {most:.3f} at most was expected"
        for name, most in MOST.items()
        if told[name] > most
    ]


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the root is made; a temporary one else")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=60, help="that an engine works")
    given = parser.parse_args()
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(dir=given.folder, prefix="kvstore-crowd-")
        folder = Path(stack.enter_context(place)) / "kv"
        told = Crowd(folder=folder, blocks=given.blocks, seconds=given.seconds).run()
        for name, figure in told.items():
            print(f"{name:36}{figure:16,.3f}")
        found = problems(told)
        print("\n".join(found) or "as it should be")
        return bool(found)


if __name__ == "__main__":
    sys.exit(main())
