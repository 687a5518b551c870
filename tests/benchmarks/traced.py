"""The process whose system calls `copies` counts. It imports the library and no more."""

import sys
from typing import Any

from kvstore import BlockStore, Config, Layout

BLOCKS = 32
NBYTES = 64 << 10


def opened_store(url: str, nbytes: int, options: dict[str, Any]) -> BlockStore:
    """A store of blocks of so many bytes, of which nothing else is known."""
    config = Config(model_name="benchmark", dtype="uint8", tokens_per_hash=16)
    layout = Layout.of_bytes(nbytes, dtype="uint8", reason="benchmark")
    return BlockStore.open(url, config, layout, storage_options=options)


def main(root: str, operation: str) -> None:
    """Open a store; fill it, unless nothing is wanted; ask for or load every block."""
    store = opened_store(f"{root}/kv", NBYTES, {})
    buffer = bytearray(NBYTES)
    for number in range(BLOCKS if operation != "open" else 0):
        store.store(b"%032d" % number, buffer)
    for number in range(BLOCKS):
        if operation == "contains":
            store.contains(b"%032d" % number)
        elif operation == "load":
            store.load(b"%032d" % number, buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
