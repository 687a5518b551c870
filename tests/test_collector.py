"""What goes when a root is full, and what stays."""

import itertools
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from unsorted import Unsorted

from kvstore import (
    BlockStore,
    DamagedBlockError,
    StorageError,
    capacity,
    collector,
    scratch,
    survey,
)
from kvstore.arrays import group_document
from kvstore.collector import Collected, Collector, Limits
from kvstore.listing import Found
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root, sample_block, sample_config, sample_layout
from kvstore.upkeep import Upkeep

LAYOUT = sample_layout()
BLOCK = sample_block(LAYOUT)
FAR = 1e9
KEY = bytes(range(36))
NOTHING = Limits(None, None, FAR)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be slow: where no test is about time, a collection has enough."""
    monkeypatch.setattr(collector, "SECONDS", 60.0)


def key(number: int) -> bytes:
    """Spread over the fan-outs, as hashes are."""
    return (number * 2654435761 % 2**32).to_bytes(4, "big") + KEY[4:]


def upkeep(root: Root) -> Upkeep:
    return Upkeep(root.url, root.storage_options, client=root.client)


def fill(store: BlockStore, numbers: Sequence[int]) -> None:
    for number in numbers:
        store.store(key(number), BLOCK)


def put(root: Root, url: str, data: bytes) -> None:
    """Write what kvstore never would."""
    if upkeep(root).local:
        Path(url).parent.mkdir(parents=True, exist_ok=True)
    root.write(url, data)


def there(store: BlockStore, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if store.contains(key(number))]


def age(store: BlockStore, number: int, seconds: float) -> None:
    """Make a block of a folder so much older."""
    document = Path(store.block_url(key(number)).removeprefix("file://")) / "zarr.json"
    then = time.time() - seconds
    os.utime(document, (then, then))


def size(root: Root) -> int:
    """What the blocks below a root take, asked of a listing."""
    files = upkeep(root).files("")
    return sum(file.nbytes for file in files if file.path.count("/") == 5)


@pytest.fixture
def folder(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "kv"))


def test_without_limits_nothing_goes_and_the_usage_is_exact(root: Root) -> None:
    store = root.open()
    fill(store, range(7))
    told = Collector(upkeep(root), NOTHING, [store.path]).collect()
    assert told == Collected(size(root))
    assert there(store, range(7)) == list(range(7))


def test_an_empty_root_holds_nothing(root: Root) -> None:
    assert Collector(upkeep(root), Limits(1, 1.0, 1.0)).collect() == Collected(0)


def test_blocks_go_until_the_rest_fits_and_are_told(root: Root) -> None:
    store, other = root.open(), root.open(config=sample_config(model_name="other"))
    fill(store, range(10))
    fill(other, range(10))
    before = size(root)
    limit = before // 2
    told = Collector(upkeep(root), Limits(limit, None, FAR), [store.path]).collect()
    assert told.used == size(root) <= capacity.LOW * limit
    assert size(root) > capacity.LOW * limit - before // 10  # and no more than needed
    left, others = there(store, range(10)), there(other, range(10))
    assert told.evicted == 20 - len(left) - len(others)
    assert set(told.keys) == {key(n) for n in range(10) if n not in left}
    assert not told.more
    for number in left:
        assert store.load(key(number), bytearray(LAYOUT.nbytes))


def test_the_least_recently_used_go_first(folder: Root) -> None:
    store = folder.open()
    fill(store, range(20))
    for number in range(20):
        age(store, number, 1000 + number)
    for number in (15, 19):  # the oldest but for this
        store.blocks.touch(key(number))
    limit = int(size(folder) * 0.51 / capacity.LOW)
    Collector(upkeep(folder), Limits(limit, None, FAR)).collect()
    assert there(store, range(20)) == [*range(8), 15, 19]


def test_a_touch_in_a_bucket_is_its_document_written_anew(root: Root) -> None:
    store = root.open()
    store.store(KEY, BLOCK)
    document = root.read(f"{store.block_url(KEY)}/zarr.json")
    assert store.blocks.touch(KEY)
    assert root.read(f"{store.block_url(KEY)}/zarr.json") == document
    assert store.blocks.touch(key(1)) is store.local  # absent
    assert not root.peek(f"{store.block_url(key(1))}/zarr.json")
    assert store.load(KEY, bytearray(LAYOUT.nbytes))


def test_what_nobody_has_used_for_long_goes(folder: Root) -> None:
    store = folder.open()
    fill(store, range(6))
    for number in range(3):
        age(store, number, 100)
    told = Collector(upkeep(folder), Limits(None, 50.0, FAR), [store.path]).collect()
    assert (told.expired, told.evicted) == (3, 0)
    assert set(told.keys) == {key(n) for n in range(3)}
    assert told.used == size(folder)
    assert there(store, range(6)) == [3, 4, 5]


def test_half_a_block_goes_when_nobody_can_be_writing_it(root: Root) -> None:
    store = root.open()
    fill(store, range(3))
    root.remove(f"{store.block_url(key(0))}/zarr.json")
    root.remove(f"{store.block_url(key(1))}/c.0.0.0.0")
    patient = Collector(upkeep(root), Limits(1, None, 60.0)).collect()
    assert (patient.orphans, patient.evicted) == (0, 1)  # one is whole, and has to go
    time.sleep(2.1)  # times in a bucket are whole seconds
    told = Collector(upkeep(root), Limits(None, None, 1.0)).collect()
    assert told.orphans == 2
    assert size(root) == 0


def test_what_killed_starts_left_in_a_bucket_goes_with_age(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    if upkeep(root).local:
        pytest.skip("a sweep does it")
    root.open()
    left = f"{root.url}/{TEMPORARY}/0123456789abcdef"
    root.write(left, b"kvstore")
    Collector(upkeep(root), NOTHING).collect()
    assert root.peek(left) == b"kvstore"
    monkeypatch.setattr(scratch, "ABANDONED_SECONDS", -10.0)
    Collector(upkeep(root), NOTHING).collect()
    assert root.peek(left) is None
    assert not [name for name in root.files() if f"/{TEMPORARY}/" in name]


def test_names_of_others_stay(folder: Root) -> None:
    store = folder.open()
    fill(store, range(2))
    top = Path(folder.url)
    group = Path(store.url.removeprefix("file://"))
    outside = top.parent / "outside"
    outside.mkdir()
    (outside / "zarr.json").write_text("{}")
    kept = [
        top / "notes.txt",
        top / "other" / "r0" / "g0" / "abc" / "README",
        group / "abc" / "abd0" / "zarr.json",  # not in its fan-out
        group / "abc" / "ABCD" / "zarr.json",
        group / "xyz" / "xyz0" / "zarr.json",
        top / ".kvstore-tmp" / "abc" / "abcd" / "zarr.json",
        top / "model" / "r0" / "gg" / "abc" / "abcd" / "zarr.json",
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (group / "abc" / "abcdef").symlink_to(outside)
    told = Collector(upkeep(folder), Limits(1, 0.001, 0.0)).collect()
    assert told.evicted + told.expired == 2
    assert all(path.read_text() == "mine" for path in kept)
    assert (outside / "zarr.json").exists()


@pytest.mark.parametrize("document", [None, b"{", group_document(layout={})])
def test_nothing_goes_where_no_namespace_is_recorded(
    root: Root, document: bytes | None
) -> None:
    """Whoever has folders of such names may have anything in them."""
    store = root.open()
    fill(store, range(1))
    theirs = f"{root.url}/theirs"
    if document is not None:
        put(root, f"{theirs}/zarr.json", document)
    kept = [f"{theirs}/r0/g0/abc/abcd/{name}" for name in ("c.0", "zarr.json")]
    kept += [f"{theirs}/r0/g0/abc/abce/zarr.json"]
    for name in kept:
        put(root, name, b"mine")
    told = Collector(upkeep(root), Limits(1, None, -10.0)).collect()
    assert (told.evicted, told.orphans, told.used) == (1, 0, 0)
    assert [root.read(name) for name in kept] == [b"mine"] * 3


def test_an_engines_own_blocks_count_without_a_document(root: Root) -> None:
    """A rule of the bucket may have removed it."""
    store = root.open()
    fill(store, range(2))
    root.remove(f"{root.url}/{store.path.partition('/')[0]}/zarr.json")
    theirs = Collector(upkeep(root), Limits(1, None, FAR))
    assert theirs.collect() == Collected(0)
    ours = Collector(upkeep(root), Limits(1, None, FAR), [store.path])
    assert ours.collect().evicted == 2


def test_files_of_others_below_a_block_stay(root: Root) -> None:
    """And the folder that holds them comes up once."""
    store = root.open()
    fill(store, range(2))
    kept = [f"{store.block_url(key(0))}/{name}" for name in ("notes.txt", "c.txt")]
    for name in kept:
        root.write(name, b"mine")
    eager = Collector(upkeep(root), Limits(1, None, -10.0), [store.path])
    told = eager.collect()
    assert (told.evicted, set(told.keys)) == (2, {key(0), key(1)})
    again = eager.collect()
    assert (again.used, again.evicted, again.orphans, again.problem) == (0, 0, 0, None)
    assert [root.read(name) for name in kept] == [b"mine"] * 2
    assert there(store, range(2)) == []


@pytest.fixture
def after_a_look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has another process do something after each listing, before the removal."""
    look = survey.Survey.look

    def patch(do: Callable[[], object]) -> None:
        def interrupted(
            self: survey.Survey,
        ) -> tuple[list[survey.StoredBlock], float]:
            found = look(self)
            do()
            return found

        monkeypatch.setattr(survey.Survey, "look", interrupted)

    return patch


