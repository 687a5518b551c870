"""The tier while its storage fails, hangs, and comes back."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fsspec.implementations.memory import MemoryFileSystem
from specs import Rows, look_up, make_tier, offloading_config, run_job
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from kvstore.circuit import FAILURES
from kvstore.vllm.metrics import BLOCKS, ERRORS, QUEUED

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
PATIENCE = 30.0


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory that fails or hangs when a test says so."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    reads: ClassVar[Callable[[str], None]] = lambda path: None
    writes: ClassVar[Callable[[str], None]] = lambda path: None
    asked: ClassVar[list[str]] = []

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        type(self).asked.append(path)
        type(self).reads(path)
        return super().cat_file(path, *arguments, **options)

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        type(self).asked.append(path)
        type(self).writes(path)
        return super().pipe_file(path, *arguments, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


def fail(path: str) -> None:
    raise ConnectionResetError("reset by a test")


@pytest.fixture
def flaky() -> Iterator[type[Flaky]]:
    Flaky.store.clear()
    yield Flaky
    Flaky.reads = Flaky.writes = lambda path: None


@pytest.fixture
def rows() -> Rows:
    rows = Rows(offloading_config(), 8)
    rows.fill()
    return rows


@pytest.fixture
def tier(flaky: type[Flaky], rows: Rows) -> Iterator[SecondaryTierManager]:
    options = {"url": "flaky://kv", "processes": 0, "io_timeout": 3, "lookup_timeout": 1}
    tier = make_tier(rows, options)
    yield tier
    Flaky.reads = Flaky.writes = lambda path: None
    tier.shutdown()


def keys_of(count: int, first: int = 0) -> list[Any]:
    return [make_offload_key(bytes([first + n]) * 32, 0) for n in range(count)]


def step(tier: SecondaryTierManager) -> None:
    tier.on_schedule_end(ScheduleEndContext((), ()))
    time.sleep(0.002)


def until(tier: SecondaryTierManager, verdict: LookupResult, key: Any) -> None:
    """New requests ask, as engines do, until one is told this."""
    end = time.monotonic() + PATIENCE
    number = 0
    while True:
        number += 1
        context = ReqContext(f"until-{number}")
        while (found := tier.lookup(key, context)) is RETRY:
            step(tier)
        tier.on_request_finished(context)
        if found is verdict:
            return
        assert time.monotonic() < end
        step(tier)


def test_dead_storage_costs_a_miss_and_soon_nothing(
    tier: SecondaryTierManager, flaky: type[Flaky]
) -> None:
    keys = keys_of(FAILURES + 1)
    assert run_job(tier, "store", keys, list(range(len(keys)))).success
    flaky.asked.clear()
    flaky.reads = fail
    time.sleep(1.0)  # so long nothing may have succeeded
    # What this process has stored it knows; these it must ask for.
    unknown = keys_of(FAILURES, 100)
    assert look_up(tier, unknown, "first") == [MISS] * FAILURES
    others = keys_of(50, 150)
    context = ReqContext("second")
    assert [tier.lookup(key, context) for key in others] == [MISS] * 50
    assert not run_job(tier, "load", keys[:1], [0]).success
    # Of the first there may be requests still, which are tried again when they fail.
    asked = "".join(flaky.asked)
    assert not any(bytes(key).hex() in asked for key in (*others, keys[0]))
    flaky.reads = lambda path: None
    until(tier, HIT, keys[-1])


def test_storage_that_hangs_is_a_miss_in_time(
    tier: SecondaryTierManager, flaky: type[Flaky]
) -> None:
    time.sleep(1.0)
    gate = threading.Event()

    def hang(path: str) -> None:
        gate.wait(PATIENCE)

    flaky.reads = hang
    started = time.monotonic()
    assert look_up(tier, keys_of(FAILURES, 100)) == [MISS] * FAILURES
    assert time.monotonic() - started < 5.0
    context = ReqContext("second")
    assert tier.lookup(keys_of(1, 150)[0], context) is MISS
    gate.set()
    [key] = keys_of(1)
    assert run_job(tier, "store", [key], [0]).success
    until(tier, HIT, key)


def test_loads_go_on_while_stores_fail(
    tier: SecondaryTierManager, flaky: type[Flaky], caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(3)
    assert run_job(tier, "store", keys, [0, 1, 2]).success
    flaky.writes = fail
    time.sleep(1.0)
    assert not run_job(tier, "store", keys_of(FAILURES, 100), [0] * FAILURES).success
    flaky.asked.clear()
    result = run_job(tier, "store", keys_of(4, 150), [0] * 4)
    assert not result.success
    assert not result.successful_keys
    assert flaky.asked == []
    assert look_up(tier, keys) == [HIT] * 3
    assert run_job(tier, "load", keys, [3, 4, 5]).success
    flaky.writes = lambda path: None
    end = time.monotonic() + PATIENCE
    while not run_job(tier, "store", keys_of(1, 200), [0]).success:
        assert time.monotonic() < end
        time.sleep(0.05)
    lines = [r.getMessage() for r in caplog.records if r.name == "kvstore.circuit"]
    assert len(lines) == 2
    assert lines[0].startswith("given up until a trial succeeds: stores of flaky://kv: ")
    assert lines[1].endswith(" s: stores of flaky://kv")


def test_an_error_is_not_remembered_as_an_absence(
    tier: SecondaryTierManager, flaky: type[Flaky], rows: Rows
) -> None:
    [key] = keys_of(1)
    other = make_tier(rows, {"url": "flaky://kv", "processes": 0})
    assert run_job(other, "store", [key], [0]).success
    other.shutdown()
    flaky.reads = fail
    assert look_up(tier, [key], "r") == [MISS]
    flaky.reads = lambda path: None
    assert tier.lookup(key, ReqContext("r")) is MISS  # it was told
    tier.on_request_finished(ReqContext("r"))
    tier.drain_jobs()  # what was late is answered by now
    step(tier)
    assert look_up(tier, [key], "s") == [HIT]


def tier_of(rows: Rows, **options: Any) -> SecondaryTierManager:
    """On threads of this process, or no test could let its storage fail."""
    common = {"url": "flaky://kv", "processes": 0, "io_timeout": 5}
    return make_tier(rows, {**common, **options})


def stored_by_another(rows: Rows, keys: list[Any]) -> None:
    """This process remembers what it has stored itself."""
    other = tier_of(rows)
    for first in range(0, len(keys), 8):
        some = keys[first : first + 8]
        assert run_job(other, "store", some, list(range(len(some)))).success
    other.shutdown()


def test_a_lookup_that_hangs_keeps_no_other_from_its_answer(
    flaky: type[Flaky], rows: Rows
) -> None:
    """Even the others of its step."""
    keys = keys_of(40)
    stored_by_another(rows, keys)
    tier = tier_of(rows, threads=4, lookup_timeout=3)
    gate = threading.Event()

    def hang(path: str) -> None:
        if bytes(keys[7]).hex() in path:
            gate.wait(PATIENCE)

    flaky.reads = hang
    assert look_up(tier, keys) == [*[HIT] * 7, MISS, *[HIT] * 32]
    assert not tier._health.reads_open
    assert run_job_beside(tier, keys[:7])
    gate.set()
    tier.shutdown()


def run_job_beside(tier: SecondaryTierManager, keys: list[Any]) -> bool:
    """Whether a load succeeds, without a drain, which would wait for lookups."""
    slots = np.arange(len(keys), dtype=np.int32)
    tier.submit_load(TransferJob(9, keys, slots, True, ReqContext("r")))
    end = time.monotonic() + PATIENCE
    while not (results := list(tier.get_finished_jobs())):
        assert time.monotonic() < end
        time.sleep(0.001)
    return bool(results[0].success)


def test_answers_that_come_too_late_are_errors_and_open_the_circuit(
    flaky: type[Flaky], rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """Storage that is a little slower than `lookup_timeout` is of no use at all."""
    keys = keys_of(FAILURES)
    stored_by_another(rows, keys)
    tier = tier_of(rows, lookup_timeout=0.3)
    gate = threading.Event()

    def hang(path: str) -> None:
        gate.wait(PATIENCE)

    flaky.reads = hang
    assert look_up(tier, keys) == [MISS] * FAILURES
    gate.set()
    tier.drain_jobs()
    step(tier)
    assert tier._health.lookups.open
    stats = tier.get_stats()
    assert stats is not None
    told = stats.data["data"]
    assert told[BLOCKS]["lookup", "found"] == 0
    assert told[BLOCKS]["lookup", "failed"] == FAILURES
    assert told[ERRORS]["lookup", "late"] == FAILURES
    assert told[QUEUED]["lookup",] == 0
    assert "lookup of 5 of 5 blocks failed" in caplog.text
    assert "no answer within 0.3 s" in caplog.text
    tier.shutdown()


def test_writes_that_hang_take_no_lookup_down(flaky: type[Flaky], rows: Rows) -> None:
    """In a bucket what is used is touched by a write."""
    used, others = keys_of(20), keys_of(20, 100)
    stored_by_another(rows, [*used, *others])
    tier = tier_of(rows, threads=2, lookup_timeout=5, max_bytes=10**9)
    gate = threading.Event()

    def hang(path: str) -> None:
        gate.wait(PATIENCE)

    flaky.writes = hang
    assert look_up(tier, used, "first") == [HIT] * len(used)
    step(tier)
    started = time.monotonic()
    assert look_up(tier, others, "second") == [HIT] * len(others)
    assert time.monotonic() - started < 5
    gate.set()
    tier.shutdown()


def test_of_a_store_that_is_a_trial_only_the_first_key_is_tried(
    tier: SecondaryTierManager, flaky: type[Flaky]
) -> None:
    """If it hangs, loads have the other threads."""
    flaky.writes = fail
    time.sleep(1.0)
    assert not run_job(tier, "store", keys_of(FAILURES), [0] * FAILURES).success
    flaky.writes = lambda path: None
    keys = keys_of(4, 100)
    end = time.monotonic() + PATIENCE
    while not (result := run_job(tier, "store", keys, [0, 1, 2, 3])).successful_keys:
        flaky.asked.clear()
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not result.success
    assert result.successful_keys == (keys[0],)
    assert not any(bytes(key).hex() in "".join(flaky.asked) for key in keys[1:])
    assert run_job(tier, "store", keys, [0, 1, 2, 3]).success


def test_a_store_is_not_unsaid_by_a_lookup_that_began_before_it(
    tier: SecondaryTierManager, flaky: type[Flaky]
) -> None:
    [key] = keys_of(1)
    looked, gate = threading.Event(), threading.Event()

    def absent(path: str) -> None:
        flaky.reads = lambda path: None
        looked.set()
        gate.wait(PATIENCE)
        raise FileNotFoundError(path)

    context = ReqContext("r")
    flaky.reads = absent
    assert tier.lookup(key, context) is RETRY
    step(tier)
    assert looked.wait(PATIENCE)
    slots = np.zeros(1, np.int32)
    tier.submit_store(TransferJob(9, [key], slots, False, ReqContext("s")))
    end = time.monotonic() + PATIENCE
    while not (results := list(tier.get_finished_jobs())):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert results[0].success
    gate.set()
    tier.drain_jobs()
    step(tier)
    assert tier.lookup(key, context) is HIT
    assert look_up(tier, [key], "later") == [HIT]


def chunk_of(path: str, *keys: Any) -> bool:
    """Whether a path is that of a block's bytes, not of its document."""
    return not path.endswith("zarr.json") and any(bytes(key).hex() in path for key in keys)


