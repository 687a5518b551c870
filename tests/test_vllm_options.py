"""Options of a tier reach its stores, and what probes the URL before them."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from specs import Rows, look_up, make_tier, offloading_config, run_job
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore import InvalidInputError
from kvstore.vllm.connector import inject_tier, probe_tiers
from kvstore.vllm.options import TierOptions


@pytest.fixture
def tiers() -> Iterator[list[SecondaryTierManager]]:
    opened: list[SecondaryTierManager] = []
    yield opened
    for tier in opened:
        tier.shutdown()


def test_a_reader_writes_nothing(tmp_path: Path, tiers: list[SecondaryTierManager]) -> None:
    extra = {"url": str(tmp_path / "kv"), "read_only": True}
    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=dict(extra),
    )
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    inject_tier(config)
    probe_tiers(config)
    tiers.append(make_tier(Rows(offloading_config()), {**extra, "processes": 0}))
    key = make_offload_key(bytes(32), 0)
    assert look_up(tiers[0], [key]) == [LookupResult.MISS]
    assert os.listdir(tmp_path) == []


def test_blocks_are_fsynced_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: list[SecondaryTierManager]
) -> None:
    synced, usual = [], os.fsync

    def fsync(descriptor: int) -> None:
        usual(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    for option in (False, True):
        options = {"url": str(tmp_path / str(option)), "processes": 0, "fsync": option}
        tiers.append(make_tier(Rows(offloading_config()), options))
        monkeypatch.setattr(os, "fsync", fsync)
        assert run_job(tiers[-1], "store", [make_offload_key(bytes(32), 0)], [0]).success
        monkeypatch.undo()
        assert any("/c.0" in name for name in synced) == option


LONG = "x" * 5000


@pytest.mark.parametrize(
    "options",
    [
        *({name: LONG} for name in ("client", "on_mismatch", "codec", "locality")),
        *({name: 10**4000} for name in ("threads", "max_age", "processes")),
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_error_repeats_the_beginning_of_a_value(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        TierOptions.parse({"url": "kv", **options}, where="tier")
    assert next(iter(options)) in str(caught.value)
    assert len(str(caught.value)) < 500