@pytest.mark.parametrize("limit", ["max_bytes", "max_age"])
def test_a_block_that_is_used_meanwhile_stays(
    folder: Root, limit: str, after_a_look: Callable[[Callable[[], object]], None]
) -> None:
    store = folder.open()
    fill(store, range(4))
    for number in range(4):
        age(store, number, 100 - number)
    limits = Limits(None, 50.0, FAR)
    if limit == "max_bytes":
        limits = Limits(size(folder) // 2, None, FAR)
    after_a_look(lambda: store.blocks.touch(key(0)))
    told = Collector(upkeep(folder), limits, [store.path]).collect()
    left = there(store, range(4))
    assert 0 in left
    assert len(left) < 4
    assert {key(n) for n in range(4) if n not in left} == set(told.keys)


@pytest.mark.parametrize("missing", ["zarr.json", "c.0.0.0.0"])
def test_half_a_block_that_is_stored_meanwhile_stays(
    root: Root, missing: str, after_a_look: Callable[[Callable[[], object]], None]
) -> None:
    store = root.open()
    fill(store, range(2))
    root.remove(f"{store.block_url(key(0))}/{missing}")
    buffer = bytearray(LAYOUT.nbytes)
    if missing != "zarr.json":  # it is found damaged, and so repaired
        with pytest.raises(DamagedBlockError):
            store.load(key(0), buffer)
    after_a_look(lambda: store.store(key(0), BLOCK))
    told = Collector(upkeep(root), Limits(None, None, -10.0)).collect()
    assert (told.orphans, told.problem) == (0, None)
    assert store.load(key(0), buffer)


def test_half_a_block_that_cannot_be_listed_again_stays(folder: Root) -> None:
    store = folder.open()
    fill(store, range(1))
    folder.remove(f"{store.block_url(key(0))}/zarr.json")

    class Once(Upkeep):
        """Lists no block by itself."""

        def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
            if path.count("/") == 4:
                raise StorageError(self.url, "list", "a test said so")
            yield from super().files(path, after=after)

    told = Collector(Once(folder.url), Limits(None, None, -10.0)).collect()
    assert told.orphans == 0
    assert "a test said so" in str(told.problem)
    assert folder.peek(f"{store.block_url(key(0))}/c.0.0.0.0") is not None


def test_a_listing_in_no_order_is_an_error_and_removes_nothing(folder: Root) -> None:
    """A block's files that do not come together would look like two halves."""
    store = folder.open()
    fill(store, range(5))
    busy = Collector(Unsorted(folder.url), Limits(1, 1e-9, -10.0))
    busy._survey.width, busy._survey._cursor = survey.FAN_OUTS, 0
    with pytest.raises(StorageError, match="expected paths that ascend"):
        busy.collect()
    assert there(store, range(5)) == list(range(5))


def test_of_many_blocks_a_sample_tells(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at a fan-out each, with ages that do not follow their keys."""
    monkeypatch.setattr(survey, "SAMPLE", 100)
    store = folder.open()
    count = 1500
    fill(store, range(count))
    for number in range(count):
        age(store, number, 100 + number)
    before = size(folder)
    looks = Collector(upkeep(folder), NOTHING)
    found = [looks.collect().used for _ in range(12)]
    assert sum(found) / 12 == pytest.approx(before, rel=0.15)
    limit = int(before * 0.8 / capacity.LOW)
    busy = Collector(upkeep(folder), Limits(limit, None, FAR))
    for _ in range(20):
        if not busy.collect().more and size(folder) <= 0.85 * before:
            break
    assert 0.7 * before < size(folder) < 0.9 * before
    gone = sorted(set(range(count)) - set(there(store, range(count))))
    # By how it was found, an age may be misjudged; what is gone is old none the less.
    assert sum(gone) / len(gone) > 0.75 * count


def test_however_slow_storage_is_a_look_sees_enough(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few fan-outs it would tell that nothing is there, or twice as much as is."""
    monkeypatch.setattr(collector, "SECONDS", -1.0)
    store = folder.open()
    fill(store, range(100))
    looks = [Collector(upkeep(folder), NOTHING) for _ in range(3)]
    assert [look.collect().used for look in looks] == [size(folder)] * 3


def test_a_look_that_takes_too_long_fails_and_removes_nothing(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "LOOK_SECONDS", -1.0)
    store = folder.open()
    fill(store, range(3))
    with pytest.raises(StorageError, match="found only 0 blocks within"):
        Collector(upkeep(folder), Limits(1, 1e-9, -10.0)).collect()
    assert there(store, range(3)) == [0, 1, 2]


def test_a_root_that_others_fill_is_looked_at_in_smaller_parts(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few blocks there were at the last look, in one group or in several."""
    monkeypatch.setattr(survey, "SAMPLE", 16)
    monkeypatch.setattr(survey, "WIDE_FILES", 128)
    monkeypatch.setattr(survey, "MAX_FILES", 128)
    stores = [folder.open(config=sample_config(model_name=name)) for name in "ab"]
    fill(stores[0], range(3))
    busy = Collector(upkeep(folder), NOTHING)
    assert busy.collect().used == size(folder)
    assert busy._survey.width == survey.FAN_OUTS
    fill(stores[1], range(50))
    fill(stores[0], range(300))
    seen = [busy._survey.look() for _ in range(40)]
    assert max(len(blocks) for blocks, _ in seen) <= 16 + 64
    told = sum(sum(block.nbytes for block in blocks) / share for blocks, share in seen)
    assert told / 40 == pytest.approx(size(folder), rel=0.25)


def test_a_call_removes_no_more_than_it_can_tell(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "MAX_REMOVED", 4)
    monkeypatch.setattr(collector, "BATCH", 2)
    store = folder.open()
    fill(store, range(10))
    busy = Collector(upkeep(folder), Limits(1, None, FAR), [store.path])
    told = list(itertools.islice(iter(busy.collect, None), 4))
    assert [t.evicted for t in told] == [4, 4, 2, 0]
    assert [t.more for t in told] == [True, True, False, False]
    assert {k for t in told for k in t.keys} == {key(n) for n in range(10)}


def aging(root: Root) -> Collector:
    """Removes all, as too old."""
    collector = Collector(upkeep(root), Limits(None, 1e-9, FAR))
    collector._survey.width = survey.FAN_OUTS
    return collector


def test_a_call_ends_when_its_time_is_over_but_removes_some(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "SECONDS", 0.0)
    monkeypatch.setattr(collector, "BATCH", 2)
    store = folder.open()
    fill(store, range(5))
    busy = Collector(upkeep(folder), Limits(1, None, FAR))
    busy._survey.width = survey.FAN_OUTS  # all are seen, late as it is
    told = list(itertools.islice(iter(busy.collect, None), 3))
    assert [(t.evicted, t.more) for t in told] == [(2, True), (2, True), (1, False)]
    fill(store, range(5))
    told = list(itertools.islice(iter(aging(folder).collect, None), 3))
    assert [(t.expired, t.more) for t in told] == [(2, True), (2, True), (1, False)]


class Broken(Upkeep):
    """Lists some of what is there, or removes nothing."""

    def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
        found = super().files(path, after=after)
        yield from itertools.islice(found, 3)
        raise StorageError(self.url, "list", "a test said so")


class Guarded(Upkeep):
    """Refuses to remove anything."""

    def delete(self, path: str, names: Sequence[str]) -> None:
        raise StorageError(self.url, "delete", "a test said so")


def test_a_call_that_has_no_time_left_removes_one_batch(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the listing took: else the next call would come no further."""
    monkeypatch.setattr(collector, "SECONDS", -1.0)
    monkeypatch.setattr(collector, "BATCH", 2)
    store = folder.open()
    fill(store, range(10))
    for number in range(10):
        age(store, number, 100.0)
    expiring = Collector(upkeep(folder), Limits(None, 50.0, FAR), [store.path])
    expiring._survey.width = survey.FAN_OUTS
    assert [expiring.collect().expired for _ in range(6)] == [2] * 5 + [0]
    assert there(store, range(10)) == []


def test_nothing_goes_on_a_guess(folder: Root) -> None:
    store = folder.open()
    fill(store, range(10))
    with pytest.raises(StorageError):
        Collector(Broken(folder.url), Limits(1, 0.0001, 0.0)).collect()
    assert there(store, range(10)) == list(range(10))


def test_a_removal_that_fails_is_told(folder: Root) -> None:
    store = folder.open()
    fill(store, range(3))
    told = Collector(Guarded(folder.url), Limits(1, None, FAR)).collect()
    assert told.evicted == 0
    assert told.problem is not None
    assert "a test said so" in told.problem
    assert told.used == size(folder)
    assert there(store, range(3)) == [0, 1, 2]


def test_two_collectors_at_once_remove_what_one_would(folder: Root) -> None:
    store = folder.open()
    fill(store, range(40))
    before = size(folder)
    limit = int(before * 0.5 / capacity.LOW)
    ours, theirs = (Collector(upkeep(folder), Limits(limit, None, FAR)) for _ in range(2))
    for _ in range(3):
        ours.collect()
        theirs.collect()
    assert 0.4 * before < size(folder) <= 0.5 * before
