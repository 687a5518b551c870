"""Writers that are killed lose nothing that they reported, and leave nothing for long."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from chaos.blocks import LAYOUT, key, payload
from chaos.moments import halves, kill_at_random, tidy
from chaos.steps import SCENARIOS, Scenario, Steps, kill_at_every_step
from servers import Server

from kvstore.testing import Root


@pytest.mark.timeout(600)  # each of the 30 is a new interpreter
def test_writers_that_are_killed_at_random(tmp_path: Path) -> None:
    found, remained = kill_at_random(Root(str(tmp_path)), 30, seed=1)
    assert (found.faults, remained) == (0, 0)
    assert found.healthy > 30


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_writers_that_are_killed_at_every_step(
    tmp_path: Path, scenario: Scenario, fsync: bool
) -> None:
    # A process that has run many tests takes seven times as long to fork as a fresh one.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        killed = fresh.submit(kill_at_every_step, tmp_path, scenario, Steps(), fsync=fsync)
        steps = killed.result()
    assert steps.problems == []
    assert steps.kills[f"{scenario} before"] == steps.kills[f"{scenario} after"] > 5
    called = set(steps.calls)
    if scenario == "delete":
        assert called == {"open", "close", "unlink", "rmdir"}
        assert set(steps.outcomes) == {"served", "absent"}
        return
    synced = {"fsync"} if fsync or scenario == "open" else set()
    assert {"open", "close", "write", "mkdir", "rename"} | synced <= called
    assert steps.kills[f"{scenario} amid"] >= 3
    assert steps.left
    worked_on = {"open": set(), "repair": {"damaged", "absent", "served"}}
    assert set(steps.outcomes) >= worked_on.get(scenario, {"absent", "served"})


def test_writers_to_a_bucket_that_are_killed_at_random(s3_server: Server) -> None:
    root = Root(f"{s3_server.url}/kills", s3_server.storage_options)
    found, remained = kill_at_random(root, 4, seed=1)
    assert (found.faults, remained) == (0, 0)


def test_a_start_with_limits_collects_half_a_block(s3_server: Server) -> None:
    root = Root(f"{s3_server.url}/halves", s3_server.storage_options)
    store = root.open(LAYOUT)
    for number in range(3):
        store.store(key(number), payload(number))
    root.remove(f"{store.block_url(key(0))}/zarr.json")
    root.remove(f"{store.block_url(key(1))}/c.0")
    assert halves(root) == 2
    assert tidy(root) == 2
    assert halves(root) == 0
    assert store.load(key(2), bytearray(store.layout.nbytes))
