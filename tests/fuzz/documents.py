"""The command: `python tests/fuzz/documents.py --seconds 600`.

Each target has its share of the time in a process of its own, which ends at the first
input that breaks it, and leaves that input in `--out`. `--replay FILE --target NAME` runs
one again. With atheris (`pip install atheris`) coverage leads the way; without it, changes
are drawn from a seed.
"""

import argparse
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)  # not this folder: the package is `fuzz`

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["kvstore"]) if atheris else nullcontext():
    from fuzz.mutate import mutations
    from fuzz.targets import TARGETS, Target

MAX_BYTES = 1 << 16
MAX_SECONDS = 1.0
"""Of the processor's time for one input: another process on the machine costs nothing."""
MAX_GROWTH = 256 << 20
"""Bytes by which a process may grow: no number in an input may be believed."""
MEMORY_MIB = 2048


def limited(target: Target) -> Target:
    """The target, which must not take long, nor grow."""

    first: list[int] = []

    def run(data: bytes) -> None:
        start = time.process_time()
        target(data)
        took = time.process_time() - start
        assert took < MAX_SECONDS, f"{took} seconds"
        if not first:
            first.append(_peak())
        grown = _peak() - first[0]
        assert grown < MAX_GROWTH, f"grew by {grown} bytes"

    return run


def _peak() -> int:
    """Bytes of this process's memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def guided(name: str, seconds: float, out: Path) -> None:
    """By atheris, which ends the process."""
    target, seeds = TARGETS[name]
    corpus = out / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [
        sys.argv[0],
        str(corpus),
        f"-artifact_prefix={out}/{name}-",
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={MAX_BYTES}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-timeout=60",  # a hang; what is only slow is found by `limited`
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup(command, limited(target))
    atheris.Fuzz()


def drawn(name: str, seconds: float, out: Path, seed: int) -> None:
    """By changes that follow from a seed."""
    target, seeds = TARGETS[name]
    run, end, count = limited(target), time.monotonic() + seconds, 0
    for data in mutations(seeds, seed, MAX_BYTES):
        try:
            run(data)
        except BaseException:
            (out / f"{name}-crash").write_bytes(data)
            raise
        count += 1
        if time.monotonic() > end:
            break
    print(f"{name}: {count} executions", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600, help="of all targets together"
    )
    parser.add_argument("--target", choices=TARGETS, help="only this one, in this process")
    parser.add_argument("--out", type=Path, default=Path("results/fuzz"))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--replay", type=Path, help="an input to run again")
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    if told.replay:
        limited(TARGETS[told.target][0])(told.replay.read_bytes())
        return
    if told.target and atheris:
        guided(told.target, told.seconds, told.out)
    if told.target:
        drawn(told.target, told.seconds, told.out, told.seed)
        return
    if not atheris:
        print(f"atheris is not installed, so changes are drawn, from seed {told.seed}")
    broken = []
    for name in TARGETS:
        share = told.seconds / len(TARGETS)
        command = [sys.executable, __file__, "--target", name, "--seconds", str(share)]
        command += ["--out", str(told.out), "--seed", str(told.seed)]
        print(f"---- {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            broken.append(name)
    sys.exit(f"broken: {', '.join(broken)}" if broken else None)


if __name__ == "__main__":
    main()
