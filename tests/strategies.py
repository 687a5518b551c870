"""Hypothesis strategies for the values that kvstore works on."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from kvstore.config import Config, Group
from kvstore.layout import ITEM_BYTES, KV_CACHE_LAYOUTS, Layout

unhurried = settings(deadline=None)
"""For tests whose time per example says something of the machine only."""

DIMS = ("block", "layer", "head", "token", "value")

keys = st.binary(min_size=2, max_size=96)
"""Keys of every length that has a path."""

dtypes = st.sampled_from(sorted(ITEM_BYTES))

names = st.text(min_size=1, max_size=40).filter(lambda name: "\0" not in name)
"""Model and layer names, with everything that a path, URL or glob takes for its own."""

digests = st.text("0123456789abcdef", min_size=12, max_size=12)

dim_orders = st.permutations(DIMS).map(tuple)
"""The order in which a tensor names its dimensions."""

memory_orders = st.permutations(DIMS[1:]).map(tuple)
"""The order in which the values of one block lie in memory."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts that an engine can have: named, tiled or opaque, known or partly unknown."""
    known: dict[str, Any] = {
        "backend": draw(st.none() | st.sampled_from(["FLASH_ATTN", "CPU_ATTN"])),
        "runner": draw(st.sampled_from([None, "v1", "v2"])),
        "layer_names": tuple(draw(st.lists(names, min_size=1, max_size=4, unique=True))),
    }
    if draw(st.booleans()):
        return Layout.of_bytes(
            draw(st.integers(1, 1 << 40)),
            dtype=draw(dtypes | st.sampled_from(["fp8_ds_mla", "int4"])),
            reason=draw(st.text(max_size=20)),
            packing=draw(st.none() | st.just("cpu-neon")),
            **known,
        )
    order = draw(st.sampled_from(sorted(KV_CACHE_LAYOUTS)))
    dtype = draw(dtypes)
    lengths = {
        "worker": draw(st.integers(1, 4)),
        "layer": len(known["layer_names"]),
        "block": draw(st.integers(1, 4)),
        "head": draw(st.integers(1, 8)),
        "token": draw(st.sampled_from([1, 16, 32])),
        "value": draw(st.sampled_from([2, 64, 256])),
    }
    axes = [
        axis
        for axis in ("worker", *KV_CACHE_LAYOUTS[order])
        if axis not in ("worker", "block") or lengths[axis] > 1
    ]
    packing = draw(st.sampled_from([None, "token-kv"]))
    page = lengths["head"] * lengths["token"] * lengths["value"] * ITEM_BYTES[dtype]
    if axes[-2:] == ["token", "value"] and draw(st.booleans()):
        axes[-2:] = ["packed"]
        lengths["packed"] = lengths["token"] * lengths["value"]
        packing = "cpu-amx"
    return Layout(
        axes=tuple(axes),
        shape=tuple(lengths[axis] for axis in axes),
        dtype=dtype,
        packing=packing,
        kv_cache_layout=draw(st.sampled_from([None, order])),
        tokens_per_block=draw(st.sampled_from([None, lengths["token"]])),
        page_bytes=draw(st.sampled_from([None, page])),
        **known,
    )


groups = st.builds(
    Group,
    tokens_per_block=st.integers(1, 4096),
    layer_names=st.lists(names, max_size=3).map(tuple),
)

configs = st.builds(
    Config,
    model_name=names,
    dtype=st.sampled_from(["bfloat16", "float16", "fp8", "fp8_e5m2", "fp8_ds_mla"]),
    tokens_per_hash=st.integers(1, 4096),
    blocks_per_file=st.integers(1, 64),
    kv_cache_groups=st.lists(groups, max_size=3).map(tuple),
    tp_size=st.integers(1, 64),
    pp_size=st.integers(1, 8),
    pcp_size=st.integers(1, 8),
    dcp_size=st.integers(1, 8),
    inference_engine=st.just("vllm"),
    parallel_agnostic=st.booleans(),
    replicated_layout=st.booleans(),
    canonical_format=st.sampled_from([None, "v1-nhd", "v1-hnd"]),
    revision=st.none() | names,
    model_config_digest=st.none() | digests,
    weights_digest=st.none() | digests,
    prefix_hash=st.sampled_from([None, "sha256", "xxhash:0"]),
)
