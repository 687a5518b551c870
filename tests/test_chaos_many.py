"""Many processes on one root, with faults and kills: see `chaos.many`."""

from pathlib import Path

import pytest
from chaos.many import Chaos

from kvstore.testing import Root


@pytest.mark.parametrize("lies", [False, True], ids=["failures", "lies"])
def test_many_processes_that_fail_and_are_killed(
    root: Root, tmp_path: Path, lies: bool
) -> None:
    filesystem = root.filesystem()
    if not filesystem.shared:
        pytest.skip("no other process sees it")
    folder = tmp_path / "diaries"
    folder.mkdir()
    keys = 150 if filesystem.local else 20
    counts = Chaos(
        root=root, folder=folder, processes=3, keys=keys, kills=3, rate=0.05, lies=lies
    ).run()
    assert counts["killed"] == 3
    assert counts["struck"]
    assert counts["hits"] >= 3 * keys
