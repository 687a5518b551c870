"""Rows B, C and D of docs/cases.md that show in vLLM's tier only."""

import json
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from faulty import Faulty, Gate
from specs import (
    Rows,
    counts,
    look_up,
    make_tier,
    offloading_config,
    run_job,
    until_found,
)
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from work import until

from kvstore import circuit
from kvstore.testing import Root, sample_config
from kvstore.vllm.metrics import CIRCUIT, ERRORS, NOT_TRIED
from kvstore.vllm.weights import weights_digest

HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform whose attention keeps tokens and values apart."""
    platform = SimpleNamespace(is_cpu=lambda: False, fp8_dtype=current_platform.fp8_dtype)
    monkeypatch.setattr("kvstore.vllm.layout.current_platform", platform)


@contextmanager
def opened(root: Root, rows: Rows, **options: Any) -> Iterator[SecondaryTierManager]:
    """A tier on threads of this process."""
    where = {"storage_options": dict(root.storage_options), "client": root.client}
    tier = make_tier(rows, {"url": root.url, "processes": 0, **where, **options})
    try:
        yield tier
    finally:
        tier.shutdown()


def keys_of(count: int, group: int = 0) -> list[Any]:
    return [make_offload_key(os.urandom(32), group) for _ in range(count)]


def filled(count: int = 4, **changes: Any) -> Rows:
    rows = Rows(offloading_config(**changes), count)
    rows.fill()
    return rows


def model(folder: Path, *, value: int = 0, tensors: int = 2) -> Path:
    """A local folder with weights."""
    names = [f"layer{n}" for n in range(tensors)]
    header = {
        name: {"dtype": "U8", "shape": [9000], "data_offsets": [9000 * n, 9000 * n + 9000]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + bytes([value]) * 9000 * tensors
    )
    return folder


def test_b8_weights_under_one_name_have_namespaces_of_their_own(
    root: Root, tmp_path: Path
) -> None:
    folders = {
        "first": model(tmp_path / "1" / "model"),
        "copy": model(tmp_path / "2" / "model"),
        "another value": model(tmp_path / "3" / "model", value=1),
        "another tensor": model(tmp_path / "4" / "model", tensors=3),
    }
    os.utime(folders["copy"] / "model.safetensors", (0, 0))  # a copy has times of its own
    stores = {
        name: root.open(config=sample_config(weights_digest=weights_digest(folder)))
        for name, folder in folders.items()
    }
    assert stores["copy"].url == stores["first"].url
    assert len({store.url for store in stores.values()}) == 3


@pytest.mark.parametrize("again", [False, True], ids=["same request", "next request"])
def test_b11_a_block_that_somebody_removed_is_a_miss_after_one_load(
    root: Root, again: bool
) -> None:
    rows, keys = filled(), keys_of(2)
    with opened(root, rows) as tier:
        assert run_job(tier, "store", keys, [0, 1]).success
        assert look_up(tier, keys) == [HIT, HIT]
        for name in root.files():
            if keys[0].hex() in name:
                root.remove(name if root.url.startswith("/") else f"{scheme(root)}{name}")
        result = run_job(tier, "load", keys, [2, 3])
        assert not result.success
        assert result.successful_keys == (keys[1],)
        request = "r"
        if again:
            tier.on_request_finished(ReqContext("r"))
            request = "next"
        assert look_up(tier, keys, request) == [MISS, HIT]
        assert run_job(tier, "store", keys, [0, 1], request).success
        tier.on_request_finished(ReqContext(request))
        assert look_up(tier, keys, "last") == [HIT, HIT]


def scheme(root: Root) -> str:
    return root.url.partition("://")[0] + "://"


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "blocks failed" in message]


def test_b12_a_dead_key_is_asked_for_once_by_all_requests() -> None:
    """A load that fails makes the key a miss for a moment; a store ends that."""
    storage, keys = Faulty(), keys_of(2)
    with opened(storage.root, filled(), io_timeout=1.0) as tier:
        assert run_job(tier, "store", keys, [0, 1]).success
        assert look_up(tier, keys) == [HIT, HIT]

        def fail(request: str, path: str) -> None:
            if keys[0].hex() in path:
                raise TimeoutError

        storage.before = fail
        assert run_job(tier, "load", keys, [2, 3]).successful_keys == (keys[1],)
        tier.on_request_finished(ReqContext("r"))
        storage.seen.clear()
        for request in "abc":
            assert look_up(tier, keys, request) == [MISS, HIT]
            tier.on_request_finished(ReqContext(request))
        assert storage.seen == []
        storage.before = lambda request, path: None
        assert run_job(tier, "store", keys[:1], [0]).success
        assert look_up(tier, keys, "d") == [HIT, HIT]


def test_b12_a_key_that_is_never_answered_is_waited_for_once() -> None:
    """Until its answer comes after all."""
    storage, keys = Faulty(), keys_of(1)
    with opened(storage.root, filled()) as tier:
        assert run_job(tier, "store", keys, [0]).success
    gate = Gate(lambda request, path: keys[0].hex() in path)
    with opened(storage.root, filled(), lookup_timeout=0.1) as tier:
        storage.before = gate
        storage.seen.clear()
        try:
            assert look_up(tier, keys, "first") == [MISS]
            tier.on_request_finished(ReqContext("first"))
            for request in "abc":
                assert tier.lookup(keys[0], ReqContext(request)) is MISS
                tier.on_request_finished(ReqContext(request))
            assert storage.count("get", f"{keys[0].hex()}/zarr.json") == 1
        finally:
            gate.opened.set()
        until_found(tier, keys[0])


def test_b17_while_all_writes_fail_loads_are_served_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage, rows, keys = Faulty(), filled(), keys_of(2)
    with opened(storage.root, rows) as tier:
        assert run_job(tier, "store", keys, [0, 1]).success

        def refuse(request: str, path: str) -> None:
            if request == "put":
                raise OSError("no room")

        storage.before = refuse
        with caplog.at_level(logging.WARNING, "kvstore"):
            result = run_job(tier, "store", others := keys_of(2), [0, 1])
        assert not result.success
        assert not result.successful_keys
        [line] = failures(caplog)
        assert "store of 2 of 2 blocks failed" in line
        assert "no room" in line
        assert look_up(tier, [*keys, *others]) == [HIT, HIT, MISS, MISS]
        assert run_job(tier, "load", keys, [2, 3]).success
        assert (rows.array[2:] == rows.array[:2]).all()


def test_b17_writes_that_all_fail_are_given_up_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a trial succeeds. Loads are tried all the while."""
    monkeypatch.setattr(circuit, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(circuit, "FIRST_PAUSE", 0.1)
    storage, rows, keys = Faulty(), filled(), keys_of(2)
    with opened(storage.root, rows) as tier:
        assert run_job(tier, "store", keys, [0, 1]).success

        def refuse(request: str, path: str) -> None:
            if request == "put":
                raise OSError("no room")

        storage.before = refuse
        tier.get_stats()
        many = keys_of(circuit.FAILURES)
        assert not run_job(tier, "store", many, [0] * len(many)).success
        storage.seen.clear()
        assert not run_job(tier, "store", keys_of(2), [0, 1]).success
        assert storage.seen == []
        stats = tier.get_stats()
        assert stats is not None
        counted = stats.data["data"]
        assert counted[ERRORS]["store", "other"] == circuit.FAILURES
        assert counted[NOT_TRIED]["store", "circuit_open"] == 2
        assert counted[CIRCUIT]["write",] == 1
        assert run_job(tier, "load", keys, [2, 3]).success
        assert (rows.array[2:] == rows.array[:2]).all()
        storage.before = lambda request, path: None
        until(lambda: run_job(tier, "store", keys_of(1), [0]).success)
    told = [r.getMessage() for r in caplog.records if r.name == circuit.__name__]
    assert [line.partition(":")[0] for line in told[:1]] == [
        "given up until a trial succeeds"
    ]
    assert "works again after" in told[-1]


@pytest.mark.parametrize("missing", ["document", "chunk"])
def test_b24_a_block_that_is_not_whole_is_no_part_of_a_hit(missing: str) -> None:
    """A row holds every worker's share, and each group of a prefix is asked for itself."""
    groups = ((0, 16, ("a", "b")), (1, 16, ("c", "d")))
    storage = Faulty()
    rows = filled(tp_size=2, world_size=2, groups=groups)
    hashed = os.urandom(32)
    keys = [make_offload_key(hashed, group) for group in (0, 1)]
    with opened(storage.root, rows) as tier:
        assert run_job(tier, "store", keys[:1], [0]).success
        assert look_up(tier, keys) == [HIT, MISS]
    with opened(storage.root, rows) as tier:
        [name] = [
            name
            for name in storage.root.files()
            if keys[0].hex() in name and name.endswith(".json") == (missing == "document")
        ]
        storage.root.remove(f"faulty:/{name}")
        rows.array[1:] = 0
        assert not run_job(tier, "load", keys, [1, 2]).success
        assert look_up(tier, keys, "next") == [MISS, MISS]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        pytest.param(PermissionError("Forbidden"), "access", id="403"),
        pytest.param(TimeoutError(), "timeout", id="timeout"),
        pytest.param(OSError("503 Slow Down"), "other", id="503"),
    ],
)
def test_c6_an_outage_is_a_miss_for_now_told_once_and_counted(
    failure: Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage, keys = Faulty(), keys_of(3)
    with opened(storage.root, filled()) as tier:
        assert run_job(tier, "store", keys, [0, 1, 2]).success
    with opened(storage.root, filled()) as tier:

        def fail(request: str, path: str) -> None:
            raise failure

        storage.before = fail
        with caplog.at_level(logging.WARNING, "kvstore"):
            assert look_up(tier, keys, "first") == [MISS] * 3
        [line] = failures(caplog)
        assert "lookup of 3 of 3 blocks failed" in line
        assert "the first: cannot read" in line
        assert counts(tier, ERRORS)["lookup", kind] == 3
        storage.before = lambda request, path: None
        tier.on_request_finished(ReqContext("first"))
        assert look_up(tier, keys, "second") == [HIT] * 3


def test_d20_an_engine_that_only_reads_stores_nothing_and_loads(root: Root) -> None:
    """Its stores are dropped before they are jobs, and one that comes all the same is
    reported as not stored."""
    rows, keys, others = filled(), keys_of(2), keys_of(2)
    with opened(root, rows) as tier:
        assert run_job(tier, "store", keys, [0, 1]).success
    files = root.files()
    with opened(root, rows, read_only=True) as tier:
        detector = tier.bp_detector
        assert detector is not None
        assert detector.is_under_pressure()
        result = run_job(tier, "store", others, [2, 3])
        assert (result.success, result.successful_keys) == (False, None)
        assert counts(tier, NOT_TRIED)["store", "read_only"] == 2
        assert look_up(tier, [*keys, *others]) == [HIT, HIT, MISS, MISS]
        assert run_job(tier, "load", keys, [2, 3]).success
        assert (rows.array[2:] == rows.array[:2]).all()
    assert root.files() == files
