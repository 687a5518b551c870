"""The documentation is true: its code runs, its output and messages are exact, its tables
are complete, and its links lead somewhere.

A Python block that cannot run says why in a comment above it: `<!-- not run: reason -->`.
A text block under `<!-- printed by the block above -->` is what that block prints.
A JSON block under `<!-- file: path -->` is a file that the page's Python blocks have made.
The block under `<!-- demo output -->` is pasted from the demo; its claims are checked.
"""

import ast
import errno
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dashboard import dashboard, explained, expressions, shown

import kvstore
from kvstore import (
    BlockStore,
    Config,
    DamagedBlockError,
    Difference,
    FormatError,
    Layout,
    LayoutMismatchError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.arrays import group_attributes, group_document
from kvstore.filesystem import Filesystem
from kvstore.jobs import PART_KEYS, START_SECONDS
from kvstore.layout import AXES, ITEM_BYTES, KV_CACHE_LAYOUTS
from kvstore.links import MAX_PAUSE
from kvstore.memory import Memory, _Proofs, _Table
from kvstore.mover import LOADS_PER_STORE
from kvstore.processes import POPULATE_SECONDS, scarce
from kvstore.records import MAX_NUMBER
from kvstore.releases import SUPPORTED, require_supported
from kvstore.scratch import ABANDONED_SECONDS, NAMES, ROOTS
from kvstore.storage_options import checked, refuse_for_obstore, secret_strings
from kvstore.urls import parse_url

TOP = Path(__file__).parent.parent
PAGES = sorted([TOP / "README.md", *(TOP / "docs").rglob("*.md")])
SOURCES = sorted((TOP / "kvstore").rglob("*.py"))

COMMANDS = {
    "aws",
    "find",
    "gcloud",
    "kvstore",
    "pip",
    "pytest",
    "python",
    "rm",
    "tox",
    "vllm",
}
LANGUAGES = {"bash", "console", "json", "python", "text"}
SECTIONS = ("Problem", "Decision", "Alternatives", "Consequences")

_FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- (.*?) -->\n\Z")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_ENVIRONMENT = re.compile(r"(?:[\w.-]|\{[^}]*\})+")
_NOT_RUN = "not run:"
_PRINTED = "printed by the block above"
_FILE = "file: "
_HASHED = "hashed: "
_DEMO = "demo output"


@dataclass(frozen=True)
class Block:
    """One fenced block, and what the comment right above it says."""

    language: str
    text: str
    line: int
    comment: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        comment = _COMMENT.search(before)
        line = before.count("\n") + 2
        found.append(Block(match[1], match[2], line, comment[1] if comment else ""))
    return found


def run(page: Path, folder: Path) -> dict[str, Any]:
    """Run a page's Python blocks in `folder`, in order and in one namespace."""
    names: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    printed = ""
    with chdir(folder):
        for block in blocks(page):
            if block.language == "python" and not block.comment.startswith(_NOT_RUN):
                # Blank lines in front, so that a traceback names the page's own line.
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                with redirect_stdout(StringIO()) as output:
                    exec(code, names)
                printed = output.getvalue()
            elif block.comment == _PRINTED:
                assert printed == block.text, f"{page.name}:{block.line}"
    return names


def name_of(page: Path) -> str:
    return str(page.relative_to(TOP))


def page(name: str) -> str:
    return (TOP / name).read_text()


def rows(name: str, *header: str) -> dict[str, list[str]]:
    """A page's first table with these column names: first cell -> the other cells."""
    lines = page(name).splitlines()
    start = lines.index(f"| {' | '.join(header)} |") + 2
    table = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        table[first.strip("` ")] = rest
    return table


# ---- code


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path)


def test_blocks_that_do_not_run_say_why() -> None:
    comments = [block.comment for path in PAGES for block in blocks(path)]
    skipped = [comment for comment in comments if comment.startswith(_NOT_RUN)]
    assert skipped
    assert all(comment.removeprefix(_NOT_RUN).strip() for comment in skipped)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_names_its_language(path: Path) -> None:
    for block in blocks(path):
        where = f"{path.name}:{block.line}"
        assert block.language in LANGUAGES, where
        assert block.text.strip(), where
        if block.comment.startswith(_NOT_RUN):
            assert block.language == "python", where


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_json_blocks_parse(path: Path) -> None:
    for block in blocks(path):
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_bash_blocks_use_known_commands(path: Path) -> None:
    for block in blocks(path):
        if block.language == "bash":
            used = list(commands(block.text))
            assert used, f"{path.name}:{block.line}"
            assert set(used) <= COMMANDS, f"{path.name}:{block.line}"


