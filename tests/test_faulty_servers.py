"""What each client makes of a network that breaks: real servers behind a proxy that spoils
their answers, and a filesystem that tries nothing again by itself."""

import errno
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from conftest import BACKENDS
from faulty_proxy import Proxy, faulty
from fsspec.implementations.memory import MemoryFileSystem

from kvstore import (
    BlockStore,
    DamagedBlockError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.client import Client
from kvstore.fsspec_client import FsspecClient
from kvstore.retries import TransientError, persist
from kvstore.testing import Root, sample_block
from kvstore.upkeep import Upkeep

DATA = np.random.default_rng(1).bytes(50_000)
KEY = bytes(range(36))


@pytest.fixture(scope="module", params=[name for name in ("s3", "gcs") if name in BACKENDS])
def proxied(request: pytest.FixtureRequest) -> Iterator[tuple[Proxy, Root]]:
    """A server behind a proxy, and a root there."""
    server = request.getfixturevalue(f"{request.param}_server")
    with faulty(server.endpoint) as proxy:
        options = {**server.storage_options, "endpoint_url": proxy.endpoint}
        yield proxy, Root(server.url, options)


@pytest.fixture(params=["obstore", "fsspec"])
def place(
    proxied: tuple[Proxy, Root], request: pytest.FixtureRequest
) -> tuple[Proxy, Root]:
    """A fresh root for one client."""
    proxy, root = proxied
    proxy.heal()
    fresh = f"{root.url}/{uuid.uuid4().hex}"
    return proxy, Root(fresh, root.storage_options, request.param)


def opened(root: Root, timeout: float = 20) -> Upkeep:
    return Upkeep(root.url, root.storage_options, client=root.client, timeout=timeout)


def writes(root: Root) -> str:
    """The method that a write of one object is."""
    return "POST" if root.url.startswith("gs") and root.client == "fsspec" else "PUT"


# ---- one fault is survived


@pytest.mark.parametrize("fault", ["503", "429", "reset", "lost", "cut", "end"])
def test_a_read_survives_a_fault(place: tuple[Proxy, Root], fault: str) -> None:
    proxy, root = place
    filesystem = opened(root)
    filesystem.publish("b", [("chunk", [DATA])], replace=False)
    proxy.spoil("GET", fault)
    assert filesystem.read("b/chunk", len(DATA)) == DATA
    buffer = bytearray(len(DATA))
    proxy.spoil("GET", fault)
    assert filesystem.read_into("b/chunk", [memoryview(buffer)]) == len(DATA)
    assert buffer == DATA
    assert not any(fault in request for request in proxy.take()[-1:])


@pytest.mark.parametrize("fault", ["503", "reset", "lost"])
def test_a_write_survives_a_fault(place: tuple[Proxy, Root], fault: str) -> None:
    proxy, root = place
    filesystem = opened(root)
    for write in (
        lambda: filesystem.publish("b", [("chunk", [DATA])], replace=False),
        lambda: filesystem.create("b/zarr.json", b"{}"),
    ):
        proxy.spoil(writes(root), fault)
        write()
    proxy.spoil(writes(root), fault)
    filesystem.create("b/zarr.json", b"second")  # and whoever was first stays
    assert filesystem.read("b/chunk", len(DATA)) == DATA
    assert filesystem.read("b/zarr.json", 100) == b"{}"
    proxy.spoil("DELETE", fault)
    filesystem.delete("b", ("chunk", "zarr.json"))
    assert filesystem.read("b/zarr.json", 100) is None
    assert filesystem.read("b/chunk", 100) is None


@pytest.mark.parametrize("fault", ["503", "reset", "cut", "short"])
def test_a_listing_survives_a_fault(place: tuple[Proxy, Root], fault: str) -> None:
    proxy, root = place
    filesystem = opened(root)
    for name in ("a", "b"):
        filesystem.publish(f"n/{name}", [("zarr.json", [b"{}"])], replace=False)
    proxy.spoil("GET", fault)
    assert [file.path for file in filesystem.files("n")] == [
        "n/a/zarr.json",
        "n/b/zarr.json",
    ]
    proxy.spoil("GET", fault)
    assert filesystem.folders("n") == ["a", "b"]


def test_a_page_that_fails_is_asked_for_again(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    if root.client == "fsspec" or root.url.startswith("gs"):
        pytest.skip("one answer holds all of a folder")
    filesystem = opened(root)
    names = [f"{n:04}" for n in range(1010)]
    filesystem.publish("n", [(name, [b""]) for name in names], replace=False)
    found = filesystem.files("n")
    assert next(found).path == "n/0000"
    proxy.take()
    proxy.spoil("GET", "cut")
    assert [file.path for file in found] == [f"n/{name}" for name in names[1:]]
    assert any(request.endswith("cut") for request in proxy.take())


# ---- whole blocks


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_a_spoilt_chunk_is_read_again(place: tuple[Proxy, Root], fault: str) -> None:
    proxy, root = place
    store = root.open()
    block = sample_block(store.layout)
    assert store.store(KEY, block)
    assert store.contains(KEY)  # so that the proof is known, and the next GET the chunk's
    proxy.take()
    proxy.spoil("GET", fault)
    buffer = bytearray(block.nbytes)
    assert store.load(KEY, buffer)
    assert buffer == block.tobytes()
    assert any(request.endswith(fault) for request in proxy.take())
    assert store.counts()["loaded"] == 1
    assert not store.counts()["damaged"]


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_a_spoilt_document_is_read_again(place: tuple[Proxy, Root], fault: str) -> None:
    proxy, root = place
    block = sample_block(root.open().layout)
    assert root.open().store(KEY, block)
    asks: tuple[Callable[[BlockStore], bool], ...] = (
        lambda store: store.contains(KEY),
        lambda store: store.load(KEY, bytearray(block.nbytes)),
        lambda store: not store.store(KEY, block),  # it is healthy, and kept
    )
    for ask in asks:
        store = root.open()
        proxy.take()
        proxy.spoil("GET", fault)
        assert ask(store)
        assert not store.counts()["damaged"]
        assert any(request.endswith(fault) for request in proxy.take())


def test_a_document_that_is_spoilt_twice_is_damaged(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    store = root.open()
    store.store(KEY, sample_block(store.layout))
    proxy.take()
    proxy.spoil("GET", "flip", times=2)
    assert not store.contains(KEY)
    assert len(proxy.take()) == 2
    assert store.counts()["damaged"] == 1


def test_a_chunk_that_is_spoilt_twice_is_damaged(place: tuple[Proxy, Root]) -> None:
    _, root = place
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    url = ".".join((f"{store.block_url(KEY)}/c", *"0000"))
    spoilt = bytearray(root.read(url))
    spoilt[5] ^= 1
    root.write(url, bytes(spoilt))
    with pytest.raises(DamagedBlockError):
        store.load(KEY, bytearray(block.nbytes))


# ---- what is not tried again, and for how long the rest is


def test_a_refusal_is_not_tried_again(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    filesystem = opened(root)
    proxy.take()
    proxy.spoil("GET", "403")
    with pytest.raises(StorageAccessError):
        filesystem.read("b", 10)
    assert len(proxy.take()) == 1


def test_absence_is_one_request(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    filesystem = opened(root)
    proxy.take()
    assert filesystem.read("absent", 10) is None
    assert len(proxy.take()) == 1


def test_no_answer_is_a_timeout_and_not_asked_for_again(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    filesystem = opened(root, timeout=2)
    proxy.take()
    proxy.spoil("GET", "hang", times=9)
    with pytest.raises(StorageTimeoutError):
        filesystem.read("b", 10)
    assert len(proxy.take()) == 1
    proxy.heal()
    assert filesystem.read("b", 10) is None


def test_a_server_that_stays_down_is_an_error_in_the_end(place: tuple[Proxy, Root]) -> None:
    proxy, root = place
    filesystem = opened(root, timeout=3)
    filesystem.publish("b", [("chunk", [DATA])], replace=False)
    proxy.spoil("GET", "reset", times=1000)
    with pytest.raises(StorageError):
        filesystem.read("b/chunk", 10)
    assert len(proxy.take()) < 40
    proxy.heal()
    assert filesystem.read("b/chunk", len(DATA)) == DATA


# ---- a filesystem without any patience of its own


class Impatient(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """fsspec's own memory, which fails first with what it is told."""

    protocol = "impatient"
    failures: ClassVar[list[Exception]] = []
    calls: ClassVar[list[str]] = []

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self.calls.append(path)
        if self.failures:
            raise self.failures.pop()
        data: bytes = super().cat_file(path, *arguments, **options)
        return data


@pytest.fixture
def impatient() -> Client:
    """A client of it, with one object."""
    fsspec.register_implementation("impatient", Impatient, clobber=True)
    Impatient.failures.clear()
    client = FsspecClient("impatient", "impatient://x", None, timeout=5)
    client.put("a", [b"1"])
    Impatient.calls.clear()
    return client


class ChecksumError(Exception):
    """As gcsfs's."""


class ReadTimeoutError(ConnectionError):
    """As botocore's, whose family it is of too."""


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionResetError("reset"),
        OSError(errno.EBUSY, "SlowDown"),
        AssertionError(),
        ChecksumError(),
    ],
    ids=repr,
)
def test_a_transient_error_is_tried_again(impatient: Client, failure: Exception) -> None:
    Impatient.failures += [failure, failure]
    assert impatient.get("a", 10) == b"1"
    assert len(Impatient.calls) == 3


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("a"),
        PermissionError("a"),
        TimeoutError(),
        ReadTimeoutError(),
        ValueError("a"),
        OSError(errno.EIO, "a"),
    ],
    ids=repr,
)
def test_any_other_error_is_not(impatient: Client, failure: Exception) -> None:
    Impatient.failures += [failure]
    with pytest.raises(type(failure)):
        impatient.get("a", 10)
    assert len(Impatient.calls) == 1


def test_no_attempt_begins_after_its_time() -> None:
    made = []

    def fail() -> None:
        made.append(1)
        raise TransientError

    def always(error: Exception) -> bool:
        return True

    with pytest.raises(TransientError):
        persist(fail, always, seconds=0)
    assert len(made) == 1
    made.clear()
    with pytest.raises(TransientError):
        persist(fail, always, seconds=0.2)
    assert 2 <= len(made) <= 10
