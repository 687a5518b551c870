"""What a person gives to the command line, and what of storage reaches the terminal."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cache
import pytest
import typer
from children import Kvstore, terminal
from faulty import Faulty

from kvstore import BlockStore
from kvstore.arrays import ArrayFormat
from kvstore.cli.app import app
from kvstore.testing import sample_config, sample_layout

KEY = bytes(range(36))

NAMESPACES = ("org_small_0f64575539d1", "org_tiny_694b2e64f41f")
TINY = f"URL/{NAMESPACES[1]}"
DEEP = "[" * 100_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a small cache in a folder."""
    cache.fill(str(tmp_path / "kv"))
    return str(tmp_path / "kv")


# ---- what cannot be used is told in one line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("ls", "URL", "--storage-options", "@~nobody-of-this-name/x"),
            "--storage-options",
        ),
        (("ls", "URL", "--storage-options", "@\0"), "--storage-options"),
        (("ls", "URL", "--storage-options", DEEP), "expected a JSON object"),
        (("gc", "URL", "--max-bytes", "9" * 320 + "B"), "--max-bytes: expected a size"),
        (("gc", "URL", "--older-than", "9" * 320 + "d"), "--older-than: expected a dur"),
        (("diff", "x" * 300, "URL"), "File name too long"),
        (("ls", "URL/x/r" + "1" * 4400), "File name too long"),
        (
            ("cp", "URL", "x", "--dst-storage-options", "{"),
            "error: --dst-storage-options: ",
        ),
        (("diff", TINY, TINY, "--b-storage-options", "{"), "error: --b-storage-options: "),
        (("ls", "URL", "--storage-options", "@none"), "error: --storage-options: none: "),
        (("verify", "URL", "--dask", "scheduler"), "--dask: expected the address"),
        (("verify", "URL", "--dask", "tcp://scheduler"), "--dask: expected the address"),
    ],
)
def test_what_cannot_be_used(
    url: str, kvstore: Kvstore, arguments: tuple[str, ...], told: str
) -> None:
    if "--dask" in arguments:
        pytest.importorskip("distributed", reason="the extra dask is not installed")
    code, out, err = kvstore(*(argument.replace("URL", url) for argument in arguments))
    assert code in (2, 3)
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_one_option_means_one_thing() -> None:
    helps: dict[str, set[str | None]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            helps.setdefault(option.opts[0], set()).add(option.help)
    # What is proved, and what is recorded by whom, differs.
    differ = {name for name, texts in helps.items() if len(texts) > 1}
    assert differ == {"--verify", "--like", "-o", "dst"}


def test_the_help_names_a_and_b(kvstore: Kvstore) -> None:
    _, out, _ = kvstore("diff", "--help")
    assert re.search(r"\[OPTIONS\] \W?A\W+B\b", out)  # in braces, by some typers


def test_a_dry_run_writes_no_journal(url: str, tmp_path: Path, kvstore: Kvstore) -> None:
    journal = tmp_path / "journal"
    call = ("cp", url, tmp_path / "copy", "--journal", journal, "--dry-run")
    assert kvstore(*call)[0] == 0
    assert not journal.exists()


def test_a_journal_that_is_none(url: str, tmp_path: Path, kvstore: Kvstore) -> None:
    (tmp_path / "journal").write_text(f"{DEEP}\n")
    code, _, err = kvstore("verify", url, "--journal", tmp_path / "journal")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected a kvstore journal" in err


# ---- where stdout or stderr cannot be written


def run(arguments: str, **environment: str) -> tuple[int, str]:
    """A command line of bash, in which $KVSTORE is kvstore; its status and stderr."""
    script = "from kvstore.cli.app import main; main()"
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'kvstore() {{ "{sys.executable}" -c "{script}" "$@"; }}; {arguments}',
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("json_too", ["", "--json"])
def test_stdout_is_full(url: str, json_too: str) -> None:
    code, err = run(f"kvstore du {url} {json_too} >/dev/full")
    assert (code, err) == (3, "error: cannot write stdout: No space left on device\n")


def test_stdout_is_closed(url: str) -> None:
    assert run(f"kvstore du {url} >&-") == (0, "")


@pytest.mark.parametrize("call", ["--help", "du --help", "--show-completion bash"])
def test_stdout_does_not_take_what_is_not_the_commands_own(call: str) -> None:
    code, err = run(f"kvstore {call} >/dev/full")
    assert (code, err) == (3, "error: cannot write stdout: No space left on device\n")
    assert run(f"kvstore {call} | true; exit ${{PIPESTATUS[0]}}") == (141, "")


@pytest.mark.parametrize(
    ("call", "suffix", "extra"),
    # Its fonts are listed at the first import, which writes a file too.
    [("plot BLOCK", ".svg", "matplotlib.font_manager"), ("report URL", ".html", "jinja2")],
)
def test_a_file_is_whole_or_not_there(
    url: str, tmp_path: Path, call: str, suffix: str, extra: str
) -> None:
    pytest.importorskip(extra)
    folder = tmp_path / "out"
    folder.mkdir()
    output = folder / f"x{suffix}"
    block = f"{url}/{NAMESPACES[1]}/r0/g0/{BLOCK}"
    call = call.replace("BLOCK", block).replace("URL", url)
    for before in (None, "before"):
        code, err = run(f"ulimit -f 4; kvstore {call} -o {output} >/dev/null")
        assert code == 2
        assert f"error: -o: cannot write {output}: File too large" in err
        assert [path.read_text() for path in folder.iterdir()] == ([before] * bool(before))
        output.write_text("before")
    link = folder / f"link{suffix}"
    link.symlink_to("/dev/full")
    code, err = run(f"kvstore {call} -o {link} >/dev/null")
    assert (code, "No space left on device" in err, link.is_symlink()) == (2, True, True)


@pytest.mark.parametrize("stderr", ["/dev/full", "&-"])
@pytest.mark.parametrize(
    ("call", "code"), [("ls s3://", 2), ("nothing", 2), ("du URL > /dev/full", 3)]
)
def test_stderr_changes_no_end(url: str, call: str, code: int, stderr: str) -> None:
    assert run(f"kvstore {call.replace('URL', url)} 2>{stderr}") == (code, "")


@pytest.mark.parametrize("stderr", ["/dev/full", "&-"])
def test_a_journal_is_gone_on_with_whatever_stderr_takes(
    url: str, tmp_path: Path, kvstore: Kvstore, stderr: str
) -> None:
    journal = tmp_path / "journal"
    assert kvstore("verify", url, "--journal", journal)[0] == 0
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: len(lines) // 2]))
    resume = f"kvstore verify {url} --journal {journal}"
    assert run(f"{resume} 2>{stderr}") == (0, "")
    assert len(journal.read_text().splitlines()) == len(lines)


def test_stdout_is_waited_for_where_it_does_not_block(tmp_path: Path) -> None:
    code = (
        "import os, sys; from kvstore.cli.streams import take_streams; "
        "os.set_blocking(1, False); take_streams(); print('x' * 500_000)"
    )
    counted = f'"{sys.executable}" -c "{code}" | (sleep 1; wc -c > {tmp_path}/count)'
    assert run(f"{counted}; exit ${{PIPESTATUS[0]}}") == (0, "")
    assert int((tmp_path / "count").read_text()) == 500_001


def test_nobody_reads_on(url: str) -> None:
    assert run(f"kvstore du {url} | true; exit ${{PIPESTATUS[0]}}") == (141, "")


def test_a_terminal_without_a_cursor_has_no_bar(url: str) -> None:
    assert "counting" in terminal("du", url, TERM="xterm")[1]
    code, seen = terminal("du", url, TERM="dumb")
    assert (code, seen.startswith("group ")) == (0, True)


KILLED = """
import os, sys, kvstore.cli.app as app
number = int(sys.argv.pop())
app.looking.print_line = lambda text: os.kill(os.getpid(), number)
app.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_at_once_and_gives_the_cursor_back(
    tmp_path: Path, number: int, code: int
) -> None:
    ours, theirs = os.openpty()
    call = [sys.executable, "-c", KILLED, "ls", str(tmp_path), str(int(number))]
    assert subprocess.run(call, stderr=theirs, timeout=60).returncode == code
    assert os.read(ours, 100).startswith(b"\x1b[?25h")
    os.close(ours)
    os.close(theirs)
    ignored = f"trap '' {number}; exec \"$@\""
    assert subprocess.run(["bash", "-c", ignored, "-", *call], timeout=60).returncode == 0


# ---- names are anybody's


@pytest.fixture
def odd(url: str) -> str:
    """A root in which names and documents hold what a terminal obeys."""
    for name in ("\x1b[31mred", "bad\udcff", "行"):
        place = Path(url) / name / "r0" / "g0"
        place.mkdir(parents=True)
        (place / "zarr.json").write_text('{"\x1b[2J": 1}')
    return url


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("du",),
        ("info",),
        ("verify",),
        ("gc", "--max-bytes", "0B"),
        ("diff", "x\x1b[2Jy"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_terminal_obeys_no_name(
    odd: str, kvstore: Kvstore, arguments: tuple[str, ...]
) -> None:
    command, *rest = arguments
    code, out, err = kvstore(command, odd, *rest)
    assert code in (0, 1, 2, 4)
    assert all(line.isprintable() for line in (out + err).split("\n"))


def test_a_name_that_the_terminal_cannot_show(odd: str) -> None:
    code, err = run(f"kvstore du {odd}", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")


def test_names_are_whole_in_json(odd: str, kvstore: Kvstore) -> None:
    _, out, _ = kvstore("du", odd, "--json")
    paths = [group["path"] for group in json.loads(out)["groups"]]
    assert {"\x1b[31mred/r0/g0", "bad\udcff/r0/g0", "行/r0/g0"} < set(paths)


# ---- one bad place hides no other one


BLOCK = "41a/41abd96fdcff360b3943c2d84215d4179350e6fe90e8bbd07aad013efb502c6700000000"


def test_a_torn_document_is_told_beside_the_others(url: str, kvstore: Kvstore) -> None:
    bad, good = NAMESPACES
    Path(url, bad, "zarr.json").write_text("{")
    for command in ("ls", "info"):
        code, out, _ = kvstore(command, url)
        assert code == 1
        assert "JSON" in out
        assert "org/tiny" in out
    _, out, _ = kvstore("info", url, "--json")
    told = json.loads(out)
    assert ["problem" in group for group in told] == [True, False]
    assert [Path(group["url"]).parts[-3] for group in told] == [bad, good]


@pytest.mark.parametrize("folder", ["", "/r0", "/r0/g0"])
def test_a_document_that_storage_refuses_is_told_beside_the_others(
    kvstore: Kvstore, folder: str
) -> None:
    faulty = Faulty()
    cache.fill(faulty.root.url)
    bad, good = NAMESPACES

    def refuse(request: str, path: str) -> None:
        if request == "get" and path.endswith(f"{bad}{folder}/zarr.json"):
            raise PermissionError("refused")

    faulty.before = refuse
    code, out, _ = kvstore("verify", faulty.root.url)
    assert code == 3
    assert f"unread  {bad}{folder}/zarr.json" in out
    assert f"{good}/r0/g0" in out
    for command in ("ls", "info"):
        code, out, _ = kvstore(command, faulty.root.url)
        assert code == (0 if folder == "/r0" else 3)
        assert "org/tiny" in out


@pytest.mark.parametrize("folder", ["", "/r0", "/r0/g0"])
@pytest.mark.parametrize(
    "command",
    ["ls", "info", "du", "verify", "gc --max-bytes 1GB", "cp NEW", "report -o NEW.html"],
)
def test_a_link_to_a_folder_is_told_as_left_out(
    url: str, tmp_path: Path, kvstore: Kvstore, command: str, folder: str
) -> None:
    pytest.importorskip("jinja2", reason="the extra report is not installed")
    name, *options = command.replace("NEW", str(tmp_path / "new")).split()
    linked, other = NAMESPACES
    place = Path(url, f"{linked}{folder}")
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    code, _, err = kvstore(name, url, *options, "--json")
    assert code == 1
    told = [line for line in err.splitlines() if line.startswith("left out: ")]
    assert len(told) == 1
    assert f"{linked}{folder} is a symbolic link" in told[0]
    code, _, err = kvstore(name, f"{url}/{other}", *options)
    assert (code, err) == (0, "")


def test_a_group_that_cannot_be_listed_is_told_beside_the_others(kvstore: Kvstore) -> None:
    faulty = Faulty()
    cache.fill(faulty.root.url)
    bad, _ = NAMESPACES

    def refuse(request: str, path: str) -> None:
        if request == "list" and f"{bad}/r0/g0" in path:
            raise PermissionError("refused")

    faulty.before = refuse
    for command in ("ls", "info"):
        code, out, _ = kvstore(command, faulty.root.url)
        assert (code, "refused" in out, "org/tiny" in out) == (3, True, True)
    told = json.loads(kvstore("ls", faulty.root.url, "--json")[1])["groups"]
    assert [group["blocks"] for group in told] == [None, 5]


def test_a_block_that_is_not_whole_is_something_that_was_found(
    url: str, kvstore: Kvstore
) -> None:
    group = Path(url, NAMESPACES[1], "r0", "g0")
    assert kvstore("info", group / BLOCK)[0] == 0
    (group / BLOCK / "c.0.0.0.0").write_bytes(b"")
    code, out, _ = kvstore("info", group / BLOCK)
    assert (code, "problem  c.0.0.0.0" in out) == (1, False)


@pytest.mark.parametrize("command", ["info", "verify", "verify --delete", "report"])
def test_a_block_that_is_not_there_is_no_block(
    url: str, tmp_path: Path, kvstore: Kvstore, command: str
) -> None:
    pytest.importorskip("jinja2", reason="the extra report is not installed")
    block = Path(url, NAMESPACES[1], "r0", "g0", BLOCK)
    (block / "zarr.json").unlink()  # half of it is there
    given = [
        *command.split(),
        block,
        *(["-o", tmp_path / "x.html"] * (command == "report")),
    ]
    assert kvstore(*given)[0] == 1
    shutil.rmtree(block)
    code, out, err = kvstore(*given)
    assert (code, out) == (2, "")
    assert f"expected a block, found none at '{block}'" in err


@pytest.mark.parametrize("command", ["ls", "du", "gc --max-bytes 1B"])
def test_what_counts_blocks_is_not_for_one(
    url: str, kvstore: Kvstore, command: str
) -> None:
    name, *options = command.split()
    block = Path(url, NAMESPACES[1], "r0", "g0", BLOCK)
    code, out, err = kvstore(name, block, *options)
    assert (code, out) == (2, "")
    assert "found one block" in err


@pytest.mark.parametrize(
    "command", ["verify", "gc --max-bytes 1B", "du", "info", "report -o x.html"]
)
def test_where_nothing_is_the_url_is_wrong(
    url: str, tmp_path: Path, kvstore: Kvstore, command: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for wrong in ("typo", "file", "kv/typo/r0", f"kv/{NAMESPACES[0]}/r0/g1"):
        name, *options = command.split()
        code, out, err = kvstore(name, tmp_path / wrong, *options)
        assert (code, out) == (2, "")
        assert f"found none at '{tmp_path / wrong}'" in err


def large(url: str, nbytes: int) -> str:
    """A group with one block, whose layout is of so many bytes. Returns the block's URL."""
    layout = sample_layout(axes=("byte",), shape=(nbytes,), dtype="uint8", packing=None)
    store = BlockStore.open(url, sample_config(), layout)
    block = Path(store.block_url(KEY).removeprefix("file://"))
    block.mkdir(parents=True)
    document = ArrayFormat.of(layout, 0).document(KEY, 0, "none")
    (block / "zarr.json").write_bytes(document)
    (block / "c.0").write_bytes(bytes(4))
    return str(block)


def test_a_layout_that_no_memory_holds(url: str, tmp_path: Path) -> None:
    block = large(url, 1 << 34)
    small = "ulimit -v 4000000; kvstore"
    code, err = run(f"{small} verify {url} --jobs 1 > {tmp_path}/out")
    assert (code, err) == (1, "")
    told = (tmp_path / "out").read_text()
    assert told.startswith("wrong-length ")
    assert all(f"{name}/r0/g0" in told for name in NAMESPACES)
    assert run(f"{small} info {block}") == (1, "")
    code, err = run(f"{small} plot {block}")
    assert (code, err.count("\n")) == (1, 1)
    with open(f"{block}/c.0", "ab") as chunk:
        chunk.truncate((1 << 34) + 4)
    code, err = run(f"{small} info {block}")
    assert (code, err.count("\n")) == (3, 1)
    assert "no memory of 17179869184 bytes" in err


# ---- one word means one thing


RUNS = (
    "ls URL",
    "du URL",
    "info URL",
    "verify URL",
    "gc URL --older-than 1d --dry-run",
    "cp URL NEW --dry-run",
    "convert URL/SMALL NEW --axes head,layer,token,value --runner v1",
    "report URL -o NEW.html",
    "plot BLOCK",
)
KINDS = {
    "url": str,
    "source": str,
    "target": str,
    "destination": str,
    "path": str,
    "halves": int,
    "nbytes": int,
    "oldest": float | None,
    "newest": float | None,
    "exact": bool,
    "problem": str | None,
    "problems": list,
    "dry_run": bool,
    "blocks": int,
    "left_out": list,
    "whole": bool,
    "unreadable": list,
}
NEVER = {"orphans", "half_blocks", "size", "bytes", "dst", "src"}


def members(told: object) -> list[tuple[str, object]]:
    """Every name in a JSON document, and its value; but for those of recorded fields."""
    if isinstance(told, list):
        return [member for value in told for member in members(value)]
    if not isinstance(told, dict):
        return []
    records = ("config", "layout", "differences")
    below = [value for name, value in told.items() if name not in records]
    return [*told.items(), *members(below)]


@pytest.mark.parametrize("given", RUNS)
def test_one_word_means_one_thing(
    url: str, tmp_path: Path, kvstore: Kvstore, given: str
) -> None:
    pytest.importorskip("jinja2", reason="the extra report is not installed")
    places = {
        "URL/SMALL": f"{url}/{NAMESPACES[0]}",
        "URL": url,
        "NEW.html": str(tmp_path / "new.html"),
        "NEW": str(tmp_path / "new"),
        "BLOCK": f"{url}/{NAMESPACES[1]}/r0/g0/{BLOCK}",
    }
    code, out, err = kvstore(*(places.get(word, word) for word in given.split()), "--json")
    assert code == 0, err
    told = json.loads(out)
    named = {name for name, _ in members(told)}
    assert named & KINDS.keys()
    assert not named & NEVER
    for name, value in members(told):
        assert isinstance(value, KINDS.get(name, object)), (name, value)


def test_the_words_are_in_the_docs() -> None:
    page = Path(__file__).parents[1] / "docs" / "commands" / "README.md"
    words = page.read_text().partition("## Words")[2]
    assert all(f"`{name}`" in words for name in KINDS)
