"""What vLLM's own tiers do, and what kvstore's does instead, through vLLM's factory.

docs/cases.md says what was read there, and where.
"""

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from faulty import Faulty, Gate
from specs import (
    LAYERS,
    Rows,
    Spec,
    keys_of,
    look_up,
    model_config,
    offloading_config,
    open_tier,
    run_job,
    submit,
    tensors,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from work import PATIENCE

from kvstore import LayoutMismatchError
from kvstore.testing import Root
from kvstore.vllm import KVStoreTier
from kvstore.vllm.identity import known_identity, offloading_identity
from kvstore.vllm.layout import engine_layout

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

pytestmark = pytest.mark.usefixtures("accelerator")

Tiers = list[SecondaryTierManager]


def path_of_vllm(config: Any) -> str:
    """Where vLLM's own tier would keep the blocks of a configuration."""
    mapper = FileMapper.from_offloading_spec(
        "/root", Spec(config), blocks_per_file=1, parallel_agnostic=True
    )
    return str(mapper.base_path)


UNNAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kv_cache_layout": ({"kv_cache_layout": "LBNHC"}, {}),
    "page bytes": ({"worker_kv_bytes_per_block": 589_824 * 2}, {}),
    "workers": ({"world_size": 2}, {}),
    "heads": ({}, {"kv_heads": 6, "head_size": 128}),
}


@pytest.mark.parametrize("field", UNNAMED)
def test_s1_fields_that_vllms_path_leaves_out_are_compared(
    root: Root, field: str, tiers: Tiers
) -> None:
    """One folder in vLLM; here the recorded layout is compared, and the start refused."""
    changes, known = UNNAMED[field]
    plain = {"kv_heads": 12, "head_size": 64} if known else {}
    ours, theirs = offloading_config(), offloading_config(**changes)
    assert path_of_vllm(ours) == path_of_vllm(theirs)
    keys = keys_of(1)
    rows = Rows(ours)
    rows.fill()
    assert run_job(open_tier(tiers, root, rows, **plain), "store", keys, [0]).success
    with pytest.raises(LayoutMismatchError):
        open_tier(tiers, root, Rows(theirs), **known)
    other = open_tier(tiers, root, Rows(theirs), on_mismatch="isolate", **known)
    assert look_up(other, keys) == [MISS]


def test_s1_groups_are_told_apart_by_their_number(tmp_path: Path, tiers: Tiers) -> None:
    """Not by their place in a list, which is all that vLLM's path has."""
    both = [
        offloading_config(groups=((0, 16, LAYERS[:6]), (number, 16, LAYERS[6:])))
        for number in (1, 2)
    ]
    assert path_of_vllm(both[0]) == path_of_vllm(both[1])
    ours, theirs = (open_tier(tiers, Root(str(tmp_path)), Rows(each)) for each in both)
    keys = [*keys_of(1, 0), *keys_of(1, 1)]
    assert run_job(ours, "store", keys, [0, 1]).success
    assert look_up(ours, keys) == [HIT, HIT]
    assert look_up(theirs, keys) == [HIT, MISS]


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "b" * 40},
        {"text": {"rope_parameters": {"rope_theta": 1e6}}},
        {"text": {"sliding_window": 512}},
        {"disable_sliding_window": True},
    ],
    ids=["revision", "RoPE", "kind of group", "kind of group by option"],
)
def test_s1_what_changes_the_values_names_another_path(changes: dict[str, Any]) -> None:
    config = offloading_config()
    layout = engine_layout([tensors()], config, "v2")
    digests = {
        offloading_identity(config, layout, known=known_identity(model)).digest
        for model in (
            model_config(revision="a" * 40),
            model_config(**{"revision": "a" * 40, **changes}),
        )
    }
    assert len(digests) == 2


