"""What a group is converted to follows from what is wanted, as an engine would have it."""

from dataclasses import replace
from typing import Any

import pytest

from kvstore import Config, InvalidInputError, Layout
from kvstore.offline.target import (
    Wanted,
    require_described,
    require_heads,
    require_like,
    target_of,
)
from kvstore.testing import sample_config

CONFIG = sample_config()
LAYOUT = Layout(
    axes=("layer", "block", "head", "token", "value"),
    shape=(2, 2, 4, 32, 16),
    dtype="float16",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=("layers.0", "layers.1"),
    tokens_per_block=32,
    page_bytes=4 * 32 * 16 * 2,
)
AGNOSTIC = sample_config(parallel_agnostic=True)
HEAD_FIRST = replace(
    LAYOUT,
    axes=("head", "layer", "block", "token", "value"),
    shape=(4, 2, 2, 32, 16),
    kv_cache_layout=None,
)
ONE_BLOCK = replace(LAYOUT, axes=("layer", "head", "token", "value"), shape=(2, 4, 32, 16))
PACKED = replace(
    ONE_BLOCK,
    axes=("layer", "head", "packed"),
    shape=(2, 4, 512),
    packing="cpu-amx",
    backend="CPU_ATTN",
)


def sharded(workers: int) -> tuple[Config, Layout]:
    return target_of(CONFIG, LAYOUT, Wanted(tp=workers))


@pytest.mark.parametrize(
    ("layout", "wanted", "changes"),
    [
        (
            LAYOUT,
            {"axes": ("block", "head", "layer", "token", "value"), "runner": "v1"},
            {
                "axes": ("block", "head", "layer", "token", "value"),
                "shape": (2, 4, 2, 32, 16),
                "runner": "v1",
                "kv_cache_layout": "BHLNC",
            },
        ),
        (
            LAYOUT,
            {"axes": ("layer", "block", "token", "head", "value")},
            {
                "axes": ("layer", "block", "token", "head", "value"),
                "shape": (2, 2, 32, 4, 16),
                "kv_cache_layout": "LBNHC",
            },
        ),
        (
            LAYOUT,  # vLLM has no name for it
            {"axes": ("token", "layer", "block", "head", "value")},
            {
                "axes": ("token", "layer", "block", "head", "value"),
                "shape": (32, 2, 2, 4, 16),
                "kv_cache_layout": None,
            },
        ),
        (
            replace(ONE_BLOCK, kv_cache_layout="BLHNC"),  # a name that fits stays
            {"runner": "v1"},
            {"runner": "v1"},
        ),
        (
            replace(ONE_BLOCK, kv_cache_layout=None),  # unknown stays so
            {"runner": "v1"},
            {"runner": "v1"},
        ),
        (
            ONE_BLOCK,
            {"packing": "cpu-vec", "backend": "CPU_ATTN"},
            {
                "axes": ("layer", "head", "packed"),
                "shape": (2, 4, 512),
                "packing": "cpu-vec",
                "backend": "CPU_ATTN",
            },
        ),
        (
            PACKED,
            {"packing": "token-kv", "axes": ("head", "layer", "token", "value")},
            {
                "axes": ("head", "layer", "token", "value"),
                "shape": (4, 2, 32, 16),
                "packing": "token-kv",
                "kv_cache_layout": "BHLNC",
            },
        ),
        (
            PACKED,
            {"packing": "token-kv"},
            {
                "axes": ("layer", "head", "token", "value"),
                "shape": (2, 4, 32, 16),
                "packing": "token-kv",
            },
        ),
        (
            LAYOUT,
            {"tp": 4},
            {
                "axes": ("worker", "layer", "block", "head", "token", "value"),
                "shape": (4, 2, 2, 1, 32, 16),
                "page_bytes": 32 * 16 * 2,
            },
        ),
        (
            HEAD_FIRST,
            {"tp": 2},
            {
                "axes": ("worker", "head", "layer", "block", "token", "value"),
                "shape": (2, 2, 2, 2, 32, 16),
                "page_bytes": 2 * 32 * 16 * 2,
            },
        ),
        (
            replace(LAYOUT, page_bytes=None),  # unknown stays so
            {"tp": 2},
            {
                "axes": ("worker", "layer", "block", "head", "token", "value"),
                "shape": (2, 2, 2, 2, 32, 16),
            },
        ),
    ],
)
def test_what_follows_from_what_is_wanted(
    layout: Layout, wanted: dict[str, Any], changes: dict[str, Any]
) -> None:
    config, target = target_of(CONFIG, layout, Wanted(**wanted))
    assert target == replace(layout, **changes)
    assert config == replace(CONFIG, tp_size=wanted.get("tp", 1))


def test_a_worker_axis_is_taken_off_again() -> None:
    config, layout = sharded(4)
    assert target_of(config, layout, Wanted(tp=1)) == (CONFIG, LAYOUT)
    config, layout = target_of(config, layout, Wanted(tp=2))
    assert (config, layout) == sharded(2)


def test_workers_join_where_the_bytes_are_parallel_agnostic() -> None:
    config, layout = sharded(2)
    wanted = Wanted(
        axes=("head", "layer", "block", "token", "value"), parallel_agnostic=True
    )
    config, target = target_of(config, layout, wanted)
    assert config == AGNOSTIC
    assert config.digest != CONFIG.digest
    assert target == HEAD_FIRST


