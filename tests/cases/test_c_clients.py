"""What a client must survive: forks, old credentials, and answers that break; rows C of
docs/cases.md."""

import errno
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import script
from faulty import Faulty
from faulty_proxy import Proxy, faulty
from servers import KEY as OLD
from servers import READER_KEY as NEW
from servers import Server, write_profile
from stored import KEY, chunk_url, loaded, run_keys

from kvstore import DamagedBlockError, StorageAccessError, StorageError, session
from kvstore.filesystem import ClientName
from kvstore.parts import FAILED
from kvstore.retries import FIRST_TRIES, TRIES
from kvstore.testing import Root, sample_block
from kvstore.transfer import FOUND, REFUSED

FIRST = bytes(36)
"""A key of the first KV group."""

CLIENTS: list[ClientName] = ["obstore", "fsspec"]

clients = pytest.mark.parametrize("client", CLIENTS)


@pytest.fixture(scope="module")
def proxy(s3_server: Server) -> Iterator[Proxy]:
    """Before S3."""
    with faulty(s3_server.endpoint) as proxy:
        yield proxy


def behind(proxy: Proxy, server: Server, client: ClientName) -> Root:
    """A fresh root in S3, by one client."""
    proxy.heal()
    options = {**server.storage_options, "endpoint_url": proxy.endpoint}
    return Root(f"{server.url}/{uuid.uuid4().hex}", options, client)


# ---- forks

FORK = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
from kvstore.testing import Root, sample_block

url, options, client = sys.argv[1:]
root = Root(url, json.loads(options), client)
store = root.open()
block = sample_block(store.layout)

def use(number):
    key, buffer = bytes([number]) * 36, bytearray(block.nbytes)
    assert not store.contains(key)
    assert store.store(key, block)
    assert store.load(key, buffer) and buffer == block.tobytes()

use(1)
child = os.fork()
if not child:
    signal.alarm(30)  # one that hangs is killed, and the test fails
    try:
        use(2)
        assert store.load(bytes([1]) * 36, bytearray(block.nbytes))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.contains(bytes([2]) * 36)
use(3)
"""


def fork(server: Server, client: ClientName) -> None:
    """A parent uses a bucket, then its child does, and then the parent again."""
    url = f"{server.url}/{uuid.uuid4().hex}"
    script(FORK, url, json.dumps(server.storage_options), client)


@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_c1_a_forked_child_uses_a_bucket(
    backend: str, request: pytest.FixtureRequest
) -> None:
    fork(request.getfixturevalue(f"{backend}_server"), "fsspec")


@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_c18_a_forked_child_uses_a_bucket_though_its_parent_has_a_runtime(
    backend: str, request: pytest.FixtureRequest
) -> None:
    fork(request.getfixturevalue(f"{backend}_server"), "obstore")


# ---- credentials


@clients
def test_c12_new_credentials_are_taken_when_the_old_ones_expire(
    client: ClientName,
    proxy: Proxy,
    s3_server: Server,
    profile: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_profile(profile, OLD)
    root = behind(proxy, s3_server, client)
    store = Root(root.url, {"endpoint_url": proxy.endpoint}, client).open()
    block = sample_block(store.layout)
    store.store(FIRST, block)
    proxy.expired = OLD
    try:
        with pytest.raises(StorageAccessError):
            store.load(FIRST, bytearray(block.nbytes))
        assert run_keys(store, "lookup", [FIRST]) == [REFUSED]  # and not absent
        write_profile(profile, NEW)
        monkeypatch.setattr(session, "RENEWAL", 0.0)  # else in a minute
        assert run_keys(store, "lookup", [FIRST]) == [FOUND]
        assert loaded(store, FIRST) == block.tobytes()
    finally:
        proxy.expired = None


# ---- answers that break


def failing(times: int, failure: Exception, of: str, moments: list[float]) -> Faulty:
    """Storage whose first requests of a block's chunk fail."""

    def fail(request: str, path: str) -> None:
        if request == of and path.endswith("/c.0.0.0.0"):
            moments.append(time.monotonic())
            if len(moments) <= times:
                raise failure

    return Faulty(before=fail)


SLOW_DOWN = OSError(errno.EBUSY, "Please reduce your request rate.")
"""As s3fs says it."""


