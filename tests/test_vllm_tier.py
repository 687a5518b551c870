"""The bare tier, driven through vLLM's own factory and base class."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from specs import (
    LAYERS,
    Rows,
    Spec,
    keys_of,
    look_up,
    make_tier,
    offloading_config,
    open_tier,
    run_job,
    submit,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from work import descriptors, movers_of, until

from kvstore import InvalidInputError, LayoutMismatchError, StorageError
from kvstore.circuit import FAILURES
from kvstore.collector import Collector
from kvstore.releases import supports
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root
from kvstore.vllm import KVStoreTier, opened

HIT, MISS = LookupResult.HIT, LookupResult.MISS

pytestmark = pytest.mark.usefixtures("accelerator")


def movers() -> list[int]:
    """The processes of all tiers that are open."""
    return movers_of(os.getpid())


where = pytest.mark.parametrize("shared", [False, True], ids=["threads", "processes"])
"""Where transfers run: rows that no other process can map are left to threads."""


@pytest.mark.parametrize(
    ("nbytes", "shared"),
    [
        pytest.param(64 << 10, False, id="64KiB"),
        pytest.param(576 << 10, False, id="576KiB"),
        pytest.param(720 << 10, False, id="720KiB"),
        pytest.param(2 << 20, False, id="2MiB"),
        pytest.param(6051, False, id="odd"),
        pytest.param(720 << 10, True, id="720KiB-processes"),
        pytest.param(6051, True, id="odd-processes"),
    ],
)
def test_stores_looks_up_from_a_new_instance_and_loads(
    root: Root, nbytes: int, shared: bool, tiers: list[SecondaryTierManager]
) -> None:
    config = offloading_config(worker_kv_bytes_per_block=nbytes)
    source, target = Rows(config, 4, shared=shared), Rows(config, 4, shared=shared)
    source.fill()
    keys = keys_of(4)
    writer = open_tier(tiers, root, source, processes=2)
    assert len(movers()) == (2 if shared and not root.url.startswith("memory:") else 0)
    stored = run_job(writer, "store", keys, [0, 1, 2, 3])
    assert stored.success
    assert stored.transfer_bytes == 4 * nbytes
    writer.shutdown()
    reader = open_tier(tiers, root, target, processes=1)
    assert look_up(reader, [*keys, *keys_of(1)]) == [HIT] * 4 + [MISS]
    loaded = run_job(reader, "load", keys, [3, 2, 1, 0])
    assert loaded.success
    assert (target.array[::-1, :nbytes] == source.array[:, :nbytes]).all()
    assert not target.array[:, nbytes:].any()  # the padding of a row is not KV


@where
@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
def test_tiers_of_every_codec_share_their_blocks(
    tmp_path: Path, codec: str, shared: bool, tiers: list[SecondaryTierManager]
) -> None:
    root, config = Root(str(tmp_path)), offloading_config()
    source, target = Rows(config, 2, shared=shared), Rows(config, 2)
    source.fill()
    source.array &= 15  # so that half of the bits can be saved
    keys = keys_of(2)
    writer = open_tier(tiers, root, source, codec=codec)
    assert run_job(writer, "store", keys, [0, 1]).success
    for chunk in tmp_path.rglob("c.0*"):
        assert (chunk.stat().st_size < source.nbytes * 3 // 4) == (codec != "none")
    for reading in ("none", "zstd", "blosc"):
        reader = open_tier(tiers, root, target, codec=reading)
        assert look_up(reader, keys) == [HIT, HIT]
        target.array[:] = 0
        assert run_job(reader, "load", keys, [0, 1]).success
        assert (target.array[:, : target.nbytes] == source.array[:, : source.nbytes]).all()


@pytest.mark.parametrize(
    "known", [{}, {"kv_heads": 12, "head_size": 64}], ids=["byte", "axes"]
)
def test_tiers_that_differ_in_kv_cache_layout_never_share(
    root: Root, known: dict[str, int], tiers: list[SecondaryTierManager]
) -> None:
    ours = Rows(offloading_config())
    theirs = Rows(offloading_config(kv_cache_layout="LBNHC"))
    keys = keys_of(2)
    ours.fill()
    assert run_job(open_tier(tiers, root, ours, **known), "store", keys, [0, 1]).success
    with pytest.raises(LayoutMismatchError) as caught:
        open_tier(tiers, root, theirs, **known)
    assert "kv_cache_layout: expected 'LBNHC', found 'LBHNC'" in str(caught.value)
    if known:
        assert "('layer', 'token', 'head', 'value')" in str(caught.value)
        assert "('layer', 'head', 'token', 'value')" in str(caught.value)
    other = open_tier(tiers, root, theirs, on_mismatch="isolate", **known)
    assert look_up(other, keys) == [MISS, MISS]
    assert not run_job(other, "load", keys, [0, 1]).success
    assert not theirs.array.any()


def test_alias_names_are_one_layout(
    tmp_path: Path, tiers: list[SecondaryTierManager]
) -> None:
    root = Root(str(tmp_path))
    open_tier(tiers, root, Rows(offloading_config(kv_cache_layout="LBHNC")))
    open_tier(tiers, root, Rows(offloading_config(kv_cache_layout="HND")))
    with pytest.raises(InvalidInputError, match="LHBNC"):
        open_tier(tiers, root, Rows(offloading_config(kv_cache_layout="LHBNC")))


class TestIdentity:
    CHANGES: tuple[dict[str, Any], ...] = (
        {},
        {"dtype": "bfloat16"},
        {"tokens_per_hash": 32},
        {"blocks_per_chunk": 2},
        {"tp_size": 2, "world_size": 2},
        {"groups": ((0, 32, LAYERS),)},
        {"groups": ((0, 16, LAYERS[:6]), (1, 16, LAYERS[6:]))},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"name": "org/other [x]"},
    )

    @pytest.mark.parametrize("changes", CHANGES, ids=str)
    def test_the_path_is_vllms_own_where_the_fields_are(
        self, tmp_path: Path, changes: dict[str, Any], tiers: list[SecondaryTierManager]
    ) -> None:
        config = offloading_config(**changes)
        mapper = FileMapper.from_offloading_spec(
            str(tmp_path),
            Spec(config),
            blocks_per_file=config.cache.blocks_per_chunk,
            parallel_agnostic=True,
        )
        tier = open_tier(tiers, Root(str(tmp_path)), Rows(config))
        assert isinstance(tier, KVStoreTier)
        [namespace] = {Path(s.url.split("://")[1]).parents[1] for s in tier.stores.values()}
        theirs = Path(mapper.base_path).name
        assert namespace.name.rpartition("_")[2] == theirs.rpartition("_")[2]
        if "[" not in theirs:
            assert namespace.name == theirs
        recorded = json.loads((namespace / "zarr.json").read_text())
        assert recorded["attributes"]["kvstore"]["config"] == mapper.fields

    def test_no_two_of_them_share_a_path(self, tmp_path: Path) -> None:
        for number, changes in enumerate(self.CHANGES):
            tier = make_tier(Rows(offloading_config(**changes)), {"url": str(tmp_path)})
            tier.shutdown()
            found = [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
            assert len(found) == number + 1


class TestJobs:
    @where
    def test_unordered_slots_of_several_groups(
        self, tmp_path: Path, shared: bool, tiers: list[SecondaryTierManager]
    ) -> None:
        groups = ((0, 16, LAYERS[:4]), (1, 64, LAYERS[4:8]), (2, 4, LAYERS[8:]))
        config = offloading_config(groups=groups, worker_kv_bytes_per_block=8192)
        source, target = Rows(config, 901, shared=shared), Rows(config, 901, shared=shared)
        source.fill()
        root = Root(str(tmp_path))
        digest = os.urandom(32)
        keys = [make_offload_key(digest, group) for group in (2, 0, 1)]
        assert run_job(open_tier(tiers, root, source), "store", keys, [7, 2, 900]).success
        reader = open_tier(tiers, root, target)
        assert look_up(reader, keys) == [HIT] * 3
        assert run_job(reader, "load", keys, [900, 7, 2]).success
        for key, (wrote, read) in zip(keys, ((7, 900), (2, 7), (900, 2)), strict=True):
            assert (source.array[wrote] == target.array[read]).all(), key
        assert look_up(reader, [make_offload_key(digest, 3)], "other") == [MISS]

    def test_empty_and_uneven_jobs(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        tier = open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config()))
        empty = run_job(tier, "store", [], [])
        assert (empty.success, empty.transfer_bytes) == (True, 0)
        assert not run_job(tier, "store", keys_of(2), [0]).success
        assert not run_job(tier, "store", keys_of(1), [99]).success

    @where
    def test_partial_load_reports_the_keys_that_were_proved(
        self, tmp_path: Path, shared: bool, tiers: list[SecondaryTierManager]
    ) -> None:
        rows = Rows(offloading_config(worker_kv_bytes_per_block=8192), shared=shared)
        rows.fill()
        tier = open_tier(tiers, Root(str(tmp_path)), rows)
        assert bool(movers()) == shared
        keys = keys_of(3)
        run_job(tier, "store", keys, [0, 1, 2])
        assert look_up(tier, keys) == [HIT] * 3
        [chunk] = tmp_path.rglob(f"{keys[1].hex()}/c.0")
        chunk.write_bytes(bytes(8196))
        result = run_job(tier, "load", keys, [3, 4, 5])
        assert not result.success
        assert set(result.successful_keys or ()) == {keys[0], keys[2]}
        # The same request asks again and is not sent round in a circle.
        context = ReqContext("r")
        assert [tier.lookup(key, context) for key in keys] == [HIT, MISS, HIT]
        # The engine computes the block anew, and its store repairs it.
        tier.on_request_finished(context)
        assert run_job(tier, "store", [keys[1]], [1]).success
        assert look_up(tier, [keys[1]], "next") == [HIT]
        assert run_job(tier, "load", [keys[1]], [6]).success
        assert (rows.array[6] == rows.array[1]).all()

    @pytest.mark.parametrize("processes", [0, 2])
    def test_shutdown_ends_movers_and_lets_go_of_memory(
        self, tmp_path: Path, processes: int
    ) -> None:
        threads, files = set(threading.enumerate()), descriptors()
        rows = Rows(offloading_config(), shared=True)
        tier = make_tier(rows, {"url": str(tmp_path), "processes": processes})
        assert len(movers()) == processes
        assert (set(threading.enumerate()) > threads) == (processes == 0)
        assert run_job(tier, "store", keys_of(3), [0, 1, 2]).success
        tier.shutdown()
        assert set(threading.enumerate()) == threads
        assert movers() == []
        assert tier._primary_kv_view.nbytes == 0
        tier.shutdown()  # twice is once
        tier.drain_jobs()
        rows.array = rows.array[:0].copy()
        rows.memory.close()  # fails while anybody has a part of it
        assert descriptors() == files

    def test_jobs_that_shutdown_gave_up_are_reported(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        rows = Rows(offloading_config(worker_kv_bytes_per_block=1 << 20), 400)
        tier = open_tier(tiers, Root(str(tmp_path)), rows, threads=1)
        submit(tier, 7, "store", keys_of(400), list(range(400)))
        tier.shutdown()
        [result] = tier.get_finished_jobs()
        assert result.job_id == 7
        submit(tier, 8, "load", keys_of(1), [0])
        [late] = tier.get_finished_jobs()
        assert (late.job_id, late.success) == (8, False)

    def test_with_a_limit_a_drain_waits_for_the_first_look(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        rows = Rows(offloading_config(worker_kv_bytes_per_block=64 << 10))
        tier = open_tier(tiers, Root(str(tmp_path)), rows, max_bytes=64 << 20)
        assert run_job(tier, "store", keys_of(16), list(range(16))).success

    def test_without_a_first_look_nothing_is_stored(
        self,
        tmp_path: Path,
        tiers: list[SecondaryTierManager],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(self: Collector) -> None:
            raise StorageError("a root", "list", "a test said so")

        monkeypatch.setattr(Collector, "collect", fail)
        monkeypatch.setattr(opened, "FIRST_LOOK_SECONDS", 0.1)
        rows = Rows(offloading_config(worker_kv_bytes_per_block=64 << 10))
        tier = open_tier(tiers, Root(str(tmp_path)), rows, max_bytes=64 << 20)
        submit(tier, 7, "store", keys_of(2), [0, 1])
        tier.drain_jobs()
        [result] = tier.get_finished_jobs()
        assert not result.successful_keys
        unlimited = open_tier(tiers, Root(str(tmp_path)), rows)
        assert run_job(unlimited, "store", keys_of(2), [0, 1]).success


class TestProcesses:
    @pytest.mark.parametrize(
        ("url", "options", "shared"),
        [
            pytest.param("memory://threads", {}, True, id="memory"),
            pytest.param(None, {"processes": 0}, True, id="0"),
            pytest.param(None, {}, False, id="private"),
        ],
    )
    def test_threads_are_used_where_a_process_could_not_help(
        self,
        tmp_path: Path,
        tiers: list[SecondaryTierManager],
        url: str | None,
        options: dict[str, Any],
        shared: bool,
    ) -> None:
        rows = Rows(offloading_config(), shared=shared)
        tier = open_tier(tiers, Root(url or str(tmp_path)), rows, **options)
        assert movers() == []
        names = {thread.name for thread in threading.enumerate()}
        assert {f"kvstore-KVStoreTier-{n}" for n in range(8)} < names
        assert run_job(tier, "store", keys_of(1), [0]).success

    def test_there_are_as_many_as_cores_and_at_most_four(
        self, tmp_path: Path, tiers: list[SecondaryTierManager], monkeypatch: Any
    ) -> None:
        for cores, expected in ((1, 1), (64, 4)):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
            rows = Rows(offloading_config(), shared=True)
            tier = open_tier(tiers, Root(str(tmp_path)), rows)
            assert len(movers()) == expected
            tier.shutdown()

    def test_a_killed_mover_fails_its_blocks_once_and_nothing_else(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        rows = Rows(
            offloading_config(worker_kv_bytes_per_block=256 << 10), 200, shared=True
        )
        rows.fill()
        before = rows.array.copy()
        tier = open_tier(tiers, Root(str(tmp_path)), rows, processes=2)
        keys = keys_of(200)
        for number in range(10):
            slots = list(range(number, 200, 10))
            submit(tier, number, "store", keys[number::10], slots)
        os.kill(movers()[0], signal.SIGKILL)
        tier.drain_jobs()
        results = list(tier.get_finished_jobs())
        assert sorted(result.job_id for result in results) == list(range(10))
        assert not all(result.success for result in results)
        stored = {key for result in results for key in result.successful_keys or ()}
        assert stored < set(keys)
        assert not list(tier.get_finished_jobs())

        until(lambda: list(tier.get_finished_jobs()) or len(movers()) == 2)
        assert run_job(tier, "store", keys, list(range(200))).success
        assert look_up(tier, keys) == [HIT] * 200
        rows.array[:] = 0
        assert run_job(tier, "load", keys, list(range(200))).success
        assert (rows.array[:, : rows.nbytes] == before[:, : rows.nbytes]).all()
        temporary = tmp_path / TEMPORARY
        until(lambda: list(tier.get_finished_jobs()) or not [*temporary.glob("*/*")])

    @where
    def test_lookups_and_jobs_of_before_outlive_another_open(
        self, tmp_path: Path, shared: bool, tiers: list[SecondaryTierManager]
    ) -> None:
        """As where vLLM's handshake comes again."""
        rows = Rows(offloading_config(), shared=shared)
        tier = open_tier(tiers, Root(str(tmp_path)), rows, processes=1)
        assert isinstance(tier, KVStoreTier)
        keys, context = keys_of(2), ReqContext("r")
        submit(tier, 1, "store", keys, [0, 1])
        tier.on_new_request(context)
        for key in keys:
            assert tier.lookup(key, context) is LookupResult.RETRY
        tier.on_schedule_end(ScheduleEndContext((), ()))
        tier._open_stores()
        [result] = tier.get_finished_jobs()
        assert result.job_id == 1
        for key in keys:
            assert tier.lookup(key, context) is not LookupResult.RETRY
        tier.on_request_finished(context)
        assert run_job(tier, "store", keys, [0, 1]).success
        assert look_up(tier, keys, "next") == [HIT, HIT]

    def test_what_is_open_goes_on_where_another_open_fails(
        self, tmp_path: Path, tiers: list[SecondaryTierManager], monkeypatch: Any
    ) -> None:
        rows = Rows(offloading_config(), shared=True)
        tier = open_tier(tiers, Root(str(tmp_path)), rows, processes=1)
        assert isinstance(tier, KVStoreTier)
        stores, keys = tier.stores, keys_of(2)
        with monkeypatch.context() as patched:
            patched.setattr("sys.executable", "/bin/false")
            with pytest.raises(InvalidInputError, match="expected 1 to start, found 0"):
                tier._open_stores()
        assert tier.stores is stores
        assert run_job(tier, "store", keys, [0, 1]).success
        assert look_up(tier, keys) == [HIT, HIT]
        assert run_job(tier, "load", keys, [0, 1]).success

    def test_a_trial_that_never_ends_is_forgotten_by_another_open(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        tier = open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config()))
        assert isinstance(tier, KVStoreTier)
        tier._health.lookups.note(0, FAILURES, "no route")
        tier._health.lookups._trial_at = 0.0
        assert tier._health.lookups.take_trial()
        keys = keys_of(1)
        assert look_up(tier, keys) == [MISS]
        tier._open_stores()
        assert run_job(tier, "store", keys, [0]).success
        assert look_up(tier, keys, "next") == [HIT]

    def test_a_start_that_fails_stops_the_engine_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        rows = Rows(offloading_config(), shared=True)
        files = descriptors()
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(InvalidInputError, match='Set "processes": 0'):
            make_tier(rows, {"url": str(tmp_path), "processes": 2})
        assert movers() == []
        assert descriptors() == files

    def test_a_request_that_ends_within_its_step_is_forgotten(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        """Of a block that is known to be damaged, so that no look is needed."""
        tier = open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config()))
        assert isinstance(tier, KVStoreTier)
        [key] = keys_of(1)
        tier.stores[0].note_damage(key, "a test")
        context = ReqContext("r")
        assert tier.lookup(key, context) is MISS
        tier.on_request_finished(context)
        tier.on_schedule_end(ScheduleEndContext((), ()))
        assert look_up(tier, [key], "next") == [MISS]

    @pytest.mark.parametrize("damaged", [False, True], ids=["given up", "known"])
    def test_a_miss_without_a_look_stays_one_for_its_request(
        self, tmp_path: Path, damaged: bool, tiers: list[SecondaryTierManager]
    ) -> None:
        """Though another request asks when storage is back, and is told a hit."""
        tier = open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config()))
        assert isinstance(tier, KVStoreTier)
        [key] = keys_of(1)
        assert run_job(tier, "store", [key], [0]).success
        if damaged:
            tier.stores[0].note_damage(key, "a test")
        else:
            tier._health.lookups.note(0, FAILURES, "no route")
        first = ReqContext("first")
        assert tier.lookup(key, first) is MISS
        if damaged:
            tier.stores[0].memory.forget(key)
            tier._lookups.mark_stored([key])  # which repairs it
        else:
            tier._health.lookups.note(1, 0)
        assert tier.lookup(key, ReqContext("next")) is LookupResult.RETRY
        assert tier.lookup(key, first) is MISS
        assert look_up(tier, [key], "next") == [HIT]
        assert tier.lookup(key, first) is MISS