def test_s5_an_outage_is_said_and_not_kept(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    """The request goes on without the block; it is found when storage is back."""
    faulty = Faulty()
    tier = open_tier(tiers, faulty.root, Rows(offloading_config()))
    keys = keys_of(3)
    assert run_job(tier, "store", keys, [0, 1, 2]).success
    reader = open_tier(tiers, faulty.root, Rows(offloading_config()))

    def fail(request: str, path: str) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    faulty.before = fail
    caplog.clear()
    assert look_up(reader, keys, "during") == [MISS] * 3
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("lookup of 3 of 3 blocks failed, and 0 since")
    assert "No route to host" in record.getMessage()
    faulty.before = lambda request, path: None
    reader.on_request_finished(ReqContext("during"))
    assert look_up(reader, keys, "after") == [HIT] * 3


def test_s6_what_vllms_factory_hands_over(tmp_path: Path, tiers: Tiers) -> None:
    """A detector always, other fields as keywords, and numbers of chunks as int32."""
    rows = Rows(offloading_config())
    view: Any = rows.array
    tier = SecondaryTierFactory.create_secondary_tier(
        {
            "type": "KVStoreTier",
            "module_path": "kvstore.vllm",
            "url": str(tmp_path),
            "threads": 2,
        },
        memoryview(view),
        Spec(rows.config),
    )
    tiers.append(tier)
    assert isinstance(tier, KVStoreTier)
    assert tier.tier_type == "KVStoreTier"
    assert tier.options.threads == 2
    chunks = np.array([3, 1], np.int32)
    keys = keys_of(2)
    tier.submit_store(TransferJob(1, keys, chunks, False, ReqContext("r")))
    tier.drain_jobs()
    [result] = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (1, True)


def test_s6_a_type_that_is_no_class_is_refused(tmp_path: Path) -> None:
    """`type` is the class's name where `module_path` is given."""
    rows = Rows(offloading_config())
    view: Any = rows.array
    config = {"type": "kvstore", "module_path": "kvstore.vllm", "url": str(tmp_path)}
    with pytest.raises((ValueError, AttributeError), match="kvstore"):
        SecondaryTierFactory.create_secondary_tier(
            config, memoryview(view), Spec(rows.config)
        )


def test_s7_no_call_waits_for_storage(tiers: Tiers) -> None:
    """While every request hangs, each of vLLM's calls returns and nothing is reported."""
    faulty = Faulty()
    tier = open_tier(tiers, faulty.root, Rows(offloading_config()), threads=2)
    gate = Gate(lambda request, path: True)
    faulty.before = gate
    keys, context = keys_of(40), ReqContext("r")
    try:
        tier.on_new_request(context)
        submit(tier, 1, "store", keys[:16], list(range(16)))
        submit(tier, 2, "load", keys[16:32], list(range(16)))
        for _ in range(3):
            assert [tier.lookup(key, context) for key in keys] == [RETRY] * 40
            tier.on_schedule_end(ScheduleEndContext((), ()))
            assert list(tier.get_finished_jobs()) == []
        assert gate.waiting.acquire(timeout=60)
    finally:
        gate.opened.set()
    tier.drain_jobs()
    results = {result.job_id: result.success for result in tier.get_finished_jobs()}
    assert results == {1: True, 2: False}


def test_s7_lookups_go_out_together(tiers: Tiers) -> None:
    """Eight at once for two threads: none is answered before all eight have been asked."""
    faulty = Faulty()
    rows = Rows(offloading_config())
    keys = keys_of(16)
    writer = open_tier(tiers, faulty.root, rows)
    assert run_job(writer, "store", keys, list(range(16))).success
    tier = open_tier(tiers, faulty.root, rows, threads=2)
    together = threading.Barrier(8)

    def meet(request: str, path: str) -> None:
        together.wait(PATIENCE)

    faulty.before = meet
    assert look_up(tier, keys) == [HIT] * 16  # a lookup that fails is a miss


def test_s7_nothing_touches_the_rows_after_drain(tiers: Tiers) -> None:
    faulty = Faulty()
    rows = Rows(offloading_config(worker_kv_bytes_per_block=4096))
    rows.fill()
    before = rows.array.copy()
    tier = open_tier(tiers, faulty.root, rows, threads=2)
    gate = Gate(lambda request, path: request == "put" and path.endswith("/c.0"))
    faulty.before = gate
    keys = keys_of(16)
    submit(tier, 1, "store", keys, list(range(16)))
    drained = threading.Event()

    def drain() -> None:
        tier.drain_jobs()
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        assert gate.waiting.acquire(timeout=60)
        assert not drained.wait(0.02)
    finally:
        gate.opened.set()
    thread.join(60)
    assert drained.is_set()
    rows.array[:] = 0  # the engine has other uses for them now
    [result] = tier.get_finished_jobs()
    assert result.success
    assert run_job(tier, "load", keys, list(range(16))).success
    assert (rows.array == before).all()
