"""`scale`: what changes when a store holds a thousand, or a million blocks.

Stores are filled without the tiers. A tier stores one block; every other block gets a
document or name of its own by the format's own rules, and a hard link to that block's
bytes, since a million copies of them would only cost time.
"""

from __future__ import annotations

import os
import shutil
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from specs import Spec, offloading_config
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.file_mapper import FileMapper

from benchmarks.figures import OURS, Results
from benchmarks.peers import FS, Bucket, bucket, folder_peers, fresh_folder
from benchmarks.process import private_memory
from benchmarks.settings import KIB, Settings
from benchmarks.tiers import (
    Bytes,
    Config,
    drive,
    fill,
    in_turns,
    jobs_of,
    look_up,
    new_keys,
    opened,
    region,
    require_hits,
    rows_of,
)
from kvstore.paths import DOCUMENT, block_path

BLOCK = 16 * KIB
MOVED = 256
ASKED = 1_000
KNOWN = 50_000
"""Keys whose memory is measured at once; fewer than what the tiers remember at most."""
INODES = 6
"""Of one block, both sides together and with room to spare; a link is one in tmpfs."""
LINKS = 60_000
"""Links to one file: ext4 ends at 65,000."""
ROUNDS_AT_MOST = 3
BATCH = 500


def scale(settings: Settings, results: Results) -> None:
    """Folders of each size, then the object store."""
    peers = {
        name: config
        for name, config in folder_peers(settings).items()
        if name in (OURS, FS)
    }
    rounds = min(settings.rounds, ROUNDS_AT_MOST)
    with region(MOVED * BLOCK) as memory:
        fill(memory)
        rows = rows_of(memory, BLOCK)
        for name, parent in settings.folders().items():
            for count in settings.blocks:
                case = f"{name}, {count:,} blocks"
                if name == "disk" and count > settings.disk_blocks:
                    continue
                if 0 < os.statvfs(parent).f_favail < INODES * count:
                    results.note(f"{case}: left out for want of inodes.")
                    continue
                _folder(results, case, parent, count, rows, peers, rounds)
        with bucket(settings, results) as place:
            if place is not None:
                for count in settings.bucket_blocks:
                    _bucket(results, place, count, rows, rounds)


def _folder(
    results: Results,
    name: str,
    parent: Path,
    count: int,
    rows: Bytes,
    peers: dict[str, Config],
    rounds: int,
) -> None:
    """Fill a folder for each side, then measure them in turns."""
    keys = new_keys(count)
    with fresh_folder(parent) as folder:
        roots = {peer: folder / str(index) for index, peer in enumerate(peers)}
        for peer, config in peers.items():
            _populate(peer, config, roots[peer], keys, rows)
        for peer in in_turns(list(peers), rounds):
            Case(results, name, peer, rows).measure(peers[peer](str(roots[peer])), keys)


def _bucket(results: Results, place: Bucket, count: int, rows: Bytes, rounds: int) -> None:
    config, root, keys = place.peers[OURS], place.fresh(), new_keys(count)
    _populate_bucket(config, root, place.storage_options, keys, rows)
    for _ in range(rounds):
        case = Case(results, f"{place.name}, {count:,} blocks", OURS, rows)
        case.measure(config(root), keys)


class Case:
    """One side, on a store of one size."""

    def __init__(self, results: Results, name: str, peer: str, rows: Bytes) -> None:
        self._results, self._name, self._peer, self._rows = results, name, peer, rows

    def add(self, quantity: str, unit: str, value: float) -> None:
        self._results.add(self._name, self._peer, quantity, unit, value)

    def measure(self, config: dict[str, Any], keys: Sequence[OffloadKey]) -> None:
        """Another instance of the tier, which knows nothing of what is there."""
        asked = _some(keys, ASKED)
        started = time.perf_counter()
        with opened(config, self._rows) as tier:
            require_hits(look_up(tier, asked[:1])[1], 1)
            self.add(
                "start-up, to the first answer", "ms", (time.perf_counter() - started) * 1e3
            )
            for state in ("first", "again"):
                seconds, hits = look_up(tier, asked)
                require_hits(hits, len(asked))
                self.add(f"look-up, {state}", "keys/s", len(asked) / seconds)
            new = new_keys(MOVED)
            stored = drive(tier, jobs_of(new, load=False, first=1 << 20))
            self.add("store", "blocks/s", MOVED / stored.seconds)
            moved = asked[:MOVED]
            loaded = drive(tier, jobs_of(moved, load=True, first=2 << 20))
            self.add("load", "blocks/s", len(moved) / loaded.seconds)
            self._memory(tier, _some(keys, 2 * KNOWN))

    def _memory(self, tier: Any, keys: list[OffloadKey]) -> None:
        """What it costs to know that a block is there, while a request asks for it.

        Python's count is exact, and of this process alone; the kernel's is of all, and
        says something only of many blocks. Each is taken of other keys than the other,
        since tracing takes memory itself.
        """
        traced, untraced = keys, keys[:0]
        if len(keys) == 2 * KNOWN:
            traced, untraced = keys[:KNOWN], keys[KNOWN:]
        tracemalloc.start()
        require_hits(look_up(tier, traced, "traced", finish=False)[1], len(traced))
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        self.add("memory of a known block", "bytes", held / len(traced))
        if untraced:
            before = private_memory()
            found = look_up(tier, untraced, "untraced", finish=False)[1]
            grown = private_memory() - before
            require_hits(found, len(untraced))
            self.add("the same, of all processes", "bytes", grown / len(untraced))