class TestRefusedAtStart:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "url: expected a value"),
            ({"url": "kv", "thread": 8}, "Did you mean 'threads'"),
            ({"url": "kv", "on_mismatch": "maybe"}, "on_mismatch: expected one of"),
            ({"url": "kv", "codec": "gzip"}, "codec: expected one of"),
            ({"url": "kv", "codec": None}, "codec: expected str, found None"),
            ({"url": "kv", "client": "boto3"}, "client: expected one of"),
            (
                {"url": "kv", "io_timeout": 1e12},
                "io_timeout: expected more than 0, at most",
            ),
            ({"url": "kv", "threads": "8"}, "threads: expected int, found '8'"),
            ({"url": "kv", "threads": True}, "threads: expected int, found True"),
            ({"url": "kv", "threads": 0}, "threads: expected more than 0"),
            ({"url": "kv", "processes": 65}, "processes: expected 0 to 64, found 65"),
            ({"url": "kv", "processes": -1}, "processes: expected 0 to 64, found -1"),
            ({"url": "kv", "processes": True}, "processes: expected int"),
            ({"url": "nothing://x"}, "expected a protocol that fsspec knows"),
            ({"url": "s3://"}, "expected a bucket"),
            ({"url": "kv", "locality": "HERE"}, "locality"),
            ({"url": "kv", "kv_heads": 12}, "expected both"),
            ({"url": "kv", "kv_heads": 12, "head_size": 65}, "multiply out to 589824"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_option(
        self, tmp_path: Path, monkeypatch: Any, options: dict[str, Any], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InvalidInputError, match=message):
            make_tier(Rows(offloading_config()), options)

    def test_heads_on_the_cpu_platform(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr("kvstore.vllm.layout.current_platform.is_cpu", lambda: True)
        options = {"url": str(tmp_path), "kv_heads": 12, "head_size": 64}
        with pytest.raises(InvalidInputError, match="expected neither on the CPU platform"):
            make_tier(Rows(offloading_config()), options)

    def test_unwritable_place(self) -> None:
        with pytest.raises(StorageError, match="cannot write below file:///proc/kv"):
            make_tier(Rows(offloading_config()), {"url": "/proc/kv"})


def test_medium_and_locality(tmp_path: Path, tiers: list[SecondaryTierManager]) -> None:
    tier = open_tier(
        tiers, Root(str(tmp_path)), Rows(offloading_config()), locality="REMOTE"
    )
    assert tier.medium is Medium.STORAGE
    assert tier.locality is not None
    assert tier.locality.value == "REMOTE"


def test_supported_versions() -> None:
    assert [
        v
        for v in ("0.30.1", "0.31.0", "0.32.0", "0.33.1+cu130", "0.34.0", "1.0", "x")
        if supports(v)
    ] == ["0.31.0", "0.32.0", "0.33.1+cu130"]
