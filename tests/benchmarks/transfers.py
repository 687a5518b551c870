"""`local` and `bucket`: store and load through the calls that vLLM's scheduler makes."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from benchmarks.figures import Results
from benchmarks.peers import Bucket, bucket, folder_peers, fresh_folder
from benchmarks.process import drop_caches, flush
from benchmarks.settings import MIB, Settings, size_name
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
    require_equal,
    require_hits,
    rows_of,
)

BUCKET_TOTAL = 64 * MIB


def local(settings: Settings, results: Results) -> None:
    """Folders: on disk, with and without the page cache, and in memory."""
    peers = folder_peers(settings)
    with region(settings.total) as source, region(settings.total) as target:
        fill(source)
        for place, parent in settings.folders().items():
            for block in settings.sizes:
                case = Case(f"{place}, {size_name(block)}", block, source, target)
                for peer in in_turns(list(peers), settings.rounds):
                    with fresh_folder(parent) as folder:
                        cold = folder if place == "disk" else None
                        case.measure(results, peer, peers[peer], str(folder), cold)


def bucket_transfers(settings: Settings, results: Results) -> None:
    """An object store, with the blocks that one would use there."""
    sizes = [size for size in settings.sizes if size >= 576 << 10] or settings.sizes
    total = min(settings.total, BUCKET_TOTAL)
    with (
        bucket(settings, results) as place,
        region(total) as source,
        region(total) as target,
    ):
        if place is None:
            return
        fill(source)
        for block in sizes:
            case = Case(f"{place.name}, {size_name(block)}", block, source, target, place)
            for peer in in_turns(list(place.peers), settings.rounds):
                case.measure(results, peer, place.peers[peer], place.fresh(), None)


class Case:
    """One block size in one place."""

    def __init__(
        self,
        name: str,
        block: int,
        source: Bytes,
        target: Bytes,
        place: Bucket | None = None,
    ) -> None:
        self.name = name
        self.source = rows_of(source, block)
        self.target = rows_of(target, block)
        self.count = len(self.source)
        self.gigabytes = self.source.nbytes / 1e9
        self.servers = place.servers if place else frozenset[int]()

    def measure(
        self, results: Results, peer: str, config: Config, root: str, cold: Path | None
    ) -> None:
        """One round of one side: store, then load in another instance of the tier.

        Args:
            root: where it keeps its blocks.
            cold: the folder whose blocks are also loaded with nothing of it in the page
                cache, or None to leave that out.
        """
        keys, warm_up = new_keys(self.count), new_keys(max(2, self.count // 8))

        def add(quantity: str, unit: str, value: float) -> None:
            results.add(self.name, peer, quantity, unit, value)

        with opened(config(root), self.source) as tier:
            drive(tier, jobs_of(warm_up, load=False, first=1 << 20))
            if cold is not None:
                flush(cold)
            stored = drive(tier, jobs_of(keys, load=False), self.servers)
            add("store", "GB/s", self.gigabytes / stored.seconds)
            add("CPU of a store", "s/GB", stored.cpu / self.gigabytes)
            if cold is not None:
                seconds = stored.seconds + timed_flush(cold)
                add("store, until it is on the device", "GB/s", self.gigabytes / seconds)
        if cold is not None:
            results.note(f"Cold: the page cache was emptied by {drop_caches(cold)}.")
            self.target[:] = 0
            with opened(config(root), self.target) as tier:
                found, hits = look_up(tier, keys)
                require_hits(hits, self.count)
                loaded = drive(tier, jobs_of(keys, load=True))
                add(
                    "find and load, cold", "GB/s", self.gigabytes / (found + loaded.seconds)
                )
                require_equal(self.target, self.source)
        self.target[:] = 0
        with opened(config(root), self.target) as tier:
            look_up(tier, warm_up)
            drive(tier, jobs_of(warm_up, load=True, first=1 << 20))
            require_hits(look_up(tier, keys)[1], self.count)
            loaded = drive(tier, jobs_of(keys, load=True), self.servers)
            require_equal(self.target, self.source)
        add("load", "GB/s", self.gigabytes / loaded.seconds)
        add("CPU of a load", "s/GB", loaded.cpu / self.gigabytes)


def timed_flush(folder: Path) -> float:
    """Seconds until all that was written is on the device."""
    started = perf_counter()
    flush(folder)
    return perf_counter() - started