def _some(keys: Sequence[OffloadKey], count: int) -> list[OffloadKey]:
    """That many at most, spread over all; keys are random, so any part would do."""
    return list(keys[:: max(1, len(keys) // count)][:count])


# ---- many blocks, quickly


def _first(config: dict[str, Any], key: OffloadKey, rows: Bytes) -> None:
    with opened(config, rows) as tier:
        drive(tier, jobs_of([key], load=False))


def _populate(
    peer: str, config: Config, root: Path, keys: Sequence[OffloadKey], rows: Bytes
) -> None:
    """Fill a folder as the peer would have; the first key is stored by the peer."""
    _first(config(str(root)), keys[0], rows)
    if peer == OURS:
        _populate_ours(root, keys)
    else:
        _populate_fs(root, keys)


def _populate_ours(root: Path, keys: Sequence[OffloadKey]) -> None:
    """For each block a folder, its document, and a link to the first one's chunk."""
    first = block_path(keys[0])
    [document] = root.glob(f"*/r0/g0/{first}/{DOCUMENT}")
    group = document.parents[2]
    text, name = document.read_bytes(), keys[0].hex().encode()
    [chunk] = (path for path in document.parent.iterdir() if path.name != DOCUMENT)
    fan_out = document.parent.parent / DOCUMENT
    for key, linked in zip(keys[1:], _links(chunk), strict=False):
        folder = group / block_path(key)
        try:
            folder.mkdir()
        except FileNotFoundError:
            folder.mkdir(parents=True)
            os.link(fan_out, folder.parent / DOCUMENT)
        (folder / DOCUMENT).write_bytes(text.replace(name, key.hex().encode()))
        os.link(linked, folder / chunk.name)


def _populate_fs(root: Path, keys: Sequence[OffloadKey]) -> None:
    """For each block a link to the first one's file, by the name that vLLM gives it."""
    spec: Any = Spec(offloading_config(worker_kv_bytes_per_block=BLOCK))
    names = FileMapper.from_offloading_spec(
        str(root), spec, blocks_per_file=1, parallel_agnostic=True
    )
    first = Path(names.get_file_name(keys[0]))
    for key, linked in zip(keys[1:], _links(first), strict=False):
        target = names.get_file_name(key)
        try:
            os.link(linked, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.link(linked, target)


def _links(first: Path) -> Iterator[Path]:
    """A file to link to, without end; a copy of it where it has too many links."""
    copy = first
    while True:
        for _ in range(LINKS):
            yield copy
        copy = first.with_name(f"{first.name}-{os.urandom(4).hex()}")
        shutil.copyfile(first, copy)
        moved = first.parents[4] / copy.name  # beside everything that a tier looks at
        copy = copy.rename(moved)


def _populate_bucket(
    config: Config,
    root: str,
    options: dict[str, Any],
    keys: Sequence[OffloadKey],
    rows: Bytes,
) -> None:
    """A document for every block, and a chunk for those that are loaded."""
    _first(config(root), keys[0], rows)
    filesystem, path = fsspec.url_to_fs(root, **options)
    first = block_path(keys[0])
    names: list[str] = filesystem.find(path)
    [document] = (name for name in names if name.endswith(f"{first}/{DOCUMENT}"))
    [chunk] = (name for name in names if first in name and name != document)
    text, data = filesystem.cat_file(document), filesystem.cat_file(chunk)
    loaded = set(_some(keys, ASKED)[:MOVED])
    objects: dict[str, bytes] = {}
    for index, key in enumerate(keys):
        new = document.replace(first, block_path(key))
        objects[new] = text.replace(keys[0].hex().encode(), key.hex().encode())
        if key in loaded:
            objects[chunk.replace(first, block_path(key))] = data
        if len(objects) >= BATCH or index == len(keys) - 1:
            filesystem.pipe(objects)
            objects = {}
