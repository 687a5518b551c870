"""What goes wrong in fsspec, s3fs, gcsfs and obstore, rows C of docs/cases.md."""

import errno
import gc
import json
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bare import Bare
from children import script
from faulty import Faulty, FaultyFileSystem
from proxy import counted
from servers import BUCKET, HOST, Server
from stored import KEY, loaded, run_keys
from work import PATIENCE

from kvstore import (
    DamagedBlockError,
    InvalidInputError,
    Layout,
    StorageAccessError,
    StorageError,
)
from kvstore.filesystem import ClientName, Filesystem
from kvstore.parts import FAILED
from kvstore.testing import Root, sample_block, sample_config, sample_layout
from kvstore.transfer import FOUND, REFUSED, TIMEOUT

CLIENTS: list[ClientName] = ["obstore", "fsspec"]

CODES = {404: "NoSuchKey", 500: "InternalError"}

FAILURES = [
    pytest.param(PermissionError(errno.EACCES, "Forbidden"), REFUSED, id="403"),
    pytest.param(OSError(errno.EBUSY, "reduce your request rate"), FAILED, id="503"),
    pytest.param(TimeoutError(), TIMEOUT, id="timeout"),
    pytest.param(ConnectionResetError(errno.ECONNRESET, "reset"), FAILED, id="reset"),
    pytest.param(OSError("Name or service not known"), FAILED, id="DNS"),
    pytest.param(RuntimeError("disconnected"), FAILED, id="a client's own class"),
    pytest.param(KeyError("zarr.json"), FAILED, id="KeyError"),
]
"""What a backend raises, and the word of a key that meets it."""


@contextmanager
def answering(
    status: int | None, *, port: int = 0, together: threading.Barrier | None = None
) -> Iterator[str]:
    """The endpoint of a server that has this answer to every GET, or none at all."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if together is not None:
                together.wait(PATIENCE)
            self.close_connection = True
            if status is not None:
                body = f"<Error><Code>{CODES[status]}</Code></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer((HOST, port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# ---- how the clients are used


def test_c2_all_threads_have_one_filesystem() -> None:
    storage = Bare()
    store = storage.root.open()
    block = sample_block(store.layout)
    together = threading.Barrier(32)

    def use(number: int) -> None:
        together.wait(PATIENCE)
        store.store(number.to_bytes(36), block)
        assert loaded(store, number.to_bytes(36)) == block.tobytes()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(use, range(32)))
    assert storage.made == 1


def test_c4_whole_objects_only_though_garbage_is_collected_on_the_loop() -> None:
    """The filesystem refuses all else: no file object is there to be finalised."""
    storage = Bare(on_request=lambda: gc.collect(0))
    store = storage.root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    assert storage.root.open().contains(KEY)
    assert loaded(store) == block.tobytes()
    store.delete(KEY)
    assert not store.contains(KEY)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder where a file costs little."""
    folder = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_c16_nothing_grows_with_the_keys(scheme: str, tmpfs: Path) -> None:
    """Measured in a process of its own, where nothing else comes and goes."""
    where = str(tmpfs) if scheme == "file" else f"memory://{uuid.uuid4().hex}"
    code = (
        "import gc, json, os, sys\n"
        "from pathlib import Path\n"
        "from fsspec.implementations.memory import MemoryFileSystem\n"
        "from kvstore import Layout\n"
        "from kvstore.testing import Root, sample_block\n"
        "layout = Layout.of_bytes(64, dtype='float16', reason='a test')\n"
        "store, block = Root(sys.argv[1]).open(layout), sample_block(layout)\n"
        "def use(numbers):\n"
        "    for number in numbers:\n"
        "        key = number.to_bytes(36)\n"
        "        store.store(key, block)\n"
        "        assert store.load(key, block.copy())\n"
        "        store.delete(key)\n"
        "    gc.collect()\n"
        "    resident = int(Path('/proc/self/statm').read_text().split()[1])\n"
        "    files = len(os.listdir('/proc/self/fd'))\n"
        "    return len(MemoryFileSystem._cache), files, resident\n"
        "print(json.dumps([use(range(1000)), use(range(1000, 20_000))]))\n"
    )
    before, after = json.loads(script(code, where))
    assert after[:2] == before[:2]
    assert after[2] < 1.05 * before[2]


@pytest.mark.parametrize("client", CLIENTS)
def test_c17_32_threads_have_32_connections(client: ClientName, s3_server: Server) -> None:
    """The server answers when all of them have come; a pool of 10 would wait for ever."""
    with answering(404, together=threading.Barrier(32)) as endpoint:
        options = s3_server.storage_options | {"endpoint_url": endpoint}
        filesystem = Filesystem(f"{s3_server.url}/c17", options, client=client)
        with ThreadPoolExecutor(32) as pool:
            found = pool.map(lambda number: filesystem.read(str(number), 9), range(32))
            assert set(found) == {None}


