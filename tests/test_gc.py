"""`kvstore gc`: limits hold, the least recently used went, and nothing else."""

import json
import os
import time
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from unsorted import Unsorted

from kvstore import BlockStore, InvalidInputError, StorageError
from kvstore import testing as kit
from kvstore.cli.app import app
from kvstore.cli.options import parse_duration, parse_size
from kvstore.collector import BATCH
from kvstore.listing import Found
from kvstore.offline.gc import (
    HALF_SECONDS,
    Remove,
    Removed,
    Rules,
    Trim,
    Weigh,
    Weight,
    quotas_of,
)
from kvstore.offline.root import Root
from kvstore.offline.shares import Share, Unfinished
from kvstore.paths import block_path
from kvstore.survey import StoredBlock
from kvstore.testing import sample_block
from kvstore.testing.roots import sample_config
from kvstore.upkeep import Upkeep

COUNT = 20
KEYS = [bytes([37 * number % 256]) * 36 for number in range(COUNT)]
HOUR, DAY = 3600.0, 86_400.0


def command(root: kit.Root, *arguments: str, path: str = "") -> Any:
    url = f"{root.url}/{path}".rstrip("/")
    options = ["--client", root.client]
    if root.storage_options:
        options += ["--storage-options", json.dumps(dict(root.storage_options))]
    return CliRunner().invoke(app, ["gc", url, *options, *arguments])


def told(root: kit.Root, *arguments: str, path: str = "") -> dict[str, Any]:
    result = command(root, *arguments, "--json", path=path)
    assert result.exit_code == 0, result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def filled(root: kit.Root, name: str = "model") -> BlockStore:
    store = root.open(config=sample_config(model_name=f"org/{name}"))
    for number, key in enumerate(KEYS):
        store.store(key, sample_block(store.layout, number))
    return store


def held(store: BlockStore) -> list[int]:
    """Which of the blocks are there."""
    buffer = bytearray(store.layout.nbytes)
    return [number for number, key in enumerate(KEYS) if store.load(key, buffer)]


def age(store: BlockStore, ages: dict[int, float]) -> None:
    """Let blocks in a folder be of these ages, in seconds."""
    for number, seconds in ages.items():
        used = time.time() - seconds
        for file in Path(store.block_url(KEYS[number]).removeprefix("file://")).iterdir():
            os.utime(file, (used, used))


def block_bytes(root: kit.Root, store: BlockStore) -> int:
    url = store.block_url(KEYS[0])
    return sum(len(root.read(f"{url}/{name}")) for name in ("zarr.json", "c.0.0.0.0"))


@pytest.fixture
def folder(tmp_path: Path) -> kit.Root:
    return kit.Root(str(tmp_path / "kv"))


def test_the_limit_holds_and_no_more_goes_than_must(root: kit.Root) -> None:
    store = filled(root)
    block = block_bytes(root, store)
    limit = f"{COUNT * block - 6 * block - 1}B"
    dry = told(root, "--max-bytes", limit, "--dry-run")
    assert (dry["evicted"], dry["freed"], dry["blocks"]) == (7, 7 * block, COUNT - 7)
    assert held(store) == list(range(COUNT))
    assert told(root, "--max-bytes", limit) == dry | {"dry_run": False}
    assert len(held(store)) == COUNT - 7
    again = told(root, "--max-bytes", limit)
    assert (again["evicted"], again["nbytes"]) == (0, (COUNT - 7) * block)
    assert told(root, "--max-bytes", "0B")["blocks"] == 0
    assert held(store) == []


