"""The command: `python tests/chaos/many.py`, on a folder; with `--s3` on a real server.

Many processes store and load keys on one root, half of which all of them have. Storage
fails and lies to each, and one after the other is killed and another comes in its place.
Every load must tell what was stored under its key, and at the end every key is there.
"""

import argparse
import logging
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # not this folder: the package is `chaos`

from chaos.workers import COUNTED, Task, done, key_of, payload_of  # noqa: E402  # path first
from kvstore.errors import DamagedBlockError  # noqa: E402  # likewise
from kvstore.testing import Root  # noqa: E402  # likewise
from kvstore.testing.plans import FAILURES, LIES  # noqa: E402  # likewise

DEADLINE = 1800.0
"""Seconds after which all is given up."""


@dataclass(slots=True, kw_only=True)
class Chaos:
    """What is to happen.

    Attributes:
        root: an empty one.
        folder: for tasks and diaries, outside of the root.
        keys: of each process; half of them are everybody's.
        kills: how many, spread evenly over what is to be done.
        lies: whether storage also tells untruths.
    """

    root: Root
    folder: Path
    processes: int = 8
    keys: int = 2000
    kills: int = 40
    rate: float = 0.02
    lies: bool = True
    seed: int = 1
    tasks: list[Task] = field(default_factory=list)

    def run(self) -> dict[str, int]:
        """All of it. Returns the counts; raises AssertionError for what must not be."""
        common = self.keys // 2
        for process in range(self.processes):
            own = range(
                common + process * common, common + process * common + self.keys - common
            )
            self.tasks.append(
                Task(
                    root=self.root,
                    process=process,
                    numbers=(*range(common), *own),
                    seed=self.seed * 1000 + process,
                    rate=self.rate,
                    kinds=(*FAILURES, *LIES) if self.lies else FAILURES,
                    diary=self.folder / f"{process}.diary",
                )
            )
        counts = Counter(killed=self._killing())
        for task in self.tasks:
            told = done(task.diary)
            assert told.keys() == set(task.numbers), f"process {task.process} left keys"
            for line in told.values():
                counts.update(dict(zip(COUNTED, line, strict=True)))
        return {**counts, **self._found()}

    def _killing(self) -> int:
        """Run the workers, and kill one whenever another part of the work is done."""
        chance = random.Random(self.seed)
        running = [self._start(task) for task in self.tasks]
        total, killed = self.processes * self.keys, 0
        end = time.monotonic() + DEADLINE
        try:
            while any(process.poll() is None for process in running):
                assert time.monotonic() < end, "it takes too long"
                alive = [i for i, process in enumerate(running) if process.poll() is None]
                due = self._finished() * (self.kills + 1) > total * (killed + 1)
                if alive and due and killed < self.kills:
                    victim = chance.choice(alive)
                    running[victim].kill()
                    running[victim].wait()
                    killed += 1
                    task = self.tasks[victim]
                    self.tasks[victim] = replace(task, seed=task.seed + 100_000)
                    running[victim] = self._start(self.tasks[victim])
                for process in running:
                    assert process.poll() in (None, 0), "a worker failed; it says why above"
                time.sleep(0.01)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return killed

    def _finished(self) -> int:
        """Keys of all processes that are done."""
        diaries = [task.diary for task in self.tasks if task.diary.exists()]
        return sum(diary.read_bytes().count(b"\n") for diary in diaries)

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        file = self.folder / f"{task.process}.task"
        file.write_bytes(pickle.dumps(task))
        code = "import sys; sys.path[:0] = {!r}; from chaos import workers; workers.main()"
        return subprocess.Popen(
            [sys.executable, "-c", code.format([str(TESTS)]), str(file)]
        )

    def _found(self) -> dict[str, int]:
        """What is there at the end, to one that storage does not fail."""
        store = self.root.open()
        found = Counter({"whole": 0, "lost": 0, "damaged at the end": 0})
        for number in sorted({n for task in self.tasks for n in task.numbers}):
            buffer = bytearray(store.layout.nbytes)
            try:
                there = store.load(key_of(number), buffer)
                found["whole" if there else "lost"] += 1
            except DamagedBlockError:
                # Two codecs of one payload may cross in an object store, until repaired.
                found["damaged at the end"] += 1
                there = store.store(key_of(number), payload_of(number))
                assert store.load(key_of(number), buffer), f"{number} was not repaired"
            if there:
                assert buffer == payload_of(number), f"other bytes than those of {number}"
        if store.local:
            assert not found["damaged at the end"], "a folder is published in one step"
        # One that is told of damage that is not there replaces a block, and between two
        # renames a kill loses it.
        assert self.lies or not found["lost"], "a store returned, and the block is gone"
        return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--keys", type=int, default=2000, help="of each process")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.02, help="of faults")
    parser.add_argument("--no-lies", action="store_true", help="storage only fails")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="on SeaweedFS, not on a folder")
    told = parser.parse_args()
    logging.disable(logging.WARNING)  # of damage, which is meant
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = Root(str(folder / "kv"))
        if told.s3:
            from servers import seaweedfs

            (folder / "server").mkdir()
            server = stack.enter_context(seaweedfs(folder / "server"))
            root = Root(f"{server.url}/chaos", server.storage_options)
        start = time.monotonic()
        counts = Chaos(
            root=root,
            folder=folder,
            processes=told.processes,
            keys=told.keys,
            kills=told.kills,
            rate=told.rate,
            lies=not told.no_lies,
            seed=told.seed,
        ).run()
        for name, count in counts.items():
            print(f"{name:20}{count:10,}")
        print(f"{'seconds':20}{time.monotonic() - start:10,.0f}")


if __name__ == "__main__":
    main()
