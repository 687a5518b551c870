"""What a tier tells vLLM: metrics, events and its configuration, without an engine."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from dashboard import explained, expressions, family, shown
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from specs import Rows, look_up, make_tier, offloading_config, run_job
from test_vllm_connector import vllm_config
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from work import until

from kvstore.collector import Collected
from kvstore.job import Job, Outcome
from kvstore.parts import Operation
from kvstore.vllm import KVStoreConnector, KVStoreTier
from kvstore.vllm.connector import ConnectorTier
from kvstore.vllm.events import Events
from kvstore.vllm.metrics import (
    BLOCKS,
    CIRCUIT,
    DEFINITIONS,
    ERRORS,
    EVICTED,
    LIMIT,
    MOVED,
    NOT_TRIED,
    QUEUED,
    SECONDS,
    USED,
    TierMetrics,
)

NBYTES = 8192
HIT, MISS = LookupResult.HIT, LookupResult.MISS

Open = Callable[..., KVStoreTier]


@pytest.fixture
def open_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Open]:
    """Makes tiers on small rows that are shut down at the end."""
    made: list[KVStoreTier] = []

    def make(*, events: bool = False, **options: Any) -> KVStoreTier:
        config = offloading_config(
            worker_kv_bytes_per_block=NBYTES, enable_kv_cache_events=events
        )
        rows = Rows(config)
        rows.fill()
        tier = make_tier(rows, {"url": str(tmp_path), **options})
        assert isinstance(tier, KVStoreTier)
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.shutdown()


def keys_of(count: int) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def damage(folder: Path, key: bytes) -> None:
    [chunk] = folder.rglob(f"{key.hex()}/c.0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))


class FrontEnd:
    """vLLM's own registration of metrics, in a registry of its own, for two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kinds: Any = {
            kind: partial(kind, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)
        }
        engines = {0: ["m", "0"], 1: ["m", "1"]}
        self._metrics = KVStoreConnector.build_prom_metrics(
            vllm_config(url="kv"), kinds, ["model_name", "engine"], engines
        )

    def scrape(self, tier: KVStoreTier, engine: int = 0) -> None:
        """Take a tier's numbers to the front end."""
        if (stats := tier.get_stats()) is not None:
            self.observe(stats, engine)

    def observe(self, stats: OffloadingConnectorStats, engine: int = 0) -> None:
        """Through the encoding in which they reach its process."""
        wire = msgspec.msgpack.encode(stats.to_dict())
        self._metrics.observe(msgspec.msgpack.decode(wire, strict=False), engine)

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        of = {"model_name": "m", "engine": str(engine), **labels}
        found: float | None = self.registry.get_sample_value(name, of)
        return found


