"""`lookups`: how fast a tier tells which blocks are there, and which are not."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from benchmarks.figures import Results
from benchmarks.peers import Bucket, bucket, folder_peers, fresh_folder
from benchmarks.settings import KIB, Settings
from benchmarks.tiers import (
    Bytes,
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

BLOCK = 4 * KIB
PREFIX = 1000
SINGLES = 20


def lookups(settings: Settings, results: Results) -> None:
    """Folders, then an object store. Each answer is of a tier that was not asked before."""
    most = max(settings.keys)
    with region(max(most, PREFIX) * BLOCK) as memory:
        fill(memory)
        rows = rows_of(memory, BLOCK)
        for place, parent in settings.folders().items():
            _folder(settings, results, place, str(parent), rows[:most])
        with bucket(settings, results) as found:
            if found is not None:
                _bucket(settings, results, found, rows[: min(PREFIX, most)])


def _folder(
    settings: Settings, results: Results, place: str, parent: str, rows: Bytes
) -> None:
    peers = folder_peers(settings)
    with fresh_folder(Path(parent)) as folder:
        roots = {peer: str(folder / str(i)) for i, peer in enumerate(peers)}
        keys = new_keys(len(rows))
        for peer, config in peers.items():
            with opened(config(roots[peer]), rows) as tier:
                drive(tier, jobs_of(keys, load=False))
        for peer in in_turns(list(peers), settings.rounds):
            with opened(peers[peer](roots[peer]), rows) as tier:
                look_up(tier, new_keys(8))
                for count in settings.keys:
                    case = f"{place}, {count} keys"
                    _ask(results, case, peer, tier, keys[:count])


def _ask(
    results: Results,
    case: str,
    peer: str,
    tier: SecondaryTierManager,
    keys: list[OffloadKey],
) -> tuple[float, float]:
    """Known keys, then as many that nobody knows. Returns the seconds of each."""
    known, hits = look_up(tier, keys)
    require_hits(hits, len(keys))
    results.add(case, peer, "look-up of what is there", "keys/s", len(keys) / known)
    unknown, hits = look_up(tier, new_keys(len(keys)))
    require_hits(hits, 0)
    results.add(case, peer, "look-up of what is not", "keys/s", len(keys) / unknown)
    return known, unknown


def _bucket(settings: Settings, results: Results, place: Bucket, rows: Bytes) -> None:
    """A prefix's blocks, and what that is in look-ups of one block."""
    keys = new_keys(len(rows))
    roots = {peer: place.fresh() for peer in place.peers}
    for peer, config in place.peers.items():
        with opened(config(roots[peer]), rows) as tier:
            drive(tier, jobs_of(keys, load=False))
    case = f"{place.name}, {len(rows)} keys"
    for peer in in_turns(list(place.peers), settings.rounds):
        with opened(place.peers[peer](roots[peer]), rows) as tier:
            look_up(tier, new_keys(8))
            one = median(look_up(tier, new_keys(1))[0] for _ in range(SINGLES))
            known, unknown = _ask(results, case, peer, tier, keys)
            again, hits = look_up(tier, keys)
            require_hits(hits, len(keys))
        results.add(case, peer, "look-up of one", "ms", one * 1e3)
        results.add(case, peer, "all that are there", "look-ups of one", known / one)
        results.add(case, peer, "all that are not", "look-ups of one", unknown / one)
        results.add(
            case, peer, "all once more, by another request", "look-ups of one", again / one
        )
