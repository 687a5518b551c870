"""`kvstore verify`: what is wrong is found, and nothing else; what is whole stays."""

import contextlib
import json
import math
import os
import threading
import time
import tracemalloc
import uuid
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
from containers import container
from planted import LOCAL, PLANTS, SOURCE, Spot
from typer.testing import CliRunner
from unsorted import Unsorted

from kvstore import DamagedBlockError, FormatError, InvalidInputError, StorageError, scratch
from kvstore import testing as kit
from kvstore.cli.app import app
from kvstore.listing import Found
from kvstore.offline import Root
from kvstore.offline.faults import LISTED, REMOVABLE, Fault, Findings, Problem
from kvstore.offline.shares import Share
from kvstore.offline.upper import Upper
from kvstore.offline.verify import LEFT, MAX_UNREAD, Verify, covering
from kvstore.paths import block_path
from kvstore.scratch import TEMPORARY
from kvstore.testing import sample_block
from kvstore.upkeep import Upkeep


def opened(root: kit.Root, path: str = "", *, read_only: bool = True) -> Root:
    return Root(
        f"{root.url}/{path}".rstrip("/"),
        root.storage_options,
        client=root.client,
        read_only=read_only,
    )


def problems(root: Root, **options: Any) -> list[Problem]:
    upper = {name: value for name, value in options.items() if name != "now"}
    found = list(Upper(root, **upper).problems())
    task = Verify(filesystem=root.filesystem, key=root.within.key, **options)
    for share in covering(root):
        found += task(share).problems
    return found


def told(root: Root, **options: Any) -> list[tuple[str, str]]:
    return sorted((found.fault, found.path) for found in problems(root, **options))


def filled(root: kit.Root, count: int = 3) -> Any:
    store = root.open()
    for number in range(count):
        key = bytes([number]) * 36
        store.store(key, sample_block(store.layout, number))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> kit.Root:
    return kit.Root(str(tmp_path / "kv"))


# ---- what is wrong is found, and nothing else


@pytest.mark.parametrize("name", PLANTS | LOCAL)
def test_each_fault_is_found_alone(name: str, folder: kit.Root) -> None:
    expected = planted.make(folder, name)
    before = everything(folder)
    assert told(opened(folder)) == [expected]
    assert everything(folder) == before


def test_what_lies_between_two_shares_is_told_once(folder: kit.Root) -> None:
    store = folder.open()
    for first in (0x00, 0x10):
        store.store(bytes([first]) * 36, sample_block(store.layout, 0))
    strangers = [f"{store.path}/{name}" for name in ("0ff+", "0fz", "100+", "100z")]
    for name in strangers:
        (Path(folder.url) / name).mkdir()
        (Path(folder.url) / name / "file").write_bytes(b"")
    assert len(covering(opened(folder))) == 2
    assert told(opened(folder)) == [(Fault.UNKNOWN_NAME, name) for name in strangers]


def everything(root: kit.Root) -> dict[str, bytes]:
    """All files, but pipes and links."""
    paths = (path for path in Path(root.url).rglob("*") if not path.is_symlink())
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def test_all_faults_are_found_at_once_and_what_is_damaged_is_removed(
    root: kit.Root,
) -> None:
    expected = planted.make_all(root)
    assert told(opened(root)) == expected
    before = blocks_that_hold(opened(root))
    found = problems(opened(root, read_only=False), delete=True, now=math.inf)
    assert sorted((problem.fault, problem.path) for problem in found) == expected
    assert {problem.fault for problem in found if problem.done == "removed"} == {
        fault for fault, _ in expected if fault in REMOVABLE | {Fault.LEFTOVER}
    }
    left = [pair for pair in expected if pair[0] not in REMOVABLE | {Fault.LEFTOVER}]
    assert told(opened(root)) == left
    assert blocks_that_hold(opened(root)) == before


def blocks_that_hold(root: Root) -> list[tuple[str, bytes]]:
    """Every block that a load finds, below the groups that can be read."""
    found = []
    for place in root.places():
        try:
            group = root.read_group(place)
        except FormatError:
            continue
        for block in group.blocks():
            with contextlib.suppress(DamagedBlockError):
                if group.load(block.key) is not None:
                    found.append((group.path, block.key))
    return found


