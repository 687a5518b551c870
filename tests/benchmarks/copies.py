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
from benchmarks.traced import BLOCKS, opened_store

BLOCK = 16 * MIB
CHURN_ROWS = 500


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
    opening = _traced(folder, "open")
    stored = _traced(folder, "store")
    for operation, without, calls in (
        ("store", opening, stored),
        ("contains", stored, _traced(folder, "contains")),
        ("load", stored, _traced(folder, "load")),
    ):
        for name in sorted(calls):
            each = (calls[name] - without.get(name, 0)) / BLOCKS
            if each >= 0.5:  # less comes from the interpreter
                case = f"disk, system calls of one {operation}"
                results.add(case, OURS, name, "calls", round(each, 1))


def _traced(folder: Path, operation: str) -> dict[str, int]:
    """Calls by name of a process that does this."""
    root = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "benchmarks.traced", root, operation]
    paths = [str(Path(__file__).parent.parent), *sys.path]
    log = Path(root, "strace")
    subprocess.run(
        ["strace", "-f", "-c", "-o", str(log), *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    row = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.MULTILINE)
    return {name: int(calls) for calls, name in row.findall(log.read_text())}


def _growth(settings: Settings, results: Results) -> None:
    """Private memory of the process and its workers, before and after many blocks."""
    block = 16 * KIB
    count = settings.churned
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