def test_c7_a_server_that_asks_for_patience_gets_it() -> None:
    """Each wait may be twice the last, and half of it is chance."""
    moments: list[float] = []
    store = failing(3, SLOW_DOWN, "put", moments).root.open(timeout=6.0)
    assert store.store(KEY, sample_block(store.layout))
    waits = [later - sooner for sooner, later in itertools.pairwise(moments)]
    assert len(waits) == 3
    for attempt, wait in enumerate(waits):
        assert wait >= 0.01 * 2**attempt
    assert loaded(store) == sample_block(store.layout).tobytes()


def test_c7_patience_has_an_end() -> None:
    moments: list[float] = []
    store = failing(100, SLOW_DOWN, "put", moments).root.open(timeout=2.0)
    begun = time.monotonic()
    assert run_keys(store, "store", [FIRST]) == [FAILED]
    assert moments[-1] - begun < 2.0
    assert 1 < len(moments) <= TRIES
    assert not store.contains(FIRST)


@clients
def test_c7_a_bucket_that_asks_for_patience_gets_it(
    client: ClientName, proxy: Proxy, s3_server: Server
) -> None:
    store = behind(proxy, s3_server, client).open()
    proxy.take()
    proxy.spoil("PUT", "503", times=3)
    assert store.store(KEY, sample_block(store.layout))
    assert sum(request.endswith(" 503") for request in proxy.take()) == 3
    assert loaded(store) == sample_block(store.layout).tobytes()


class ChecksumError(Exception):
    """As gcsfs's, of a body that does not hold."""


@pytest.mark.parametrize("failure", [AssertionError("md5"), ChecksumError("md5")], ids=repr)
def test_c10_a_clients_own_checksum_is_tried_again(failure: Exception) -> None:
    moments: list[float] = []
    storage = failing(1, failure, "get", moments)
    store = storage.root.open(timeout=2.0)
    block = sample_block(store.layout)
    store.store(KEY, block)
    assert loaded(store) == block.tobytes()
    assert len(moments) == 2


def test_c10_one_that_never_holds_is_a_failed_load_and_no_damage() -> None:
    moments: list[float] = []
    storage = failing(100, ChecksumError("md5"), "get", moments)
    store = storage.root.open(timeout=2.0)
    store.store(FIRST, sample_block(store.layout))
    files = storage.root.files()
    assert run_keys(store, "load", [FIRST]) == [FAILED]
    assert moments[-1] - moments[0] <= FIRST_TRIES * 2.0
    assert storage.root.files() == files


@clients
def test_c19_a_connection_that_is_reset_is_made_again(
    client: ClientName, proxy: Proxy, s3_server: Server
) -> None:
    store = behind(proxy, s3_server, client).open()
    block = sample_block(store.layout)
    uses: tuple[tuple[str, Callable[[], object]], ...] = (
        ("PUT", lambda: store.store(KEY, block)),
        ("GET", lambda: store.load(KEY, bytearray(block.nbytes))),
        ("DELETE", lambda: store.delete(KEY)),
    )
    for method, use in uses:
        proxy.take()
        proxy.spoil(method, "reset")
        use()
        assert any(request.endswith(" reset") for request in proxy.take())
    assert not store.contains(KEY)
    assert store.counts() == {"stored": 1, "repaired": 0, "loaded": 1, "damaged": 0}


@clients
def test_c20_half_of_an_object_is_asked_for_again(
    client: ClientName, proxy: Proxy, s3_server: Server
) -> None:
    root = behind(proxy, s3_server, client)
    store = root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    assert store.contains(KEY)  # so that the next GET is the chunk's
    proxy.take()
    proxy.spoil("GET", "short")
    assert loaded(store) == block.tobytes()
    assert any(request.endswith(" short") for request in proxy.take())
    assert store.counts()["damaged"] == 0
    proxy.spoil("GET", "short", times=100)
    # obstore hears how much there should be; who does not, finds the chunk too short.
    with pytest.raises(StorageError if client == "obstore" else DamagedBlockError):
        loaded(store)
    proxy.heal()
    assert root.peek(chunk_url(store)) is not None
    assert loaded(store) == block.tobytes()