class TestMetrics:
    def test_the_life_of_some_blocks(self, tmp_path: Path, open_tier: Open) -> None:
        tier, front = open_tier(), FrontEnd()
        keys = keys_of(3)
        assert run_job(tier, "store", keys, [0, 1, 2]).success
        assert run_job(tier, "store", keys[:1], [0]).success
        assert look_up(tier, [*keys, *keys_of(2)]) == [HIT] * 3 + [MISS] * 2
        damage(tmp_path, keys[1])
        assert not run_job(tier, "load", keys, [3, 4, 5]).success
        tier.on_request_finished(ReqContext("r"))
        assert run_job(tier, "store", [keys[1]], [1]).success
        front.scrape(tier)
        blocks = partial(front.value, f"{BLOCKS}_total")
        assert blocks(operation="store", result="stored") == 3
        assert blocks(operation="store", result="kept") == 1
        assert blocks(operation="store", result="repaired") == 1
        assert blocks(operation="lookup", result="found") == 3
        assert blocks(operation="lookup", result="absent") == 2
        assert blocks(operation="load", result="loaded") == 2
        assert blocks(operation="load", result="damaged") == 1
        moved = partial(front.value, f"{MOVED}_total")
        assert moved(operation="store") == 4 * NBYTES  # nothing was written of what is kept
        assert moved(operation="load") == 2 * NBYTES
        for operation, jobs in (("store", 3), ("load", 1)):
            assert front.value(f"{SECONDS}_count", operation=operation) == jobs
            assert front.value(QUEUED, operation=operation) == 0
        assert not front.value(f"{ERRORS}_total", operation="load", kind="other")

    def test_every_series_of_a_counter_is_there_before_anything_happens(
        self, open_tier: Open
    ) -> None:
        tier, front = open_tier(), FrontEnd()
        front.scrape(tier)
        assert front.value(f"{ERRORS}_total", operation="load", kind="timeout") == 0
        assert front.value(f"{NOT_TRIED}_total", operation="store", reason="read_only") == 0
        assert front.value(f"{EVICTED}_total", reason="expired") == 0
        assert front.value(CIRCUIT, direction="read") == 0
        assert front.value(QUEUED, operation="lookup") == 0
        assert front.value(USED) is None  # nobody counts them, so nobody says 0
        assert tier.get_stats() is None

    def test_engines_are_told_apart(self, open_tier: Open) -> None:
        tier, front = open_tier(), FrontEnd()
        run_job(tier, "store", keys_of(2), [0, 1])
        front.scrape(tier, engine=1)
        of = {"operation": "store", "result": "stored"}
        assert front.value(f"{BLOCKS}_total", 1, **of) == 2
        assert front.value(f"{BLOCKS}_total", 0, **of) is None

    def test_a_failure_is_counted_by_its_kind(self) -> None:
        metrics = TierMetrics(NBYTES)
        words = ["failed", "timeout", "refused", "timeout", "absent", "loaded"]
        end(metrics, "load", words)
        values = taken(metrics)
        assert values[ERRORS] | {("store", "other"): 0} == values[ERRORS]
        assert values[ERRORS]["load", "timeout"] == 2
        assert values[ERRORS]["load", "access"] == values[ERRORS]["load", "other"] == 1
        assert values[BLOCKS]["load", "failed"] == 4
        assert values[BLOCKS]["load", "absent"] == values[BLOCKS]["load", "loaded"] == 1
        assert values[MOVED]["load",] == NBYTES

    def test_storage_that_cannot_be_used(self, tmp_path: Path, open_tier: Open) -> None:
        tier, front = open_tier(), FrontEnd()
        [fan_outs] = tmp_path.glob("*/r0/g0")
        for file in fan_outs.iterdir():
            file.unlink()
        fan_outs.rmdir()
        fan_outs.write_text("no folder")
        assert not run_job(tier, "store", keys_of(2), [0, 1]).success
        front.scrape(tier)
        failed = front.value(f"{BLOCKS}_total", operation="store", result="failed")
        kinds = [
            front.value(f"{ERRORS}_total", operation="store", kind=kind)
            for kind in ("other", "timeout", "access")
        ]
        assert failed == sum(kind or 0 for kind in kinds) == 2

    def test_a_hit_from_memory_is_a_hit(self, open_tier: Open) -> None:
        tier, front = open_tier(url=f"memory://{os.urandom(8).hex()}"), FrontEnd()
        keys = keys_of(2)
        run_job(tier, "store", keys, [0, 1])
        assert look_up(tier, keys) == [HIT, HIT]
        front.scrape(tier)
        assert front.value(f"{BLOCKS}_total", operation="lookup", result="found") == 2
        assert front.value(f"{SECONDS}_count", operation="lookup") is None

    def test_what_waits_is_queued(self) -> None:
        metrics = TierMetrics(NBYTES)
        job = Job(1, "store", keys_of(3), (0, 1, 2))
        metrics.job_submitted(job)
        assert taken(metrics)[QUEUED]["store",] == 3
        metrics.job_ended(Outcome(job, ["stored"] * 3, [None] * 3, {}, 0.5))
        assert taken(metrics)[QUEUED] == {("store",): 0}

    def test_what_the_tier_is_told_by_others(self) -> None:
        metrics = TierMetrics(NBYTES)
        metrics.set_usage(10, None)
        assert LIMIT not in taken(metrics)
        metrics.set_usage(20, 100)
        metrics.evicted("no_room", 7)
        metrics.not_tried("store", "circuit_open", 5)
        metrics.set_circuit(reads_open=False, writes_open=True)
        assert taken(metrics) == {
            USED: {(): 20},
            LIMIT: {(): 100},
            EVICTED: {("no_room",): 7},
            NOT_TRIED: {("store", "circuit_open"): 5},
            CIRCUIT: {("write",): 1},
        }
        metrics.set_usage(20, 100)
        metrics.set_circuit(reads_open=False, writes_open=True)
        assert metrics.take_stats() is None

    def test_every_label_that_is_used_is_defined(self) -> None:
        metrics = TierMetrics(NBYTES)
        metrics.set_usage(1, 1)
        end(metrics, "lookup", ["found"])
        values = taken(metrics)
        assert values.keys() == DEFINITIONS.keys()
        for name, series in values.items():
            assert {len(labels) for labels in series} == {len(DEFINITIONS[name].labelnames)}
            assert all(type(value) is str for labels in series for value in labels)

    @pytest.mark.parametrize("tier", [KVStoreTier, ConnectorTier])
    def test_both_tiers_define_them(self, tier: type[KVStoreTier]) -> None:
        assert tier.build_metric_definitions({"url": "kv"}) == DEFINITIONS


