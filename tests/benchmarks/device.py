"""`device`: blocks of a GPU's memory to a store and back. Needs torch with CUDA."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

from benchmarks.figures import OURS, Results
from benchmarks.peers import fresh_folder
from benchmarks.settings import Settings, size_name
from benchmarks.tiers import BenchmarkFailed, in_turns
from kvstore import BlockStore, Config, Layout

STAGED, DIRECT = "kvstore, pinned staging", OURS


def device(settings: Settings, results: Results) -> None:
    """Tensors as they are, and through pinned memory that the caller stages in.

    One thread, one block after the other: it is the way of one block that is measured.
    """
    if find_spec("torch") is None:
        results.note("Left out: torch is not installed.")
        return
    import torch

    if not torch.cuda.is_available():
        results.note("Left out: torch sees no CUDA device.")
        return
    results.facts["device"] = torch.cuda.get_device_name()
    for place, parent in settings.folders().items():
        for block in settings.sizes:
            count = max(1, settings.total // block)
            shape = (count, block)
            source = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
            pinned = torch.empty(block, dtype=torch.uint8, pin_memory=True)
            case = f"{place}, {size_name(block)}"
            for side in in_turns([DIRECT, STAGED], settings.rounds):
                with fresh_folder(parent) as folder:
                    staging = pinned if side == STAGED else None
                    _measure(results, case, side, f"{folder}/kv", source, staging)


def _measure(
    results: Results, case: str, side: str, url: str, source: object, staging: object
) -> None:
    """One round: store every block, load every block, compare all bytes on the device."""
    import torch

    assert isinstance(source, torch.Tensor)
    target = torch.zeros_like(source)
    config = Config(model_name="benchmark", dtype="uint8", tokens_per_hash=16)
    layout = Layout.of_bytes(source.shape[1], dtype="uint8", reason="benchmark")
    store = BlockStore.open(url, config, layout)
    keys = [os.urandom(32) for _ in source]
    gigabytes = source.numel() / 1e9
    started = time.perf_counter()
    for key, block in zip(keys, source, strict=True):
        if staging is None:
            store.store(key, block)
        else:
            staging.copy_(block)  # type: ignore[attr-defined]  # torch is not typed here
            store.store(key, staging)
    torch.cuda.synchronize()
    results.add(case, side, "store", "GB/s", gigabytes / (time.perf_counter() - started))
    started = time.perf_counter()
    for key, block in zip(keys, target, strict=True):
        if staging is None:
            store.load(key, block)
        else:
            store.load(key, staging)
            block.copy_(staging)
    torch.cuda.synchronize()
    results.add(case, side, "load", "GB/s", gigabytes / (time.perf_counter() - started))
    if not torch.equal(source, target):
        raise BenchmarkFailed("a block came back with other bytes")
