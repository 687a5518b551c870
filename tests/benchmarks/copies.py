"""`copies`: memory that a block costs on its way, system calls, and what stays behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.figures import OURS, Results
from benchmarks.peers import bucket, folder_peers, fresh_folder
from benchmarks.process import private_memory
from benchmarks.settings import KIB, MIB, Settings, size_name
from benchmarks.tiers import (
    drive,
    fill,
    in_turns,
    jobs_of,
    look_up,
    new_keys,
    opened,
    region,
    rows_of,
)
from kvstore import BlockStore, Config, Layout

BLOCK = 16 * MIB
TRACED = 32
"""Blocks whose system calls are counted: those of none are taken away."""
CHURNED, CHURN_ROWS = 10_000, 500


def copies(settings: Settings, results: Results) -> None:
    """Allocations and system calls of the library; growth of whoever uses the tiers."""
    with fresh_folder(settings.disk) as folder:
        _allocated(results, "disk", f"{folder}/kv", {})
        _allocated(results, "memory", f"memory://{os.urandom(8).hex()}", {})
        with bucket(settings, results) as place:
            if place is not None:
                _allocated(results, place.name, place.fresh(), place.storage_options)
        _syscalls(results, folder)
    _growth(settings, results)


def opened_store(url: str, nbytes: int, options: dict[str, Any]) -> BlockStore:
    config = Config(model_name="benchmark", dtype="uint8", tokens_per_hash=16)
    layout = Layout.of_bytes(nbytes, dtype="uint8", reason="benchmark")
    return BlockStore.open(url, config, layout, storage_options=options)


def _allocated(results: Results, name: str, url: str, options: dict[str, Any]) -> None:
    """The most that Python holds at once while one block passes, as a share of it."""
    case = f"{name}, {size_name(BLOCK)}"
    store = opened_store(url, BLOCK, options)
    source, target = os.urandom(BLOCK), bytearray(BLOCK)
    store.store(b"warm-up", source)  # whatever is made at the first use is there now
    store.load(b"warm-up", target)
    key = os.urandom(32)
    for quantity, step in (("store", store.store), ("load", store.load)):
        tracemalloc.start()
        step(key, source if quantity == "store" else target)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        results.add(case, OURS, f"held at once by a {quantity}", "× payload", peak / BLOCK)
    assert target == source


def _syscalls(results: Results, folder: Path) -> None:
    """System calls of one block, those of opening taken away. Only where strace is."""
    if shutil.which("strace") is None:
        results.note("System calls are left out: strace is not installed.")
        return
    nothing = _traced(folder, "store", 0)
    stored = _traced(folder, "store", TRACED)
    for operation, without, calls in (
        ("store", nothing, stored),
        ("contains", stored, _traced(folder, "contains", TRACED)),
        ("load", stored, _traced(folder, "load", TRACED)),
    ):
        for name in sorted(calls):
            each = (calls[name] - without.get(name, 0)) / TRACED
            if each >= 0.5:  # less comes from the interpreter
                case = f"disk, system calls of one {operation}"
                results.add(case, OURS, name, "calls", round(each, 1))


def _traced(folder: Path, operation: str, count: int) -> dict[str, int]:
    """Calls by name of a process that does this to so many blocks."""
    root = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "benchmarks.copies", root, operation, str(count)]
    paths = [str(Path(__file__).parent.parent), *sys.path]
    log = Path(root, "strace")
    subprocess.run(
        ["strace", "-f", "-c", "-o", str(log), *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    rows = re.findall(
        r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", log.read_text(), re.MULTILINE
    )
    return {name: int(calls) for calls, name in rows if name != "total"}


def traced(root: str, operation: str, count: int) -> None:
    """What `_traced` runs: every block is stored, then asked for or loaded; or only so
    many are stored.
    """
    store = opened_store(f"{root}/kv", 64 * KIB, {})
    buffer = bytearray(64 * KIB)
    keys = [b"%032d" % number for number in range(TRACED)]
    for key in keys[:count]:
        store.store(key, buffer)
    for key in keys[:count]:
        if operation == "contains":
            store.contains(key)
        elif operation == "load":
            store.load(key, buffer)


def _growth(settings: Settings, results: Results) -> None:
    """Private memory of the process and its workers, before and after many blocks."""
    block = 16 * KIB
    count = min(CHURNED, CHURNED * settings.total // (256 * MIB))
    count = max(CHURN_ROWS, count - count % CHURN_ROWS)
    peers = folder_peers(settings)
    with region(CHURN_ROWS * block) as memory:
        fill(memory)
        rows = rows_of(memory, block)
        for peer in in_turns(list(peers), min(settings.rounds, 2)):
            with (
                fresh_folder(settings.disk) as folder,
                opened(peers[peer](str(folder)), rows) as tier,
            ):

                def lap(number: int) -> None:
                    keys = new_keys(CHURN_ROWS)
                    request = f"request {number}"
                    drive(tier, jobs_of(keys, load=False, first=number << 21))
                    look_up(tier, keys, request)
                    drive(tier, jobs_of(keys, load=True, first=(number << 21) + (1 << 20)))

                for number in range(4):
                    lap(number)
                before = private_memory()
                for number in range(4, 4 + count // CHURN_ROWS):
                    lap(number)
                grown = (private_memory() - before) / count
            case = f"disk, {count:,} blocks stored, found and loaded"
            results.add(case, peer, "memory that stays", "bytes/block", grown)


if __name__ == "__main__":
    traced(sys.argv[1], sys.argv[2], int(sys.argv[3]))