def test_c19_a_big_job_is_no_more_requests_at_once_than_threads() -> None:
    """What waits its turn is not under way, so it cannot be late."""
    storage = Bare()
    layout = Layout.of_bytes(1 << 20, dtype="float16", reason="a test")
    store = storage.root.open(layout)
    keys = [number.to_bytes(32) + bytes(4) for number in range(64)]
    assert run_keys(store, "store", keys, threads=4) == ["stored"] * 64
    assert 1 < storage.at_once <= 4


# ---- a failure is not an absence


@pytest.mark.parametrize(("failure", "word"), FAILURES)
def test_c6_a_failure_is_not_absence(failure: Exception, word: str) -> None:
    storage = Faulty()
    store = storage.root.open(timeout=2.0)
    block = sample_block(store.layout)
    key = bytes(36)
    store.store(key, block)

    def fail(request: str, path: str) -> None:
        raise failure

    storage.before = fail
    for ask in (store.contains, lambda key: store.load(key, bytearray(block.nbytes))):
        with pytest.raises(StorageError) as caught:
            ask(key)
        assert isinstance(caught.value, PermissionError) == isinstance(
            failure, PermissionError
        )
    with pytest.raises(StorageError):
        store.store(key, block)
    assert run_keys(store, "lookup", [key]) == [word]
    storage.before = lambda request, path: None
    assert store.contains(key)  # nothing was remembered, and nothing removed
    assert run_keys(store, "lookup", [key]) == [FOUND]
    assert loaded(store, key) == block.tobytes()
    assert store.counts()["damaged"] == 0


@pytest.mark.parametrize(("failure", "word"), FAILURES)
def test_c8_a_chunk_that_cannot_be_read_is_a_failed_load(
    failure: Exception, word: str
) -> None:
    storage = Faulty()
    store = storage.root.open(timeout=2.0)
    key = bytes(36)
    store.store(key, sample_block(store.layout))

    def fail(request: str, path: str) -> None:
        if path.endswith("/c.0.0.0.0"):
            raise failure

    storage.before = fail
    with pytest.raises(StorageError):
        store.load(key, bytearray(store.layout.nbytes))
    assert run_keys(store, "load", [key]) == [word]
    assert store.counts()["loaded"] == 0
    storage.before = lambda request, path: None
    assert loaded(store, key) == sample_block(store.layout).tobytes()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [500, None], ids=["500", "disconnected"])
def test_c8_a_server_that_fails_is_a_failed_load(
    client: ClientName, status: int | None, s3_server: Server
) -> None:
    with counted(s3_server.endpoint) as requests:
        endpoint = requests.endpoint
        options = s3_server.storage_options | {"endpoint_url": endpoint}
        root = Root(f"{s3_server.url}/c8-{client}-{status}", options, client)
        store = root.open(timeout=5.0)
        block = sample_block(store.layout)
        store.store(KEY, block)
        assert store.contains(KEY)  # so that the load asks for the chunk alone
    port = int(endpoint.rpartition(":")[2])
    with answering(status, port=port), pytest.raises(StorageError):
        store.load(KEY, bytearray(block.nbytes))
    with counted(s3_server.endpoint, port=port):
        assert loaded(store) == block.tobytes()
    assert store.counts() == {"stored": 1, "repaired": 0, "loaded": 1, "damaged": 0}


