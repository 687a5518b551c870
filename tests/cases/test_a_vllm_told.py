"""Reports on vLLM's native KV offload: what a tier keeps in order, and what it tells.

docs/cases.md says what was reported for each row, and where.
"""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from faulty import Faulty, Gate
from specs import (
    Rows,
    keys_of,
    look_up,
    offloading_config,
    open_tier,
    run_job,
    submit,
    until_found,
)
from test_scratch import killed, writer
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from work import until

from kvstore import InvalidInputError, StorageError
from kvstore.collector import Collector, Limits
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root
from kvstore.upkeep import Upkeep
from kvstore.vllm import KVStoreTier, hits
from kvstore.vllm.metrics import USED

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

Tiers = list[SecondaryTierManager]

PAGE_BYTES = 4096


def small_rows(count: int = 16, *, shared: bool = False, events: bool = True) -> Rows:
    config = offloading_config(
        worker_kv_bytes_per_block=PAGE_BYTES, enable_kv_cache_events=events
    )
    rows = Rows(config, count, shared=shared)
    rows.fill()
    return rows


def work(
    tier: SecondaryTierManager, operation: str, keys: list[Any], slots: list[int]
) -> JobResult:
    """One job, step by step: draining would be a reset of vLLM's caches."""
    submit(tier, 1, operation, keys, slots)
    results: list[JobResult] = []

    def step() -> bool:
        tier.on_schedule_end(ScheduleEndContext((), ()))
        results.extend(tier.get_finished_jobs())
        return bool(results)

    until(step)
    return results[0]


# ---- what is left behind


@pytest.mark.parametrize("shared", [False, True], ids=["threads", "processes"])
def test_a17_a_start_removes_what_killed_writers_left(
    tmp_path: Path, shared: bool, tiers: Tiers
) -> None:
    """And nothing of a writer that lives, of others, or behind a link."""
    root, outside = tmp_path / "kv", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "file").write_text("precious")
    left = killed(root)
    foreign = root / TEMPORARY / "download.tmp"
    foreign.write_text("half")
    boot = left.name.partition("-")[0]
    link = root / TEMPORARY / f"{boot}-{0:016x}-0"  # a writer's name, and the first one
    for name in (link, left / "link"):
        name.symlink_to(outside)
    with writer(root) as (process, built):
        open_tier(tiers, Root(str(root)), small_rows(shared=shared), processes=1)
        until(lambda: not left.exists())
        assert process.communicate("go on\n")[0] == "True\n"
    assert not built.exists()
    assert (root / "a/b/c").read_bytes() == b"chunk"
    assert foreign.read_text() == "half"
    assert (link / "file").read_text() == "precious"


def test_a17_a_sweep_that_fails_stops_no_start(
    tmp_path: Path,
    tiers: Tiers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: Collector) -> None:
        raise StorageError("kv", "sweep", "Input/output error")

    monkeypatch.setattr(Collector, "sweep", fail)
    tier = open_tier(tiers, Root(str(tmp_path)), small_rows(), processes=0)
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert work(tier, "store", keys_of(1), [0]).success

        def swept() -> bool:
            assert not list(tier.get_finished_jobs())
            return "upkeep failed" in caplog.text

        until(swept)
    assert "upkeep failed: sweep" in caplog.text
    assert "cannot sweep kv: Input/output error" in caplog.text


LIMIT = 1_000_000


def test_a45_what_lies_there_counts_after_a_restart(tmp_path: Path, tiers: Tiers) -> None:
    """Of two engines, one after the other, neither has the whole limit for itself."""
    root, rows = Root(str(tmp_path)), small_rows(150)
    first, second = keys_of(150), keys_of(150)
    tier = open_tier(tiers, root, rows, max_bytes=LIMIT, processes=0)
    assert work(tier, "store", first, list(range(150))).success
    tier.shutdown()
    tier = open_tier(tiers, root, rows, max_bytes=LIMIT, processes=0)
    used: list[int] = []

    def collected() -> bool:
        tier.on_schedule_end(ScheduleEndContext((), ()))
        tier.get_finished_jobs()
        stats = tier.get_stats()
        used.extend(stats.data["data"].get(USED, {}).values() if stats else ())
        return bool(used)

    until(collected)
    assert used[0] > LIMIT / 2  # before it has stored anything
    assert work(tier, "store", second, list(range(150))).success
    tier.shutdown()
    left = Collector(Upkeep(tmp_path), Limits(None, None, 1e9)).collect().used
    assert LIMIT / 2 < left <= LIMIT


# ---- lookups