def test_every_fault_is_planted_but_what_only_storage_can_do() -> None:
    faults = {fault for fault, _ in (PLANTS | LOCAL).values()}
    assert set(Fault) - faults == {Fault.UNREAD}
    assert len(faults) >= 20


def test_what_is_whole_is_no_problem(root: kit.Root) -> None:
    """Of every codec, of two ranks and groups, and isolated."""
    layout = kit.roots.sample_layout(runner="v1")
    for store in (
        root.open(),
        root.open(codec="zstd", rank=1),
        root.open(codec="blosc", rank=1, group=1),
        root.open(layout, on_mismatch="isolate"),
    ):
        for number in range(3):
            key = bytes([number]) * 36
            store.store(key, sample_block(store.layout, number, values=4))
    task = Verify(filesystem=opened(root).filesystem)
    found = sum(map(task, covering(opened(root))), Findings())
    assert told(opened(root)) == []
    assert (found.blocks, found.unproved) == (12, 0)


def test_an_isolated_namespace_is_named_after_its_layout(folder: kit.Root) -> None:
    folder.open()
    layout = kit.roots.sample_layout(runner="v1")
    store = folder.open(layout, on_mismatch="isolate")
    at = Spot(folder, store, SOURCE)
    change = {"runner": "v2"}
    at.edit(
        store.path, lambda found: found["attributes"]["kvstore"]["layout"].update(change)
    )
    assert told(opened(folder)) == [(Fault.NAMESPACE_MISNAMED, at.namespace)]


def test_blocks_below_a_group_without_a_layout_are_not_called_proved(
    folder: kit.Root,
) -> None:
    planted.make(folder, "no_layout")
    [share] = covering(opened(folder))[:1]
    found = Verify(filesystem=opened(folder).filesystem, delete=False)(
        Share(share.group, 0, 4096)
    )
    assert (found.blocks, found.unproved, found.found) == (2, 2, {})


def test_only_the_part_that_is_meant_is_looked_at(root: kit.Root) -> None:
    _, damaged = planted.make(root, "cut_chunk")
    _, group = planted.make(root, "name_behind_all_fan_outs")
    assert told(opened(root, damaged)) == [(Fault.WRONG_LENGTH, damaged)]
    assert told(opened(root, damaged.partition("/")[0])) == [(Fault.WRONG_LENGTH, damaged)]
    store = root.open(config=kit.roots.sample_config(model_name="org/cut_chunk"))
    assert told(opened(root, Spot(root, store, SOURCE).source)) == []
    assert told(opened(root, group.rpartition("/")[0])) == [(Fault.UNKNOWN_NAME, group)]
    assert told(opened(root, "nothing_0123456789ab/r0/g0")) == []


# ---- removal and repair


@pytest.mark.parametrize(
    "name", ["later_format", "gzip", "zstd_with_a_new_member", "another_checksum"]
)
def test_what_another_version_wrote_stays(name: str, folder: kit.Root) -> None:
    expected = planted.make(folder, name)
    [found] = problems(opened(folder, read_only=False), delete=True, now=math.inf)
    assert found.done == "kept: another version may read it"
    assert told(opened(folder)) == [expected]


def test_a_wrong_document_of_a_group_costs_no_block(root: kit.Root) -> None:
    store = filled(root)
    other = root.open(
        kit.roots.sample_layout(runner="v1"),
        config=kit.roots.sample_config(model_name="org/other"),
    )
    document = root.read(f"{root.url}/{store.path}/zarr.json")
    wrong = root.read(f"{root.url}/{other.path}/zarr.json")
    root.write(f"{root.url}/{store.path}/zarr.json", wrong)
    found = problems(opened(root, read_only=False), delete=True, now=math.inf)
    assert [problem.fault for problem in found] == [Fault.OTHER_LAYOUT] * 3
    assert {problem.done[:40] for problem in found} == {
        "kept: if the group's document is the wro"
    }
    root.write(f"{root.url}/{store.path}/zarr.json", document)
    assert told(opened(root)) == []
    assert len(blocks_that_hold(opened(root))) == 3


