"""Credentials that are replaced, processes that fork, and the number of connections."""

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_proxy import Proxy, faulty
from servers import KEY, SECRET, Server, write_profile

from kvstore import StorageAccessError, session
from kvstore.filesystem import ClientName
from kvstore.upkeep import Upkeep

NAMES = ("chunk", "zarr.json")
clients = pytest.mark.parametrize("client", ["obstore", "fsspec"])


@pytest.fixture(scope="module")
def proxy(s3_server: Server) -> Iterator[Proxy]:
    with faulty(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url(s3_server: Server) -> str:
    return f"{s3_server.url}/{uuid.uuid4().hex}"


# ---- credentials


def refused(filesystem: Upkeep) -> Upkeep:
    """It has used the credentials of yesterday, and not only read them."""
    with pytest.raises(StorageAccessError):
        filesystem.read("absent", 10)
    return filesystem


@clients
def test_new_credentials_are_found(
    url: str,
    proxy: Proxy,
    profile: Path,
    client: ClientName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "RENEWAL", 0.0)
    options = {"endpoint_url": proxy.endpoint}
    operations: list[Callable[[Upkeep], object]] = [
        lambda f: f.publish("b", [(n, [b"{}"]) for n in NAMES], replace=False),
        lambda f: f.read("b/zarr.json", 10),
        lambda f: f.read_into("b/zarr.json", [memoryview(bytearray(2))]),
        lambda f: f.create("zarr.json", b"{}"),
        lambda f: f.folders(""),
        lambda f: [file.path for file in f.files("")],
        lambda f: f.touch("b", b"{}"),
        lambda f: f.delete_many([("b", NAMES)]),
        lambda f: f.delete("b", NAMES),
    ]
    answers = []
    for operation in operations:
        write_profile(profile, "yesterdays-key", "yesterdays-secret")
        filesystem = refused(Upkeep(url, options, client=client))
        write_profile(profile, KEY, SECRET)
        answers.append(operation(filesystem))
    listed = ["b/chunk", "b/zarr.json", "zarr.json"]
    assert answers == [True, b"{}", 2, None, ["b"], listed, None, (["b"], None), None]


@clients
def test_new_credentials_are_found_beside_an_option_that_only_sounds_secret(
    url: str,
    proxy: Proxy,
    profile: Path,
    client: ClientName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "RENEWAL", 0.0)
    additional = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:::key/x"}
    options = {"endpoint_url": proxy.endpoint, "s3_additional_kwargs": additional}
    filesystem = refused(Upkeep(url, options, client=client))
    write_profile(profile, KEY, SECRET)
    assert filesystem.read("absent", 10) is None


@clients
def test_without_new_ones_a_refusal_stays_one(
    url: str,
    proxy: Proxy,
    profile: Path,
    client: ClientName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem = Upkeep(url, {"endpoint_url": proxy.endpoint}, client=client)
    proxy.take()
    for requests in (2, 1, 1):  # once a minute another client is made
        with pytest.raises(StorageAccessError):
            filesystem.read("absent", 10)
        assert len(proxy.take()) == requests
    removed, problem = filesystem.delete_many([("b", NAMES)])
    assert removed == []
    assert isinstance(problem, StorageAccessError)
    with pytest.raises(StorageAccessError):
        list(filesystem.files(""))
    write_profile(profile, KEY, SECRET)
    with pytest.raises(StorageAccessError):
        filesystem.read("absent", 10)
    monkeypatch.setattr(session, "RENEWAL", 0.0)
    assert filesystem.read("absent", 10) is None


def test_credentials_that_are_gone_are_a_refusal(
    url: str, proxy: Proxy, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call is wrong: so in a mover too, where the circuit counts refusals."""
    filesystem = refused(Upkeep(url, {"endpoint_url": proxy.endpoint}))
    profile.unlink()
    told = "HTTP 403.*; and no other client could be made: .*found no credentials"
    refusals: list[Callable[[], object]] = [
        lambda: filesystem.read("absent", 10),
        lambda: filesystem.publish("b", [("zarr.json", [b"{}"])], replace=False),
        lambda: list(filesystem.files("")),
    ]
    for ask in refusals:
        monkeypatch.setattr(session, "RENEWAL", 0.0)
        with pytest.raises(StorageAccessError, match=told):
            ask()
        monkeypatch.setattr(session, "RENEWAL", 60.0)  # this one was the minute's
        with pytest.raises(StorageAccessError, match=r"HTTP 403(?!.*client)"):
            ask()
    monkeypatch.setattr(session, "RENEWAL", 0.0)
    removed, problem = filesystem.delete_many([("b", NAMES)])
    assert removed == []
    assert re.search(told, str(problem))
    write_profile(profile, KEY, SECRET)
    assert filesystem.read("absent", 10) is None


@clients
def test_many_threads_make_one_new_client(
    url: str,
    proxy: Proxy,
    profile: Path,
    client: ClientName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filesystem = Upkeep(url, {"endpoint_url": proxy.endpoint}, client=client)
    monkeypatch.setattr(session, "RENEWAL", 0.0)
    refused(filesystem)
    write_profile(profile, KEY, SECRET)
    made = []
    original = session.Session._made

    def made_noted(self: session.Session, anew: bool) -> object:
        made.append(anew)
        return original(self, anew)

    monkeypatch.setattr(session.Session, "_made", made_noted)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: filesystem.read(f"absent{n}", 10), range(64)))
    assert found == [None] * 64
    assert made == [True]


@clients
def test_an_expired_token_is_a_refusal(
    url: str, proxy: Proxy, s3_server: Server, client: ClientName
) -> None:
    """AWS answers 400 to it. What stands in the options is fixed, so nothing is renewed."""
    options = {**s3_server.storage_options, "endpoint_url": proxy.endpoint}
    filesystem = Upkeep(url, options, client=client)
    proxy.take()
    proxy.spoil("GET", "expired", times=9)
    with pytest.raises(StorageAccessError):
        filesystem.read("absent", 10)
    assert len(proxy.take()) == 1
    proxy.heal()


# ---- fork

FORKS = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
from kvstore.testing import Root, sample_block

def use(store, n):
    key, block = bytes([n]) * 36, sample_block(store.layout, n)
    store.store(key, block)
    assert store.contains(key)
    buffer = bytearray(block.nbytes)
    assert store.load(key, buffer) and buffer == block.tobytes()

url, endpoint, client, end = sys.argv[1:]
options = {"endpoint_url": endpoint, "key": "test-key", "secret": "test-secret"}
root = Root(url, options, client)
store = root.open()
use(store, 1)
idle = root.open()  # which the child lets go of
use(idle, 2)
ended, failures = threading.Event(), []

def busy():
    n = 10
    while not ended.is_set():
        try:
            use(store, n)
        except Exception as error:
            failures.append(error)
            raise
        n = 10 + (n - 9) % 200

threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()
for fork in range(3):
    child = os.fork()
    if not child:
        signal.alarm(30)  # a child that hangs is killed, and the test fails
        begun = time.monotonic()
        del idle
        try:
            use(store, 220 + fork)
            use(root.open(), 230 + fork)
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
        print("child:", "done", flush=True)
        if end == "exit":
            os._exit(0)
        ended.set()
        sys.exit(0)
    print("status", os.waitpid(child, 0)[1], flush=True)
ended.set()
for thread in threads:
    thread.join()
use(store, 3)
use(idle, 4)
print("parent", failures, flush=True)
"""


@clients
@pytest.mark.parametrize("end", ["exit", "finalize"])
def test_a_forked_child_works_and_its_parent_too(
    url: str, s3_server: Server, client: ClientName, end: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, url, s3_server.endpoint, client, end],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert lines == ["child: done", "status 0"] * 3 + ["parent []"], ran.stderr[-2000:]
    assert ran.returncode == 0
    told = "this process was forked from one that uses obstore"
    assert (told in ran.stderr) == (client == "obstore")


# ---- connections


@clients
def test_threads_do_not_wait_for_each_others_connections(
    url: str, proxy: Proxy, s3_server: Server, client: ClientName
) -> None:
    options = {**s3_server.storage_options, "endpoint_url": proxy.endpoint}
    filesystem = Upkeep(url, options, client=client)
    proxy.gather = threading.Barrier(32)  # no answer before 32 requests are there
    try:
        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(lambda n: filesystem.read(f"a{n}", 10), range(32)))
        assert found == [None] * 32
        assert not proxy.gather.broken
    finally:
        proxy.gather = None


@clients
def test_descriptors_do_not_grow_with_the_blocks(
    url: str, s3_server: Server, client: ClientName
) -> None:
    filesystem = Upkeep(url, s3_server.storage_options, client=client)

    def use(n: int) -> None:
        path = f"n/r0/g0/{n % 16:03x}/{n:08x}"
        filesystem.publish(path, [("zarr.json", [b"%d" % n])], replace=False)
        assert filesystem.read(f"{path}/zarr.json", 10) == b"%d" % n

    def used(numbers: range) -> int:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(use, numbers))
        return len(os.listdir("/proc/self/fd"))

    few = used(range(100))
    assert used(range(100, 600)) < few + 16
