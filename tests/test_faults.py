"""The fakes of `kvstore.testing.faults`: what they add to a backend, and nothing else."""

import inspect
import pickle
from collections import Counter

import pytest

from kvstore import (
    BlockStore,
    DamagedBlockError,
    InvalidInputError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.filesystem import Filesystem
from kvstore.paths import DOCUMENT
from kvstore.testing import Root, open_on, sample_block
from kvstore.testing.faults import (
    CountingFilesystem,
    FaultyFilesystem,
    SlowFilesystem,
    WrappedFilesystem,
)
from kvstore.testing.plans import (
    FAILURES,
    KINDS,
    LIES,
    OPERATIONS,
    Fault,
    Kind,
    Operation,
    PlannedFaults,
    RandomFaults,
)

KEY = bytes(range(36))


def faulty_store(root: Root) -> tuple[BlockStore, FaultyFilesystem]:
    faulty = FaultyFilesystem(root.filesystem())
    return open_on(faulty), faulty


def load(store: BlockStore) -> bytes | None:
    buffer = bytearray(store.layout.nbytes)
    return bytes(buffer) if store.load(KEY, buffer) else None


def test_every_operation_is_wrapped() -> None:
    public = {
        name
        for name, _ in inspect.getmembers(Filesystem, inspect.isfunction)
        if not name.startswith("_")
    }
    assert public == {*OPERATIONS, "place", "require_writable", "storage"}
    assert public <= vars(WrappedFilesystem).keys()


def test_counts(root: Root) -> None:
    counting = CountingFilesystem(root.filesystem())
    store = open_on(counting)
    block = sample_block(store.layout)
    counting.calls.clear()
    store.store(KEY, block)
    assert counting.calls == {"read": 1, "create": 1, "publish": 1}
    assert load(open_on(counting)) == block.tobytes()
    store.delete(KEY)
    assert counting.calls["read_into"] == 1
    assert counting.calls["delete"] == 1


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("error", [StorageError, StorageAccessError, StorageTimeoutError])
def test_a_publish_that_fails(root: Root, kind: Kind, error: type[StorageError]) -> None:
    store, faulty = faulty_store(root)
    block = sample_block(store.layout)
    faulty.plan = PlannedFaults({("publish", 1): Fault(kind=kind, error=error)})
    with pytest.raises(error) as caught:
        store.store(KEY, block)
    assert type(caught.value) is error
    assert "cannot write" in str(caught.value)
    assert faulty.struck == {("publish", kind): 1}
    there = [name for name in root.files() if KEY.hex() in name]
    chunk = [name for name in there if not name.endswith(DOCUMENT)]
    if kind == "half" and not faulty.local:  # a folder is published in one step
        assert there == chunk != []
    else:
        assert bool(there) == (kind == "after")
    assert root.open().contains(KEY) == (kind == "after")
    assert store.store(KEY, block) == (kind != "after")
    assert load(store) == block.tobytes()


@pytest.mark.parametrize("kind", FAILURES)
def test_a_delete_that_fails(root: Root, kind: Kind) -> None:
    store, faulty = faulty_store(root)
    store.store(KEY, sample_block(store.layout))
    faulty.plan = PlannedFaults({("delete", 1): Fault(kind=kind)})
    with pytest.raises(StorageError):
        store.delete(KEY)
    assert root.open().contains(KEY) == (kind == "before")
    store.delete(KEY)
    assert not [name for name in root.files() if KEY.hex() in name]


@pytest.mark.parametrize("kind", LIES)
def test_a_read_that_lies(root: Root, kind: Kind) -> None:
    _, faulty = faulty_store(root)
    faulty.create(f"folder/{DOCUMENT}", b"")
    name = f"folder/block/{DOCUMENT}"
    assert faulty.read(name, 9) is None
    faulty.publish("folder/block", [(DOCUMENT, [b"abcd"])], replace=False)
    assert faulty.read(name, 9) == b"abcd"
    fault = Fault(kind=kind, at=0.99)
    faulty.plan = PlannedFaults({("read", 1): fault, ("read_into", 1): fault})
    lies = {"flipped": b"abce", "short": b"abc", "long": b"abcd\0", "stale": None}
    lie = lies[kind]
    assert faulty.read(name, 9) == lie
    buffer = bytearray(4)
    length = faulty.read_into(name, [memoryview(buffer)])
    assert length == (None if lie is None else len(lie))
    if length == 4:
        assert bytes(buffer) == lie
    assert faulty.read(name, 9) == b"abcd"
    assert faulty.read_into(name, [memoryview(buffer)]) == 4
    assert buffer == b"abcd"


def test_stale_bytes_are_those_before_the_last_change(root: Root) -> None:
    _, faulty = faulty_store(root)
    faulty.create(f"folder/{DOCUMENT}", b"")
    for content in (b"one", b"two", b"two"):
        faulty.publish("folder/block", [(DOCUMENT, [content])], replace=True)
        assert faulty.read(f"folder/block/{DOCUMENT}", 9) == content
    faulty.plan = PlannedFaults({("read", 1): Fault(kind="stale")})
    assert faulty.read(f"folder/block/{DOCUMENT}", 9) == b"one"
    assert faulty.read("folder/other", 9) is None


@pytest.mark.parametrize("kind", ["flipped", "short", "long"])
def test_a_chunk_that_is_misread_is_not_served(root: Root, kind: Kind) -> None:
    store, faulty = faulty_store(root)
    block = sample_block(store.layout)
    store.store(KEY, block)
    # The chunk is read again, in case that another engine has replaced the block.
    fault = Fault(kind=kind)
    faulty.plan = PlannedFaults({("read_into", 1): fault, ("read_into", 2): fault})
    with pytest.raises(DamagedBlockError):
        load(store)
    assert load(store) == block.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_fails_before_it_does_anything(operation: Operation) -> None:
    inner = CountingFilesystem(Root("memory://never").filesystem())
    plan = PlannedFaults({(operation, 1): Fault(kind="before")})
    faulty = FaultyFilesystem(inner, plan)
    calls = {
        "exists": lambda: faulty.exists("x"),
        "read": lambda: faulty.read("x", 1),
        "read_into": lambda: faulty.read_into("x", []),
        "create": lambda: faulty.create("x", b""),
        "publish": lambda: faulty.publish("x", [], replace=False),
        "delete": lambda: faulty.delete("x", []),
        "touch": lambda: faulty.touch("x", b""),
        "probe": faulty.probe,
    }
    with pytest.raises(StorageError, match="HTTP 503"):
        calls[operation]()
    assert not inner.calls


def test_chance_repeats_itself_and_keeps_to_what_it_was_told() -> None:
    def drawn(plan: RandomFaults) -> list[Fault | None]:
        return [plan(operation) for operation in OPERATIONS * 300]

    plan = RandomFaults(7, 0.5)
    faults = drawn(plan)
    assert faults == drawn(RandomFaults(7, 0.5)) != drawn(RandomFaults(8, 0.5))
    assert drawn(pickle.loads(pickle.dumps(plan))) == faults
    for operation, fault in zip(OPERATIONS * 300, faults, strict=True):
        assert fault is None or fault.kind in KINDS[operation]
    kinds = Counter(fault.kind for fault in faults if fault is not None)
    assert set(kinds) == {*FAILURES, *LIES}
    assert 800 < kinds.total() < 1300
    only = drawn(RandomFaults(7, {"read": 1.0}, kinds=("stale",)))
    assert [fault and fault.kind for fault in only] == [
        "stale" if operation == "read" else None for operation in OPERATIONS * 300
    ]


def test_wrappers_compose_and_pickle(root: Root) -> None:
    plan = PlannedFaults({("read", 2): Fault(kind="before")})
    filesystem = CountingFilesystem(
        SlowFilesystem(FaultyFilesystem(root.filesystem(), plan), {"probe": 0.001})
    )
    ends: list[CountingFilesystem] = [filesystem]
    if filesystem.shared:
        ends.append(pickle.loads(pickle.dumps(filesystem)))
    else:
        with pytest.raises(InvalidInputError, match="that other processes see"):
            pickle.dumps(filesystem)
    for each in ends:
        assert each.read("x/y", 1) is None
        with pytest.raises(StorageError):
            each.read("x/y", 1)
        each.probe()
        assert each.calls == {"read": 2, "probe": 1}
        assert each.place("x") == root.filesystem().place("x")
