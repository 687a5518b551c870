"""The runs that docs/commands shows are run again, and print what the pages say."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import cache
import children
import pytest
import vllm_cache
from children import Kvstore

from kvstore import __version__
from kvstore.cli.app import app, main

PAGES = Path(__file__).parent.parent / "docs" / "commands"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def runs(page: Path) -> Iterator[tuple[str, str]]:
    """Every command of a page, and what it prints."""
    for block in _BLOCK.findall(page.read_text()):
        for part in block.split("$ ")[1:]:
            command, _, printed = part.partition("\n")
            while command.endswith("\\"):
                more, _, printed = printed.partition("\n")
                command = command[:-1] + more.strip()
            yield command, printed


def matches(expected: str, found: str) -> bool:
    """Whether a text is as expected; `...` stands for anything, and spaces for spaces."""
    parts = [re.escape(part) for part in " ".join(expected.split()).split("...")]
    return re.fullmatch(".*?".join(parts), " ".join(found.split()), re.DOTALL) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cache in it, and `kvstore` and `python` to be called by name."""
    monkeypatch.chdir(tmp_path)
    cache.fill("kv")
    vllm_cache.fill("vllm")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    script = f"#!{sys.executable}\nfrom kvstore.cli.app import main\nmain()\n"
    (tools / "kvstore").write_text(script)
    (tools / "kvstore").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_the_runs_of_a_page(page: Path, folder: Path) -> None:
    for command, printed in runs(page):
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert matches(printed, done.stdout), f"{command}\n{done.stdout}"


def test_every_command_has_its_page_with_a_run() -> None:
    names = {
        info.name or getattr(info.callback, "__name__", "").replace("_", "-")
        for info in app.registered_commands
    }
    assert names == {page.stem for page in PAGES.glob("*.md")} - {"README"}
    index = (PAGES / "README.md").read_text()
    for name in names:
        assert f"[`{name}`]({name}.md)" in index
        shown = [command for command, _ in runs(PAGES / f"{name}.md")]
        assert any(command.startswith(f"kvstore {name}") for command in shown)


def test_every_command_says_how_it_is_called() -> None:
    for info in app.registered_commands:
        assert info.callback is not None
        assert "Example: kvstore " in (info.callback.__doc__ or "")


def test_the_command_is_installed() -> None:
    [script] = entry_points(group="console_scripts", name="kvstore")
    assert script.load() is main


def test_the_module_is_the_command_and_tells_its_version(kvstore: Kvstore) -> None:
    assert kvstore("--version") == (0, f"kvstore {__version__}\n", "")
    told = children.script(
        "import runpy; runpy.run_module('kvstore', run_name='__main__')", "--version"
    )
    assert told == f"kvstore {__version__}\n"


def test_what_stands_for_anything() -> None:
    assert matches("a ... c", "a  b\nc\n")
    assert matches("1 block", "1  block")
    assert not matches("1 block", "2 block")
