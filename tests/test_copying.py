"""`kvstore cp`: blocks to another root, byte by byte, each proved on its way."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from containers import ContainersFileSystem, container
from stored import chunk_url
from typer.testing import CliRunner

from kvstore import BlockStore, KVStoreError, StorageError, offline
from kvstore.cli.app import app, exit_code
from kvstore.offline import copying
from kvstore.offline.convert import Converted
from kvstore.offline.copying import Copied
from kvstore.offline.doctor import transfer_config
from kvstore.offline.faults import LISTED
from kvstore.offline.import_vllm import Imported
from kvstore.offline.whole import WholeBlocks
from kvstore.testing import Root, sample_block, sample_config, sample_layout
from kvstore.upkeep import Upkeep

CODECS = ("none", "zstd", "blosc")
KEYS = [bytes([16 * number]) * 36 for number in range(6)]


def fill(root: Root, **options: Any) -> BlockStore:
    """Blocks of every codec."""
    for number, key in enumerate(KEYS):
        store = root.open(codec=CODECS[number % 3], **options)
        store.store(key, sample_block(store.layout, number, values=4))
    return store


@pytest.fixture
def source(seen: Root) -> Root:
    return seen.below("from")


@pytest.fixture
def target(seen: Root) -> Root:
    return seen.below("to")


def options(root: Root) -> list[str]:
    told = json.dumps(dict(root.storage_options))
    given = ["--storage-options", told, "--dst-storage-options", told]
    return [*given, "--client", root.client]


def cp(source: Root, target: Root, *more: str, path: str = "") -> tuple[int, Any]:
    """The exit code, and what is printed as JSON; or the message."""
    arguments = ["cp", source.url + path, target.url, *options(source), "--json", *more]
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, KVStoreError):
        return exit_code(result.exception), str(result.exception)
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, json.loads(result.stdout)


def counts(told: dict[str, Any]) -> dict[str, int]:
    names = ("copied", "kept", "repaired", "damaged", "gone")
    return {name: told[name] for name in names if told[name]}


def content(root: Root) -> dict[str, bytes]:
    """Every file by its path below the root."""
    last = f"/{root.url.rpartition('/')[2]}/"
    files = [name for name in root.files() if ".kvstore-tmp" not in name]
    scheme = root.url.partition("://")[0]
    prefix = f"{scheme}://" if "://" in root.url else ""
    return {name.rpartition(last)[2]: root.read(f"{prefix}{name}") for name in files}


@pytest.fixture
def containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of an earlier test's is left."""
    monkeypatch.setattr(ContainersFileSystem, "storages", defaultdict(dict))


# ---- what is copied


def test_every_byte_is_kept_and_nothing_is_copied_twice(source: Root, target: Root) -> None:
    fill(source)
    code, told = cp(source, target)
    assert (code, counts(told)) == (0, {"copied": len(KEYS)})
    assert content(target) == content(source)
    store = target.open()
    blocks = [sample_block(store.layout, number, values=4) for number in range(len(KEYS))]
    for key, block in zip(KEYS, blocks, strict=True):
        found = bytearray(store.layout.nbytes)
        assert store.load(key, found)
        assert found == block.tobytes()
    for more in ((), ("--verify",), ("--dry-run",)):
        code, told = cp(source, target, *more)
        assert (code, counts(told), told["nbytes"]) == (0, {"kept": len(KEYS)}, 0)


@pytest.mark.usefixtures("containers")
def test_from_one_container_to_another(tmp_path: Path) -> None:
    first, second, third = map(container, ("first", "second", "third"))
    fill(first)
    journal = tmp_path / "journal"
    code, told = cp(first, second, "--journal", str(journal))
    assert (code, counts(told)) == (0, {"copied": len(KEYS)})
    assert told["destination"] == "abfs://second@account/kv"
    code, message = cp(first, third, "--journal", str(journal))
    assert (code, "is of another work: destination: expected" in message) == (2, True)
    code, message = cp(first, first)
    assert (code, "expected another root than the source's" in message) == (2, True)
    config = transfer_config(offline.Root(second.url, read_only=False))
    assert config["kv_connector_extra_config"]["url"] == second.url


def test_from_one_storage_to_another(seen: Root, tmp_path: Path) -> None:
    fill(seen)
    there = Root(str(tmp_path / "there"), client=seen.client)
    given = ["--storage-options", json.dumps(dict(seen.storage_options))]
    result = CliRunner().invoke(app, ["cp", seen.url, there.url, *given, "--verify"])
    assert result.exit_code == 0, result.output
    back = seen.below("back")
    given = ["--dst-storage-options", json.dumps(dict(seen.storage_options))]
    result = CliRunner().invoke(app, ["cp", there.url, back.url, *given, "--verify"])
    assert result.exit_code == 0, result.output
    assert content(back) == content(there)
    assert len(content(there)) == 3 * len(KEYS) + 3  # fan-outs have documents too