def test_blocks_that_do_not_come_are_soon_not_asked_for_while_documents_come(
    tier: SecondaryTierManager, flaky: type[Flaky], caplog: pytest.LogCaptureFixture
) -> None:
    """As over a network that is too slow for a block, and answers lookups."""
    keys = keys_of(FAILURES + 1)
    assert run_job(tier, "store", keys, list(range(len(keys)))).success

    def fail_chunks(path: str) -> None:
        if chunk_of(path, *keys):
            fail(path)

    flaky.reads = fail_chunks
    assert look_up(tier, keys, "first") == [HIT] * len(keys)
    assert not run_job(tier, "load", keys[:FAILURES], list(range(FAILURES))).success
    tier.on_request_finished(ReqContext("first"))
    assert look_up(tier, keys_of(3, 100), "second") == [MISS] * 3
    flaky.asked.clear()
    end = time.monotonic() + PATIENCE
    while not any(chunk_of(path, keys[0]) for path in flaky.asked):
        step(tier)  # a trial
        assert time.monotonic() < end
    assert look_up(tier, keys[FAILURES:], "third") == [MISS]
    flaky.reads = lambda path: None
    until(tier, HIT, keys[FAILURES])  # it was stored here, and no lookup would ask
    lines = [r.getMessage() for r in caplog.records if r.name == "kvstore.circuit"]
    assert [line.partition(" of flaky://kv")[0].rpartition(" ")[2] for line in lines] == [
        "loads"
    ] * 2


def test_a_few_blocks_that_cannot_be_read_do_not_keep_the_others_away(
    tier: SecondaryTierManager, flaky: type[Flaky]
) -> None:
    bad, good = keys_of(FAILURES), keys_of(1, 100)
    assert run_job(tier, "store", bad + good, list(range(FAILURES + 1))).success

    def fail_bad(path: str) -> None:
        if chunk_of(path, *bad):
            fail(path)

    flaky.reads = fail_bad
    assert not run_job(tier, "load", bad, list(range(FAILURES))).success
    assert look_up(tier, good, "first") == [MISS]
    until(tier, HIT, good[0])
    assert run_job(tier, "load", good, [FAILURES]).success
