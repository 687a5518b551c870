import hashlib
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import configs, unhurried

from kvstore.config import Config, Group, prove_parallel_agnostic
from kvstore.errors import Difference, InvalidInputError
from kvstore.layout import Layout
from kvstore.paths import namespace_path

OPT_LAYERS = tuple(f"model.decoder.layers.{i}.self_attn.attn" for i in range(12))
OPT = Config(
    model_name="facebook/opt-125m",
    dtype="float16",
    tokens_per_hash=16,
    kv_cache_groups=(Group(tokens_per_block=16, layer_names=OPT_LAYERS),),
    parallel_agnostic=True,
)
# What vLLM's FileMapper hashes for this engine: literal, so that it cannot follow a
# mistake of ours.
OPT_FIELDS: dict[str, Any] = {
    "model_name": "facebook/opt-125m",
    "tokens_per_hash": 16,
    "blocks_per_file": 1,
    "tp_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "dtype": "float16",
    "kv_cache_groups": [
        {
            "tokens_per_block": 16,
            "layer_names": [
                "model.decoder.layers.0.self_attn.attn",
                "model.decoder.layers.1.self_attn.attn",
                "model.decoder.layers.2.self_attn.attn",
                "model.decoder.layers.3.self_attn.attn",
                "model.decoder.layers.4.self_attn.attn",
                "model.decoder.layers.5.self_attn.attn",
                "model.decoder.layers.6.self_attn.attn",
                "model.decoder.layers.7.self_attn.attn",
                "model.decoder.layers.8.self_attn.attn",
                "model.decoder.layers.9.self_attn.attn",
                "model.decoder.layers.10.self_attn.attn",
                "model.decoder.layers.11.self_attn.attn",
            ],
        }
    ],
    "inference_engine": "vllm",
}
# Every field that takes part only when it is known, and a value that changes it.
OPTIONAL: dict[str, Any] = {
    "replicated_layout": True,
    "canonical_format": "v1-hnd",
    "revision": "8fc1de9a",
    "model_config_digest": "0123456789ab",
    "weights_digest": "ba9876543210",
    "prefix_hash": "sha256:0",
}


def changed(**changes: Any) -> Config:
    return replace(OPT, **changes)


def vllm_digest(fields: dict[str, Any]) -> str:
    """The rule of `FileMapper._compute_base_path`."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:12]


# ---- the digest


@pytest.mark.parametrize(
    ("config", "fields", "digest"),
    [
        pytest.param(OPT, OPT_FIELDS, "beab61a58146", id="agnostic"),
        pytest.param(
            changed(parallel_agnostic=False, tp_size=2),
            OPT_FIELDS | {"parallel_agnostic": False, "tp_size": 2},
            "45b363539ab8",
            id="tp2",
        ),
        pytest.param(
            changed(replicated_layout=True),
            OPT_FIELDS | {"replicated_layout": True},
            "07261360b557",
            id="replicated",
        ),
        pytest.param(
            changed(canonical_format="v1-nhd"),
            OPT_FIELDS | {"canonical_format": "v1-nhd"},
            "4cd152b1babd",
            id="canonical",
        ),
        pytest.param(
            changed(kv_cache_groups=()),
            OPT_FIELDS | {"kv_cache_groups": []},
            "2a555a0246a0",
            id="no-groups",
        ),
        pytest.param(
            changed(model_name="Größe/模型", kv_cache_groups=()),
            OPT_FIELDS | {"model_name": "Größe/模型", "kv_cache_groups": []},
            "7b2b899d4ce5",
            id="non-ascii",
        ),
        pytest.param(
            changed(**OPTIONAL, blocks_per_file=4, pp_size=2, parallel_agnostic=False),
            OPT_FIELDS
            | OPTIONAL
            | {"blocks_per_file": 4, "pp_size": 2, "parallel_agnostic": False},
            "fdb78038c0d8",
            id="all-fields",
        ),
    ],
)
def test_the_digest_is_vllms_over_the_fields(
    config: Config, fields: dict[str, Any], digest: str
) -> None:
    assert config.fields() == fields
    assert config.digest == vllm_digest(fields) == digest


def test_the_folder_has_vllms_name() -> None:
    assert namespace_path(OPT) == "facebook_opt-125m_beab61a58146"


@unhurried
@given(configs)
def test_the_digest_follows_vllms_rule_for_every_config(config: Config) -> None:
    assert config.digest == vllm_digest(config.fields())


def test_fields_that_are_not_known_are_absent_so_that_no_old_digest_moves() -> None:
    assert not OPTIONAL.keys() & OPT.fields().keys()
    assert OPTIONAL.keys() <= changed(**OPTIONAL).fields().keys()


DIGEST_SCRIPT = """
import random
from kvstore.config import Config, Group