def test_memory_that_ends_with_the_command_is_no_destination(tmp_path: Path) -> None:
    source, memory = Root(str(tmp_path / "from")), Root(f"memory://{tmp_path.name}")
    fill(source)
    for more in ((), ("--dry-run",)):
        code, message = cp(source, memory, *more)
        assert (code, memory.files()) == (2, [])
        assert message.startswith("DST: expected storage that other processes see, found")


def test_a_part_is_copied_alone(source: Root, target: Root) -> None:
    store = fill(source)
    fill(source, rank=1)
    other = fill(source, config=sample_config(model_name="org/other"))
    namespace = store.path.partition("/")[0]
    for path, count in (
        (store.block_url(KEYS[2]).removeprefix(store.url.removesuffix(store.path)), 1),
        (f"/{store.path}", len(KEYS) - 1),
        (f"/{namespace}", len(KEYS)),
        ("", len(KEYS)),
    ):
        code, told = cp(source, target, path="/" + path.lstrip("/") if path else "")
        assert (code, told["copied"]) == (0, count)
        here = content(target)
        assert any(name.startswith(other.path) for name in here) == (not path)
    assert content(target) == content(source)


def test_a_dry_run_writes_nothing(source: Root, target: Root) -> None:
    fill(source)
    code, told = cp(source, target, "--dry-run")
    assert (code, counts(told)) == (0, {"copied": len(KEYS)})
    assert told["nbytes"] == cp(source, target)[1]["nbytes"]
    kept = content(target)
    target.remove(chunk_url(target.open(), KEYS[0]))
    assert counts(cp(source, target, "--dry-run")[1]) == {
        "copied": 1,
        "repaired": 1,
        "kept": len(KEYS) - 1,
    }
    assert len(content(target)) == len(kept) - 1


def test_a_block_that_is_there_costs_one_request(
    source: Root, target: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source)
    cp(source, target)
    read: list[str] = []
    real = Upkeep.read

    def counted(self: Upkeep, path: str, limit: int) -> bytes | None:
        read.append(path)
        return real(self, path, limit)

    monkeypatch.setattr(Upkeep, "read", counted)
    monkeypatch.setattr(Upkeep, "read_into", None)
    monkeypatch.setattr(Upkeep, "publish", None)
    assert counts(cp(source, target)[1]) == {"kept": len(KEYS)}
    assert sum(key.hex() in path for path in read for key in KEYS) == len(KEYS)


# ---- damage


