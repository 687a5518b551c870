"""What grows and what does not, in short: see the commands in `chaos`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from chaos.growth import Growth, problems
from servers import Server

MIB = 1 << 20
KIB = 1 << 10


def grow(url: str, folder: Path, *, hits: float, **changes: Any) -> dict[str, float]:
    """What was counted. A block's whole life here is a second or so."""
    growth = Growth(
        url=url, folder=folder, limit=16 * MIB, total=32 * MIB, nbytes=128 * KIB, **changes
    )
    counts = growth.run()
    assert problems(counts, growth.limit, allowed=1.1, hits=hits) == []
    assert counts["load done"] > 100
    assert counts["removed events"] > 50
    return counts


@pytest.fixture
def diaries(tmp_path: Path) -> Path:
    (folder := tmp_path / "diaries").mkdir()
    return folder


@pytest.mark.timeout(600)
def test_engines_that_store_without_end_stay_within_the_limit(
    tmp_path: Path, diaries: Path
) -> None:
    url = str(tmp_path / "kv")
    grow(url, diaries, hits=0.5)
    again = grow(url, diaries, hits=0.5, engines=1, seed=2)  # where all is full
    assert again["at the end"] > 12 * MIB


@pytest.mark.timeout(600)
def test_engines_that_store_to_a_bucket_without_end_stay_within_the_limit(
    s3_server: Server, diaries: Path
) -> None:
    # Times in a bucket are whole seconds: of such short lives they do not tell.
    options = s3_server.storage_options
    url = f"{s3_server.url}/growth"
    grow(url, diaries, hits=0.0, engines=1, storage_options=options)


def command(name: str, folder: Path, *arguments: str) -> str:
    """What it prints. It looks at its own process, so that it needs one."""
    path = Path(__file__).parent / "chaos" / name
    line = [sys.executable, str(path), "--folder", str(folder), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_a_soak(tmp_path: Path) -> None:
    told = command("soak.py", tmp_path, "--minutes", "0.3", "--kill-seconds", "3")
    counts = {line[:28].strip(): line[28:] for line in told.splitlines()}
    assert int(counts["killed"]) >= 2
    assert int(counts["load done"].replace(",", "")) > 100


@pytest.mark.timeout(600)
def test_a_crowd(tmp_path: Path) -> None:
    told = command("crowd.py", tmp_path, "--blocks", "3000", "--seconds", "4")
    assert "looks at the start" in told
