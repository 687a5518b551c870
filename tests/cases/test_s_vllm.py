"""What vLLM's own tiers do, and what kvstore does instead, by kvstore's own names.

docs/cases.md says what was read there, and where.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Faulty
from stored import KEY, chunk_url, document_url, folder, loaded

from kvstore import DamagedBlockError, StorageError
from kvstore.config import prove_parallel_agnostic
from kvstore.layout import KV_CACHE_LAYOUTS
from kvstore.testing import Root, sample_block, sample_layout

LENGTHS = {"layer": 2, "block": 2, "head": 4, "token": 3, "value": 2}


def row(order: tuple[str, ...], workers: int) -> np.ndarray[Any, Any]:
    """A row of as many workers, each with its share of the heads; no two values equal."""
    shape = [LENGTHS[dim] for dim in LENGTHS]
    tagged = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    heads = LENGTHS["head"] // workers
    parts = [tagged[:, :, n * heads : (n + 1) * heads] for n in range(workers)]
    axes = [list(LENGTHS).index(dim) for dim in order]
    return np.concatenate([part.transpose(axes).reshape(-1) for part in parts])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", KV_CACHE_LAYOUTS)
def test_s2_a_claim_is_believed_only_where_the_bytes_are_equal(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every order of a row, written by one worker and by two."""
    monkeypatch.setitem(LENGTHS, "block", blocks)
    axes = tuple(dim for dim in KV_CACHE_LAYOUTS[name] if dim != "block" or blocks > 1)
    one = sample_layout(
        axes=axes, shape=tuple(LENGTHS[dim] for dim in axes), kv_cache_layout=name
    )
    equal = (row(axes_of(axes), 1) == row(axes_of(axes), 2)).all()
    proved = prove_parallel_agnostic(one, claimed=True)
    assert proved == equal
    assert proved == (name == "BHLNC" and blocks == 1)
    assert not prove_parallel_agnostic(one, claimed=False)


def axes_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """All dimensions; one of length 1 may be anywhere."""
    return axes if "block" in axes else ("block", *axes)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data[:-1], id="shorter"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data + b"\0", id="longer"),
        pytest.param(lambda data: data * 2, id="twice"),
    ],
)
def test_s3_a_chunk_of_another_length(root: Root, change: Any, codec: Any) -> None:
    """Refused whether it is shorter or longer, and left where it is."""
    store = root.open(codec=codec)
    store.store(KEY, sample_block(store.layout, values=16))
    url = chunk_url(store)
    wrong = change(root.read(url))
    root.write(url, wrong)
    with pytest.raises(DamagedBlockError):
        loaded(root.open())
    assert root.read(url) == wrong
    root.read(document_url(store))


def test_s3_transfers_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may move fewer bytes than it was asked to: go on, delete nothing."""
    readv, write = os.preadv, os.write
    calls = []

    def some_of(data: Any) -> memoryview:
        calls.append(len(data))
        return memoryview(data)[:100]

    def read_some(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return readv(descriptor, [some_of(buffers[0])], offset)

    root = Root(str(tmp_path))
    monkeypatch.setattr(os, "write", lambda to, data: write(to, some_of(data)))
    store = root.open()
    store.store(KEY, sample_block(store.layout))
    monkeypatch.setattr(os, "preadv", read_some)
    assert loaded(root.open()) == sample_block(store.layout).tobytes()
    assert len(calls) > 2 * store.layout.nbytes // 100


@pytest.mark.parametrize("times", [1, 2])
def test_s3_short_answers_delete_nothing(times: int) -> None:
    """One is asked for again; two in a row are a damaged block, which stays as it is."""
    faulty = Faulty()
    store = faulty.root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    short = iter(range(times))

    def break_off(path: str, data: bytes) -> bytes:
        if path.endswith("/c.0.0.0.0") and next(short, None) is not None:
            return data[: len(data) // 2]
        return data

    faulty.answer = break_off
    before = faulty.root.files()
    if times == 2:
        with pytest.raises(DamagedBlockError):
            loaded(store)
    assert loaded(store) == block.tobytes()
    assert next(short, None) is None
    assert faulty.root.files() == before


@pytest.mark.parametrize("reader", ["this process", "another process"])
def test_s4_a_wrong_block_of_the_right_length_is_replaced(root: Root, reader: str) -> None:
    """Once a load has found it, by the next store; and a healthy one is not rewritten."""
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    root.write(chunk_url(store), bytes(len(root.read(chunk_url(store)))))
    engine = store if reader == "this process" else root.open()
    with pytest.raises(DamagedBlockError):
        loaded(engine)
    assert engine.store(KEY, block)
    assert engine.counts()["repaired"] == 1
    assert not engine.store(KEY, block)
    assert loaded(root.open()) == block.tobytes()


@pytest.mark.parametrize("broken", ["document of another", "torn document"])
def test_s4_a_document_that_is_not_the_blocks(root: Root, broken: str) -> None:
    """What vLLM would take for present is no block, and the store replaces it unasked."""
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    url = document_url(store)
    data = root.read(url)
    key = KEY.hex().encode()
    assert key in data
    wrong = data[:100] if broken == "torn document" else data.replace(key, key[::-1])
    root.write(url, wrong)
    fresh = root.open()
    assert fresh.store(KEY, block)
    assert loaded(root.open()) == block.tobytes()


def test_s5_an_outage_is_no_absence() -> None:
    faulty = Faulty()
    store = faulty.root.open()
    store.store(KEY, sample_block(store.layout))

    def fail(request: str, path: str) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    faulty.before = fail
    reader = store
    for _ in range(2):
        with pytest.raises(StorageError, match="No route to host"):
            reader.contains(KEY)
    faulty.before = lambda request, path: None
    assert reader.contains(KEY)


def test_s5_an_outage_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Root(str(tmp_path)).open()
    store.store(KEY, sample_block(store.layout))
    assert folder(document_url(store)).is_file()

    def fail(*arguments: Any) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(StorageError, match="Stale file handle"):
            store.contains(KEY)
    assert store.contains(KEY)