def taken(metrics: TierMetrics) -> dict[str, dict[tuple[str, ...], Any]]:
    stats = metrics.take_stats()
    assert stats is not None
    values: dict[str, dict[tuple[str, ...], Any]] = stats.data["data"]
    return values


def end(to: TierMetrics | Events, operation: Operation, words: list[str]) -> list[bytes]:
    """A job whose keys ended so."""
    keys: list[bytes] = list(keys_of(len(words)))
    job = Job(1, operation, keys, range(len(words)))
    if isinstance(to, TierMetrics):
        to.job_submitted(job)
    to.job_ended(Outcome(job, words, [None] * len(words), {}, 0.1))
    return keys


# ---- events


def told(tier: KVStoreTier) -> list[tuple[str, set[OffloadKey]]]:
    return [
        ("removed" if event.removed else "stored", set(event.keys))
        for event in tier.take_events()
    ]


def work(
    tier: KVStoreTier, operation: str, keys: list[OffloadKey], slots: list[int]
) -> None:
    """One job, polled for as a scheduler does. Draining would be a reset of the caches."""
    job = TransferJob(
        7, keys, np.array(slots, np.int32), operation == "load", ReqContext("r")
    )
    getattr(tier, f"submit_{operation}")(job)
    until(lambda: list(tier.get_finished_jobs()))