def commands(script: str) -> Iterator[str]:
    """The first word of every command, by the shell's own rules for words."""
    words = shlex.shlex(
        script.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&\n"
    )
    words.whitespace, words.whitespace_split = " \t", True
    first = True
    for word in words:
        if set(word) <= set(";|&\n"):
            first = True
        elif first and not re.match(r"\w+=", word):
            first = False
            yield word


def test_commands_are_found() -> None:
    script = (
        "A=1 pip install 'x y' && tox run \\\n  -e rm\n# no command\nfind . | rm -r '\nx'"
    )
    assert list(commands(script)) == ["pip", "tox", "find", "rm"]


# ---- README


def test_readme_has_its_two_commands() -> None:
    scripts = [b.text for b in blocks(TOP / "README.md") if b.language == "bash"]
    assert "pip install tox && tox run -e demo\n" in scripts
    assert "tox run-parallel -p 2\n" in scripts


def test_readme_names_the_supported_releases() -> None:
    text = page("README.md")
    for major, minor in SUPPORTED:
        assert f"{major}.{minor}" in text
    metadata_text = page("pyproject.toml")
    for minor in re.findall(r"Programming Language :: Python :: (3\.\d+)", metadata_text):
        assert minor in text


def test_readme_shows_what_the_demo_claims() -> None:
    """Times and paths are of the run that was pasted; the claims are the demo's own."""
    [shown] = [b.text for b in blocks(TOP / "README.md") if b.comment == _DEMO]
    calls = [
        node
        for node in ast.walk(ast.parse(page("examples/demo.py")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "require"
    ]
    claims = {
        ast.literal_eval(call.args[1])
        for call in calls
        if not isinstance(call.args[0], ast.Constant)  # that one is a failure's
    }
    assert claims
    assert {line[2:] for line in shown.splitlines() if line.startswith("✓")} == claims
    [message] = re.findall(r"was\swritten with .* config:", shown)
    assert message.replace("\n", " ") in str(LayoutMismatchError("here", ()))


# ---- configuration


def test_every_option_is_documented_with_its_default() -> None:
    table = rows("docs/configuration.md", "Option", "Type", "Default", "Effect")
    options = option_defaults()
    assert list(table) == list(options)
    for name, default in options.items():
        assert table[name][1].strip("`") == default, name


def option_defaults() -> dict[str, str]:
    """Every field of `TierOptions` and its default as JSON, without importing vLLM."""
    for node in ast.walk(ast.parse(page("kvstore/vllm/options.py"))):
        if isinstance(node, ast.ClassDef) and node.name == "TierOptions":
            return {
                field.target.id: "required"
                if field.value is None
                else json.dumps(ast.literal_eval(field.value))
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
    raise AssertionError("no class TierOptions")


def test_every_option_of_vllm_is_documented() -> None:
    table = rows("docs/configuration.md", "Option", "Effect")
    documented = {name.strip("` ") for cell in table for name in cell.split(",")}
    for node in ast.parse(page("kvstore/vllm/options.py")).body:
        if isinstance(node, ast.Assign) and "VLLM_OPTIONS" in ast.unparse(node.targets[0]):
            assert isinstance(node.value, ast.Call)
            assert documented == set(ast.literal_eval(node.value.args[0]))
            return
    raise AssertionError("no VLLM_OPTIONS")


def test_options_of_the_examples_are_known() -> None:
    known = option_defaults().keys() | {"cpu_bytes_to_use", "secondary_tiers", "spec_name"}
    seen = 0
    for path in PAGES:
        for block in blocks(path):
            if block.language == "json" and "kv_connector" in block.text:
                extra = json.loads(block.text)["kv_connector_extra_config"]
                assert set(extra) <= known
                for tier in extra.get("secondary_tiers", ()):
                    assert set(tier) <= option_defaults().keys() | {"type", "module_path"}
                seen += 1
    assert seen == 3


# ---- format


def test_examples_of_the_format_are_the_files_that_are_written(tmp_path: Path) -> None:
    path = TOP / "docs" / "format.md"
    run(path, tmp_path)
    seen = set()
    for block in blocks(path):
        if block.comment.startswith(_FILE):
            file = tmp_path / block.comment.removeprefix(_FILE)
            written, shown = json.loads(file.read_bytes()), json.loads(block.text)
            for document in (written, shown):
                document["attributes"]["kvstore"].pop("provenance", None)
            assert written == shown, f"format.md:{block.line}"
            # Members come in the same order, too.
            assert json.dumps(written) == json.dumps(shown), f"format.md:{block.line}"
            seen.add(file.relative_to(tmp_path).parts[1:-1])
    assert [len(parts) for parts in sorted(seen, key=len)] == [1, 3, 4, 5]


def test_worked_example_of_the_config_digest() -> None:
    [block] = [
        b for b in blocks(TOP / "docs" / "format.md") if b.comment.startswith(_HASHED)
    ]
    digest = block.comment.removeprefix(_HASHED)
    text = block.text.removesuffix("\n")
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == digest
    config = Config.from_fields(json.loads(text), where="example")
    assert config.digest == digest
    assert f"`{digest}`" in page("docs/format.md")


def test_tables_of_the_format_are_complete() -> None:
    layout = Layout.of_bytes(1, dtype="float16", reason="a test")
    fields = rows("docs/format.md", "Field", "Type", "Compared", "Meaning")
    assert list(fields) == list(layout.to_dict())
    compared = {name for name, cells in fields.items() if cells[1] == "yes"}
    assert compared == fields.keys() - {"reason"}

    names = rows("docs/format.md", "Field", "Type", "Present", "Meaning")
    documented = {name.strip("` ") for cell in names for name in cell.split(",")}
    config = Config(model_name="m", dtype="float16", tokens_per_hash=16)
    assert documented == set(config.to_dict())

    orders = rows("docs/format.md", "`kv_cache_layout`", "Axes")
    found = {name: tuple(axes[0].split(", ")) for name, axes in orders.items()}
    assert found == KV_CACHE_LAYOUTS

    types = rows("docs/format.md", "Layout's `dtype`", "Zarr `data_type`", "`fill_value`")
    listed = {name.strip("` ") for cell in types for name in cell.split(",")}
    assert ITEM_BYTES.keys() < listed


# ---- errors


def test_every_error_has_its_section() -> None:
    text = page("docs/errors.md")
    for name, kind in vars(sys.modules["kvstore.errors"]).items():
        if isinstance(kind, type) and kind.__module__ == "kvstore.errors":
            assert f"\n## {name}\n" in text, name
    tree = (sys.modules["kvstore.errors"].__doc__ or "").split("\n\n")[1]
    drawn = next(b.text for b in blocks(TOP / "docs" / "errors.md"))
    assert [line.strip() for line in tree.splitlines()] == [
        line.strip() for line in drawn.splitlines()
    ]


def test_messages_of_errors_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text block of the page but the tree and what its code prints."""
    config = Config(model_name="my/model", dtype="float16", tokens_per_hash=16)
    layout = Layout(
        axes=("layer", "head", "token", "value"), shape=(12, 12, 16, 128), dtype="float16"
    )
    mnt, s3, misspelt = "file:///mnt/kv", "s3://bucket/kv", {"endpoint_ulr": "http://x"}
    namespace = f"my_model_{config.digest}"
    group = f"{namespace}/r0/g0"
    chunk = f"{s3}/{group}/a3f/a3f09c/c.0.0.0.0"
    store = BlockStore.open(tmp_path, config, layout)
    monkeypatch.setattr(metadata, "version", lambda name: "0.28.0")
    monkeypatch.setitem(sys.modules, "obstore", None)
    config_kwargs = "storage_options.config_kwargs"
    errors = [
        raised(lambda: parse_url("simplecache::s3://bucket/kv")),
        raised(lambda: checked(S3, misspelt)),
        raised(lambda: refuse_for_obstore({"retries": 1}, {"s3": dict}, config_kwargs)),
        raised(lambda: checked(S3, {"endpoint_url": "storage.example.com"})),
        raised(lambda: checked(S3, {"anon": "false"})),
        raised(lambda: Filesystem(s3)),
        raised(no_descriptor),
        raised(Filesystem("/mnt/kv", read_only=True).require_writable, "store"),
        raised(lambda: store.store(b"key", bytes(10))),
        LayoutMismatchError(
            f"{mnt}/facebook_opt-125m_3c412b280dad/r0/g0/zarr.json",
            (
                Difference(
                    "axes",
                    ("layer", "head", "token", "value"),
                    ("head", "layer", "token", "value"),
                ),
                Difference("kv_cache_layout", "LBHNC", "BHLNC"),
            ),
        ),
        raised(
            lambda: group_attributes(
                group_document(format=2), place=f"{mnt}/{group}/zarr.json"
            )
        ),
        FormatError(f"{mnt}/{group}/zarr.json", not_a_document(tmp_path)),
        *(
            DamagedBlockError(chunk, str(error).split("c.0.0.0.0: ")[1])
            for error in damages(store, tmp_path)
        ),
        DamagedBlockError(f"{mnt}/{group}/a3f/a3f09c/zarr.json", not_a_file(store)),
        raised(require_supported),
        StorageError(s3, "write below", "HTTP 404: The specified bucket does not exist"),
        StorageAccessError(
            f"{s3}/{namespace}/zarr.json", "read", "HTTP 403: Access Denied."
        ),
        StorageTimeoutError(f"{s3}/{namespace}/zarr.json", "read", "no answer in time"),
    ]
    shown = [
        block.text.removesuffix("\n")
        for block in blocks(TOP / "docs" / "errors.md")[1:]
        if block.language == "text" and block.comment != _PRINTED
    ]
    assert shown == [str(error) for error in errors]


class S3:
    """What matters of s3fs's class, which need not be installed."""

    protocol = ("s3", "s3a")

    def __init__(self, endpoint_url: str | None = None) -> None:
        pass


def raised(call: Any, *arguments: str) -> kvstore.KVStoreError:
    with pytest.raises(kvstore.KVStoreError) as caught:
        call(*arguments)
    return caught.value


def no_descriptor() -> None:
    with scarce():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def damages(store: BlockStore, root: Path) -> Iterator[kvstore.KVStoreError]:
    """A changed byte, a short chunk, and no chunk, each found by a load."""
    key = b"k" * 36
    buffer = bytearray(store.layout.nbytes)
    store.store(key, buffer)
    [chunk] = root.rglob("c.0.0.0.0")
    data = bytearray(chunk.read_bytes())
    data[100] = ord("x")
    for damage in (data, data[:1000], None):
        chunk.unlink()
        if damage is not None:
            chunk.write_bytes(damage)
        yield raised(lambda: store.load(key, buffer))


def not_a_document(root: Path) -> str:
    """What is said of a link in the place of a namespace's document."""
    config = Config(model_name="linked", dtype="float16", tokens_per_hash=16)
    layout = Layout.of_bytes(1, dtype="float16", reason="a test")
    (root / f"linked_{config.digest}").mkdir()
    (root / f"linked_{config.digest}" / "zarr.json").symlink_to("/etc/passwd")
    error = raised(lambda: BlockStore.open(root, config, layout))
    assert isinstance(error, FormatError)
    return error.problem


def not_a_file(store: BlockStore) -> str:
    """What is said of a pipe in the place of a block's document."""
    key = b"p" * 36
    store.store(key, bytes(store.layout.nbytes))
    document = Path(store.block_url(key).removeprefix("file://")) / "zarr.json"
    document.unlink()
    os.mkfifo(document)
    error = raised(lambda: store.load(key, bytearray(store.layout.nbytes)))
    assert isinstance(error, DamagedBlockError)
    return error.problem


# ---- completeness


def test_every_public_name_is_documented() -> None:
    text = "".join(path.read_text() for path in PAGES)
    for name in kvstore.__all__:
        assert f"`{name}`" in text, name


def test_every_axis_is_in_the_glossary() -> None:
    assert tuple(rows("docs/glossary.md", "Axis", "What it counts")) == AXES
    assert tuple(rows("docs/format.md", "Axis", "What it counts")) == AXES


def test_modules_are_listed_in_import_order() -> None:
    listed = list(rows("docs/architecture.md", "Module", "What it is"))
    assert sorted(listed) == [str(source.relative_to(TOP)) for source in SOURCES]
    for place, name in enumerate(listed):
        for imported in first_party_imports(TOP / name):
            assert imported in listed[:place], f"{name} imports {imported}"


def first_party_imports(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if not (isinstance(node, ast.ImportFrom) and node.module):
            continue
        for alias in node.names if node.module.startswith("kvstore") else ():
            path = node.module.replace(".", "/")
            candidates = (f"{path}/{alias.name}.py", f"{path}.py", f"{path}/__init__.py")
            yield next(c for c in candidates if (TOP / c).exists())


def test_numbers_are_the_codes() -> None:
    damage = f"{Memory.DAMAGE_SECONDS:.0f} seconds"
    assert damage in page("docs/backends.md")
    assert damage in page("docs/architecture.md")
    assert damage in page("docs/errors.md")
    assert f"after\n   {LOADS_PER_STORE} loads a store" in page("docs/architecture.md")
    bounds = f"at most {16 * _Table.LIMIT * _Proofs.TABLES >> 20} MiB"
    assert bounds in page("docs/backends.md")
    assert f"a number above {MAX_NUMBER:,}." in page("docs/configuration.md")
    assert bounds in page("docs/decisions/0003-contains-reads-the-document.md")
    assert f"parts of up to {PART_KEYS} keys" in page("docs/architecture.md")
    assert f"within {START_SECONDS:.0f} seconds" in page("docs/architecture.md")
    assert f"for {POPULATE_SECONDS:.0f} seconds" in page("docs/architecture.md")
    assert f"up to {MAX_PAUSE:.0f} seconds" in page("docs/architecture.md")
    lock = page("docs/decisions/0018-a-lock-tells-a-dead-writer.md")
    assert f"locks in {ROOTS} roots at most" in lock
    assert f"some for each {NAMES:,}" in lock
    assert ABANDONED_SECONDS == 24 * 60 * 60
    assert "has changed\n  for a day" in page("docs/operations.md")


def test_names_of_secrets_are_listed() -> None:
    text = page("docs/configuration.md")
    [listed] = re.findall(r"Such a name contains ([^.]*)\.", text)
    names = re.findall(r"`(\w+)`", listed)
    assert list(secret_strings({f"my_{name}s": f"long {name}" for name in names})) == [
        masked for name in names for masked in (f"long {name}", f"long%20{name}")
    ]
    source = ast.parse(page("kvstore/storage_options.py"))
    [known] = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_SECRET_NAMES"
    ]
    assert names == list(known)


def test_every_log_line_is_in_operations() -> None:
    table = rows("docs/operations.md", "Line", "Logger", "What it means, what to do")
    patterns = {
        (cells[0].strip("`"), re.escape(line).replace("…", ".*"))
        for cell, cells in table.items()
        for line in cell.split("`")
        if len(line) > 2
    }
    for source in SOURCES:
        logger = ".".join(source.relative_to(TOP).with_suffix("").parts)
        for message in logged(source):
            filled = re.sub("%[srd]", "load", message)
            assert any(
                name == logger and re.fullmatch(pattern, filled)
                for name, pattern in patterns
            ), f"{logger}: {message}"


def logged(source: Path) -> Iterator[str]:
    """The messages of a module's log calls, with their placeholders."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
            yield ast.literal_eval(node.args[0])


def test_the_dashboard_takes_its_data_from_what_is_chosen() -> None:
    document = dashboard()
    variables = {v["name"]: v for v in document["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids) > 0
    for panel in document["panels"]:
        assert panel["title"]
        assert panel["description"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == chosen
    for text in expressions():
        assert set(re.findall(r"\$(\w+)", text)) <= variables.keys() | {"__rate_interval"}
    assert shown() - explained() == set()


def test_every_tox_environment_is_explained() -> None:
    table = rows("docs/contributing.md", "Environment", "What it shows", "If it fails")
    explained = {name.strip("` ") for cell in table for name in cell.split(",")}
    tox = TOP / "tox.ini"
    if not tox.exists():
        pytest.skip("there is no tox.ini beside the docs")
    [names] = re.findall(r"^env_?list *=((?:.*\n)(?:[ \t]+.*\n)*)", tox.read_text(), re.M)
    # What `tox run` leaves out has a section and no place in the list.
    names += " ".join(re.findall(r"^\[testenv:(.+)\]$", tox.read_text(), re.M))
    listed = {name for word in _ENVIRONMENT.findall(names) for name in expanded(word)}
    assert listed
    assert listed == explained


def expanded(word: str) -> Iterator[str]:
    """`py312-{s3,gcs}` as tox reads it: `py312-s3`, `py312-gcs`."""
    parts = [part.split(",") for part in re.split(r"[{}]", word)]
    return ("".join(choice) for choice in product(*parts))


# ---- links and decisions


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path: Path) -> None:
    prose = _FENCE.sub("", path.read_text())
    for link in _LINK.findall(prose):
        if path.name == "cases.md" and link.startswith("https://github.com/"):
            continue  # others' reports are what that page is for
        target, _, anchor = link.partition("#")
        assert "://" not in target, link
        file = (path.parent / target).resolve() if target else path
        assert file.is_file(), link
        if anchor:
            assert anchor in anchors(file), link


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


def test_decisions_are_listed_dated_and_whole() -> None:
    folder = TOP / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    listed = re.findall(r"\]\((\d{4}-[\w.-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == [path.name for path in pages]
    for number, path in enumerate(pages, 1):
        text = path.read_text()
        assert text.startswith(f"# {number:04}: "), path.name
        assert re.search(r"^Date: \d{4}-\d\d-\d\d$", text, re.MULTILINE), path.name
        assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS, path.name
        assert len(text.splitlines()) <= 80, path.name
