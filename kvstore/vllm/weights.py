"""Fingerprint of weights that lie in a local folder, cheap enough for every start.

A folder has no commit that names its contents, and its files' times change with every
copy. So a little of every tensor is read: weights that were retrained, requantised or
merged differ in practically every value, and a copy of the same weights does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

SAMPLE_BYTES = 4096
_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SAMPLES_PER_FILE = 1024
_MAX_HEADER = 100 << 20


def weights_digest(model: Path) -> str | None:
    """12 hex digits over a sample of the weights in a folder, or in one file.

    None if `model` is no local path, or has none.

    Raises:
        OSError: a file cannot be read.
    """
    files = [model] if model.is_file() else []
    if model.is_dir():
        files = sorted(f for f in model.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            for offset in _offsets(file, size):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _offsets(file: Path, size: int) -> Iterator[int]:
    """Where to look: the start, middle and end of every tensor, or evenly."""
    yield 0
    if file.suffix == ".safetensors" and (ranges := _tensors(file, size)):
        for start, end in ranges:
            last = max(start, end - SAMPLE_BYTES)
            yield from (start, (start + last) // 2, last)
        return
    step = max(SAMPLE_BYTES, size // _SAMPLES_PER_FILE)
    yield from range(step, size, step)


def _tensors(file: Path, size: int) -> list[tuple[int, int]]:
    """Byte ranges of a safetensors file's tensors; empty if its header is not sound."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length < _MAX_HEADER:
            return []
        try:
            header = json.loads(stream.read(length))
            ranges = sorted(
                (8 + length + start, 8 + length + end)
                for name, entry in header.items()
                if name != "__metadata__"
                for start, end in [entry["data_offsets"]]
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
    sound = all(type(s) is type(e) is int and 8 + length <= s <= e for s, e in ranges)
    return ranges if sound and (not ranges or ranges[-1][1] <= size) else []
