"""Memory does not grow with the number of blocks: tests/chaos/million.py in small."""

import json
from pathlib import Path

import pytest
from chaos import million

from kvstore.testing import Root

FAN_OUTS = 256
"""As many in both roots, since the names of one folder are in memory at once."""

MOST = 2 << 20
"""Bytes by which 18,000 blocks more may be apart: at 120 each it would be as much."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Root]:
    """Roots by the number of their blocks."""
    found = {}
    for blocks in (2_000, 20_000):
        found[blocks] = Root(str(tmp_path_factory.mktemp("blocks") / "kv"))
        million.fill(found[blocks], blocks, own_documents=True, fan_outs=FAN_OUTS)
    return found


@pytest.mark.parametrize("command", ["ls", "du", "cp"])
def test_memory_is_that_of_fewer_blocks(
    command: str, roots: dict[int, Root], tmp_path: Path
) -> None:
    peaks = []
    for blocks, root in roots.items():
        more = ["--jobs", "2"] if command != "ls" else []
        more += [str(tmp_path / str(blocks)), "--dry-run"] if command == "cp" else []
        taken = million.take(command, root.url, *more, "--json")
        told = json.loads(taken.printed)
        found = told["groups"][0]["copied" if command == "cp" else "blocks"]
        assert found == pytest.approx(blocks, rel=0.1)
        peaks.append(taken.peak)
    assert peaks[1] - peaks[0] < MOST
