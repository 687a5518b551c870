"""`Settings`: how much to measure, where, and against whom."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says.

    Attributes:
        rounds: how often each side of a comparison is measured, in turns.
        disk: a folder on the disk that is measured.
        memory: a folder in memory, or None to leave that out.
        total: bytes that one case stores and loads.
        sizes: block sizes, in bytes.
        seconds: how long each of the timed loops runs.
        keys: how many keys are looked up at once.
        churned: blocks that pass through a tier whose memory is watched.
        blocks: sizes of the stores whose scale is measured.
        disk_blocks: more than these are made in memory only: disks take long for it.
        bucket_blocks: the same, on the object store.
        bucket: an fsspec URL to use instead of a SeaweedFS that is started here.
        storage_options: of that URL.
        tiers: further tiers by name: vLLM's secondary-tier config, in which `{ROOT}`
            is replaced by a fresh folder.
    """

    rounds: int = 5
    disk: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    memory: Path | None = Path("/dev/shm")
    total: int = 256 * MIB
    sizes: tuple[int, ...] = (64 * KIB, 576 * KIB, 2 * MIB, 16 * MIB)
    seconds: float = 1.5
    keys: tuple[int, ...] = (512, 4096)
    churned: int = 10_000
    blocks: tuple[int, ...] = (1_000, 100_000)
    disk_blocks: int = 10_000
    bucket_blocks: tuple[int, ...] = (1_000,)
    bucket: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def folders(self) -> dict[str, Path]:
        """The folders to measure in, by what they are."""
        folders = {"disk": self.disk}
        if self.memory is not None and self.memory.is_dir():
            folders["tmpfs"] = self.memory
        return folders


def size_name(nbytes: int) -> str:
    """As people write it: `576 KiB`, `2 MiB`."""
    if nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes / KIB:g} KiB"
