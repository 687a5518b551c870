"""`kvstore report`: one page, true, harmless whatever names are in it, and readable."""

import base64
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Faulty
from typer.testing import CliRunner

from kvstore import BlockStore, InvalidInputError, Layout
from kvstore import testing as kit
from kvstore.cli.app import app
from kvstore.offline import Root
from kvstore.offline.census import AGES, Census
from kvstore.offline.faults import Findings
from kvstore.offline.page import page
from kvstore.offline.report import SAMPLE, GroupReport, Report, sample
from kvstore.offline.words import config_text, layout_text
from kvstore.paths import DOCUMENT, block_path
from kvstore.survey import FAN_OUTS, StoredBlock
from kvstore.testing import sample_config, sample_layout

HOSTILE = (
    "</title></style><script>document.title='owned'</script>"
    "<img src=//evil.example/x onerror=alert(1)>\"'`{{ 7*7 }}&amp;\u202egnp\x1b[31m"
)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + bytes(4)


def filled(root: kit.Root, count: int = 5, **options: Any) -> BlockStore:
    store = root.open(**options)
    random = np.random.default_rng(0)
    for number in range(count):
        values = random.standard_normal(store.layout.shape).astype("float16")
        store.store(key(number), values.view("uint8").reshape(-1)[: store.layout.nbytes])
    return store


