"""`kvstore diff`: what differs between two groups, and what would bridge it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from children import Kvstore

from kvstore import InvalidInputError, Layout
from kvstore import testing as kit
from kvstore.errors import Difference
from kvstore.offline import Root
from kvstore.offline.diff import Comparison, Side, compare, narrowed
from kvstore.testing import sample_config, sample_layout

CONFIG, LAYOUT = sample_config(), sample_layout()
HEAD_FIRST = replace(
    LAYOUT,
    axes=("head", "layer", "token", "value"),
    shape=(3, 2, 16, 8),
    runner="v1",
    kv_cache_layout="BHLNC",
)
LARGE = json.dumps({"layout": replace(LAYOUT, shape=(2, 3, 16, 8 * 10**21)).to_dict()})
AGNOSTIC = sample_config(parallel_agnostic=True)


def side(config: Any = CONFIG, layout: Layout | None = LAYOUT) -> Side:
    return Side("somewhere", config, layout)


def fields(found: Comparison) -> list[str]:
    return [
        difference.field for difference in (*(found.config or ()), *(found.layout or ()))
    ]


def test_nothing_differs() -> None:
    found = compare(side(), side())
    assert found == Comparison((), (), reordered=False, convertible=False, obstacles=None)
    assert found.same


@pytest.mark.parametrize(
    ("b", "names", "reordered", "convertible"),
    [
        (
            side(layout=HEAD_FIRST),
            ["axes", "shape", "runner", "kv_cache_layout"],
            True,
            True,
        ),
        (
            side(AGNOSTIC, HEAD_FIRST),
            ["parallel_agnostic", "axes", "shape", "runner", "kv_cache_layout"],
            False,
            True,
        ),
        (
            side(
                layout=replace(
                    LAYOUT,
                    axes=("layer", "head", "packed"),
                    shape=(2, 3, 128),
                    packing="cpu-vec",
                )
            ),
            ["axes", "shape", "packing"],
            False,
            True,
        ),
        (side(layout=replace(LAYOUT, packing=None)), ["packing"], False, False),
        (side(layout=replace(LAYOUT, dtype="bfloat16")), ["dtype"], False, False),
        (side(sample_config(revision="abc")), ["revision"], False, False),
        (side(sample_config(tp_size=2)), ["tp_size"], False, False),
    ],
)
def test_what_differs_and_what_bridges_it(
    b: Side, names: list[str], reordered: bool, convertible: bool
) -> None:
    found = compare(side(), b)
    assert not found.same
    assert fields(found) == names
    assert (found.reordered, found.convertible) == (reordered, convertible)
    assert (found.obstacles is None) is convertible


def test_what_one_side_does_not_tell_is_not_compared() -> None:
    found = compare(side(), side(config=None, layout=HEAD_FIRST))
    assert found.config is None
    assert (found.reordered, found.convertible) == (False, False)
    assert "both sides" in str(found.obstacles)
    with pytest.raises(InvalidInputError, match="config or layout"):
        compare(side(layout=None), side(config=None))


LONG = tuple(f"model.layers.{number}.self_attn.attn" for number in range(40))


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (("head", "layer"), ("layer", "head"), ("x", ("head", "layer"), ("layer", "head"))),
        (LONG, (*LONG[:7], "other", *LONG[8:]), ("x[7]", LONG[7], "other")),
        (LONG, LONG[1:], ("number of x", 40, 39)),
        (
            [{"layer_names": list(LONG), "tokens_per_block": 16}],
            [{"layer_names": list(LONG), "tokens_per_block": 32}],
            ("x[0].tokens_per_block", 16, 32),
        ),
        ("y" * 100, None, ("x", "y" * 100, None)),
    ],
)
def test_of_long_values_only_what_differs_is_told(
    a: object, b: object, told: object
) -> None:
    found = narrowed(Difference("x", a, b))
    assert (found.field, found.expected, found.found) == told


# ---- the command


def test_the_command_on_every_backend(root: kit.Root, kvstore: Kvstore) -> None:
    a, b = root.below("a").open(LAYOUT), root.below("b").open(HEAD_FIRST)
    told = json.dumps(root.storage_options)
    options = ["--storage-options", told, "--b-storage-options", told]
    options += ["--client", root.client]
    code, out, _ = kvstore("diff", a.url, b.url, *options)
    assert code == 1
    assert "layout.axes             layer, head, token, value  head, layer, token" in out
    assert "blocks with on_mismatch" in out
    assert "`kvstore convert A DST --like B`" in out
    code, out, _ = kvstore("diff", a.url, b.url, *options, "--json")
    told = json.loads(out)
    assert (code, told["same"], told["convert"], told["on_mismatch_convert"]) == (
        1,
        False,
        True,
        True,
    )
    assert told["layout"][2] == {"field": "runner", "a": "v2", "b": "v1"}
    assert kvstore("diff", a.url, a.url, *options)[0] == 0


def test_an_engines_records(tmp_path: Path, kvstore: Kvstore) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    store = root.open(LAYOUT)
    _, printed, _ = kvstore("info", store.url, "--json")
    engine = tmp_path / "engine.json"
    engine.write_text(printed)
    assert kvstore("diff", store.url, engine)[0] == 0
    [record] = json.loads(printed)
    engine.write_text(json.dumps({"config": record["config"] | {"revision": "abc"}}))
    code, out, _ = kvstore("diff", engine, store.url)
    assert code == 1
    assert "config.revision  abc  unknown" in out
    assert "layout: not told by both" in out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "expected JSON"),
        ("[]", "expected one group's records, found 0"),
        ("{}", "config, layout or both"),
        ('{"layout": {}, "colour": 1}', "unknown option 'colour'"),
        ('{"layout": {"axes": 3}}', "layout.axes: expected a list"),
        ('{"config": {"model_name": ""}}', "config"),
        ("[" * 100_000, "expected JSON"),
        (" " * (2 << 20), "found more"),
        (LARGE, "layout: expected blocks of at most 17179869184 bytes, found 1536000"),
    ],
)
def test_records_that_cannot_be_read(
    content: str, reason: str, tmp_path: Path, kvstore: Kvstore
) -> None:
    kit.Root(str(tmp_path / "kv")).open()
    engine = tmp_path / "engine.json"
    engine.write_text(content)
    code, _, err = kvstore("diff", tmp_path / "kv", engine)
    assert code == 2
    assert reason in err
    assert err.count("\n") == 1


def test_one_group_is_meant(tmp_path: Path, kvstore: Kvstore) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    code, _, err = kvstore("diff", root.url, root.url)
    assert (code, "expected one KV group" in err) == (2, True)
    store = root.open()
    root.open(config=AGNOSTIC, layout=HEAD_FIRST)
    code, _, err = kvstore("diff", store.url, root.url)
    assert (code, store.path in err) == (2, True)
    assert Root(store.url).only_group().path == store.path
    with pytest.raises(InvalidInputError, match="found a block"):
        Root(store.block_url(b"key")).only_group()