def test_a_damaged_block_is_told_and_left_out(source: Root, target: Root) -> None:
    store = fill(source)
    for key in KEYS[:3]:
        chunk = bytearray(source.read(chunk_url(store, key)))
        chunk[len(chunk) // 2] ^= 1
        source.write(chunk_url(store, key), bytes(chunk))
    source.remove(f"{store.block_url(KEYS[3])}/zarr.json")  # never committed
    code, told = cp(source, target)
    assert (code, counts(told)) == (1, {"copied": 2, "damaged": 3, "gone": 1})
    assert len(told["left_out"]) == 3
    for key, problem in zip(KEYS[:3], told["left_out"], strict=True):
        assert key.hex() in problem
        assert "crc32c" in problem
    assert not any(key.hex() in name for name in content(target) for key in KEYS[:4])


def test_of_many_damaged_blocks_some_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory does not grow with their number."""
    for kind in (Copied, Converted, Imported):
        one = kind(left_out=("x",))
        assert len(sum([one] * 3 * LISTED, kind()).left_out) == LISTED
    monkeypatch.setattr("kvstore.offline.copying.LISTED", 4)
    source, target = Root(str(tmp_path / "from")), Root(str(tmp_path / "to"))
    store = fill(source)
    for key in KEYS:
        source.write(chunk_url(store, key), b"")
    told = CliRunner().invoke(app, ["cp", source.url, target.url]).stdout
    assert told.count("left out: ") == 4
    assert told.splitlines()[-1] == "and 2 more"


def test_what_is_damaged_there_is_repaired(source: Root, target: Root) -> None:
    store = fill(source)
    cp(source, target)
    there = target.open()
    target.write(chunk_url(there, KEYS[0]), b"short")
    target.remove(chunk_url(there, KEYS[1]))
    target.write(f"{there.block_url(KEYS[2])}/zarr.json", b"{}")
    target.remove(f"{there.block_url(KEYS[3])}/zarr.json")
    found = {"copied": 4, "repaired": 3, "kept": 2}
    assert counts(cp(source, target)[1]) == found
    assert content(target) == content(source)
    assert store.config == there.config


def test_bytes_that_rotted_there_are_found_by_reading_back(
    source: Root, target: Root
) -> None:
    fill(source)
    cp(source, target)
    url = chunk_url(target.open(), KEYS[0])
    chunk = bytearray(target.read(url))
    chunk[7] ^= 1
    target.write(url, bytes(chunk))
    assert counts(cp(source, target)[1]) == {"kept": len(KEYS)}
    found = {"copied": 1, "repaired": 1, "kept": len(KEYS) - 1}
    assert counts(cp(source, target, "--verify")[1]) == found
    assert content(target) == content(source)


def test_storage_that_does_not_give_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Root(str(tmp_path / "from")), Root(str(tmp_path / "to"))
    fill(source)
    real = Upkeep.publish

    def forgetful(self: Upkeep, path: str, files: Any, *, replace: bool) -> bool:
        (name, parts), document = files
        first = [bytes(len(part)) for part in parts]
        return real(self, path, ((name, first), document), replace=replace)

    monkeypatch.setattr(Upkeep, "publish", forgetful)
    code, message = cp(source, target, "--verify")
    assert code == 3
    assert message.startswith(f"cannot read back file://{target.url}")


# ---- documents


def test_another_layout_there_is_refused_with_every_field(
    source: Root, target: Root
) -> None:
    fill(source)
    other = sample_layout(shape=(2, 3, 8, 8), tokens_per_block=8, page_bytes=384)
    target.open(other)
    before = content(target)
    code, message = cp(source, target)
    assert code == 4
    for field in ("shape", "tokens_per_block", "page_bytes"):
        assert f"{field}: expected" in message
    assert content(target) == before


def test_another_config_there_is_refused_before_anything_is_written(
    source: Root, target: Root
) -> None:
    first = fill(source, config=sample_config(model_name="org/a")).path.partition("/")[0]
    path = fill(source, config=sample_config(model_name="org/b")).path.partition("/")[0]
    target.open(config=sample_config(model_name="org/b"))
    document = source.read(f"{source.url}/{path}/zarr.json")
    target.write(f"{target.url}/{path}/zarr.json", document.replace(b"org/b", b"org/c"))
    code, message = cp(source, target)
    assert code == 4
    assert "model_name: expected 'org/b', found 'org/c'" in message
    assert not any(name.startswith(first) for name in content(target))


def test_a_group_that_cannot_be_read_hides_no_other(source: Root, target: Root) -> None:
    store = fill(source)
    source.write(f"{source.open(group=1).url}/zarr.json", b"{")
    code, told = cp(source, target)
    assert (code, counts(told)) == (1, {"copied": len(KEYS)})
    [problem] = told["unreadable"]
    assert f"{store.path.removesuffix('g0')}g1" in problem


# ---- what cannot be done


def test_where_nothing_can_be_copied(source: Root, target: Root) -> None:
    assert "expected KV groups, found none" in cp(source, target)[1]
    store = fill(source)
    namespace = store.path.partition("/")[0]
    code, message = cp(source, source)
    assert (code, message.startswith("destination: expected another root")) == (2, True)
    code, message = cp(source, target.below(namespace))
    assert code == 2
    assert message.endswith(f"name the root, {target.filesystem().url}")
    code, message = cp(source, target, path=f"/{store.path}/fff/{'ff' * 36}")
    assert (code, message.startswith("url: expected a block, found none")) == (2, True)


def test_the_modules_example(tmp_path: Path) -> None:
    urls = {"/mnt/kv": f"{tmp_path}/from", "s3://bucket/kv": f"{tmp_path}/to"}
    source, target = map(Root, urls.values())
    fill(source)
    lines = str(copying.__doc__).splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    for named, url in urls.items():
        example = example.replace(named, url)
    exec(example, vars(copying) | {"Root": offline.Root})
    assert content(target) == content(source)


# ---- interruption


def test_a_copy_that_ends_early_leaves_whole_blocks_and_goes_on(
    source: Root, target: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source)
    real, room = WholeBlocks.give, iter([True, True])

    def given(self: WholeBlocks, key: bytes, *rest: Any, **more: Any) -> bool:
        if not next(room, False):
            raise StorageError("there", "write", "no more room")
        return real(self, key, *rest, **more)

    monkeypatch.setattr(WholeBlocks, "give", given)
    journal = ("--journal", str(tmp_path / "journal"), "--jobs", "1")
    assert cp(source, target, *journal) == (3, "cannot write there: no more room")
    assert counts(cp(target, source)[1]) == {"kept": 2}  # each is whole
    done = len((tmp_path / "journal").read_bytes().splitlines()) - 1
    monkeypatch.undo()
    code, told = cp(source, target, *journal)
    assert (code, told["copied"], told["kept"]) == (0, len(KEYS) - 2 + done, 2 - done)
    assert told["journal"] == {"recalled": done, "shares": len(KEYS)}
    code, message = cp(source, target, *journal)
    assert (code, "is finished" in message) == (2, True)
    assert content(target) == content(source)
    code, message = cp(source, target.below("other"), *journal)
    assert (code, "is of another work: destination: expected" in message) == (2, True)


@pytest.mark.usefixtures("containers")
def test_a_journal_is_of_one_storage(tmp_path: Path) -> None:
    connection = "AccountName=a;AccountKey=hidden"
    here = {"endpoint_url": "http://a", "connection_string": connection}
    source, target = container("from", **here), container("to", **here)
    fill(source)
    journal = tmp_path / "journal"

    def again(**changed: str) -> tuple[int, Any]:
        root = replace(target, storage_options=here | changed)
        given = ["--storage-options", json.dumps(here)]
        given += ["--dst-storage-options", json.dumps(root.storage_options)]
        return cp(source, root, *given, "--journal", str(journal))

    assert again()[0] == 0
    lines = journal.read_text().splitlines(keepends=True)
    assert "hidden" not in lines[0]
    journal.write_text("".join(lines[:-1]))
    for changed in (
        {"endpoint_url": "http://b"},
        {"profile": "b"},
        {"connection_string": connection.replace("=a", "=b")},
    ):
        code, message = again(**changed)
        assert (code, "of another work: destination_storage" in message) == (2, True)
    rotated = {"connection_string": connection.replace("hidden", "new"), "account_key": "x"}
    code, told = again(**rotated)
    assert (code, told["journal"]["recalled"]) == (0, len(lines) - 2)
    old = {k: v for k, v in json.loads(lines[0]).items() if not k.endswith("_storage")}
    journal.write_text("".join([json.dumps(old) + "\n", *lines[1:]]))
    code, message = again()
    assert (code, "or an older kvstore did not note it" in message) == (2, True)


def test_a_journal_is_refused_before_anything_is_written(
    source: Root, target: Root, tmp_path: Path
) -> None:
    fill(source)
    journal = tmp_path / "journal"
    journal.write_text('{"work": "another"}\n')
    code, message = cp(source, target, "--journal", str(journal))
    assert (code, "is of another work" in message, target.files()) == (2, True, [])


def test_a_journal_does_not_stand_for_blocks_that_are_gone(
    source: Root, target: Root, tmp_path: Path
) -> None:
    fill(source)
    journal = tmp_path / "journal"
    for more in ((), ("--verify",)):
        call = (*more, "--journal", str(journal))
        assert cp(source, target, *call)[0] == 0
        noted = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(noted[:-1]))
        target.clear(folders=True)
        code, message = cp(source, target, *call)
        assert (code, "found none in 5 of them: it is another disk" in message) == (2, True)
        assert not [name for name in target.files() if name.endswith("zarr.json")]
        if target.filesystem().local:
            target.open()  # as an engine does that did not miss them either
            assert cp(source, target, *call) == (code, message)
        journal.unlink()
        assert cp(source, target, *call)[1]["copied"] == len(KEYS)
        journal.unlink()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_copy_that_is_killed_leaves_whole_blocks(
    number: int, status: int, tmp_path: Path
) -> None:
    source, target = Root(str(tmp_path / "from")), Root(str(tmp_path / "to"))
    store = source.open()
    for n in range(400):
        store.store(n.to_bytes(2) * 18, sample_block(store.layout, n))
    code = "import sys; from kvstore.cli.app import main; main()"
    command = [sys.executable, "-c", code, "cp", source.url, target.url, "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 60
        while not list(Path(target.url).glob("*/r0/g0/*/*/zarr.json")):
            assert time.monotonic() < deadline
        process.send_signal(number)
        assert process.wait(5) == status
    blocks = len(list(Path(target.url).glob("*/r0/g0/*/*/zarr.json")))
    ended, told = cp(target, Root(str(tmp_path / "proof")))
    assert (ended, counts(told)) == (0, {"copied": blocks})
    assert 0 < blocks < 400
    assert counts(cp(source, target)[1]) == {"copied": 400 - blocks, "kept": blocks}