class TestEvents:
    def test_the_life_of_some_blocks(self, tmp_path: Path, open_tier: Open) -> None:
        tier = open_tier(events=True, enable_kv_events=True, locality="REMOTE")
        keys = keys_of(3)
        work(tier, "store", keys, [0, 1, 2])
        [event] = tier.take_events()
        assert (event.medium, event.locality) == (Medium.STORAGE, Locality.REMOTE)
        assert (event.ownership, event.removal_expected) == ("kvstore", True)
        assert (event.removed, event.keys) == (False, keys)
        work(tier, "store", keys[:1], [0])  # kept, and known
        look_up(tier, [*keys, *keys_of(1)])
        assert told(tier) == []
        damage(tmp_path, keys[1])
        for _ in range(2):
            work(tier, "load", keys, [3, 4, 5])
        assert told(tier) == [("removed", {keys[1]})]
        work(tier, "store", [keys[1]], [1])
        assert told(tier) == [("stored", {keys[1]})]

    def test_an_absent_block_that_was_announced_is_taken_back_once(
        self, tmp_path: Path, open_tier: Open
    ) -> None:
        tier = open_tier(events=True, enable_kv_events=True)
        keys = keys_of(2)
        work(tier, "store", keys, [0, 1])
        assert told(tier) == [("stored", set(keys))]
        [block] = tmp_path.rglob(keys[0].hex())
        for file in block.iterdir():
            file.unlink()
        block.rmdir()
        for request in ("a", "b"):
            assert look_up(tier, keys, request) == [MISS, HIT]
        assert told(tier) == [("removed", {keys[0]})]

    def test_what_was_evicted_and_then_stored_is_there(self, open_tier: Open) -> None:
        """Both ended since the last look, in this order."""
        tier = open_tier(events=True, enable_kv_events=True)
        keys = keys_of(2)
        work(tier, "store", keys, [0, 1])
        assert told(tier) == [("stored", set(keys))]
        store = Job(7, "store", keys[:1], (0,))
        ended = [
            Collected(0, evicted=2, keys=tuple(keys)),
            Outcome(store, ["stored"], [None], {}, 0.1),
        ]
        tier._opened._ended += ended  # type: ignore[union-attr]  # it is open
        list(tier.get_finished_jobs())
        assert sorted(told(tier)) == [("removed", {keys[1]}), ("stored", {keys[0]})]

    def test_a_block_of_another_engine_is_announced_when_it_is_stored_again(
        self, open_tier: Open
    ) -> None:
        keys = keys_of(1)
        run_job(open_tier(), "store", keys, [0])
        tier = open_tier(events=True, enable_kv_events=True)
        look_up(tier, keys)
        work(tier, "load", keys, [1])
        assert told(tier) == []
        work(tier, "store", keys, [0])
        assert told(tier) == [("stored", set(keys))]

    def test_what_failed_is_not_announced(self) -> None:
        events = Events(None)
        keys = end(events, "store", ["stored", "failed", "timeout", "repaired"])
        [event] = events.take()
        assert event.keys == [keys[0], keys[3]]
        events.job_ended(
            Outcome(Job(2, "load", keys, range(4)), ["failed"] * 4, [None] * 4, {}, 0.1)
        )
        assert events.take() == []

    def test_after_a_reset_they_are_announced_anew(self, open_tier: Open) -> None:
        """vLLM drains its tiers before it clears its caches, and tells consumers to."""
        tier = open_tier(events=True, enable_kv_events=True)
        keys = keys_of(2)
        work(tier, "store", keys, [0, 1])
        assert told(tier) == [("stored", set(keys))]
        tier.drain_jobs()
        assert told(tier) == []
        work(tier, "store", keys[:1], [0])
        assert told(tier) == [("stored", {keys[0]})]

    def test_without_the_option_or_vllms_own_there_are_none(
        self, open_tier: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        silent = open_tier(events=True)
        with caplog.at_level(logging.WARNING, logger="kvstore.vllm.events"):
            logging.getLogger("kvstore").addHandler(caplog.handler)
            inert = open_tier(enable_kv_events=True)
            logging.getLogger("kvstore").removeHandler(caplog.handler)
        assert "Set enable_kv_cache_events in --kv-events-config." in caplog.text
        for tier in (silent, inert):
            work(tier, "store", keys_of(1), [0])
            assert told(tier) == []

    def test_vllm_translates_them(self, open_tier: Open) -> None:
        tier = open_tier(events=True, enable_kv_events=True, locality="LOCAL")
        config = OffloadingKVEventsConfig(
            enable_kv_cache_events=True, self_describing_kv_events=False
        )
        tracker = OffloadingEventsTracker(config)
        keys = keys_of(1)
        work(tier, "store", keys, [0])
        [stored] = tracker.take_events(tier.take_events())
        assert tier.events is not None
        tier.events.removed(keys)
        [removed] = tracker.take_events(tier.take_events())
        assert isinstance(stored, BlockStored)
        assert isinstance(removed, BlockRemoved)
        assert stored.block_hashes == removed.block_hashes
        for event in (stored, removed):
            assert (event.medium, event.locality) == ("STORAGE", "LOCAL")
            assert (event.ownership, event.group_idx) == ("kvstore", 0)


class Few(Events):
    ANNOUNCED = 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "take", "clear"]),
        st.lists(st.integers(0, 7), max_size=4),
    ),
    max_size=40,
)


