"""`kvstore plot`: proved before it is shown, in a terminal or a file."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import terminal
from typer.testing import CliRunner

from kvstore import BlockStore, DamagedBlockError, InvalidInputError
from kvstore import testing as kit
from kvstore.cli.app import app, exit_code
from kvstore.paths import block_path
from kvstore.testing import sample_block, sample_config, sample_layout

KEY = bytes([7]) * 36


def plot(root: kit.Root, *arguments: str, path: str = "") -> Any:
    options = ["--client", root.client]
    if root.storage_options:
        options += ["--storage-options", json.dumps(dict(root.storage_options))]
    url = f"{root.url}/{path}".rstrip("/")
    return CliRunner().invoke(app, ["plot", url, *arguments, *options])


def filled(root: kit.Root) -> BlockStore:
    store = root.open()
    values = np.ones(store.layout.shape, "float16")
    values[1] = 3
    store.store(KEY, values)
    store.store(bytes(36), sample_block(store.layout))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> kit.Root:
    return kit.Root(str(tmp_path / "kv"))


def test_a_block_is_shown_by_its_key_or_its_url(root: kit.Root) -> None:
    store = filled(root)
    by_key = plot(root, KEY.hex())
    assert by_key.exit_code == 0, by_key.output
    assert " 0 ...\n 1 @@@\n" in by_key.output
    assert "org/model, float16, layer,head,token,value" in by_key.output
    by_url = plot(
        root, path=store.block_url(KEY).removeprefix(store.url.rpartition(store.path)[0])
    )
    assert by_url.output == by_key.output


def test_json_holds_every_number(root: kit.Root) -> None:
    store = filled(root)
    told = json.loads(plot(root, KEY.hex(), "--json").output)
    assert told["url"] == store.block_url(KEY)
    assert [part["name"] for part in told["parts"]] == ["K", "V"]
    assert told["parts"][0]["means"] == [[1, 1, 1], [3, 3, 3]]


def test_a_picture_is_drawn_whatever_the_model_is_called(folder: kit.Root) -> None:
    name = "$\\frac{<b>\x1b[31m"
    store = folder.open(config=sample_config(model_name=name))
    store.store(KEY, sample_block(store.layout))  # NaN are among the values
    for suffix in ("png", "svg", "pdf"):
        output = Path(folder.url) / f"block.{suffix}"
        told = plot(folder, KEY.hex(), "-o", str(output))
        assert told.exit_code == 0, told.output
        assert output.stat().st_size > 5000
        assert "\x1b" not in told.output
    assert (output.with_suffix(".png")).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [0x7F00, 0x7F80, 0x7FC0, 0x0001], ids=hex)
def test_a_block_of_one_value_is_shown_and_drawn(folder: kit.Root, value: int) -> None:
    store = folder.open(layout=sample_layout(dtype="bfloat16"))
    store.store(KEY, np.full(store.layout.shape, value, "uint16").tobytes())
    output = Path(folder.url) / "block.svg"
    for arguments in ([], ["-o", str(output)]):
        told = plot(folder, KEY.hex(), *arguments)
        assert told.exit_code == 0, told.output
    assert output.stat().st_size > 5000


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"TERM": "xterm-256color"}, "▀"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "▀"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, " 0 ...\n 1 @@@\n"),
        ({"TERM": "xterm"}, " 0 ...\n 1 @@@\n"),
        ({"TERM": "dumb"}, " 0 ...\n 1 @@@\n"),
    ],
)
def test_a_terminal_shows_what_it_can(
    folder: kit.Root, environment: dict[str, str], shown: str
) -> None:
    filled(folder)
    code, text = terminal("plot", folder.url, KEY.hex(), **environment)
    assert code == 0
    assert shown in text
    assert ("▀" in text) == (shown == "▀")


def test_a_damaged_block_is_not_shown(root: kit.Root) -> None:
    store = filled(root)
    chunk = f"{store.block_url(KEY)}/c.0.0.0.0"
    root.write(chunk, bytes(len(root.read(chunk))))
    told = plot(root, KEY.hex())
    assert isinstance(told.exception, DamagedBlockError)
    assert exit_code(told.exception) == 1
    assert told.output == ""


def refused(told: Any) -> str:
    assert isinstance(told.exception, InvalidInputError), told.output
    return str(told.exception)


def test_every_refusal_says_what_to_do(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder)
    assert f"There is, for example, {bytes(36).hex()}" in refused(plot(folder))
    assert "expected hex digits, found 'xyz'" in refused(plot(folder, "xyz"))
    assert "expected a block, found none" in refused(plot(folder, "ff" * 36))
    inside = f"{store.path}/{block_path(KEY)}"
    assert "names another block" in refused(plot(folder, "00" * 36, path=inside))
    assert "ends in one of" in refused(plot(folder, KEY.hex(), "-o", "block.xyz"))
    monkeypatch.setenv("PATH", "")  # no LaTeX is on it
    assert "cannot draw .pgf" in refused(plot(folder, KEY.hex(), "-o", "block.pgf"))
    nowhere = str(Path(folder.url) / "no" / "block.png")
    assert "cannot write" in refused(plot(folder, KEY.hex(), "-o", nowhere))
    folder.open(group=1).store(KEY, sample_block(store.layout))
    assert "r0/g0 and" in refused(plot(folder, KEY.hex()))


def test_nothing_is_there(root: kit.Root) -> None:
    assert "holds no block" in refused(plot(root))


def test_a_group_that_cannot_be_read_hides_no_block(folder: kit.Root) -> None:
    filled(folder)
    other = folder.open(group=1)
    folder.write(f"{other.url}/zarr.json", b"{")
    assert plot(folder, KEY.hex()).exit_code == 0
    told = plot(folder, "ff" * 36)
    assert exit_code(told.exception) == 4


def test_without_matplotlib_the_command_says_how_to_get_it(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = plot(folder, KEY.hex(), "-o", "block.png")
    assert "pip install 'kvstore-zarr[plot]'" in refused(told)
    assert plot(folder, KEY.hex()).exit_code == 0
