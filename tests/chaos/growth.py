"""The command: `python tests/chaos/growth.py`, on a folder; with `--s3` on a real server.

Engines store without end below one root with `max_bytes`, and load what they have stored
before, while another process measures what lies there, many times a second. It prints the
highest measures of the first minute and of all others, the rate of the stores, and what
became of the keys that are asked for all the time. Engines can be killed and started anew.

Ends with 1 if a load told other bytes, if events told what was not so, if a store failed,
if more than the allowed share of the limit was there at any time, or if too few of the keys
that are asked for all the time were hits.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # not this folder: the package is `chaos`

from kvstore.testing import Root  # noqa: E402  # path first

MIB = 1 << 20
DEADLINE = 1800.0
MEASURE_SECONDS = 0.05
STEP_SECONDS = 0.002
"""Between two steps of an engine: those of a real one take longer."""

SLOTS = 32
"""Rows of an engine's memory, and so the most blocks that it stores at once."""

KILL_SECONDS = 15.0
"""So long an engine lives at least before it is killed, and twice as long at most."""

FIRST = 60.0
"""Seconds: what was there before is told apart from what was there after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one engine does.

    Attributes:
        url, options: of its tier.
        nbytes: of a block.
        blocks: how many it stores.
        first: the number of its first key.
        hot: the number of the first key that it asks for all the time, and how many
            there are.
        restarted: whether the one before it was killed.
        diary: the file that says what it has done, again and again.
    """

    url: str
    options: dict[str, Any]
    nbytes: int
    blocks: int
    first: int
    hot: tuple[int, int]
    restarted: bool
    seed: int
    diary: str


def work(task: Work) -> None:
    """Store all blocks."""
    from chaos.driver import Driver

    options = {"url": task.url, **task.options}
    driver = Driver(
        options,
        nbytes=task.nbytes,
        slots=SLOTS,
        first=task.first,
        hot=range(task.hot[0], sum(task.hot)),
        seed=task.seed,
        restarted=task.restarted,
    )
    diary = Path(task.diary)
    start, written, done = time.monotonic(), 0.0, False
    while not done or driver.busy:
        driver.step(store=not done)
        now = time.monotonic()
        done = driver.counts["store done"] + driver.counts["store failed"] >= task.blocks
        if now - written > 0.2:
            _write(diary, driver.counts, now - start)
            written = now
        time.sleep(STEP_SECONDS)
    seconds = time.monotonic() - start
    driver.close()
    _write(diary, driver.counts, seconds)


def _write(diary: Path, counts: Counter[str], seconds: float) -> None:
    new = diary.with_suffix(".new")
    new.write_text(json.dumps({**counts, "seconds": seconds}))
    new.replace(diary)


def measure(root: str) -> int:
    """Bytes below a folder, each file counted once however often it is renamed.

    What goes while it looks is counted beside what comes: more than there ever was.
    """
    files: dict[int, int] = {}
    waiting = [root]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    told = entry.stat(follow_symlinks=False)
                    files[told.st_ino] = told.st_size
        except FileNotFoundError:
            continue
    return sum(files.values())


def measure_bucket(root: Root) -> int:
    """Bytes below a root in a bucket, by the listing of a client that is not kvstore's."""
    filesystem, path = root._fs(root.url)
    filesystem.invalidate_cache()
    return sum(told["size"] for told in filesystem.find(path, detail=True).values())


def watch(url: str, storage_options: str, told: str) -> None:
    """Measure until the file `told` is gone, and write the measures there."""
    path = Path(told)
    root = Root(url, json.loads(storage_options))
    start = time.monotonic()
    while True:
        begun = time.monotonic() - start
        nbytes = measure_bucket(root) if "://" in url else measure(url)
        try:
            with path.open("r+") as file:
                file.seek(0, os.SEEK_END)
                file.write(f"{begun:.3f} {nbytes}\n")
        except FileNotFoundError:
            return
        time.sleep(MEASURE_SECONDS)


