"""Reports on vLLM's native KV offload, with a tier that vLLM's own factory makes.

docs/cases.md says what was reported for each row, and where.
"""

import errno
import json
import os
import shutil
import threading
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from faulty import Faulty, Gate
from specs import (
    LAYERS,
    Rows,
    counts,
    keys_of,
    look_up,
    make_tier,
    model_config,
    offloading_config,
    open_tier,
    run_job,
    submit,
    tensors,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from work import movers_of

from kvstore import InvalidInputError, UnsupportedVersionError
from kvstore.testing import Root
from kvstore.vllm import KVStoreTier, lookups
from kvstore.vllm.host_worker import KVStoreOffloadingSpec
from kvstore.vllm.identity import known_identity, offloading_identity
from kvstore.vllm.layout import engine_layout, layer_tensor
from kvstore.vllm.metrics import BLOCKS

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

pytestmark = pytest.mark.usefixtures("accelerator")

Tiers = list[SecondaryTierManager]

where = pytest.mark.parametrize("shared", [False, True], ids=["threads", "processes"])
"""Where transfers run: rows that no other process can map are left to threads."""

PAGE_BYTES = 4096


def small_rows(count: int = 16, *, shared: bool = False, **changes: Any) -> Rows:
    """Rows of one page each, filled."""
    config = offloading_config(**{"worker_kv_bytes_per_block": PAGE_BYTES, **changes})
    rows = Rows(config, count, shared=shared)
    rows.fill()
    return rows


def as_told(*arguments: Any) -> None:
    """What `Faulty.before` does while nothing is wrong."""


def block_of(store_root: Root, key: Any) -> list[str]:
    """The two files of a block, by storage's own words; the document is the last."""
    return sorted(f for f in store_root.files() if key.hex() in f)


# ---- whose bytes they are


def test_a2_a_claim_is_not_believed(tmp_path: Path, tiers: Tiers) -> None:
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


def test_a2_head_outermost_is_agnostic_and_shared(tmp_path: Path, tiers: Tiers) -> None:
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


def test_a2_canonical_rows_are_shared(tmp_path: Path, tiers: Tiers) -> None:
    """vLLM's canonical bytes are the same under TP 1 and TP 2, and found by both."""
    root = Root(str(tmp_path))
    one, two = (
        small_rows(
            canonical_layout=True,
            is_parallelism_agnostic=True,
            tp_size=tp,
            world_size=tp,
            worker_kv_bytes_per_block=8192 // tp,
        )
        for tp in (1, 2)
    )
    two.array[:] = 0
    keys = keys_of(2)
    assert run_job(open_tier(tiers, root, one), "store", keys, [0, 1]).success
    reader = open_tier(tiers, root, two)
    assert look_up(reader, keys) == [HIT, HIT]
    assert run_job(reader, "load", keys, [1, 0]).success
    assert (two.array[1::-1] == one.array[:2]).all()
    direct = open_tier(tiers, root, small_rows(worker_kv_bytes_per_block=8192))
    assert look_up(direct, keys) == [MISS, MISS]


def test_a4_auto_is_never_hashed(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(InvalidInputError, match="auto"):
        open_tier(tiers, Root(str(tmp_path)), Rows(offloading_config(dtype="auto")))


def test_a5_a_dtype_that_is_resolved_in_place() -> None:
    """What the engine's specs say counts, not the word that only some processes see."""
    digests = set()
    for word in ("fp8", "fp8_ds_mla"):
        config = offloading_config(dtype=word)
        spec = SimpleNamespace(cache_dtype_str="fp8_ds_mla", page_size_bytes=656 * 16)
        cache = torch.zeros((4, 16, 656), dtype=torch.uint8)
        layer = layer_tensor("layer", spec, cache, None, word)
        assert layer.cache_dtype == "fp8_ds_mla"
        layout = engine_layout([tensors(cache_dtype=layer.cache_dtype)], config, "v1")
        known = known_identity(model_config(revision="a" * 40))
        identity = offloading_identity(config, layout, dtype=layer.cache_dtype, known=known)
        assert identity.dtype == "fp8_ds_mla"
        digests.add((identity.digest, layout.digest))
    assert len(digests) == 1


def test_a6_revisions_are_apart() -> None:
    one, two = (known_identity(model_config(revision=c * 40)) for c in "ab")
    assert one["revision"] != two["revision"]
    assert one["model_config_digest"] == two["model_config_digest"]


def test_a6_a_local_folder_is_known_by_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no commit; two with other weights are apart, without a word from the user."""
    known = []
    for name, value in (("one", b"1"), ("two", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(value * 10_000)
        known.append(known_identity(model_config(model=str(tmp_path / name))))
    assert known[0]["weights_digest"] != known[1]["weights_digest"]
    assert "revision" not in known[0]
    assert caplog.records == []
    known_identity(model_config(model="org/model"))
    assert "Set --revision to a commit" in caplog.text


def test_a9_replicated_rows_are_one_copy(tmp_path: Path, tiers: Tiers) -> None:
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


def test_a10_canonical_layouts_are_apart(tmp_path: Path, tiers: Tiers) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"canonical_layout": True, "kv_cache_layout": "LBNHC"},
        {"canonical_layout": True},
    )
    keys = keys_of(1)
    urls = set()
    for change in changes:
        tier = open_tier(tiers, Root(str(tmp_path)), small_rows(**change))
        assert isinstance(tier, KVStoreTier)
        assert look_up(tier, keys) == [MISS]
        assert run_job(tier, "store", keys, [0]).success
        urls.add(tier.stores[0].url)
    assert len(urls) == 3


def test_a10_what_cannot_be_canonical_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, whose pages hold tiles, and with heads that it would not keep."""
    config = offloading_config(canonical_layout=True)
    options = {"url": str(tmp_path), "kv_heads": 12, "head_size": 64}
    with pytest.raises(InvalidInputError, match="direct layout"):
        make_tier(Rows(config), options)
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setattr("kvstore.vllm.host_worker.current_platform", platform)
    spec = object.__new__(KVStoreOffloadingSpec)
    spec.config = config
    with pytest.raises(InvalidInputError, match="canonical_layout: not supported"):
        spec.get_worker(None)


def test_a24_tokens_of_one_group(tmp_path: Path, tiers: Tiers) -> None:
    keys = keys_of(1)
    for tokens, expected in ((16, MISS), (16, HIT), (32, MISS)):
        groups = ((0, 64, LAYERS[:6]), (1, tokens, LAYERS[6:]))
        tier = open_tier(tiers, Root(str(tmp_path)), small_rows(groups=groups))
        assert look_up(tier, keys) == [expected]
        assert run_job(tier, "store", keys, [0]).success


def test_a25_a_group_smaller_than_one_hash(tmp_path: Path, tiers: Tiers) -> None:
    """Groups of 4480, 4 and 4480 tokens, hashed by 4480."""
    groups = tuple(
        (n, tokens, LAYERS[4 * n : 4 * n + 4]) for n, tokens in enumerate((4480, 4, 4480))
    )
    rows = small_rows(groups=groups, tokens_per_hash=4480)
    tier = open_tier(tiers, Root(str(tmp_path)), rows)
    keys = [key for group in range(3) for key in keys_of(1, group)]
    assert run_job(tier, "store", keys, [0, 1, 2]).success
    assert look_up(tier, keys) == [HIT] * 3


@pytest.mark.parametrize("order", [1, -1])
def test_a32_what_has_no_order_is_hashed_in_one(order: int) -> None:
    """Sets and mappings of a model's config, in whichever order a process has them."""
    kinds = set([0, 8][::order])  # they meet in one slot, so the first one stays first
    assert list(kinds) == [0, 8][::order]
    text = {"kinds": kinds, **dict([("a", 1), ("b", 2)][::order])}
    known = known_identity(model_config(revision="a" * 40, text=text))
    plain = {"kinds": ["0", "8"], "b": 2, "a": 1}
    assert known == known_identity(model_config(revision="a" * 40, text=plain))


def test_a32_hashes_that_begin_anew_in_each_process_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = model_config(revision="a" * 40)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    known_identity(config)
    assert caplog.records == []
    monkeypatch.delenv("PYTHONHASHSEED")
    known_identity(config)
    [record] = caplog.records
    assert "nothing stored now can be found after a restart" in record.getMessage()


def test_a36_stages_of_unequal_layers() -> None:
    """Recorded are the layers of all stages; unequal ones stop the engine at its start."""
    config = offloading_config(
        pp_size=2, world_size=2, worker_kv_bytes_per_block=589_824 // 2
    )
    stages = [tensors(0, LAYERS[:6]), tensors(1, LAYERS[6:])]
    assert engine_layout(stages, config, "v1").layer_names == LAYERS
    with pytest.raises(InvalidInputError, match="workers 0 and 1 lay out KV differently"):
        engine_layout([stages[0], tensors(1, LAYERS[5:])], config, "v1")


HEADS, TOKENS, SIZE = 12, 16, 64
SCALED = HEADS * TOKENS * 2 * (SIZE + 4)
"""A page whose every token and head has its own scale, of 4 bytes, for K and for V."""


def test_a40_scales_inside_a_page(tmp_path: Path, tiers: Tiers) -> None:
    """Bytes of which nothing is assumed, and never those of plain fp8."""
    root = Root(str(tmp_path))
    rows = small_rows(dtype="fp8_per_token_head", worker_kv_bytes_per_block=SCALED)
    before = rows.array.copy()
    tier = open_tier(tiers, root, rows)
    assert isinstance(tier, KVStoreTier)
    assert tier.stores[0].layout.axes == ("byte",)
    keys = keys_of(1)
    assert run_job(tier, "store", keys, [3]).success
    [document] = [f for f in block_of(root, keys[0]) if f.endswith("zarr.json")]
    assert json.loads(Path(document).read_bytes())["data_type"] == "uint8"
    assert run_job(tier, "load", keys, [0]).success
    assert (rows.array[0, :SCALED] == before[3, :SCALED]).all()
    plain = small_rows(dtype="fp8", worker_kv_bytes_per_block=SCALED)
    assert look_up(open_tier(tiers, root, plain), keys) == [MISS]


def test_a40_the_tensors_of_such_a_page_are_opaque() -> None:
    page = SCALED
    told = tensors(
        shape=(100, HEADS, TOKENS, 2 * (SIZE + 4)),
        strides=(page, page // HEADS, 2 * (SIZE + 4), 1),
        dtype="uint8",
        cache_dtype="fp8_per_token_head",
        plain=False,
        page_bytes=page,
        payload_bytes=page,
    )
    config = offloading_config(worker_kv_bytes_per_block=12 * page)
    layout = engine_layout([told], config, "v1")
    assert (layout.axes, layout.nbytes) == (("byte",), 12 * page)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_a41_caches_of_8_bits_are_stored(tmp_path: Path, dtype: str, tiers: Tiers) -> None:
    rows = small_rows(dtype=dtype)
    before = rows.array.copy()
    tier = open_tier(tiers, Root(str(tmp_path)), rows)
    assert isinstance(tier, KVStoreTier)
    keys = keys_of(2)
    assert run_job(tier, "store", keys, [0, 1]).success
    assert tier.stores[0].counts()["stored"] == 2
    reader = open_tier(tiers, Root(str(tmp_path)), rows)
    assert look_up(reader, keys) == [HIT, HIT]
    assert run_job(reader, "load", keys, [2, 3]).success
    assert (rows.array[2:4] == before[:2]).all()


# ---- storage that fails


@pytest.mark.parametrize("backend", ["folder", "bucket"])
def test_a12_a_block_that_is_gone_is_asked_for_once(
    tmp_path: Path, backend: str, tiers: Tiers
) -> None:
    """HIT, then a load that fails: from then on its request is told MISS."""
    faulty = Faulty()
    root = faulty.root if backend == "bucket" else Root(str(tmp_path))
    rows = small_rows()
    keys = keys_of(1)
    assert run_job(open_tier(tiers, root, rows), "store", keys, [0]).success
    tier = open_tier(tiers, root, rows)
    assert look_up(tier, keys) == [HIT]
    for file in block_of(root, keys[0]):
        root.remove(f"file://{file}" if backend == "folder" else f"faulty:/{file}")
    result = run_job(tier, "load", keys, [1])
    assert (result.success, result.successful_keys) == (False, None)
    requests = len(faulty.seen)
    context = ReqContext("r")
    for _ in range(100):
        assert tier.lookup(keys[0], context) is MISS
        tier.on_schedule_end(ScheduleEndContext((), ()))
        assert list(tier.get_finished_jobs()) == []
    assert len(faulty.seen) == requests


BACKEND_ERRORS: list[Exception] = [
    OSError(errno.EIO, "Input/output error"),
    KeyError("key"),
    TimeoutError(),
    ValueError("a value"),
]


@pytest.mark.parametrize("error", BACKEND_ERRORS, ids=lambda e: type(e).__name__)
def test_a13_errors_of_a_backend_fail_their_job(error: Exception, tiers: Tiers) -> None:
    faulty = Faulty()
    rows = small_rows()
    tier = open_tier(tiers, faulty.root, rows)
    keys = keys_of(1)
    assert run_job(tier, "store", keys, [0]).success

    def fail(request: str, path: str) -> None:
        raise error

    faulty.before = fail
    assert not run_job(tier, "load", keys, [1]).success
    assert not run_job(tier, "store", keys_of(1), [1]).success
    faulty.before = as_told
    assert run_job(tier, "load", keys, [1]).success
    assert (rows.array[1] == rows.array[0]).all()


def test_a14_a_passing_error_costs_the_block_for_a_moment(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss for its request, and for those that come in the next seconds; see B12."""
    faulty = Faulty()
    rows = small_rows()
    tier = open_tier(tiers, faulty.root, rows)
    keys = keys_of(1)
    assert run_job(tier, "store", keys, [0]).success
    files = faulty.root.files()
    assert look_up(tier, keys) == [HIT]

    def once(request: str, path: str) -> None:
        faulty.before = as_told
        raise OSError(errno.EIO, "Input/output error")

    faulty.before = once
    assert not run_job(tier, "load", keys, [1]).success
    assert faulty.root.files() == files
    tier.on_request_finished(ReqContext("r"))
    assert look_up(tier, keys, "soon") == [MISS]
    monkeypatch.setattr(lookups, "ABSENT_SECONDS", 0.0)
    assert look_up(tier, keys, "next") == [HIT]
    assert run_job(tier, "load", keys, [1], "next").success
    assert (rows.array[1] == rows.array[0]).all()


def test_a27_what_failed_is_stored_when_it_is_offered_again(tiers: Tiers) -> None:
    """Eight keys of which two fail: six are there, two are not until they come again."""
    faulty = Faulty()
    rows = small_rows()
    tier = open_tier(tiers, faulty.root, rows)
    keys = keys_of(8)
    failing = {keys[1].hex(), keys[6].hex()}

    def fail(request: str, path: str) -> None:
        if request == "put" and path.split("/")[-2] in failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    faulty.before = fail
    result = run_job(tier, "store", keys, list(range(8)))
    assert not result.success
    there = [key for key in keys if key.hex() not in failing]
    assert sorted(result.successful_keys or ()) == sorted(there)
    verdicts = [MISS if key.hex() in failing else HIT for key in keys]
    assert look_up(tier, keys) == verdicts
    tier.on_request_finished(ReqContext("r"))
    faulty.before = as_told
    assert run_job(tier, "store", [keys[1], keys[6]], [1, 6]).success
    assert look_up(tier, keys, "next") == [HIT] * 8
    assert run_job(tier, "load", [keys[6]], [15], "next").success
    assert (rows.array[15] == rows.array[6]).all()


def test_a28_a_store_under_way(tiers: Tiers) -> None:
    """Not there yet for who asks; there once it ends. A second store ends well, too."""
    faulty = Faulty()
    tier = open_tier(tiers, faulty.root, small_rows(), threads=2)
    keys = keys_of(1)
    gate = Gate(lambda request, path: request == "put" and keys[0].hex() in path)
    faulty.before = gate
    try:
        submit(tier, 1, "store", keys, [0])
        submit(tier, 2, "store", keys, [0])
        for _ in range(2):
            assert gate.waiting.acquire(timeout=60)
        assert look_up(tier, keys, "early") == [MISS]
        assert list(tier.get_finished_jobs()) == []
    finally:
        gate.opened.set()
    tier.drain_jobs()
    results = {result.job_id: result.success for result in tier.get_finished_jobs()}
    assert results == {1: True, 2: True}
    tier.on_request_finished(ReqContext("early"))
    assert look_up(tier, keys, "late") == [HIT]


# ---- keys, chunks and groups


def test_a22_five_groups_after_a_restart(tmp_path: Path, tiers: Tiers) -> None:
    """One hash in every group is as many blocks, all found by the next engine."""
    tokens = (4, 16, 32, 64, 256)
    groups = tuple((n, each, LAYERS[2 * n : 2 * n + 2]) for n, each in enumerate(tokens))
    source, target = small_rows(groups=groups), small_rows(groups=groups)
    target.array[:] = 0
    digest = os.urandom(32)
    keys = [make_offload_key(digest, group) for group in range(5)]
    writer = open_tier(tiers, Root(str(tmp_path)), source)
    assert run_job(writer, "store", keys, [0, 1, 2, 3, 4]).success
    writer.shutdown()
    reader = open_tier(tiers, Root(str(tmp_path)), target)
    assert look_up(reader, keys) == [HIT] * 5
    assert run_job(reader, "load", keys, [4, 3, 2, 1, 0]).success
    assert (target.array[4::-1] == source.array[:5]).all()
    assert len(list(tmp_path.rglob("c.0"))) == 5


@where
def test_a23_each_key_has_its_own_chunk(tmp_path: Path, shared: bool, tiers: Tiers) -> None:
    """Numbers of chunks without order, with gaps, for keys of three groups."""
    groups = ((0, 16, LAYERS[:4]), (1, 64, LAYERS[4:8]), (2, 4, LAYERS[8:]))
    rows = small_rows(901, shared=shared, groups=groups)
    before = rows.array.copy()
    tier = open_tier(tiers, Root(str(tmp_path)), rows, processes=1)
    keys = [*keys_of(1, 2), *keys_of(1, 0), *keys_of(1, 1)]
    assert run_job(tier, "store", keys, [7, 2, 900]).success
    rows.array[:] = 0
    assert run_job(tier, "load", keys, [2, 900, 7]).success
    for wrote, read in ((7, 2), (2, 900), (900, 7)):
        assert (rows.array[read] == before[wrote]).all()
    rows.array[[2, 900, 7]] = 0
    assert not rows.array.any()
    empty = run_job(tier, "store", [], [])
    assert (empty.success, empty.transfer_bytes) == (True, 0)


@where
def test_a34_rows_with_strides(tmp_path: Path, shared: bool, tiers: Tiers) -> None:
    config = offloading_config(world_size=6, tp_size=6, worker_kv_bytes_per_block=10_000)
    rows = Rows(config, 8, shared=shared)
    rows.fill()
    rows.array = rows.array[::2]
    tier = open_tier(tiers, Root(str(tmp_path)), rows)
    keys = keys_of(1)
    assert run_job(tier, "store", keys, [3]).success
    assert run_job(tier, "load", keys, [0]).success
    assert (rows.array[0, :60_000] == rows.array[3, :60_000]).all()


def test_a46_keys_and_chunks_of_unequal_number(tmp_path: Path, tiers: Tiers) -> None:
    """A job that fails and is reported, with nothing that no chunk was given for.

    It says nothing of storage: however many there are, it is not given up.
    """
    tier = open_tier(tiers, Root(str(tmp_path)), small_rows())
    keys = keys_of(2)
    assert run_job(tier, "store", keys, [0, 1]).success
    for operation, asked in (("store", keys_of(2)), ("load", keys)):
        assert not run_job(tier, operation, asked, [0]).success
        assert not run_job(tier, operation, asked[:1], [0, 1]).success
        assert not run_job(tier, operation, [], [0]).success
        for chunk in (99, -1, -(2**31)):
            result = run_job(tier, operation, asked[:1], [chunk])
            assert (result.success, result.successful_keys) == (False, None)
    assert run_job(tier, "store", keys_of(1), [0]).success
    assert run_job(tier, "load", keys, [2, 3]).success


@where
def test_a47_successful_keys_are_those_that_were_proved(
    tmp_path: Path, shared: bool, tiers: Tiers
) -> None:
    """Beside a block that is damaged, one that is torn, and one that is gone."""
    rows = small_rows(shared=shared)
    before = rows.array.copy()
    tier = open_tier(tiers, Root(str(tmp_path)), rows, processes=1)
    keys = keys_of(6)
    assert run_job(tier, "store", keys, list(range(6))).success
    assert look_up(tier, keys) == [HIT] * 6
    chunks = {n: next(tmp_path.rglob(f"{keys[n].hex()}/c.0")) for n in (1, 2, 4)}
    data = bytearray(chunks[1].read_bytes())
    data[-5] ^= 1  # the whole row is filled before that is seen
    chunks[1].write_bytes(data)
    os.truncate(chunks[2], 1000)
    shutil.rmtree(chunks[4].parent)
    result = run_job(tier, "load", keys, list(range(10, 16)))
    assert not result.success
    proved = [0, 3, 5]
    assert sorted(result.successful_keys or ()) == sorted(keys[n] for n in proved)
    for n in proved:
        assert (rows.array[10 + n] == before[n]).all()


# ---- engines that end, and many at once


@where
def test_a33_an_old_engine_ends_beside_a_new_one(
    tmp_path: Path, shared: bool, tiers: Tiers
) -> None:
    """Its late shutdown takes nothing from the new one, which stores meanwhile."""
    root = Root(str(tmp_path))
    old_rows, new_rows = small_rows(shared=shared), small_rows(200, shared=shared)
    old = open_tier(tiers, root, old_rows, processes=1)
    keys = keys_of(200)
    new = open_tier(tiers, root, new_rows, processes=1)
    running = movers_of(os.getpid())
    submit(new, 1, "store", keys, list(range(200)))
    old.shutdown()
    assert len(movers_of(os.getpid())) == (1 if shared else 0)
    assert set(movers_of(os.getpid())) <= set(running)
    new.drain_jobs()
    [result] = new.get_finished_jobs()
    assert result.success
    assert look_up(new, keys) == [HIT] * 200
    before = new_rows.array.copy()
    new_rows.array[:] = 0
    assert run_job(new, "load", keys, list(range(200))).success
    assert (new_rows.array == before).all()


def test_a35_replicas_share_blocks_and_nothing_else(tmp_path: Path, tiers: Tiers) -> None:
    """Two replicas of one engine store the same keys at once."""
    root = Root(str(tmp_path))
    replicas = [
        small_rows(
            shared=True, data_parallel_index=n, data_parallel_size=2, engine_id=f"dp{n}"
        )
        for n in range(2)
    ]
    replicas[1].array[:] = replicas[0].array
    opened = [open_tier(tiers, root, rows, processes=1) for rows in replicas]
    keys = keys_of(16)
    for tier in opened:
        submit(tier, 1, "store", keys, list(range(16)))
    for tier in opened:
        tier.drain_jobs()
        [result] = tier.get_finished_jobs()
        assert result.success
    urls = {tier.stores[0].url for tier in opened if isinstance(tier, KVStoreTier)}
    assert len(urls) == 1
    assert len(list(tmp_path.rglob("c.0"))) == 16
    assert not list((tmp_path / ".kvstore-tmp").glob("*/*"))
    before = replicas[0].array.copy()
    replicas[1].array[:] = 0
    assert run_job(opened[1], "load", keys, list(range(16))).success
    assert (replicas[1].array == before).all()


def test_a38_a_load_of_ten_thousand_leaves_stores_their_turn(tiers: Tiers) -> None:
    """No more transfers at once than threads, and a store's turn comes among the first."""
    faulty = Faulty()
    tier = open_tier(tiers, faulty.root, small_rows(), threads=2)
    keys, stored, asked = keys_of(10_000), keys_of(1), keys_of(1)
    loads = {key.hex() for key in keys}
    gate = Gate(lambda request, path: path.split("/")[-2] in loads)
    lock, running, most = threading.Lock(), [0], [0]

    def count(request: str, path: str) -> None:
        if asked[0].hex() in path:
            return
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate(request, path)
        with lock:
            running[0] -= 1

    faulty.before = count
    try:
        submit(tier, 1, "load", keys, [n % 16 for n in range(10_000)])
        submit(tier, 2, "store", stored, [0])
        for _ in range(2):
            assert gate.waiting.acquire(timeout=60)
        # An answer to a lookup shows that what was sent before it has arrived.
        assert look_up(tier, asked) == [MISS]
    finally:
        gate.opened.set()
    tier.drain_jobs()
    results = {result.job_id: result.success for result in tier.get_finished_jobs()}
    assert results == {1: False, 2: True}
    assert most[0] == 2
    paths = [path for _, path in faulty.seen]
    [first, *_] = [n for n, path in enumerate(paths) if stored[0].hex() in path]
    before = sum(path.split("/")[-2] in loads for path in paths[:first])
    assert before < 100


# ---- vLLM's interface, and what a machine lacks


BACKPRESSURE = "vllm.v1.kv_offload.tiering.backpressure"


def test_a37_with_and_without_a_detector(tmp_path: Path, tiers: Tiers) -> None:
    rows = small_rows()
    plain = open_tier(tiers, Root(str(tmp_path)), rows)
    assert run_job(plain, "store", keys_of(1), [0]).success
    if util.find_spec(BACKPRESSURE) is None:
        pytest.skip("this vLLM has no detectors")
    detector = {"backpressure_cls": "EMABackpressureDetector"}
    tier = open_tier(tiers, Root(str(tmp_path)), rows, backpressure=detector)
    assert run_job(tier, "store", keys_of(1), [0]).success


def test_a37_an_unknown_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="unknown option 'from_the_framework'"):
        make_tier(small_rows(), {"url": str(tmp_path), "from_the_framework": 1})


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0"])
def test_a37_another_vllm_is_refused_in_one_line(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedVersionError) as caught:
        make_tier(small_rows(), {"url": str(tmp_path / "kv")})
    assert f"found vllm {version}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "kv").exists()


@where
def test_a48_a_root_that_goes_away(
    tmp_path: Path, shared: bool, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs fail, are reported and counted, lookups miss; all is well when it is back."""
    monkeypatch.setattr(lookups, "ABSENT_SECONDS", 0.0)
    rows = small_rows(shared=shared)
    tier = open_tier(tiers, Root(str(tmp_path / "kv")), rows, processes=1)
    keys = keys_of(2)
    assert run_job(tier, "store", keys, [0, 1]).success
    (tmp_path / "kv").rename(tmp_path / "away")
    assert not run_job(tier, "store", keys_of(1), [0]).success
    assert not run_job(tier, "load", keys, [2, 3]).success
    assert look_up(tier, keys, "during") == [MISS, MISS]
    counted = counts(tier, BLOCKS)
    assert counted["store", "failed"] == 1
    assert counted["load", "absent"] == counted["lookup", "absent"] == 2
    tier.on_request_finished(ReqContext("during"))
    (tmp_path / "away").rename(tmp_path / "kv")
    assert look_up(tier, keys, "after") == [HIT, HIT]
    assert run_job(tier, "load", keys, [2, 3], "after").success
    assert (rows.array[2:4] == rows.array[:2]).all()