def test_a21_blocks_that_are_never_found_are_said_once(
    tmp_path: Path,
    tiers: Tiers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hits, "PATIENCE", 0.0)
    tier = open_tier(tiers, Root(str(tmp_path)), small_rows(), processes=0)
    stored = keys_of(3)
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert run_job(tier, "store", stored, [0, 1, 2]).success
        for request in "abc":
            keys = keys_of(hits.LOOKUPS // 2)
            assert look_up(tier, keys, request) == [MISS] * len(keys)
    [line] = [r.getMessage() for r in caplog.records if r.name == hits.__name__]
    assert line.startswith("no hit among 1000 lookups in 0 s, while 3 blocks were stored")
    # A hole in a prefix takes nothing from its neighbours.
    asked = [stored[0], *keys_of(1), stored[2], stored[1]]
    assert look_up(tier, asked, "d") == [HIT, MISS, HIT, HIT]


def test_a39_no_lookup_waits_and_none_is_asked_for_ever(tiers: Tiers) -> None:
    faulty, rows, keys = Faulty(), small_rows(), keys_of(500)
    writer = open_tier(tiers, faulty.root, rows, processes=0)
    assert run_job(writer, "store", keys, [n % 16 for n in range(500)]).success
    tier = open_tier(tiers, faulty.root, rows, processes=0, lookup_timeout=0.2)
    gate = Gate(lambda request, path: request == "get")
    faulty.before = gate
    context = ReqContext("r")
    try:
        for _ in range(2):
            assert [tier.lookup(key, context) for key in keys] == [RETRY] * 500
            tier.on_schedule_end(ScheduleEndContext((), ()))
        assert gate.waiting.acquire(timeout=60)
        assert look_up(tier, keys) == [MISS] * 500
        assert not gate.opened.is_set()
    finally:
        gate.opened.set()
    assert [tier.lookup(key, context) for key in keys] == [MISS] * 500  # as it was told
    tier.on_request_finished(context)
    until_found(tier, keys[0])


# ---- events


def told(tier: SecondaryTierManager) -> list[tuple[bool, set[bytes]]]:
    return [(event.removed, set(event.keys)) for event in tier.take_events()]


def test_a29_events_are_of_stores_that_succeeded(tiers: Tiers) -> None:
    faulty = Faulty()
    tier = open_tier(tiers, faulty.root, small_rows(), processes=0, enable_kv_events=True)
    keys = keys_of(4)

    def fail(request: str, path: str) -> None:
        if request == "put" and keys[2].hex() in path:
            raise OSError(errno.ENOSPC, "No space left on device")

    faulty.before = fail
    assert not work(tier, "store", keys, [0, 1, 2, 3]).success
    there = [keys[0], keys[1], keys[3]]
    assert told(tier) == [(False, set(there))]
    assert work(tier, "load", there, [4, 5, 6]).success
    look_up(tier, keys)
    assert told(tier) == []


def test_a29_without_vllms_own_events_there_are_none(
    tmp_path: Path, tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    rows = small_rows(events=False)
    with caplog.at_level(logging.WARNING, "kvstore"):
        tier = open_tier(tiers, Root(str(tmp_path)), rows, enable_kv_events=True)
    assert "enable_kv_events is set, but vLLM's own events are off" in caplog.text
    assert work(tier, "store", keys_of(1), [0]).success
    assert told(tier) == []


@pytest.mark.parametrize("locality", [None, "LOCAL", "REMOTE"])
def test_a30_an_event_says_where(
    tmp_path: Path, locality: str | None, tiers: Tiers
) -> None:
    options = {} if locality is None else {"locality": locality}
    tier = open_tier(
        tiers, Root(str(tmp_path)), small_rows(), enable_kv_events=True, **options
    )
    assert work(tier, "store", keys_of(1), [0]).success
    [event] = tier.take_events()
    assert event.medium is Medium.STORAGE is KVStoreTier.medium
    assert event.locality is (None if locality is None else Locality(locality))


def test_a30_another_place_is_refused(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(InvalidInputError, match="locality: expected one of"):
        open_tier(tiers, Root(str(tmp_path)), small_rows(), locality="NEARBY")


def test_a31_what_is_stored_again_is_not_told_again(tmp_path: Path, tiers: Tiers) -> None:
    tier = open_tier(tiers, Root(str(tmp_path)), small_rows(), enable_kv_events=True)
    keys = keys_of(2)
    assert work(tier, "store", keys, [0, 1]).success
    assert told(tier) == [(False, set(keys))]
    for again in (keys[:1], keys):
        assert work(tier, "store", again, list(range(len(again)))).success
        assert told(tier) == []