layers = {f"layers.{i}" for i in range(100)}  # a set has another order in each process
fields = [
    ("model_name", "org/model"),
    ("dtype", "bfloat16"),
    ("tokens_per_hash", 16),
    ("kv_cache_groups", (Group(tokens_per_block=16, layer_names=tuple(sorted(layers))),)),
    ("tp_size", 2),
    ("revision", "main"),
    ("prefix_hash", "sha256"),
]
random.shuffle(fields)
print(Config(**dict(fields)).digest)
"""


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(None, id="A32-unset"),
        pytest.param("0", id="A32-0"),
        pytest.param("1", id="A32-1"),
    ],
)
def test_every_process_computes_the_same_digest(seed: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    told = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "861853dbb24d"


# ---- what needs a path of its own


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "bfloat16"}, id="A4-bf16-and-fp16"),
        pytest.param({"revision": "8fc1de9a"}, id="A6-revision"),
        pytest.param({"replicated_layout": True}, id="A9-replicated"),
        pytest.param({"canonical_format": "v1-nhd"}, id="A10-v1-nhd"),
        pytest.param({"canonical_format": "v1-hnd"}, id="A10-v1-hnd"),
        pytest.param(
            {"kv_cache_groups": (Group(tokens_per_block=32, layer_names=OPT_LAYERS),)},
            id="A24-tokens-per-block",
        ),
        pytest.param(
            {"kv_cache_groups": (Group(tokens_per_block=16, layer_names=OPT_LAYERS[1:]),)},
            id="layer-names",
        ),
        pytest.param({"dtype": "fp8"}, id="B7-fp8"),
        pytest.param({"dtype": "fp8_e5m2"}, id="B7-fp8-of-the-same-width"),
        pytest.param({"model_config_digest": "0123456789ab"}, id="rope-and-overrides"),
        pytest.param({"weights_digest": "ba9876543210"}, id="B8-weights"),
        pytest.param({"prefix_hash": "sha256:0"}, id="hash-algorithm"),
        pytest.param({"prefix_hash": "sha256:1"}, id="hash-seed"),
        pytest.param({"model_name": "facebook_opt-125m"}, id="name-of-the-same-label"),
        pytest.param({"tokens_per_hash": 32}, id="tokens-per-hash"),
        pytest.param({"blocks_per_file": 2}, id="blocks-per-file"),
        pytest.param({"inference_engine": "sglang"}, id="engine"),
        pytest.param({"parallel_agnostic": False}, id="not-agnostic"),
    ],
)
def test_another_value_is_another_path(changes: dict[str, Any]) -> None:
    assert namespace_path(changed(**changes)) != namespace_path(OPT)


def test_no_two_values_of_one_field_share_a_path() -> None:
    tried = [
        *(changed(dtype=d) for d in ("float16", "bfloat16", "fp8", "fp8_e5m2")),
        *(changed(canonical_format=f) for f in ("v1-nhd", "v1-hnd")),
        *(changed(revision=r) for r in ("a", "b", "")),
        *(changed(weights_digest=r) for r in ("a", "b")),
        *(changed(model_config_digest=r) for r in ("a", "b")),
        *(changed(prefix_hash=r) for r in ("a", "b")),
        changed(replicated_layout=True),
    ]
    assert len({namespace_path(config) for config in tried}) == len(tried)


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "pcp_size", "dcp_size"])
def test_sizes_are_folded_only_where_they_do_not_matter(size: str) -> None:
    assert changed(**{size: 4}) == OPT
    assert changed(**{size: 4}).fields() == OPT_FIELDS
    assert changed(parallel_agnostic=False, **{size: 4}).fields()[size] == 4


def test_ranks_that_replicate_share_one_path_at_every_size() -> None:  # A9
    tp2, tp4 = (changed(replicated_layout=True, tp_size=size) for size in (2, 4))
    assert namespace_path(tp2) == namespace_path(tp4)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"dtype": "auto"}, "dtype: expected a resolved", id="A4-auto"),
        pytest.param({"dtype": ""}, "dtype: expected a resolved", id="no-dtype"),
        pytest.param({"model_name": ""}, "model_name: expected a name", id="A45-empty"),
        pytest.param({"model_name": "a\0b"}, "model_name: expected a name", id="A45-NUL"),
    ],
)
def test_what_must_never_be_hashed_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        changed(**changes)
    with pytest.raises(ValueError, match=problem):
        Config.from_fields(OPT_FIELDS | changes, where="config")


# ---- to JSON and back


@unhurried
@given(configs)
def test_a_config_comes_back_from_its_fields_as_it_was(config: Config) -> None:
    stored = json.loads(json.dumps(config.fields()))
    found = Config.from_fields(stored, where="config")
    assert found == config
    assert found.digest == config.digest
    assert config.differences(found) == ()


@pytest.mark.parametrize("name", ["model_name", "dtype", "tokens_per_hash"])
def test_a_missing_field_is_refused(name: str) -> None:
    stored = {k: v for k, v in OPT_FIELDS.items() if k != name}
    with pytest.raises(InvalidInputError, match=rf"config\.{name}: .*found none"):
        Config.from_fields(stored, where="config")


@pytest.mark.parametrize("stored", [None, [], "config", 3])
def test_what_is_not_an_object_is_refused(stored: object) -> None:
    with pytest.raises(InvalidInputError, match="config: expected an object"):
        Config.from_fields(stored, where="config")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("tp_sizes", 1, r"'tp_sizes'.*Did you mean 'tp_size'"),
        ("model_name", None, r"config\.model_name: expected str"),
        ("model_name", ["a"], r"config\.model_name: expected str"),
        ("dtype", 16, r"config\.dtype: expected str"),
        ("tokens_per_hash", True, r"config\.tokens_per_hash: expected int, found True"),
        ("tokens_per_hash", "16", r"config\.tokens_per_hash: expected int"),
        ("blocks_per_file", 1.0, r"config\.blocks_per_file: expected int, found 1\.0"),
        ("tp_size", None, r"config\.tp_size: expected int"),
        ("parallel_agnostic", 1, r"config\.parallel_agnostic: expected bool"),
        ("replicated_layout", "no", r"config\.replicated_layout: expected bool"),
        ("canonical_format", 1, r"config\.canonical_format: expected str"),
        ("revision", 7, r"config\.revision: expected str"),
        ("kv_cache_groups", {}, r"config\.kv_cache_groups: expected a list"),
        ("kv_cache_groups", [1], r"config\.kv_cache_groups\[0\]: expected an object"),
        (
            "kv_cache_groups",
            [{"tokens_per_block": 16}],
            r"config\.kv_cache_groups\[0\]\.layer_names: .*found none",
        ),
        (
            "kv_cache_groups",
            [{"tokens_per_block": True, "layer_names": []}],
            r"config\.kv_cache_groups\[0\]\.tokens_per_block: expected int",
        ),
        (
            "kv_cache_groups",
            [{"tokens_per_block": 16, "layer_names": [], "kind": "mamba"}],
            r"config\.kv_cache_groups\[0\]: unknown option 'kind'",
        ),
    ],
)
def test_a_malformed_field_is_refused(name: str, value: object, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Config.from_fields(OPT_FIELDS | {name: value}, where="config")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_name": None}, r"config\.model_name: expected str, found None"),
        ({"tokens_per_hash": "16"}, r"config\.tokens_per_hash: expected int, found '16'"),
        ({"tokens_per_hash": True}, r"config\.tokens_per_hash: expected int, found True"),
        ({"tp_size": np.int64(2)}, r"config\.tp_size: expected int, found np\.int64\(2\)"),
        ({"parallel_agnostic": 1}, r"config\.parallel_agnostic: expected bool, found 1"),
        ({"revision": 7}, r"config\.revision: expected str, found 7"),
        ({"kv_cache_groups": 1}, r"config\.kv_cache_groups: expected a list, found 1"),
    ],
)
def test_a_config_that_nobody_could_read_is_not_made(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        replace(Config.from_fields(OPT_FIELDS, where="config"), **changes)


def test_a_group_that_nobody_could_read_is_not_made() -> None:
    lists: Any = ["a", "b"]
    assert Group(tokens_per_block=16, layer_names=lists).layer_names == ("a", "b")
    wrong: Any = 16.0
    with pytest.raises(InvalidInputError, match=r"group\.tokens_per_block: expected int"):
        Group(tokens_per_block=wrong, layer_names=())


# ---- what differs


def test_every_field_that_differs_is_listed() -> None:
    stored = changed(dtype="bfloat16", revision="8fc1de9a", tokens_per_hash=32)
    assert set(OPT.differences(stored)) == {
        Difference("dtype", "float16", "bfloat16"),
        Difference("tokens_per_hash", 16, 32),
        Difference("revision", None, "8fc1de9a"),
    }


@pytest.mark.parametrize("name", OPTIONAL)
def test_unknown_equals_only_unknown(name: str) -> None:
    known = changed(**{name: OPTIONAL[name]})
    assert OPT.differences(OPT) == ()
    assert OPT.differences(known) == (Difference(name, None, OPTIONAL[name]),)
    assert known.differences(OPT) == (Difference(name, OPTIONAL[name], None),)


def test_not_agnostic_differs_from_agnostic() -> None:
    [difference] = OPT.differences(changed(parallel_agnostic=False))
    assert difference.field == "parallel_agnostic"


def test_no_field_escapes_the_comparison() -> None:
    named = changed(**OPTIONAL, parallel_agnostic=False).fields()
    assert {field.name for field in fields(Config)} == named.keys()


# ---- parallel_agnostic is proved, not believed

LENGTHS = {"worker": 2, "layer": 12, "block": 4, "head": 12, "token": 16, "value": 128}


def laid_out(*axes: str) -> Layout:
    lengths = LENGTHS | {"packed": 2048}
    return Layout(axes=axes, shape=tuple(lengths[a] for a in axes), dtype="float16")


HEAD_OUTERMOST = [
    pytest.param(laid_out("head", "layer", "token", "value"), id="v1-cross-layer"),
    pytest.param(laid_out("head", "layer", "packed"), id="head-first-tiles"),
]
OTHERWISE = [
    pytest.param(laid_out("layer", "head", "token", "value"), id="A2-LBHNC"),
    pytest.param(laid_out("layer", "token", "head", "value"), id="LBNHC"),
    pytest.param(laid_out("worker", "head", "layer", "token", "value"), id="rank-major"),
    pytest.param(laid_out("block", "head", "layer", "token", "value"), id="BHLNC"),
    pytest.param(laid_out("token", "head", "value"), id="token-outermost"),
    pytest.param(Layout.of_bytes(9, dtype="float16", reason="mamba"), id="opaque"),
]
ONE_COPY = [
    pytest.param({"replicated_layout": True}, id="replicated"),
    pytest.param({"canonical_format": "v1-hnd"}, id="canonical"),
]


@pytest.mark.parametrize("layout", HEAD_OUTERMOST)
def test_heads_outermost_prove_a_claim(layout: Layout) -> None:
    assert prove_parallel_agnostic(layout, claimed=True)


@pytest.mark.parametrize("layout", OTHERWISE)
def test_a_claim_alone_is_not_believed(layout: Layout) -> None:
    assert not prove_parallel_agnostic(layout, claimed=True)


@pytest.mark.parametrize("one_copy", ONE_COPY)
@pytest.mark.parametrize("layout", HEAD_OUTERMOST + OTHERWISE)
def test_one_copy_of_what_every_rank_holds_proves_a_claim(
    layout: Layout, one_copy: dict[str, Any]
) -> None:
    assert prove_parallel_agnostic(layout, claimed=True, **one_copy)


@pytest.mark.parametrize("one_copy", [pytest.param({}, id="direct"), *ONE_COPY])
@pytest.mark.parametrize("layout", HEAD_OUTERMOST + OTHERWISE)
def test_what_is_not_claimed_is_not_so(layout: Layout, one_copy: dict[str, Any]) -> None:
    assert not prove_parallel_agnostic(layout, claimed=False, **one_copy)