def report(root: kit.Root, output: Path, *arguments: str) -> Any:
    options = ["--client", root.client, "-o", str(output)]
    if root.storage_options:
        options += ["--storage-options", json.dumps(dict(root.storage_options))]
    return CliRunner().invoke(app, ["report", root.url, *options, *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> kit.Root:
    return kit.Root(str(tmp_path / "kv"))


class Parsed(HTMLParser):
    """The elements of a page, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.style = ""
        self.feed(text)
        self.words = " ".join(self.words.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("td", "p", "dd", "div"):
            self.words += " "

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style" and not self.style:
            self.style = data
        else:
            self.words += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


# ---- what it says


def test_the_page_says_what_is_there(root: kit.Root, tmp_path: Path) -> None:
    filled(root)
    output = tmp_path / "report.html"
    told = report(root, output, "--verify", "all")
    assert told.exit_code == 0, told.output
    assert "1 groups, 5 blocks" in told.output
    assert "5 blocks were read and proved: no problem was found" in told.output
    found = Parsed(output.read_text())
    for words in (
        "All blocks were read and proved: 5 of 5 blocks",
        "No problem was found.",
        "org/model",
        "KV in float16, computed by vllm by one worker; a hash covers 16 tokens.",
        "in memory as 2 layers × 3 heads × 16 tokens × 8 values, in float16",
        "less than an hour 5",
        "mean |value| by layer (down, 2) and head (across, 3). 384 values",
    ):
        assert words in found.words
    assert len([image for image in found.named("img") if image["class"] == "map"]) == 2


def test_json_holds_what_the_page_says(folder: kit.Root, tmp_path: Path) -> None:
    filled(folder)
    told = json.loads(report(folder, tmp_path / "x.html", "--json").output)
    assert told["groups"][0]["census"]["sizes"]["blocks"] == 5
    assert told["verified"] == "sample"
    assert told["picture"]["parts"][0]["name"] == "K"


def test_damage_is_told_and_not_pictured(root: kit.Root, tmp_path: Path) -> None:
    store = filled(root, 3)
    for number in (0, 1):
        chunk = f"{store.block_url(key(number))}/c.0.0.0.0"
        root.write(chunk, bytes(len(root.read(chunk))))
    output = tmp_path / "report.html"
    told = report(root, output)
    assert told.exit_code == 1, told.output
    found = Parsed(output.read_text())
    assert "2 problems were found" in found.words
    assert "wrong-checksum 2" in found.words
    assert block_path(key(0)) in found.words
    assert store.block_url(key(2)) in found.words  # the picture
    told = report(root, output, "--verify", "none")
    assert told.exit_code == 0, told.output
    assert "No block was verified." in Parsed(output.read_text()).words


def test_what_cannot_be_pictured_costs_no_page(
    folder: kit.Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    filled(folder)
    monkeypatch.setattr("kvstore.offline.report.parts_of", refuse)
    output = tmp_path / "report.html"
    assert report(folder, output).exit_code == 0
    assert "No block could be pictured." in Parsed(output.read_text()).words


@pytest.mark.parametrize(
    ("ending", "told"),
    [("c.0.0.0.0", "No block could be pictured"), ("g0/zarr.json", "cannot read")],
)
def test_what_storage_refuses_costs_no_page(tmp_path: Path, ending: str, told: str) -> None:
    faulty = Faulty()
    filled(faulty.root)

    def refuse(request: str, path: str) -> None:
        if request == "get" and path.endswith(ending):
            raise PermissionError("refused")

    faulty.before = refuse
    output = tmp_path / "report.html"
    assert report(faulty.root, output).exit_code == 3
    assert told in Parsed(output.read_text()).words
    unverified = report(faulty.root, output, "--verify", "none").exit_code
    assert unverified == (3 if ending.startswith("g0") else 0)


def test_the_picture_is_of_the_block_that_is_named(
    folder: kit.Root, tmp_path: Path
) -> None:
    store = filled(folder)
    last = max(map(key, range(5)))
    named = kit.Root(store.block_url(last))
    told = json.loads(report(named, tmp_path / "x.html", "--json").output)
    assert told["picture"]["url"] == named.url


def test_a_group_that_cannot_be_read_hides_no_other(
    folder: kit.Root, tmp_path: Path
) -> None:
    filled(folder)
    other = folder.open(group=1)
    folder.write(f"{other.url}/{DOCUMENT}", b"{")
    output = tmp_path / "report.html"
    assert report(folder, output, "--verify", "none").exit_code == 1
    found = Parsed(output.read_text())
    assert "unreadable" in found.words
    assert "org/model" in found.words


def test_nothing_is_there(root: kit.Root, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    told = report(root, output)
    assert isinstance(told.exception, InvalidInputError)
    assert not output.exists()
    made = Report(
        url=root.url, made=0, groups=(), verified="none", findings=Findings(), picture=None
    )
    assert "There is none." in Parsed(page(made)).words


def test_a_page_that_cannot_be_written_is_an_error(
    folder: kit.Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder)
    told = report(folder, tmp_path / "no" / "report.html")
    assert isinstance(told.exception, InvalidInputError)
    output = tmp_path / "report.html"
    output.write_text("before")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    told = report(folder, output)
    assert "full" in str(told.exception)
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "report.html"]


def test_a_link_is_followed_and_a_device_is_written_to(
    folder: kit.Root, tmp_path: Path
) -> None:
    filled(folder)
    page, link, hanging = tmp_path / "page.html", tmp_path / "link", tmp_path / "hanging"
    page.write_text("before")
    link.symlink_to(page)
    hanging.symlink_to(tmp_path / "new.html")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for output in (link, hanging, pipe, Path("/dev/null")):
        assert report(folder, output).exit_code == 0
    assert link.is_symlink()
    assert hanging.is_symlink()
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()
    assert page.read_text().startswith("<!doctype html>")
    assert (tmp_path / "new.html").read_text().startswith("<!doctype html>")
    assert os.read(reader, 64).startswith(b"<!doctype html>")
    os.close(reader)


def test_without_jinja_the_command_says_how_to_get_it(
    folder: kit.Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    told = report(folder, tmp_path / "report.html")
    assert "pip install 'kvstore-zarr[report]'" in str(told.exception)


# ---- counts


def test_ages_are_counted_in_classes() -> None:
    now = time.time()
    ends = [seconds for seconds, _ in AGES]
    blocks = [
        StoredBlock("g/000/00", ("c", DOCUMENT), 10, now - age)
        for age in (-5.0, 0.0, *ends, 1e9)
    ]
    half = StoredBlock("g/000/01", ("c",), 10, now - 5)
    census = Census.of([*blocks, half], now)
    assert census.ages == (2, *(1 for _ in ends[:-1]), 2)
    assert (census.blocks, census.sizes.halves) == (len(blocks), 1)
    assert (census + census).ages == tuple(2 * count for count in census.ages)


def test_a_sample_is_of_about_so_many_blocks(folder: kit.Root) -> None:
    store = folder.open()
    for number in range(FAN_OUTS):
        (Path(folder.url) / store.path / f"{number:03x}").mkdir()
    root = Root(folder.url)
    chosen = sample(root, {store.path: 1_000_000})
    assert [share.stop - share.first for share in chosen] == [1] * 2
    assert len(sample(root, {store.path: 100 * SAMPLE})) == 41
    [whole] = sample(root, {store.path: SAMPLE})
    assert (whole.first, whole.stop) == (0, FAN_OUTS)


def test_what_is_recorded_is_said_in_words() -> None:
    config = sample_config(tp_size=4, pp_size=2)
    assert "in parallel: tensor 4, pipeline 2" in config_text(config)
    config = sample_config(parallel_agnostic=True)
    assert "whatever the number of workers" in config_text(config)
    opaque = Layout.of_bytes(2048, dtype="float16", reason="several kinds of layers")
    assert layout_text(opaque) == (
        "Blocks of 2.0 KiB in an order that is not known: several kinds of layers."
    )
    packed = sample_layout(axes=("layer", "head", "packed"), shape=(1, 3, 256))
    assert "1 layer × 3 heads × 256 packed" in layout_text(packed)


# ---- what it cannot do


def hostile(folder: kit.Root) -> str:
    """A page in which every word that a stranger may choose is hostile."""
    store = filled(folder, config=sample_config(model_name=HOSTILE))
    stranger = Path(folder.url) / store.path / "<script>alert(3)<"
    stranger.mkdir()
    (stranger / "x").write_bytes(b"x")
    output = Path(folder.url).parent / "report.html"
    assert report(folder, output, "--verify", "all").exit_code == 1
    return output.read_text()


def test_names_are_words_and_nothing_else(folder: kit.Root) -> None:
    text = hostile(folder)
    found = Parsed(text)
    assert not found.named("script")
    sources = [str(image["src"]) for image in found.named("img")]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert [link["href"] for link in found.named("link")] == ["data:,"]
    assert not any(
        name.startswith("on") or name == "style"
        for _, attributes in found.elements
        for name in attributes
    )
    assert "document.title='owned'" in found.words
    assert "49" not in found.words.partition("{{ 7*7 }}")[2][:3]
    assert "<script>alert(3)<" in found.words
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_policy_allows_what_is_in_the_page_only(folder: kit.Root) -> None:
    found = Parsed(hostile(folder))
    [policy] = [meta["content"] for meta in found.named("meta") if "http-equiv" in meta]
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_the_page_does_not_grow_with_the_blocks() -> None:
    def made(blocks: int) -> str:
        half = StoredBlock("g/000/00", ("c", DOCUMENT), 10, 0.0)
        census = Census.of([half], 0.0)
        group = GroupReport(path="g", census=census + Census(ages=(blocks,) + (0,) * 6))
        return page(
            Report(
                url="memory://x",
                made=0.0,
                groups=(group,),
                verified="all",
                findings=Findings(),
                picture=None,
            )
        )

    assert abs(len(made(10**9)) - len(made(1))) < 100


# ---- in a browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        yield (chromium := driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS))
        chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page(
    browser: Any, folder: kit.Root, width: int, scheme: str
) -> None:
    hostile(folder)
    said, asked = [], []
    view = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("dialog", lambda dialog: said.append(dialog.message))
    view.on("request", lambda request: asked.append(request.url))
    output = Path(folder.url).parent / "report.html"
    view.goto(output.as_uri())
    view.screenshot(path=str(output.with_name(f"{width}-{scheme}.png")), full_page=True)
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [output.as_uri()]
    assert view.title().startswith("KV cache at file:///")
    wide = "document.documentElement.scrollWidth"
    assert view.evaluate(wide) == view.evaluate("document.documentElement.clientWidth")
    text, ground = (
        sum(
            map(
                int,
                view.evaluate(f"getComputedStyle(document.body).{name}")[4:-1].split(","),
            )
        )
        for name in ("color", "backgroundColor")
    )
    assert (text > ground) == (scheme == "dark")
    view.emulate_media(media="print")
    assert (
        view.evaluate("getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert view.evaluate("document.querySelector('img.map').naturalWidth") == 3
