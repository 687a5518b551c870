"""The bare tier, driven through vLLM's own factory and base class."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from specs import LAYERS, Rows, Spec, look_up, make_tier, offloading_config, run_job
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore import InvalidInputError, LayoutMismatchError, StorageError
from kvstore.testing import Root
from kvstore.vllm import KVStoreTier
from kvstore.vllm.versions import supports

HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform whose attention keeps tokens and values apart."""
    platform = SimpleNamespace(is_cpu=lambda: False, fp8_dtype=current_platform.fp8_dtype)
    monkeypatch.setattr("kvstore.vllm.layout.current_platform", platform)


@pytest.fixture
def tiers() -> Iterator[list[SecondaryTierManager]]:
    """Tiers that a test made, shut down at its end."""
    made: list[SecondaryTierManager] = []
    yield made
    for tier in made:
        tier.shutdown()


def open_tier(
    tiers: list[SecondaryTierManager], root: Root, rows: Rows, **options: Any
) -> SecondaryTierManager:
    where = {"storage_options": dict(root.storage_options), "client": root.client}
    options = {"url": root.url, **where, **options}
    tiers.append(make_tier(rows, options))
    return tiers[-1]


def keys_of(count: int, group: int = 0) -> list[Any]:
    return [make_offload_key(os.urandom(32), group) for _ in range(count)]


@pytest.mark.parametrize(
    "nbytes",
    [64 << 10, 576 << 10, 720 << 10, 2 << 20, 6051],
    ids=["64KiB", "576KiB", "720KiB", "2MiB", "odd"],
)
def test_stores_looks_up_from_a_new_instance_and_loads(
    root: Root, nbytes: int, tiers: list[SecondaryTierManager]
) -> None:
    config = offloading_config(worker_kv_bytes_per_block=nbytes)
    source, target = Rows(config, 4), Rows(config, 4)
    source.fill()
    keys = keys_of(4)
    stored = run_job(open_tier(tiers, root, source), "store", keys, [0, 1, 2, 3])
    assert stored.success
    assert stored.transfer_bytes == 4 * nbytes
    reader = open_tier(tiers, root, target)
    assert look_up(reader, [*keys, *keys_of(1)]) == [HIT] * 4 + [MISS]
    loaded = run_job(reader, "load", keys, [3, 2, 1, 0])
    assert loaded.success
    assert (target.array[::-1, :nbytes] == source.array[:, :nbytes]).all()
    assert not target.array[:, nbytes:].any()  # the padding of a row is not KV


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
def test_tiers_of_every_codec_share_their_blocks(
    tmp_path: Path, codec: str, tiers: list[SecondaryTierManager]
) -> None:
    root, config = Root(str(tmp_path)), offloading_config()
    source, target = Rows(config, 2), Rows(config, 2)
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

    def test_a2_a_claim_is_not_believed(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        """Rank-major rows of TP 1 and TP 2, which vLLM claims to be agnostic."""
        root = Root(str(tmp_path))
        known = {"kv_heads": 12, "head_size": 64}
        one = offloading_config(is_parallelism_agnostic=True)
        two = offloading_config(
            is_parallelism_agnostic=True,
            tp_size=2,
            world_size=2,
            worker_kv_bytes_per_block=589_824 // 2,
        )
        rows = Rows(one)
        rows.fill()
        keys = keys_of(1)
        run_job(open_tier(tiers, root, rows, **known), "store", keys, [0])
        other = open_tier(tiers, root, Rows(two), kv_heads=6, head_size=64)
        assert look_up(other, keys) == [MISS]

    def test_a1_head_outermost_is_agnostic_and_shared(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        root = Root(str(tmp_path))
        common = {"is_parallelism_agnostic": True, "kv_cache_layout": "BHLNC"}
        one, two = (
            Rows(
                offloading_config(
                    **common,
                    tp_size=tp,
                    world_size=tp,
                    worker_kv_bytes_per_block=589_824 // tp,
                )
            )
            for tp in (1, 2)
        )
        one.fill()
        keys = keys_of(1)
        writer = open_tier(tiers, root, one, kv_heads=12, head_size=64)
        run_job(writer, "store", keys, [0])
        reader = open_tier(tiers, root, two, kv_heads=6, head_size=64)
        assert look_up(reader, keys) == [HIT]
        assert run_job(reader, "load", keys, [5]).success
        assert (two.array[5, :589_824] == one.array[0, :589_824]).all()
        recorded = json.loads(next(tmp_path.glob("facebook*/zarr.json")).read_text())
        assert "parallel_agnostic" not in recorded["attributes"]["kvstore"]["config"]

    def test_a9_replicated_rows_are_one_copy(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        root = Root(str(tmp_path))
        keys = keys_of(1)
        for tp, expected in ((2, [MISS]), (4, [HIT])):
            config = offloading_config(replicated_layout=True, tp_size=tp, world_size=tp)
            rows = Rows(config)
            rows.fill()
            tier = open_tier(tiers, root, rows)
            assert look_up(tier, keys) == expected
            run_job(tier, "store", keys, [0])
        plain = open_tier(tiers, root, Rows(offloading_config(tp_size=2, world_size=2)))
        assert look_up(plain, keys) == [MISS]

    def test_auto_is_never_hashed(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        with pytest.raises(InvalidInputError, match="auto"):
            open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config(dtype="auto")))


class TestJobs:
    def test_unordered_slots_of_several_groups(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        groups = ((0, 16, LAYERS[:4]), (1, 64, LAYERS[4:8]), (2, 4, LAYERS[8:]))
        config = offloading_config(groups=groups, worker_kv_bytes_per_block=8192)
        source, target = Rows(config, 901), Rows(config, 901)
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

    def test_partial_load_reports_the_keys_that_were_proved(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        rows = Rows(offloading_config(worker_kv_bytes_per_block=8192))
        rows.fill()
        tier = open_tier(tiers, Root(str(tmp_path)), rows)
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

    def test_view_with_strides(
        self, tmp_path: Path, tiers: list[SecondaryTierManager]
    ) -> None:
        config = offloading_config(
            world_size=6, tp_size=6, worker_kv_bytes_per_block=10_000
        )
        rows = Rows(config, 8)
        rows.fill()
        rows.array = rows.array[::2]
        tier = open_tier(tiers, Root(str(tmp_path)), rows)
        keys = keys_of(1)
        assert run_job(tier, "store", keys, [3]).success
        assert run_job(tier, "load", keys, [0]).success
        assert (rows.array[0, :60_000] == rows.array[3, :60_000]).all()

    def test_shutdown_ends_threads_and_lets_go_of_memory(self, tmp_path: Path) -> None:
        import threading

        before = set(threading.enumerate())
        tier = make_tier(Rows(offloading_config()), {"url": str(tmp_path)})
        assert set(threading.enumerate()) > before
        tier.shutdown()
        assert set(threading.enumerate()) == before
        assert tier._primary_kv_view.nbytes == 0
        tier.shutdown()  # twice is once


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
