"""Make a small cache without an engine, to try the command line on.

python examples/cache.py kv
"""

import hashlib
import sys
from dataclasses import replace

import numpy as np

from kvstore import BlockStore, Config, Group, Layout

LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(4))
LAYOUT = Layout(
    axes=("layer", "head", "token", "value"),
    shape=(4, 2, 16, 16),
    dtype="float16",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=LAYERS,
    tokens_per_block=16,
    page_bytes=1024,
)
HEAD_MAJOR = replace(
    LAYOUT,
    axes=("head", "layer", "token", "value"),
    shape=(2, 4, 16, 16),
    runner="v1",
    kv_cache_layout="BHLNC",
)


def config_of(model: str) -> Config:
    """What an engine of this model would have."""
    return Config(
        model_name=model,
        dtype="float16",
        tokens_per_hash=16,
        kv_cache_groups=(Group(tokens_per_block=16, layer_names=LAYERS),),
    )


def key_of(model: str, number: int) -> bytes:
    """A key as vLLM makes them: a hash, and the group's number."""
    return hashlib.sha256(f"{model} {number}".encode()).digest() + bytes(4)


def fill(url: str) -> None:
    """Two models: twelve blocks of one, and five of the other."""
    random = np.random.default_rng(0)
    for model, layout, count in (("org/small", LAYOUT, 12), ("org/tiny", HEAD_MAJOR, 5)):
        store = BlockStore.open(url, config_of(model), layout)
        for number in range(count):
            values = random.standard_normal(layout.shape).astype("float16")
            store.store(key_of(model, number), values)


if __name__ == "__main__":
    fill(*sys.argv[1:])