@dataclass(slots=True, kw_only=True)
class Growth:
    """What is to happen.

    Attributes:
        url: of a root, which may be filled.
        folder: for diaries, outside of it.
        limit: `max_bytes`, or None for stores without one.
        total: bytes that all engines store together.
        kills: of engines, at random times.
    """

    url: str
    folder: Path
    limit: int | None
    total: int
    storage_options: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 2 * MIB
    engines: int = 2
    processes: int = 1
    hot: int = 8
    kills: int = 0
    seed: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, float]:
        """All of it. Returns what was counted and measured."""
        measures = self.folder / "measures"
        measures.write_text("")
        watcher = self._start(
            "watch", self.url, json.dumps(self.storage_options), str(measures)
        )
        begun = time.monotonic()
        try:
            counts = self._engines()
        finally:
            lines = measures.read_text().split("\n")[:-1]
            measures.unlink()
            watcher.wait()
        counts["seconds in all"] = time.monotonic() - begun
        told = [(float(at), int(nbytes)) for at, nbytes in map(str.split, lines)]
        counts["highest before"] = max((n for at, n in told if at <= FIRST), default=0)
        counts["highest after"] = max((n for at, n in told if at > FIRST), default=0)
        counts["at the end"] = told[-1][1]
        counts["measures"] = len(told)
        return counts

    def _task(self, engine: int, start: int, blocks: int, *, restarted: bool) -> Work:
        """What an engine does from its start on: its hot keys are those of before."""
        options = {
            "processes": self.processes,
            "storage_options": self.storage_options,
            "max_bytes": self.limit,
            **self.options,
        }
        number = self.seed * 1000 + self.engines + start
        return Work(
            url=self.url,
            options=options,
            nbytes=self.nbytes,
            blocks=blocks,
            first=number << 20,
            hot=((self.seed * 1000 + engine) << 20, self.hot),
            restarted=restarted,
            seed=number,
            diary=str(self.folder / f"{start}.diary"),
        )

    def _engines(self) -> dict[str, float]:
        chance = random.Random(self.seed)
        counts: Counter[str] = Counter()
        rate, killed, starts = 0.0, 0, 0
        running: dict[subprocess.Popen[bytes], tuple[int, Work, float]] = {}
        left = dict.fromkeys(range(self.engines), self.total // self.nbytes // self.engines)
        begun: set[int] = set()
        end = time.monotonic() + DEADLINE
        try:
            while running or left:
                assert time.monotonic() < end, "it takes too long"
                for i, blocks in left.items():
                    starts += 1
                    task = self._task(i, starts, blocks, restarted=i in begun)
                    begun.add(i)
                    due = float("inf")
                    if killed < self.kills:
                        killed += 1
                        due = time.monotonic() + KILL_SECONDS * chance.uniform(1, 2)
                    running[self._start("work", json.dumps(asdict(task)))] = i, task, due
                left.clear()
                for process, (i, task, due) in list(running.items()):
                    if time.monotonic() > due:
                        process.kill()
                        process.wait()
                    if process.poll() is None:
                        continue
                    del running[process]
                    was_killed = process.returncode == -signal.SIGKILL
                    assert was_killed or not process.returncode, "an engine failed"
                    diary = Path(task.diary)
                    told = json.loads(diary.read_text()) if diary.exists() else {}
                    seconds = told.pop("seconds", 0.0)
                    counts.update(told)
                    if was_killed:
                        counts["killed"] += 1
                        left[i] = max(1, task.blocks - told.get("store done", 0))
                    else:
                        rate += told["store done"] * self.nbytes / seconds
                time.sleep(0.02)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return {**counts, "MiB/s": rate / MIB}

    def _start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        code = "import sys; sys.path[:0] = {!r}; from chaos import growth; growth.role()"
        command = [sys.executable, "-c", code.format([str(TESTS)]), role, *arguments]
        return subprocess.Popen(command)


def role() -> None:
    """What another process of this command does."""
    if sys.argv[1] == "watch":
        watch(*sys.argv[2:])
    else:
        work(Work(**json.loads(sys.argv[2])))


def problems(
    told: dict[str, float], limit: int | None, *, allowed: float, hits: float
) -> list[str]:
    """What must not be."""
    found = [
        f"{name}: {told[name]:.0f}"
        for name in ("wrong", "false events", "store failed")
        if told.get(name)
    ]
    highest = max(told["highest before"], told["highest after"])
    if limit is not None and highest > allowed * limit:
        found.append(f"{highest / limit:.3f} of the limit was there")
    if (share := hot_hits(told)) < hits:
        found.append(f"of the keys that are asked for always, {share:.3f} were hits")
    return found


def hot_hits(told: dict[str, float]) -> float:
    """Which share of the lookups of hot keys, once they were stored, were hits."""
    hits, misses = told.get("hot hit", 0), told.get("hot miss", 0)
    return hits / max(1, hits + misses)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the root is made; a temporary one else")
    parser.add_argument("--limit", type=float, default=256, help="MiB; 0: without one")
    parser.add_argument("--total", type=float, default=4096, help="MiB that are stored")
    parser.add_argument("--block", type=float, default=2, help="MiB")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of each engine")
    parser.add_argument("--hot", type=int, default=8, help="keys that are asked for always")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--allowed", type=float, default=1.1, help="share of the limit")
    parser.add_argument("--hits", type=float, default=0.95, help="least share of the hot")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="on SeaweedFS, not on a folder")
    told = parser.parse_args()
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(dir=told.folder, prefix="kvstore-growth-")
        folder = Path(stack.enter_context(place))
        url, options = str(folder / "kv"), {}
        if told.s3:
            from servers import seaweedfs

            (folder / "server").mkdir()
            server = stack.enter_context(seaweedfs(folder / "server"))
            url, options = f"{server.url}/growth", server.storage_options
        limit = int(told.limit * MIB) or None
        counts = Growth(
            url=url,
            folder=folder,
            limit=limit,
            total=int(told.total * MIB),
            storage_options=options,
            nbytes=int(told.block * MIB),
            engines=told.engines,
            processes=told.processes,
            hot=told.hot,
            kills=told.kills,
            seed=told.seed,
        ).run()
        for name, count in sorted(counts.items()):
            print(f"{name:20}{count:16,.1f}")
        for when in ("before", "after"):
            share = counts[f"highest {when}"] / (limit or 1)
            print(f"{when} {FIRST:.0f} s, of the limit{share:14.3f}")
        print(f"hot hits {hot_hits(counts):27.3f}")
        found = problems(counts, limit, allowed=told.allowed, hits=told.hits)
        print("\n".join(found) or "as it should be")
        return bool(found)


if __name__ == "__main__":
    sys.exit(main())