@pytest.mark.parametrize("obeys", [True, False], ids=["forgets", "ignores"])
@given(steps=STEPS)
def test_consumers_know_what_is_announced(
    obeys: bool, steps: list[tuple[str, list[int]]]
) -> None:
    """Whether or not they forget blocks when vLLM's own caches are cleared."""
    events = Few(None)
    known: set[bytes] = set()
    announced: dict[bytes, None] = {}
    doubted: set[bytes] = set()
    for step, numbers in [*steps, ("take", [])]:
        keys = [bytes([number]) for number in numbers]
        if step == "stored":
            events.stored(keys)
            for key in keys:
                announced.setdefault(key)
                doubted.discard(key)
            while len(announced) > Few.ANNOUNCED:
                announced.pop(next(iter(announced)))
        elif step == "removed":
            events.removed(keys)
            for key in keys:
                announced.pop(key, None)
        elif step == "clear":
            # What waits to be told is told after it.
            events.cleared()
            known = set() if obeys else known
            doubted |= announced.keys()
        else:
            for event in events.take():
                for key in event.keys:
                    (known.discard if event.removed else known.add)(key)
            assert known - doubted == announced.keys() - doubted
            assert known <= announced.keys()
    assert len(events._announced) <= Few.ANNOUNCED


@given(steps=STEPS)
def test_what_nobody_takes_is_bounded(steps: list[tuple[str, list[int]]]) -> None:
    events = Few(None)
    for start in range(10):
        for step, numbers in steps:
            keys = [bytes([start, number]) for number in numbers]
            if step in ("stored", "removed"):
                getattr(events, step)(keys)
            elif step == "clear":
                events.cleared()
        assert len(events._pending) <= 2 * Few.ANNOUNCED


# ---- configuration


@pytest.mark.parametrize("tier_class", [KVStoreTier, ConnectorTier])
def test_config_info_has_every_option_but_secrets(
    tier_class: type[KVStoreTier], open_tier: Open
) -> None:
    tier = open_tier(
        url="memory://kv", storage_options={"token": "hush"}, codec="zstd", threads=3
    )
    info = tier.config_info()
    assert tuple(info) == tier_class.config_info_keys({"url": "memory://kv"})
    assert info["kvstore_url"] == "memory://kv"
    assert info["kvstore_codec"] == "zstd"
    assert info["kvstore_threads"] == "3"
    assert "hush" not in json.dumps(dict(info))
    assert "tier" not in info  # vLLM's own


@pytest.mark.skipif(
    not hasattr(SecondaryTierManager, "config_info_keys"), reason="vLLM has it from 0.33"
)
def test_vllm_shows_the_configuration(open_tier: Open) -> None:
    front, tier = FrontEnd(), open_tier(codec="zstd")
    stats = OffloadingConnectorStats()
    stats.set_info([dict(tier.config_info()) | {"tier": "1:ConnectorTier"}])
    front.observe(stats)
    [labels] = [
        sample.labels
        for metric in front.registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:kv_offload_config_info"
    ]
    assert labels.items() >= tier.config_info().items()
    assert labels["kvstore_codec"] == "zstd"


# ---- what people are told of


@pytest.mark.parametrize("names", [shown, explained], ids=["dashboard", "operations"])
def test_every_metric_that_is_named_is_registered(names: Callable[[], set[str]]) -> None:
    registered = {metric.name for metric in FrontEnd().registry.collect()}
    theirs = {"vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"}
    assert {family(name) for name in names()} <= registered | theirs
    assert {name for name in registered if name.startswith("vllm:kvstore_")} <= {
        family(name) for name in names()
    }


def test_every_label_that_the_dashboard_asks_for_is_there(open_tier: Open) -> None:
    front, tier = FrontEnd(), open_tier()
    run_job(tier, "store", keys_of(1), [0])
    look_up(tier, keys_of(1))
    run_job(tier, "load", keys_of(1), [0])
    tier.metrics.set_usage(1, 2)
    front.scrape(tier)
    samples = [s for metric in front.registry.collect() for s in metric.samples]
    asked = 0
    for text in expressions():
        for name, matchers in re.findall(r"(vllm:kvstore_\w+)\{(.*?)\}", text):
            for label, values in re.findall(r'(\w+)=~?"([^"$]*)"', matchers):
                for value in values.split("|"):
                    known = (s.labels.get(label) for s in samples if s.name == name)
                    assert value in known, f"{name}: {label}={value}"
                    asked += 1
    assert asked > 10