@pytest.mark.parametrize("name", ["chunk_alone", "document_alone"])
def test_half_a_block_may_be_a_write_under_way(name: str, root: kit.Root) -> None:
    _, path = planted.make(root, name)
    [found] = problems(opened(root, read_only=False), delete=True)
    assert (found.path, found.done[:13]) == (path, "kept: it is n")
    assert told(opened(root)) == [(found.fault, path)]


@pytest.mark.parametrize("name", ["chunk_alone", "document_alone"])
def test_half_a_block_is_removed_when_it_is_old(name: str, folder: kit.Root) -> None:
    _, path = planted.make(folder, name)
    before = time.time() - 3700
    for file in Path(folder.url, path).iterdir():
        os.utime(file, (before, before))
    found_by = opened(folder, read_only=False)
    [found] = problems(found_by, delete=True, now=found_by.now())
    assert found.done == "removed"
    assert not Path(folder.url, path).exists()


def test_how_old_half_a_block_is_the_storages_clock_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = kit.Root(f"memory://{uuid.uuid4().hex}")
    _, path = planted.make(bucket, "chunk_alone")
    ours = time.time
    monkeypatch.setattr(time, "time", lambda: ours() + 7200)
    command(bucket, "--delete")
    assert told(opened(bucket)) == [(Fault.DOCUMENT_MISSING, path)]


@pytest.mark.parametrize("name", ["linked_chunk", "pipe_for_a_document"])
def test_what_is_no_file_goes_with_its_block(name: str, folder: kit.Root) -> None:
    _, path = planted.make(folder, name)
    [found] = problems(opened(folder, read_only=False), delete=True)
    assert found.done == "removed"
    assert not Path(folder.url, path).exists()


@pytest.mark.parametrize("name", ["a link beside", "a folder beside", "for a chunk"])
def test_what_no_listing_shows_is_told_where_it_is_left(
    name: str, folder: kit.Root
) -> None:
    at = planted.spot(folder, "any")
    block = Path(folder.url, at.block)
    if name == "for a chunk":
        planted.folder_for_a_chunk(at)
    else:
        planted.cut_chunk(at)
        mine = block / "mine"
        mine.mkdir() if "folder" in name else mine.symlink_to(folder.url)
    [found] = problems(opened(folder, read_only=False), delete=True)
    assert found.done == LEFT
    assert not found.mended
    assert [path.name for path in block.iterdir()] == [
        at.chunk.rpartition("/")[2] if name == "for a chunk" else "mine"
    ]
    at.store.store(at.key, sample_block(at.store.layout, 2))
    assert at.store.load(at.key, bytearray(at.store.layout.nbytes))