def test_what_was_used_least_recently_goes_first(folder: kit.Root) -> None:
    store = filled(folder)
    block = block_bytes(folder, store)
    ages = {number: DAY * (1 + number * 7 % COUNT) for number in range(COUNT)}
    age(store, ages)
    assert told(folder, "--max-bytes", f"{COUNT // 2 * block}B")["evicted"] == COUNT // 2
    youngest = sorted(sorted(ages, key=lambda number: ages[number])[: COUNT // 2])
    assert held(store) == youngest


def test_over_all_namespaces_or_only_in_the_part_that_is_named(folder: kit.Root) -> None:
    old, new = filled(folder, "old"), filled(folder, "new")
    age(old, dict.fromkeys(range(COUNT), 2 * DAY))
    age(new, dict.fromkeys(range(COUNT), DAY))
    block = block_bytes(folder, old)
    limit = ("--max-bytes", f"{COUNT * block}B")
    part = new.path.partition("/")[0]
    assert told(folder, *limit, path=part)["evicted"] == 0
    assert told(folder, *limit, "--dry-run")["evicted"] == COUNT
    groups = told(folder, *limit)["groups"]
    evicted = {group["path"]: group["evicted"] for group in groups}
    assert evicted == {old.path: COUNT, new.path: 0}
    assert (held(old), len(held(new))) == ([], COUNT)
    assert told(folder, "--older-than", "1h", path=part)["expired"] == COUNT


def test_what_was_not_used_for_so_long_goes(folder: kit.Root) -> None:
    store = filled(folder)
    age(store, dict.fromkeys((2, 3, 5), 31 * DAY) | {7: 29 * DAY})
    found = told(folder, "--older-than", "30d")
    assert (found["expired"], found["evicted"]) == (3, 0)
    assert held(store) == [n for n in range(COUNT) if n not in (2, 3, 5)]


def test_a_limit_that_does_not_hold_is_told(folder: kit.Root) -> None:
    store = filled(folder)
    root_of = Path(store.block_url(KEYS[3]).removeprefix("file://"))
    (root_of / "zarr.json").unlink()  # somebody may be writing it
    result = command(folder, "--max-bytes", "1B")
    assert (result.exit_code, held(store)) == (1, [])
    assert "The limit does not hold: 1.5 KiB are left" in result.stdout
    assert command(folder, "--max-bytes", "2KiB").exit_code == 0


def test_both_limits_hold(folder: kit.Root) -> None:
    store = filled(folder)
    block = block_bytes(folder, store)
    age(store, {0: 40 * DAY, 1: 20 * DAY, 2: 10 * DAY})
    limit = f"{(COUNT - 2) * block}B"
    found = told(folder, "--older-than", "30d", "--max-bytes", limit)
    assert (found["expired"], found["evicted"]) == (1, 1)
    assert held(store) == list(range(2, COUNT))


def test_half_blocks_go_when_they_are_old(folder: kit.Root) -> None:
    store = filled(folder)
    for number in (4, 6):
        folder.remove(f"{store.block_url(KEYS[number])}/zarr.json")
    age(store, {6: HALF_SECONDS + 60})
    found = told(folder, "--older-than", "30d")
    assert (found["halves"], found["expired"]) == (1, 0)
    assert folder.peek(f"{store.block_url(KEYS[4])}/c.0.0.0.0") is not None
    assert folder.peek(f"{store.block_url(KEYS[6])}/c.0.0.0.0") is None


def test_what_is_not_kvstores_stays(root: kit.Root) -> None:
    store = filled(root)
    notes = f"{store.block_url(KEYS[3])}/notes.txt"
    root.write(notes, b"anything")
    for arguments in (["--older-than", "0s", "--dry-run"], ["--max-bytes", "0B"]):
        assert told(root, *arguments)["blocks"] == 0
    assert root.read(notes) == b"anything"
    assert held(store) == []


def test_blocks_of_another_version_are_no_halves(root: kit.Root) -> None:
    """Whose chunks have other names."""
    store = filled(root)
    for number, name in enumerate(("c.0.0.0.0", "zarr.json")):
        root.remove(f"{store.block_url(KEYS[number])}/{name}")
    root.write(f"{store.block_url(KEYS[0])}/c-0-0", b"a chunk")
    task = Remove(
        filesystem=Upkeep(root.url, root.storage_options, client=root.client),
        rules=Rules(now=time.time() + 2 * HALF_SECONDS, max_age=365 * DAY),
    )
    assert task(Share(store.path, 0, 4096)).halves == 1
    assert root.read(f"{store.block_url(KEYS[0])}/zarr.json")
    assert root.peek(f"{store.block_url(KEYS[1])}/c.0.0.0.0") is None


@pytest.mark.parametrize("whose", ["nobody", "later", "torn"])
def test_what_no_document_tells_is_kvstores_is_left_out(root: kit.Root, whose: str) -> None:
    store = filled(root)
    other = filled(root, "other")
    document = f"{root.url}/{other.path.partition('/')[0]}/zarr.json"
    if whose == "nobody":
        root.remove(document)
        root.remove(f"{other.url}/zarr.json")
    elif whose == "later":
        later = root.read(document).replace(b'"format": 1', b'"format": 2')
        root.write(document, later)
    else:
        root.write(f"{other.url}/zarr.json", b"{")
    for arguments in (["--older-than", "0s", "--dry-run"], ["--max-bytes", "0B"]):
        result = command(root, *arguments, "--json")
        found = json.loads(result.stdout)
        assert result.exit_code == 1
        assert [group["path"] for group in found["groups"]] == [store.path]
        assert other.path.partition("/")[0] in found["unreadable"][0]
    assert root.peek(f"{other.block_url(KEYS[3])}/zarr.json") is not None
    assert held(store) == []
    assert "left out: " in command(root, "--older-than", "0s").stdout


def test_what_is_used_meanwhile_stays(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder)
    age(store, {3: 2 * DAY, 4: 2 * DAY})
    listed = Upkeep.files

    def used(self: Upkeep, path: str, *, after: str = "") -> Any:
        found = listed(self, path, after=after)
        if path.endswith(KEYS[3].hex()):  # right before its removal
            document = f"{store.block_url(KEYS[3])}/zarr.json"
            os.utime(document.removeprefix("file://"))
        return found

    monkeypatch.setattr(Upkeep, "files", used)
    assert told(folder, "--older-than", "1d")["expired"] == 1
    assert held(store) == [n for n in range(COUNT) if n != 4]


@pytest.mark.parametrize("arguments", [("--older-than", "1d"), ("--max-bytes", "0B")])
def test_what_was_removed_is_told_even_if_storage_fails(
    arguments: tuple[str, ...], folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the block, of all the shares that were under way."""
    store = filled(folder)
    age(store, dict.fromkeys(range(COUNT), 2 * DAY))
    monkeypatch.setattr("kvstore.offline.gc.BATCH", 1)
    delete, calls = Upkeep.delete, []

    def failing(self: Upkeep, path: str, names: Any) -> None:
        calls.append(path)
        if len(calls) > 4:
            raise StorageError("kv", "delete", "no network")
        delete(self, path, names)

    monkeypatch.setattr(Upkeep, "delete", failing)
    result = command(folder, *arguments, "--json", "--jobs", "4")
    assert isinstance(result.exception, StorageError)
    found = json.loads(result.stdout)
    assert found["expired"] + found["evicted"] == COUNT - len(held(store)) == 4
    assert (found["whole"], found["blocks"], found["nbytes"]) == (False, None, None)


def test_where_nothing_could_be_listed_nothing_is_said_to_be_left(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder)

    def failing(self: Upkeep, path: str, *, after: str = "") -> Any:
        raise StorageError("kv", "list", "no network")

    monkeypatch.setattr(Upkeep, "files", failing)
    result = command(folder, "--max-bytes", "1B")
    assert isinstance(result.exception, StorageError)
    assert "left" not in result.stdout
    assert "Not all was looked at" in result.stdout


def test_a_listing_in_no_order_ends_the_work_and_removes_nothing(folder: kit.Root) -> None:
    store = filled(folder)
    age(store, dict.fromkeys(range(COUNT), 2 * DAY))
    rules = Rules(now=time.time(), max_age=DAY)
    with pytest.raises(Unfinished, match="expected paths that ascend"):
        Remove(filesystem=Unsorted(folder.url), rules=rules)(Share(store.path, 0, 4096))
    assert held(store) == list(range(COUNT))


def test_half_a_block_that_is_stored_before_its_removal_stays(
    root: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(root)
    root.remove(f"{store.block_url(KEYS[3])}/zarr.json")
    listed = Upkeep.files

    def stored(self: Upkeep, path: str, *, after: str = "") -> Any:
        if path.endswith(KEYS[3].hex()):
            store.store(KEYS[3], sample_block(store.layout, 3))
        return listed(self, path, after=after)

    monkeypatch.setattr(Upkeep, "files", stored)
    rules = Rules(now=time.time() + 2 * HALF_SECONDS)
    task = Remove(
        filesystem=Root(
            root.url, root.storage_options, client=root.client, read_only=False
        ).filesystem,
        rules=rules,
    )
    assert task(Share(store.path, 0, 4096)).halves == 0
    assert held(store) == list(range(COUNT))


def test_what_a_batch_removed_is_told_before_its_error(
    folder: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder)
    age(store, dict.fromkeys(range(COUNT), 2 * DAY))
    delete, calls = Upkeep.delete, []

    def failing(self: Upkeep, path: str, names: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise StorageError("kv", "delete", "no network")
        delete(self, path, names)

    monkeypatch.setattr(Upkeep, "delete", failing)
    share = Share(store.path, 0, 4096)
    task = Remove(filesystem=Upkeep(folder.url), rules=Rules(now=time.time(), max_age=DAY))
    with pytest.raises(Unfinished) as caught:
        task(share)
    assert str(caught.value.error) == "cannot delete kv: no network"
    removed = caught.value.done
    assert isinstance(removed, Removed)
    assert removed.expired == COUNT - len(held(store)) == COUNT - 1


def test_memory_grows_neither_with_blocks_nor_with_what_goes(folder: kit.Root) -> None:
    store = filled(folder)

    class Endless(Upkeep):
        """Blocks in one share, all equally old."""

        count = 0

        def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
            if path != store.path:
                return
            for number in range(self.count):
                block = f"{store.path}/{block_path(number.to_bytes(36))}"
                yield Found(f"{block}/c.0.0.0.0", 1540, 0.0)
                yield Found(f"{block}/zarr.json", 1000, 0.0)

    share, rules = Share(store.path, 0, 4096), Rules(now=1e9, dry_run=True)
    peaks = []
    for Endless.count in (2 * BATCH, 2 * BATCH, 8 * BATCH):  # the first one warms up
        filesystem = Endless(folder.url)
        weight = Weigh(filesystem, rules)(share)
        cut = weight.cut(0)
        assert cut is not None
        quotas = {share: weight.nbytes - 1}
        trim = Trim(filesystem=filesystem, rules=rules, cut=cut, quotas=quotas)
        tracemalloc.start()
        found = trim(share)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.evicted == Endless.count
    assert peaks[2] < 1.1 * peaks[1] + 10_000


def test_the_table_says_what_went_from_which_group(folder: kit.Root) -> None:
    store = filled(folder)
    age(store, {3: 2 * DAY})
    lines = command(folder, "--older-than", "1d", "--dry-run").stdout.splitlines()
    assert lines[1].split()[:4] == [store.path, "1", "0", "0"]
    assert "dry run" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--max-bytes or --older-than"),
        (("--max-bytes", "5"), "--max-bytes: expected a size"),
        (("--max-bytes", "-5GB"), "--max-bytes: expected a size"),
        (("--older-than", "30"), "--older-than: expected a duration"),
        (("--older-than", "30m"), "--older-than: expected a duration"),
    ],
)
def test_what_is_unclear_removes_nothing(
    arguments: tuple[str, ...], message: str, folder: kit.Root
) -> None:
    store = filled(folder)
    error = command(folder, *arguments).exception
    assert isinstance(error, InvalidInputError)
    assert message in str(error)
    assert held(store) == list(range(COUNT))


def test_one_block_is_no_part_to_make_room_in(folder: kit.Root) -> None:
    store = filled(folder)
    path = store.block_url(KEYS[0]).partition("/kv/")[2]
    error = command(folder, "--max-bytes", "0B", path=path).exception
    assert "found one block" in str(error)


def test_sizes_and_durations_are_those_that_people_write() -> None:
    sizes = {"512MiB": 512 << 20, "1.5TB": 1_500_000_000_000, "7 gb": 7 * 10**9, "0B": 0}
    assert {text: parse_size(text, "x") for text in sizes} == sizes
    spans = {"30d": 30 * DAY, "12h": 12 * HOUR, "1.5 min": 90.0, "2w": 14 * DAY}
    assert {text: parse_duration(text, "x") for text in spans} == spans


# ---- the arithmetic


def test_the_limit_lies_in_the_step_that_is_needed() -> None:
    weight = Weight(blocks=6, nbytes=60, steps={1: 20, 5: 30, 9: 10})
    limits = {60: None, 59: 9, 50: 9, 49: 5, 20: 5, 19: 1, 0: 1}
    assert {limit: weight.cut(limit) for limit in limits} == limits


def test_shares_give_in_turn_what_is_needed() -> None:
    shares = [Share("g", number, number + 1) for number in range(4)]
    edges = dict(zip(shares, (10, 0, 30, 40), strict=True))
    assert quotas_of(edges, 35) == {shares[0]: 10, shares[2]: 25}
    assert quotas_of(edges, 0) == {}
    assert sum(quotas_of(edges, 1000).values()) == 80


def test_steps_are_a_hundredth_of_the_age() -> None:
    rules = Rules(now=1e9)

    def step(seconds: float) -> int:
        return rules.step(StoredBlock("b", ("zarr.json",), 1, 1e9 - seconds))

    assert step(0) == step(-5) == 0
    for seconds in (10.0, HOUR, DAY, 365 * DAY):
        assert step(seconds) < step(1.02 * seconds) <= step(seconds) + 3
    assert step(100 * 365 * DAY) < 2300
