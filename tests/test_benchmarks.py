"""The benchmarks still run: tiny sizes, one round, no time asserted."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("typer", reason="the group benchmarks is not installed")

from benchmarks import app, plot, report
from benchmarks.figures import Figure, Results, Spread, ratio
from benchmarks.settings import KIB, MIB, Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    # The page cache of the whole machine is not a test's to drop.
    monkeypatch.setattr("benchmarks.process._DROP_CACHES", tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    return Settings(
        rounds=1,
        disk=disk,
        memory=None,
        total=MIB,
        sizes=(64 * KIB,),
        seconds=0.1,
        keys=(16,),
        churned=500,
        blocks=(40,),
        bucket_blocks=(40,),
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    return out


QUICK = ("local", "bucket", "pauses", "lookups", "scale", "copies", "device")


def test_every_benchmark_is_run_here_or_needs_more_than_a_moment() -> None:
    assert set(app.BENCHMARKS) == {*QUICK, "object_stores", "codecs", "ttft"}


@pytest.mark.parametrize("name", QUICK)
def test_it_runs_and_is_rendered(name: str, settings: Settings, out: Path) -> None:
    assert app.run(name, settings, out)
    results = Results.read(out / f"{name}.json")
    assert results.figures or results.notes
    assert all(len(figure.samples) >= 1 for figure in results.figures)
    if results.figures:
        assert "kvstore" in results.sides()
        assert "| Case | Quantity | kvstore |" in report.markdown(results)
    assert not list(settings.disk.iterdir())
    assert not list(Path("/dev/shm").glob(f"kvstore-benchmark-{os.getpid()}-*"))


def test_a_failure_ends_one_benchmark_and_is_told(
    settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.transfers.look_up", lambda tier, keys: (1.0, 0))
    assert not app.run("local", settings, out)
    [note] = [n for n in Results.read(out / "local.json").notes if "Ended" in n]
    assert note == "Ended by BenchmarkFailed: expected 16 blocks to be there, found 0"


@pytest.mark.parametrize("name", ["object_stores", "codecs"])
def test_what_is_not_there_is_left_out(
    name: str, settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.companions.find_spec", lambda name: None)
    assert app.run(name, settings, out)
    [note] = Results.read(out / f"{name}.json").notes
    assert note == f"Left out: there is no benchmarks.{name}."


def results() -> Results:
    found = Results("local", {"cpu": "A CPU", "cores": 2})
    for ours, theirs in ((2.0, 1.0), (3.0, 2.0), (8.0, 2.0)):
        found.add("disk, 2 MiB", "vLLM fs", "load", "GB/s", theirs)
        found.add("disk, 2 MiB", "kvstore", "load", "GB/s", ours)
    found.note("A note.")
    return found


def test_ratios_are_taken_round_by_round() -> None:
    theirs, ours = results().figures
    assert ratio(ours, theirs) == Spread(2.0, 1.5, 4.0)
    assert ratio(ours, Figure("", "", "", "", [0.0])) is None


def test_the_page_is_rewritten_from_json_alone(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results().write(out / "local.json")
    page = out / "performance.md"
    page.write_text(
        "Before.\n<!-- results: local -->\nOld.\n<!-- end -->\n"
        "<!-- results: ttft -->\nKept.\n<!-- end -->\n"
    )
    monkeypatch.setattr(app, "DOCS", out)
    app.rendered([out / "local.json"], docs=True)
    table = capsys.readouterr().out.partition("\n")[2].partition("\nPlot")[0]
    written = page.read_text()
    assert f"<!-- results: local -->\n{table.rstrip()}\n<!-- end -->\n" in written
    assert "Old." not in written
    assert "Kept." in written
    row = "| disk, 2 MiB | load, GB/s ↑ | 3.00 (2.00..8.00) | 2.00 (1.00..2.00) | "
    assert f"{row}2.00 (1.50..4.00) |" in written


def test_the_plot_of_the_same_results_is_the_same_file(out: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert plot.draw([results()], out / name)
    assert (out / "a.svg").read_bytes() == (out / "b.svg").read_bytes()
    assert not plot.draw([], out / "c.svg")


def test_results_name_no_machine(settings: Settings, out: Path) -> None:
    app.run("device", settings, out)
    text = (out / "device.json").read_text()
    assert json.loads(text)["facts"]["cores"] > 0
    assert str(settings.disk) not in text
    assert os.uname().nodename not in text
    assert sys.prefix not in text


def test_every_benchmark_has_its_place_in_the_page() -> None:
    page = Path(__file__).parent.parent / "docs" / "performance.md"
    if not page.exists():
        pytest.skip("there are no docs beside the tests")
    text = page.read_text()
    for name in app.BENCHMARKS:
        assert f"| `{name}` | " in text
        assert f"<!-- results: {name} -->\n" in text