def test_a_block_that_is_stored_anew_meanwhile_is_not_called_left(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = planted.spot(folder, "any")
    planted.cut_chunk(at)
    delete = Upkeep.delete

    def then_store(self: Upkeep, path: str, names: Any) -> None:
        delete(self, path, names)
        at.store.store(at.key, sample_block(at.store.layout, 2))

    monkeypatch.setattr(Upkeep, "delete", then_store)
    [found] = problems(opened(folder, read_only=False), delete=True)
    assert found.done == "removed"


@pytest.mark.parametrize("name", ["notes.txt", "below/x"])
def test_what_is_not_kvstores_stays_with_the_block_that_it_lies_in(
    name: str, root: kit.Root
) -> None:
    at = planted.spot(root, "any")
    planted.cut_chunk(at)
    at.put_in(f"{at.block}/{name}".rpartition("/")[0], name.rpartition("/")[2])
    found = problems(opened(root, read_only=False), delete=True, now=math.inf)
    assert sorted((problem.fault, problem.done) for problem in found) == [
        (Fault.UNKNOWN_FILE, "kept: it is not kvstore's"),
        (Fault.WRONG_LENGTH, "kept: files that are not kvstore's lie beside it"),
    ]
    assert at.read(f"{at.block}/{name}") == b"anything"
    assert at.read(at.chunk)


@pytest.mark.parametrize("name", ["verify", "gc"])
def test_what_was_left_in_a_bucket_goes_when_it_is_old(
    name: str, root: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(root)
    if opened(root).filesystem.local:
        pytest.skip("its writer's lock tells")
    left = f"{TEMPORARY}/0123456789abcdef-0/3/chunk"
    root.write(f"{root.url}/{left}", b"a probe")
    commands = {"verify": ["--delete"], "gc": ["--older-than", "1d"]}
    command(root, *commands[name], name=name)
    assert root.read(f"{root.url}/{left}")
    monkeypatch.setattr(scratch, "ABANDONED_SECONDS", -10.0)
    assert (Fault.LEFTOVER, left) in told(opened(root))
    result = command(root, *commands[name], name=name)
    assert root.peek(f"{root.url}/{left}") is None
    if name == "verify":
        assert f"leftover  {left}  its writer is dead [removed]" in result.stdout


def test_a_listing_in_no_order_is_an_error(folder: kit.Root) -> None:
    """A block whose files come apart would count twice."""
    store = filled(folder)
    task = Verify(filesystem=Unsorted(folder.url), delete=True, now=math.inf)
    before = everything(folder)
    with pytest.raises(StorageError, match="expected paths that ascend"):
        task(Share(store.path, 0, 4096))
    assert everything(folder) == before


def test_what_cannot_be_removed_is_told_and_stays(folder: kit.Root) -> None:
    at = planted.spot(folder, "any")
    planted.cut_chunk(at)
    other = planted.one_more(folder, at.store, "other")
    planted.cut_chunk(other)

    class Failing(Upkeep):
        def delete(self, path: str, names: Any) -> None:
            if path == at.block:
                raise StorageError(path, "delete", "no network")
            super().delete(path, names)

    task = Verify(filesystem=Failing(folder.url), delete=True)
    done = {
        problem.path: problem.done
        for problem in task(Share(at.store.path, 0, 4096)).problems
    }
    assert done[at.block].startswith("kept: cannot delete")
    assert done[other.block] == "removed"
    assert told(opened(folder)) == [(Fault.WRONG_LENGTH, at.block)]


def test_what_was_found_is_told_even_if_storage_fails(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = planted.spot(folder, "any")
    planted.cut_chunk(at)
    look, begun = Verify.__call__, threading.Event()

    def failing(self: Verify, share: Share) -> Findings:
        found = look(self, share)
        if not found.found:
            begun.wait(10.0)  # what has not begun is never done
            raise StorageError("kv", "list", "no network")
        begun.set()
        return found

    monkeypatch.setattr(Verify, "__call__", failing)
    result = command(folder, "--delete", "--jobs", "8")
    assert isinstance(result.exception, StorageError)
    assert "[removed]" in result.stdout
    assert "Not all was looked at" in result.stdout
    assert "No problem" not in result.stdout
    planted.cut_chunk(planted.one_more(folder, at.store, "other"))
    begun.clear()
    result = command(folder, "--json", "--jobs", "8")
    assert json.loads(result.stdout.splitlines()[-1])["whole"] is False


def test_missing_documents_of_ranks_and_fan_outs_are_written(root: kit.Root) -> None:
    for name in ("no_rank", "no_fan_out", "no_layout", "no_config"):
        planted.make(root, name)
    found = problems(opened(root, read_only=False), repair=True)
    done = {problem.fault: problem.done for problem in found}
    assert done == {
        Fault.RANK_MISSING: "written",
        Fault.FAN_OUT_MISSING: "written",
        Fault.GROUP_MISSING: "",
        Fault.NAMESPACE_MISSING: "",
    }
    left = told(opened(root))
    assert [fault for fault, _ in left] == [Fault.GROUP_MISSING, Fault.NAMESPACE_MISSING]


@pytest.mark.parametrize(
    "document", [None, b'{"zarr_format": 3, "node_type": "group", "attributes": {}}']
)
def test_nothing_is_written_among_what_is_not_kvstores(
    document: bytes | None, folder: kit.Root
) -> None:
    photos = Path(folder.url, "photos")
    for name in ("r5/a.jpg", f"r5/g0/{block_path(bytes(36))}/zarr.json"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"a picture")
    if document is not None:
        (photos / "zarr.json").write_bytes(document)
    before = everything(folder)
    found = problems(opened(folder, read_only=False), repair=True, delete=True)
    assert {Fault.RANK_MISSING, Fault.FAN_OUT_MISSING} < {p.fault for p in found}
    assert not any(problem.mended for problem in found)
    assert everything(folder) == before


class Watched(Upkeep):
    """Calls `meet` before each read of a path that ends so."""

    end = "none"

    def meet(self, reads: int) -> None: ...

    def read(self, path: str, limit: int) -> bytes | None:
        if path.endswith(self.end):
            self.reads = getattr(self, "reads", 0) + 1
            self.meet(self.reads)
        return super().read(path, limit)


def test_a_block_that_an_engine_repairs_meanwhile_stays(folder: kit.Root) -> None:
    at = planted.spot(folder, "any")
    planted.cut_chunk(at)
    store, path, key = at.store, at.block, at.key

    class Repaired(Watched):
        end = f"{path}/zarr.json"

        def meet(self, reads: int) -> None:
            if reads == 3:  # after two looks
                with pytest.raises(DamagedBlockError):
                    store.load(key, bytearray(store.layout.nbytes))
                assert store.store(key, sample_block(store.layout, 1))

    task = Verify(filesystem=Repaired(folder.url), delete=True)
    [found] = task(Share(store.path, 0, 4096)).problems
    assert (found.fault, found.done) == (Fault.WRONG_LENGTH, "kept: it is whole by now")
    assert store.load(key, bytearray(store.layout.nbytes))


def test_what_is_damaged_for_one_read_is_whole(folder: kit.Root) -> None:
    store = filled(folder)

    class Spoilt(Watched):
        end = "/zarr.json"

        def read(self, path: str, limit: int) -> bytes | None:
            data = super().read(path, limit)
            spoilt = path.count("/") == 5 and self.reads % 2
            return b"spoilt" if spoilt else data

    task = Verify(filesystem=Spoilt(folder.url), delete=True)
    found = task(Share(store.path, 0, 4096))
    assert (found.blocks, found.found) == (3, {})


def test_what_could_not_be_read_is_told_and_stays(folder: kit.Root) -> None:
    store = filled(folder)
    unread = f"{store.path}/{block_path(bytes([1]) * 36)}"

    class Failing(Watched):
        end = f"{unread}/zarr.json"

        def meet(self, reads: int) -> None:
            raise StorageError(unread, "read", "a bad sector")

    task = Verify(filesystem=Failing(folder.url), delete=True)
    [found] = task(Share(store.path, 0, 4096)).problems
    assert (found.fault, found.path, found.done) == (Fault.UNREAD, unread, "")
    assert "a bad sector" in found.detail
    assert told(opened(folder)) == []


def test_where_nothing_can_be_read_the_work_ends(folder: kit.Root) -> None:
    store = filled(folder, MAX_UNREAD + 2)

    class Failing(Watched):
        end = "c.0.0.0.0"

        def read_into(self, path: str, buffers: Any) -> int | None:
            raise StorageError(path, "read", "no network")

    with pytest.raises(StorageError, match="no network"):
        Verify(filesystem=Failing(folder.url), delete=True)(Share(store.path, 0, 4096))
    assert told(opened(folder)) == []


def test_memory_does_not_grow_with_the_problems(folder: kit.Root) -> None:
    store = filled(folder, 2 * LISTED)
    for number in range(2 * LISTED):
        Path(store.block_url(bytes([number]) * 36)[7:], "zarr.json").write_bytes(b"")
    task = Verify(filesystem=opened(folder).filesystem)
    found = task(Share(store.path, 0, 4096))
    assert found.found == {Fault.DOCUMENT_UNREADABLE: 2 * LISTED}
    assert len((found + found).problems) == len(found.problems) == LISTED
    assert (found + found).found == {Fault.DOCUMENT_UNREADABLE: 4 * LISTED}


def test_memory_grows_neither_with_blocks_nor_with_problems(folder: kit.Root) -> None:
    store = filled(folder)

    class Endless(Upkeep):
        """A share with many blocks, all damaged."""

        count = 0

        def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
            for number in range(self.count):
                block = f"{store.path}/{block_path(number.to_bytes(36))}"
                yield Found(f"{block}/c.0.0.0.0", 1540, 0.0)
                yield Found(f"{block}/zarr.json", 1000, 0.0)

        def read(self, path: str, limit: int) -> bytes | None:
            if path == f"{store.path}/zarr.json":
                return super().read(path, limit)
            return b""

    peaks = []
    for Endless.count in (2 * LISTED, 2 * LISTED, 8 * LISTED):  # the first one warms up
        tracemalloc.start()
        found = Verify(filesystem=Endless(folder.url))(Share(store.path, 0, 4096))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.found[Fault.DOCUMENT_UNREADABLE] == found.blocks == Endless.count
    assert peaks[2] < 1.1 * peaks[1] + 10_000


# ---- the command


def command(root: kit.Root, *arguments: str, path: str = "", name: str = "verify") -> Any:
    url = f"{root.url}/{path}".rstrip("/")
    options = ["--client", root.client]
    if root.storage_options:
        options += ["--storage-options", json.dumps(dict(root.storage_options))]
    return CliRunner().invoke(app, [name, url, *options, *arguments])


def test_the_command_tells_and_ends_with_what_it_found(root: kit.Root) -> None:
    filled(root)
    whole = command(root)
    assert (whole.exit_code, "No problem was found" in whole.stdout) == (0, True)
    _, path = planted.make(root, "flipped_bit")
    found = command(root)
    assert found.exit_code == 1
    assert f"wrong-checksum  {path}" in found.stdout
    *listed, total = map(json.loads, command(root, "--json").stdout.splitlines())
    assert [(line["fault"], line["path"]) for line in listed] == [("wrong-checksum", path)]
    assert (total["blocks"], total["found"]) == (5, {"wrong-checksum": 1})


@pytest.mark.parametrize("path", ["", "model_0123456789ab", "model_0123456789ab/r0/g0"])
def test_where_nothing_is_nothing_is_called_whole(path: str, folder: kit.Root) -> None:
    nothing = command(folder, path=path)
    assert isinstance(nothing.exception, InvalidInputError)
    assert "found none at" in str(nothing.exception)
    assert path in str(nothing.exception)
    assert not Path(folder.url).exists()


def test_the_command_removes_and_repairs(folder: kit.Root) -> None:
    planted.make(folder, "flipped_bit")
    planted.make(folder, "no_rank")
    assert command(folder).exit_code == 1
    mended = command(folder, "--delete", "--repair")
    assert mended.exit_code == 1
    assert mended.stdout.count("[removed]") == mended.stdout.count("[written]") == 1
    assert command(folder).exit_code == 0


def test_a_name_cannot_speak_to_the_terminal(folder: kit.Root) -> None:
    store = filled(folder)
    Path(folder.url, store.path, "\x1b[2Jgone").touch()
    printed = command(folder).stdout
    assert "\x1b" not in printed
    assert "\\x1b[2Jgone" in printed


def test_an_interrupted_run_goes_on_where_it_was(
    folder: kit.Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder, 200)
    for number in (0, 199):
        at = Spot(folder, store, bytes([number]) * 36)
        at.put(at.chunk, b"")
    shares = covering(opened(folder))
    assert len(shares) > 10
    journal = ("--journal", str(tmp_path / "journal"), "--jobs", "1", "--json")
    look = Verify.__call__
    looked: list[Share] = []

    def interrupted(self: Verify, share: Share) -> Findings:
        if len(looked) == 7:
            raise StorageError("kv", "read", "no network")
        looked.append(share)
        return look(self, share)

    monkeypatch.setattr(Verify, "__call__", interrupted)
    assert isinstance(command(folder, *journal).exception, StorageError)

    def resumed(self: Verify, share: Share) -> Findings:
        assert share not in looked[:5]  # the last ones may have ended unseen
        looked.append(share)
        return look(self, share)

    monkeypatch.setattr(Verify, "__call__", resumed)
    done = command(folder, *journal)
    assert set(looked) == set(shares)
    monkeypatch.undo()
    *found, told = map(json.loads, done.stdout.splitlines())
    *expected, fresh = map(json.loads, command(folder, "--json").stdout.splitlines())
    count = len(shares) - (len(looked) - 7)
    assert told == fresh | {"journal": {"recalled": count, "shares": len(shares)}}
    assert fresh["journal"] is None
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert f"{count} of {len(shares)} shares are told from the journal" in done.stderr
    assert done.exit_code == 1


def test_what_could_not_be_read_is_read_again_by_the_next_run(
    folder: kit.Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder)
    journal = ("--journal", str(tmp_path / "journal"))
    read = Upkeep.read

    def failing(self: Upkeep, path: str, limit: int) -> bytes | None:
        if path.endswith(f"{block_path(bytes(36))}/zarr.json"):
            raise StorageError(path, "read", "a bad sector")
        return read(self, path, limit)

    monkeypatch.setattr(Upkeep, "read", failing)
    first = command(folder, *journal)
    assert (first.exit_code, first.stdout.count("a bad sector")) == (3, 1)
    monkeypatch.undo()
    assert command(folder, *journal).exit_code == 0
    assert store.contains(bytes(36))


def test_a_journal_does_not_tell_the_past_as_the_present(
    folder: kit.Root, tmp_path: Path
) -> None:
    planted.make(folder, "no_rank")
    journal = ("--repair", "--journal", str(tmp_path / "journal"))
    assert command(folder, *journal).exit_code == 1
    planted.make(folder, "no_rank")
    before = everything(folder)
    refused = command(folder, *journal)
    assert isinstance(refused.exception, InvalidInputError)
    assert "finished" in str(refused.exception)
    assert refused.stdout == ""
    assert everything(folder) == before
    store = filled(folder)  # what is new is looked at
    assert command(folder, *journal).exit_code == 1
    assert store.contains(bytes(36))


def test_a_journal_is_of_one_work(folder: kit.Root, tmp_path: Path) -> None:
    filled(folder)
    journal = ("--journal", str(tmp_path / "journal"))
    assert command(folder, *journal).exit_code == 0
    refused = command(folder, *journal, "--delete").exception
    assert "delete" in str(refused)


def test_a_journal_is_of_one_storage(tmp_path: Path) -> None:
    roots = [container(uuid.uuid4().hex, endpoint_url=f"http://{name}") for name in "ab"]
    roots[1] = replace(roots[0], storage_options=roots[1].storage_options)
    for root in roots:
        filled(root, 30)
    journal = tmp_path / "journal"
    noting = ("--journal", str(journal))
    assert command(roots[0], *noting).exit_code == 0
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))
    refused = command(roots[1], *noting).exception
    assert "is of another work: url_storage: expected" in str(refused)
    assert command(roots[0], *noting).exit_code == 0


def test_the_journal_of_a_folder_says_no_more_than_before(
    folder: kit.Root, tmp_path: Path
) -> None:
    filled(folder)
    journal = tmp_path / "journal"
    assert command(folder, "--journal", str(journal)).exit_code == 0
    about = json.loads(journal.read_text().splitlines()[0])
    assert set(about) == {"work", "url", "part", "delete", "repair"}


def test_the_page_tells_every_word() -> None:
    page = Path(__file__).parent.parent / "docs" / "commands" / "verify.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if "| `" in line]
    assert {row[1].strip(" `") for row in rows} == {fault.value for fault in Fault}
    removed = {row[1].strip(" `") for row in rows if row[3].strip() == "`--delete`"}
    assert removed == {fault.value for fault in REMOVABLE | {Fault.LEFTOVER}}