@pytest.mark.parametrize("name", ["c.0.0.0.0", "zarr.json"])
def test_c20_half_of_an_object_is_refused_and_deletes_nothing(name: str) -> None:
    """A server that answers 200 with a shorter body."""
    storage = Faulty()
    store = storage.root.open()
    block = sample_block(store.layout)
    store.store(KEY, block)
    files = storage.root.files()

    def halve(path: str, data: bytes) -> bytes:
        return data[: len(data) // 2] if path.endswith(f"{KEY.hex()}/{name}") else data

    storage.answer = halve
    with pytest.raises(DamagedBlockError):
        store.load(KEY, bytearray(block.nbytes))
    assert storage.root.files() == files
    storage.answer = lambda path, data: data
    assert loaded(store) == block.tobytes()


def test_c21_what_is_missing_is_an_answer_on_every_backend(root: Root) -> None:
    store = root.open()
    assert not store.contains(KEY)
    assert not store.load(KEY, bytearray(store.layout.nbytes))
    store.delete(KEY)
    filesystem = Filesystem(root.url, root.storage_options, client=root.client)
    assert filesystem.read("absent", 1) is None
    assert filesystem.read("absent/zarr.json", 1) is None
    assert filesystem.read_into("absent", [memoryview(bytearray(1))]) is None
    filesystem.create("file", b"data")
    if filesystem.local:
        assert filesystem.read("file/below", 1) is None  # ENOTDIR


def test_c21_a_bucket_that_hides_what_is_missing_stops_the_engine_at_open() -> None:
    """As S3 does where the caller may not list: 403 instead of 404."""
    storage = Faulty()

    def hide(request: str, path: str) -> None:
        if request == "get" and path not in FaultyFileSystem.store:
            raise PermissionError("Forbidden")

    storage.before = hide
    with pytest.raises(StorageAccessError, match=r"cannot read .*zarr.json: Forbidden"):
        storage.root.open()


# ---- names and modes


def test_c13_no_name_is_a_pattern(root: Root) -> None:
    """Each name would match its sibling, were it one."""
    block = sample_block(sample_layout())
    stores = {
        (below, model): Root(f"{root.url}/{below}", root.storage_options, root.client).open(
            config=sample_config(model_name=model)
        )
        for below in ("kv[1]*", "kv1", "kv1 too")
        for model in ("a[b]?", "ab?", "abc", "*")
    }
    assert len({store.url for store in stores.values()}) == len(stores)
    for seed, store in enumerate(stores.values()):
        assert store.store(KEY, sample_block(store.layout, seed))
    for seed, store in enumerate(stores.values()):
        assert loaded(store) == sample_block(store.layout, seed).tobytes()
    files = len(root.files())
    stores["kv[1]*", "a[b]?"].delete(KEY)
    assert len(root.files()) == files - 2
    absent = [place for place, store in stores.items() if not store.contains(KEY)]
    assert absent == [("kv[1]*", "a[b]?")]
    assert stores["kv[1]*", "a[b]?"].store(KEY, block)


@pytest.mark.parametrize(
    ("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o002, 0o775, 0o664)], ids=oct
)
def test_c14_modes_follow_the_umask(
    mask: int, folder: int, file: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        store = Root(str(tmp_path / "kv")).open()
        store.store(KEY, sample_block(store.layout))
    finally:
        os.umask(before)
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        found[path.is_dir()].add(stat.S_IMODE(path.stat().st_mode))
    assert found == {True: {folder}, False: {file}}
    assert sum(path.name == "zarr.json" for path in tmp_path.rglob("*")) == 5


@pytest.mark.parametrize("chain", ["simplecache", "filecache", "blockcache", "zip"])
def test_c15_nothing_may_stand_between(chain: str) -> None:
    with pytest.raises(InvalidInputError, match="chained URLs are not supported"):
        Root(f"{chain}::s3://bucket/kv").open()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_c22_no_spelling_makes_an_empty_name(
    backend: str, client: ClientName, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{backend}_server")
    scheme, fresh = server.url.partition("://")[0], uuid.uuid4().hex
    whole = Root(server.url, server.storage_options, client)

    def made(url: str) -> set[str]:
        """The objects that a store there has made, by the names in their bucket."""
        before = set(whole.files())
        store = Root(url, server.storage_options, client).open(
            config=sample_config(model_name=fresh)
        )
        store.store(KEY, sample_block(store.layout))
        assert loaded(store) == sample_block(store.layout).tobytes()
        return {file.removeprefix(f"{BUCKET}/") for file in set(whole.files()) - before}

    at_the_top = made(f"{scheme}://{BUCKET}")
    assert len(at_the_top) == 6
    assert made(f"{scheme}://{BUCKET}/") == set()
    below = made(f"{scheme}://{BUCKET}//{fresh}/")
    assert below == {f"{fresh}/{name}" for name in at_the_top}
    assert made(f"{scheme}://{BUCKET}/{fresh}") == set()
    assert not [name for name in at_the_top | below if re.search("^/|//|/$", name)]


# ---- large blocks


@pytest.mark.parametrize("client", CLIENTS)
def test_c11_a_block_is_one_put_so_no_part_is_left(
    client: ClientName, s3_server: Server
) -> None:
    layout = Layout.of_bytes(80 << 20, dtype="float16", reason="a test")
    with counted(s3_server.endpoint) as requests:
        options = s3_server.storage_options | {"endpoint_url": requests.endpoint}
        store = Root(f"{s3_server.url}/c11-{client}", options, client).open(layout)
        requests.take()
        store.store(KEY, bytes(layout.nbytes))
        puts = [line for line in requests.take() if line.split()[0] in ("PUT", "POST")]
        assert len(puts) == 3  # the fan-out's document, the chunk, the block's document
        assert not [line for line in puts if "upload" in line]


def test_c11_a_write_that_fails_half_way_is_absent() -> None:
    storage = Faulty()
    store = storage.root.open()

    def fail(request: str, path: str) -> None:
        if request == "put" and path.endswith("/c.0.0.0.0"):
            raise ConnectionResetError("half way")

    storage.before = fail
    with pytest.raises(StorageError, match="half way"):
        store.store(KEY, sample_block(store.layout))
    storage.before = lambda request, path: None
    assert not store.contains(KEY)
