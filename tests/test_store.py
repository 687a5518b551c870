import errno
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy import Requests, counted
from servers import HOST, Server

from kvstore import (
    DamagedBlockError,
    FormatError,
    InvalidInputError,
    LayoutMismatchError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.filesystem import ClientName, Filesystem
from kvstore.testing import (
    BlockStoreTests,
    Root,
    sample_block,
    sample_config,
    sample_layout,
)

KEY = bytes(range(36))


class TestBlockStore(BlockStoreTests):
    @pytest.fixture
    def root(self, root: Root) -> Root:
        return root


CLIENTS: list[ClientName] = ["obstore", "fsspec"]

HALF_AN_ANSWER = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Length: 99\r\n"
    b'Content-Range: bytes 0-98/99\r\nETag: "tag"\r\nContent-Type: text/plain\r\n'
    b"Last-Modified: Sun, 29 Nov 2026 12:00:00 GMT\r\n\r\nhalf of it"
)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_requests_per_block(
    backend: str, client: ClientName, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{backend}_server")
    with counted(server.endpoint) as requests:
        options = server.storage_options | {"endpoint_url": requests.endpoint}
        root = Root(f"{server.url}/requests-{client}", options, client)
        writer, block = root.open(), sample_block(sample_layout())
        other = KEY[:2] + bytes(34)  # the same fan-out
        writer.store(KEY, block)
        requests.take()

        writer.store(other, block)
        assert _methods(requests, backend) == ["GET", "PUT", "PUT"]
        assert not writer.store(other, block)
        assert _methods(requests, backend) == ["GET"]

        reader = root.open()
        requests.take()
        assert reader.contains(KEY)
        assert _methods(requests, backend) == ["GET"]
        assert reader.load(KEY, bytearray(block.nbytes))
        assert _methods(requests, backend) == ["GET"]
        assert not reader.contains(b"absent")
        assert _methods(requests, backend) == ["GET"]
        # Without `contains`, the document is read as well.
        assert reader.load(other, bytearray(block.nbytes))
        assert _methods(requests, backend) == ["GET", "GET"]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_opening_lists_nothing(
    backend: str, client: ClientName, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{backend}_server")
    with counted(server.endpoint) as requests:
        options = server.storage_options | {"endpoint_url": requests.endpoint}
        root = Root(f"{server.url}/listing-{client}", options, client)
        root.open().store(KEY, sample_block(sample_layout()))
        first = len(requests.take())
        root.open()
        again = requests.take()
        assert len(again) <= 6 < first
        assert not any("list-type" in r or "prefix=" in r for r in again)


def _methods(requests: Requests, backend: str) -> list[str]:
    """GCS uploads with POST; what counts is how many."""
    methods = [request.split()[0] for request in requests.take()]
    return [{"POST": "PUT"}.get(m, m) if backend == "gcs" else m for m in methods]


class TestLocal:
    def test_system_calls_per_block(self, tmp_path: Path) -> None:
        """Counted by the interpreter's own audit events."""
        store = Root(str(tmp_path)).open()
        block = sample_block(store.layout)
        store.store(KEY[:2] + bytes(34), block)
        opened = _audited(lambda: store.store(KEY, block))
        assert opened.count("open") == 3  # the proof that it is absent, chunk, document
        assert opened.count("os.mkdir") == 1
        assert opened.count("os.rename") == 1
        assert len(opened) == 5
        assert _audited(lambda: store.contains(KEY)) == ["open"]
        assert _audited(lambda: store.load(KEY, bytearray(block.nbytes))) == ["open"]

    def test_opening_a_full_namespace_lists_nothing(self, tmp_path: Path) -> None:
        store = Root(str(tmp_path)).open()
        folder = Path(store.url.removeprefix("file://"))
        for n in range(2000):
            (folder / f"{n:03x}" / f"{n:072x}").mkdir(parents=True)
        events = _audited(lambda: Root(str(tmp_path)).open())
        assert not {"os.listdir", "os.scandir", "glob.glob"} & set(events)
        assert len(events) < 12

    def test_modes_follow_the_umask(self, tmp_path: Path) -> None:
        for mask, folder, file in ((0o022, 0o755, 0o644), (0o002, 0o775, 0o664)):
            before = os.umask(mask)
            try:
                root = Root(str(tmp_path / oct(mask)))
                store = root.open()
                store.store(KEY, sample_block(store.layout))
            finally:
                os.umask(before)
            block = Path(store.block_url(KEY).removeprefix("file://"))
            assert stat.S_IMODE(block.stat().st_mode) == folder
            assert {stat.S_IMODE(f.stat().st_mode) for f in block.iterdir()} == {file}

    def test_nested_and_unsafe_names(self, tmp_path: Path) -> None:
        root = Root(str(tmp_path / "kv[1]*" / "a b?"))
        store = root.open(config=sample_config(model_name="../../org/a[b]?%2F..\u00e9"))
        other = root.open(config=sample_config(model_name="../../org/a[b]?%2F..\u00e8"))
        block = sample_block(store.layout)
        store.store(KEY, block)
        other.store(KEY, block)
        store.delete(KEY)
        assert other.contains(KEY)
        below = {p.relative_to(tmp_path).parts[:2] for p in tmp_path.rglob("*")}
        assert below == {("kv[1]*",), ("kv[1]*", "a b?")}

    def test_leftovers_of_a_writer_that_was_killed(self, tmp_path: Path) -> None:
        """Killed before its rename: the key is a miss, and no Zarr node is half there."""
        script = (
            "import os, sys\n"
            "from kvstore.testing import Root, sample_block, sample_layout\n"
            "os.rename = lambda *a: os.kill(os.getpid(), 9)\n"
            "store = Root(sys.argv[1]).open()\n"
            "store.store(bytes(range(36)), sample_block(sample_layout()))\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
        assert done.returncode == -9
        store = Root(str(tmp_path)).open()
        assert not store.contains(KEY)
        assert not list(Path(store.url.removeprefix("file://")).rglob("c.*"))
        assert store.store(KEY, sample_block(store.layout))

    def test_folders_removed_under_a_running_store(self, tmp_path: Path) -> None:
        store = Root(str(tmp_path / "kv")).open()
        block = sample_block(store.layout)
        store.store(KEY, block)
        _rm(tmp_path / "kv", keep_root=True)
        assert not store.contains(KEY)
        assert store.store(KEY, block)
        assert Root(str(tmp_path / "kv")).open().contains(KEY)
        _rm(tmp_path / "kv", keep_root=False)
        with pytest.raises(StorageError, match="No such file"):
            store.store(KEY, block)
        assert not (tmp_path / "kv").exists()

    def test_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        script = (
            "import resource, signal, sys\n"
            "from kvstore.testing import Root, sample_block, sample_layout\n"
            "from kvstore import StorageError\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "store = Root(sys.argv[1]).open()\n"
            "block = sample_block(store.layout)\n"
            "key = bytes(range(36))\n"
            "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (block.nbytes // 2, limits[1]))\n"
            "try:\n"
            "    store.store(key, block)\n"
            "except StorageError as error:\n"
            "    print(error)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
            "assert not store.contains(key)\n"
            "assert store.store(key, block)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"[Errno {errno.EFBIG}]" in done.stdout
        assert not list((tmp_path / ".kvstore-tmp").glob("*/*"))

    @pytest.mark.parametrize("stray", ["a stray file", "a file in its place"])
    def test_what_was_never_committed_makes_room(self, tmp_path: Path, stray: str) -> None:
        store = Root(str(tmp_path)).open()
        block = sample_block(store.layout)
        store.store(KEY, block)
        place = Path(store.block_url(KEY).removeprefix("file://"))
        (place / "zarr.json").unlink()
        (place / ".nfs0001").touch()
        if stray == "a file in its place":
            shutil.rmtree(place)
            place.touch()
        assert not store.contains(KEY)
        assert store.store(KEY, block)
        assert Root(str(tmp_path)).open().load(KEY, bytearray(block.nbytes))
        assert not list((tmp_path / ".kvstore-tmp").glob("*/*"))

    def test_failed_repair_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Root(str(tmp_path)).open()
        block = sample_block(store.layout)
        store.store(KEY, block)
        place = Path(store.block_url(KEY).removeprefix("file://"))
        (place / "c.0.0.0.0").write_bytes(b"damaged")
        with pytest.raises(DamagedBlockError):
            store.load(KEY, bytearray(block.nbytes))
        rename = os.rename

        def failing(source: Path, target: Path) -> None:
            if Path(target) == place and (Path(source) / "c.0.0.0.0").stat().st_size > 7:
                raise OSError(errno.EIO, "Input/output error")
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", failing)
            with pytest.raises(StorageError, match="Input/output"):
                store.store(KEY, block)
        assert (place / "c.0.0.0.0").read_bytes() == b"damaged"
        assert store.store(KEY, block)
        assert store.load(KEY, bytearray(block.nbytes))

    def test_repair_that_comes_second_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, other = Root(str(tmp_path)).open(), Root(str(tmp_path)).open()
        block = sample_block(store.layout)
        store.store(KEY, block)
        place = Path(store.block_url(KEY).removeprefix("file://"))
        (place / "c.0.0.0.0").write_bytes(b"damaged")
        with pytest.raises(DamagedBlockError):
            store.load(KEY, bytearray(block.nbytes))
        rename = os.rename

        def overtaken(source: Path, target: Path) -> None:
            rename(source, target)
            if Path(source) == place:  # set aside: now another writer comes first
                monkeypatch.setattr(os, "rename", rename)
                other.store(KEY, block)

        monkeypatch.setattr(os, "rename", overtaken)
        store.store(KEY, block)
        assert store.load(KEY, bytearray(block.nbytes))
        assert not list((tmp_path / ".kvstore-tmp").glob("*/*"))

    def test_another_process_has_the_same_folder_wherever_it_works(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        filesystem = Filesystem("kv")
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(filesystem)).url == f"file://{tmp_path}/kv"

    def test_io_error_deletes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Root(str(tmp_path)).open()
        block = sample_block(store.layout)
        store.store(KEY, block)

        def failing(*arguments: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(StorageError, match="Input/output"):
                store.load(KEY, bytearray(block.nbytes))
        assert store.load(KEY, bytearray(block.nbytes))
        assert store.counts()["damaged"] == 0


def _rm(root: Path, *, keep_root: bool) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if not keep_root:
        root.rmdir()


_EVENTS: list[str] | None = None
_FILE_EVENTS = ("open", "os.", "glob.", "shutil.")


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _EVENTS is not None and event.startswith(_FILE_EVENTS):
        _EVENTS.append(event)


sys.addaudithook(_hook)


def _audited(call: Any) -> list[str]:
    """The file operations of a call, by CPython's audit events."""
    global _EVENTS
    _EVENTS = []
    try:
        call()
        return list(_EVENTS)
    finally:
        _EVENTS = None


class TestOpen:
    def test_read_only_root(self, tmp_path: Path) -> None:
        target = tmp_path / "file"
        target.write_text("a file where a folder should be")
        with pytest.raises(StorageError, match="write below"):
            Root(str(target)).open()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_folder_without_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(StorageAccessError, match="write below"):
            Root(str(tmp_path)).open()

    def test_read_only_mount(self) -> None:
        """/proc refuses new folders even to root."""
        with pytest.raises(StorageError, match="cannot write below file:///proc/kv"):
            Root("/proc/kv").open()

    def test_unknown_choice(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="on_mismatch: expected one of"):
            Root(str(tmp_path)).open(on_mismatch="maybe")

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
    def test_senseless_timeout(self, tmp_path: Path, timeout: float) -> None:
        with pytest.raises(InvalidInputError, match="timeout: expected seconds"):
            Root(str(tmp_path)).open(timeout=timeout)

    def test_parallel_agnostic_must_be_a_fact(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="outermost axis is 'layer'"):
            Root(str(tmp_path)).open(config=sample_config(parallel_agnostic=True))

    def test_torn_document_says_what_to_do(self, root: Root) -> None:
        store = root.open()
        root.write(f"{store.url}/zarr.json", b"")
        with pytest.raises(FormatError, match="remove this one document"):
            root.open()

    def test_misspelt_storage_option(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="Did you mean 'auto_mkdir'"):
            Root(str(tmp_path), {"auto_mkdr": True}).open()

    def test_document_of_another_format(self, root: Root) -> None:
        store = root.open()
        url = f"{store.url}/zarr.json"
        root.write(url, root.read(url).replace(b'"format": 1', b'"format": 2'))
        with pytest.raises(FormatError, match=r"kvstore.format: expected 1, found 2"):
            root.open()

    def test_digest_collision(self, root: Root) -> None:
        """Another config under this config's path: 48 bits do not prove."""
        store = root.open()
        url = store.url.removesuffix("/r0/g0") + "/zarr.json"
        root.write(url, root.read(url).replace(b"org/model", b"org/other"))
        with pytest.raises(LayoutMismatchError, match="model_name: expected 'org/model'"):
            root.open()


@pytest.mark.parametrize("client", CLIENTS)
class TestBucketErrors:
    """What goes wrong between an engine and a bucket, told alike by both clients."""

    def test_wrong_bucket(self, s3_server: Server, client: ClientName) -> None:
        with pytest.raises(StorageError, match=r"s3://nowhere.*bucket does not exist"):
            Root("s3://nowhere/kv", s3_server.storage_options, client).open()

    def test_wrong_bucket_of_google(self, gcs_server: Server, client: ClientName) -> None:
        with pytest.raises(StorageError, match="cannot write below gs://nowhere"):
            Root("gs://nowhere/kv", gcs_server.storage_options, client).open()

    def test_wrong_credentials(self, s3_server: Server, client: ClientName) -> None:
        secret = "not-the-secret-at-all"
        options = s3_server.storage_options | {"secret": secret}
        with pytest.raises(StorageAccessError) as caught:
            Root(f"{s3_server.url}/kv", options, client).open()
        assert secret not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, PermissionError)

    def test_refused_reads_are_no_absence(
        self, s3_server: Server, client: ClientName
    ) -> None:
        options = s3_server.storage_options | {"secret": "another"}
        filesystem = Filesystem(s3_server.url, options, client=client)
        with pytest.raises(StorageAccessError, match="cannot read"):
            filesystem.read("absent", 10)

    @pytest.mark.parametrize("backend", ["s3", "gcs"])
    def test_unreachable_server(
        self, backend: str, client: ClientName, request: pytest.FixtureRequest
    ) -> None:
        server: Server = request.getfixturevalue(f"{backend}_server")
        options = server.storage_options | {"endpoint_url": f"http://{HOST}:9"}
        with pytest.raises(StorageError, match="cannot write below"):
            Root(f"{server.url}/kv", options, client).open(timeout=3.0)

    @pytest.mark.parametrize("backend", ["s3", "gcs"])
    @pytest.mark.parametrize("answer", [b"", HALF_AN_ANSWER], ids=["nothing", "half"])
    def test_server_that_hangs(
        self,
        backend: str,
        client: ClientName,
        answer: bytes,
        request: pytest.FixtureRequest,
    ) -> None:
        server: Server = request.getfixturevalue(f"{backend}_server")
        with _hanging(answer) as endpoint:
            options = server.storage_options | {"endpoint_url": endpoint}
            filesystem = Filesystem(server.url, options, client=client, timeout=1.0)
            began = time.monotonic()
            with pytest.raises(StorageTimeoutError, match="no answer in time"):
                filesystem.read_into("block", [memoryview(bytearray(99))])
            assert time.monotonic() - began < 25  # any default of theirs is longer


def test_server_that_is_gone_and_back(s3_server: Server) -> None:
    """A failure is never an absence, and no connection is remembered as broken."""
    with counted(s3_server.endpoint) as requests:
        endpoint = requests.endpoint
        options = s3_server.storage_options | {"endpoint_url": endpoint}
        url = f"{s3_server.url}/gone"
        store = Root(url, options).open(timeout=10.0)
        block = sample_block(store.layout)
        store.store(KEY, block)
    with pytest.raises(StorageError):
        store.contains(KEY)
    with pytest.raises(StorageError):
        store.load(KEY, bytearray(block.nbytes))
    with pytest.raises(StorageError):
        store.store(KEY[::-1], block)
    port = int(endpoint.rpartition(":")[2])
    with counted(s3_server.endpoint, port=port):
        assert store.load(KEY, bytearray(block.nbytes))
    assert store.counts()["damaged"] == 0


@contextmanager
def _hanging(answer: bytes) -> Iterator[str]:
    """The endpoint of a server that begins to answer, and leaves it at that."""
    with socket.create_server((HOST, 0)) as listener, ExitStack() as accepted:

        def serve(connection: socket.socket) -> None:
            with suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(answer)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection = accepted.enter_context(listener.accept()[0])
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://{HOST}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_concurrent_processes_write_one_key(tmp_path: Path) -> None:
    """Eight processes, the same 100 keys: all report success, no temporary is left."""
    script = (
        "import sys\n"
        "from kvstore.testing import Root, sample_block, sample_layout\n"
        "store = Root(sys.argv[1]).open()\n"
        "block = sample_block(store.layout)\n"
        "for n in range(100):\n"
        "    store.store(n.to_bytes(36, 'big'), block)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    store = Root(str(tmp_path)).open()
    block = sample_block(store.layout)
    for n in range(100):
        loaded = np.zeros_like(block)
        assert store.load(n.to_bytes(36, "big"), loaded)
        assert (loaded == block).all()
    assert not list((tmp_path / ".kvstore-tmp").glob("*/*"))