def test_agnostic_blocks_are_divided_again() -> None:
    wanted = Wanted(parallel_agnostic=False, tp=2)
    config, target = target_of(AGNOSTIC, HEAD_FIRST, wanted)
    assert config == replace(CONFIG, tp_size=2)
    assert target.axes == ("worker", "head", "layer", "block", "token", "value")
    wanted = Wanted(parallel_agnostic=False)
    assert target_of(AGNOSTIC, HEAD_FIRST, wanted) == (CONFIG, HEAD_FIRST)


@pytest.mark.parametrize(
    ("config", "layout", "wanted", "reason"),
    [
        (CONFIG, LAYOUT, {"tp": 3}, "tp: expected a divisor of the 4 KV heads, found 3"),
        (CONFIG, LAYOUT, {"tp": 8}, "holds copies of heads"),
        (CONFIG, LAYOUT, {"parallel_agnostic": True}, "expected head outermost"),
        (
            AGNOSTIC,
            HEAD_FIRST,
            {"tp": 2},
            "tp: expected none for blocks that are",
        ),
        (
            AGNOSTIC,
            HEAD_FIRST,
            {"axes": ("layer", "block", "head", "token", "value")},
            "expected head outermost",
        ),
        (
            CONFIG,
            LAYOUT,
            {"axes": ("layer", "head")},
            "expected layer, block, head, token",
        ),
        (
            CONFIG,
            LAYOUT,
            {"axes": ("worker", "layer", "block", "head", "token", "value")},
            "axes: expected",
        ),
        (CONFIG, ONE_BLOCK, {"axes": ("layer", "head", "value", "token")}, "ends in value"),
        (
            CONFIG,
            PACKED,
            {"axes": ("layer", "head", "token", "value")},
            "axes: expected layer, head, packed in an order that ends in packed",
        ),
        (
            CONFIG,
            LAYOUT,
            {"kv_cache_layout": "LBNHC"},
            "expected a name of the order .*, found LBNHC",
        ),
        (CONFIG, LAYOUT, {"kv_cache_layout": "LCHNB"}, "kv_cache_layout: expected one of"),
        (CONFIG, LAYOUT, {"runner": "v3"}, "runner: expected 'v1' or 'v2'"),
        (
            CONFIG,
            replace(ONE_BLOCK, tokens_per_block=None),
            {"packing": "cpu-vec"},
            "tokens_per_block: expected a number",
        ),
    ],
)
def test_what_no_engine_has_is_refused(
    config: Config, layout: Layout, wanted: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        target_of(config, layout, Wanted(**wanted))


def test_a_name_that_does_not_contradict_is_recorded() -> None:
    one_head = replace(ONE_BLOCK, shape=(2, 1, 32, 16), page_bytes=1024)
    _, target = target_of(CONFIG, one_head, Wanted(kv_cache_layout="NHD"))
    assert target.kv_cache_layout == "LBNHC"


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        ({"pp_size": 2}, {}, "pp_size: expected 1, found 2"),
        ({"pcp_size": 2}, {}, "pcp_size: expected 1, found 2"),
        ({"dcp_size": 2}, {}, "dcp_size: expected 1, found 2"),
        ({"tp_size": 2}, {}, "tp_size: expected 1, the workers in a block"),
        ({"replicated_layout": True}, {}, "replicated_layout: one copy"),
        (
            {"canonical_format": "v1-hnd"},
            {},
            "canonical_format: vLLM's own",
        ),
        ({}, {"axes": ("byte",), "shape": (9,), "reason": "padded"}, "bytes .*padded"),
        ({}, {"page_bytes": 9}, "page_bytes: expected 4096 by the shape, found 9"),
        (
            {},
            {"axes": ("layer", "block", "token", "value"), "shape": (2, 2, 32, 16)},
            "axes: expected",
        ),
    ],
)
def test_a_group_that_does_not_tell_is_refused(
    config: dict[str, Any], layout: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        require_described(replace(CONFIG, **config), replace(LAYOUT, **layout))


def test_every_reason_is_told() -> None:
    config = replace(CONFIG, pp_size=2, dcp_size=4, replicated_layout=True)
    with pytest.raises(InvalidInputError) as caught:
        require_described(config, replace(LAYOUT, page_bytes=9))
    for name in ("pp_size", "dcp_size", "replicated_layout", "page_bytes"):
        assert f"\n  {name}: " in str(caught.value)


def test_heads_that_may_be_copies_must_be_counted() -> None:
    _, layout = sharded(2)
    with pytest.raises(InvalidInputError, match="num_key_value_heads"):
        require_heads(layout, None)
    with pytest.raises(InvalidInputError, match="expected 4, the 2 of each of 2 workers"):
        require_heads(layout, 2)
    require_heads(layout, 4)
    require_heads(LAYOUT, None)
    with pytest.raises(InvalidInputError, match="found 8"):
        require_heads(LAYOUT, 8)


def test_like_an_engine_of_other_values_is_refused_with_every_field() -> None:
    config, layout = sharded(2)
    require_like(CONFIG, LAYOUT, config, layout)
    other = replace(config, model_name="org/other", revision="abc", prefix_hash="sha256")
    with pytest.raises(InvalidInputError) as caught:
        require_like(CONFIG, LAYOUT, other, layout)
    for name in ("model_name", "revision", "prefix_hash"):
        assert f"\n  {name}: " in str(caught.value)
    assert "tp_size" not in str(caught.value)
