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
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from processes import in_child
from proxy import Requests, counted
from servers import HOST, READER_KEY, Server

from kvstore import (
    BlockStore,
    DamagedBlockError,
    FormatError,
    InvalidInputError,
    LayoutMismatchError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.arrays import MAX_DOCUMENT_BYTES
from kvstore.codecs import Codec
from kvstore.filesystem import ClientName, Filesystem
from kvstore.testing import (
    BlockStoreTests,
    Root,
    sample_block,
    sample_config,
    sample_layout,
)
from kvstore.upkeep import Upkeep

KEY = bytes(range(36))


HOSTILE = (
    "link to a secret",
    "link to the file",
    "link to nothing",
    "link to itself",
    "folder",
    "socket",
    "device",
    "pipe",
    "pipe with bytes",
)


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


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_a_reader_only_gets(
    backend: str, client: ClientName, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{backend}_server")
    url = f"{server.url}/reader-{client}"
    block = sample_block(sample_layout())
    with counted(server.endpoint) as requests:
        options = server.storage_options | {"endpoint_url": requests.endpoint}
        reader = Root(url, options, client).open(read_only=True)
        assert not reader.contains(KEY)
        Root(url, server.storage_options, client).open().store(KEY, block)
        requests.take()
        reader = Root(url, options, client).open(read_only=True)
        assert len(requests.take()) == 3
        assert reader.contains(KEY)
        assert reader.load(KEY, bytearray(block.nbytes))
        with pytest.raises(InvalidInputError):
            reader.blocks.store(b"other", memoryview(block), suspect=True)
        with pytest.raises(InvalidInputError):
            reader.delete(KEY)
        assert {seen.split()[0] for seen in requests.seen} == {"GET"}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_reader_needs_no_right_to_write(s3_server: Server, client: ClientName) -> None:
    url = f"{s3_server.url}/right-{client}"
    block = sample_block(sample_layout())
    Root(url, s3_server.storage_options, client).open().store(KEY, block)
    root = Root(url, s3_server.storage_options | {"key": READER_KEY}, client)
    with pytest.raises(StorageAccessError):
        root.open()
    reader = root.open(read_only=True)
    assert reader.contains(KEY)
    assert reader.load(KEY, bytearray(block.nbytes))
    assert not reader.contains(KEY[::-1])


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

    def test_fsync_is_for_blocks_and_always_for_the_documents_above(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        usual = os.fsync

        def fsync(descriptor: int) -> None:
            usual(descriptor)
            synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

        monkeypatch.setattr(os, "fsync", fsync)
        for option, per_block, first in ((False, 0, 0), (True, 4, 3)):
            root = Root(str(tmp_path / str(option)))
            store = root.open(fsync=option)
            block = sample_block(store.layout)
            assert synced.count("zarr.json") == 3
            assert len(synced) == 9
            root.open(fsync=option)
            assert len(synced) == 9
            synced.clear()
            store.store(KEY, block)
            assert len(synced) == first + per_block
            other = pickle.loads(pickle.dumps(store.blocks))  # as a mover has them
            synced.clear()
            other.store(KEY[:2] + bytes(34), memoryview(block), suspect=False)
            assert len(synced) == per_block
            synced.clear()

    def test_opening_a_full_namespace_lists_nothing(self, tmp_path: Path) -> None:
        store = Root(str(tmp_path)).open()
        folder = Path(store.url.removeprefix("file://"))
        for n in range(2000):
            (folder / f"{n:03x}" / f"{n:072x}").mkdir(parents=True)
        events = _audited(lambda: Root(str(tmp_path)).open())
        assert not {"os.listdir", "os.scandir", "glob.glob"} & set(events)
        assert len(events) < 12

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

    @pytest.mark.parametrize(
        "name",
        ["two  spaces", "token=1", "/".join(["long" * 50] * 6)],
        ids=["spaces", "token", "long"],
    )
    def test_folders_that_somebody_removed_are_made_again(
        self, tmp_path: Path, name: str
    ) -> None:
        """Whatever their names look like: they are the operating system's words."""
        store = Root(str(tmp_path / name)).open()
        block = sample_block(store.layout)
        store.store(bytes(36), block)
        _rm(tmp_path / name, keep_root=True)
        assert store.store(KEY, block)

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

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    @pytest.mark.parametrize("name", ["zarr.json", "c.0.0.0.0"])
    @pytest.mark.parametrize("what", HOSTILE)
    def test_what_is_no_file_is_damage(
        self, tmp_path: Path, what: str, name: str, codec: Codec
    ) -> None:
        root = Root(str(tmp_path / "kv"))
        store = root.open(codec=codec)
        block = sample_block(store.layout, values=16)
        store.store(KEY, block)
        place = Path(store.block_url(KEY).removeprefix("file://"))
        secret = tmp_path / "secret"
        secret.write_text("s3cr3t" * 1000)
        shutil.copy(place / name, tmp_path / "healthy")
        with put(what, place / name, tmp_path):
            assert store.blocks.look(KEY) == (name != "zarr.json", None)
            assert store.contains(KEY) == (name != "zarr.json")
            with pytest.raises(DamagedBlockError, match=f"{name}: ") as caught:
                store.load(KEY, bytearray(block.nbytes))
            assert "s3cr3t" not in str(caught.value)
            assert store.store(KEY, block)
        assert store.load(KEY, bytearray(block.nbytes))
        assert (place / name).is_file()
        assert not (place / name).is_symlink()
        assert secret.read_text() == "s3cr3t" * 1000
        assert store.counts()["repaired"] == 1
        assert not list((tmp_path / "kv" / ".kvstore-tmp").glob("*/*"))

    @pytest.mark.parametrize("above", [1, 3])
    @pytest.mark.parametrize("what", HOSTILE)
    def test_a_group_document_that_is_no_file_is_refused(
        self, tmp_path: Path, what: str, above: int
    ) -> None:
        root = Root(str(tmp_path / "kv"))
        store = root.open()
        block = Path(store.block_url(KEY).removeprefix("file://"))
        document = block.parents[above] / "zarr.json"
        (tmp_path / "secret").write_text("s3cr3t" * 1000)
        shutil.copy(document, tmp_path / "healthy")
        with put(what, document, tmp_path), pytest.raises(FormatError) as caught:
            root.open()
        assert not isinstance(caught.value, DamagedBlockError)
        assert "s3cr3t" not in str(caught.value)
        if what != "device":  # that one has bytes, which are no document
            assert "zarr.json: expected a file, found a" in str(caught.value)
            assert "Remove it" in str(caught.value)

    @pytest.mark.parametrize("name", ["zarr.json", "c.0.0.0.0"])
    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_a_huge_file_is_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: Codec
    ) -> None:
        store = Root(str(tmp_path)).open(codec=codec)
        block = sample_block(store.layout, values=16)
        store.store(KEY, block)
        place = Path(store.block_url(KEY).removeprefix("file://"))
        os.truncate(place / name, 10 << 30)
        buffer, usual, read = bytearray(block.nbytes), os.pread, [0]

        def pread(descriptor: int, length: int, offset: int) -> bytes:
            data = usual(descriptor, length, offset)
            read[0] += len(data)
            return data

        monkeypatch.setattr(os, "pread", pread)
        tracemalloc.start()
        try:
            with pytest.raises(DamagedBlockError):
                store.load(KEY, buffer)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert read[0] <= 2 * MAX_DOCUMENT_BYTES
        assert peak < 8 * MAX_DOCUMENT_BYTES
        assert store.store(KEY, block)
        assert store.load(KEY, buffer)

    def test_a_failure_to_read_a_file_is_no_damage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one of those that only what is no file should give."""
        store = Root(str(tmp_path)).open()
        store.store(KEY, sample_block(store.layout))
        for code in (errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EISDIR, errno.EAGAIN):

            def failing(*arguments: Any, code: int = code) -> int:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, "open", failing)
                with pytest.raises(StorageError):
                    store.contains(KEY)
        assert store.contains(KEY)
        assert store.counts()["damaged"] == 0

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


@contextmanager
def put(what: str, place: Path, folder: Path) -> Iterator[None]:
    """Put what is no file into the place of one, which is in `folder` as "healthy"."""
    place.unlink()
    with ExitStack() as stack:
        if what == "link to a secret":
            place.symlink_to(folder / "secret")
        elif what == "link to the file":
            place.symlink_to(folder / "healthy")
        elif what == "link to nothing":
            place.symlink_to(folder / "nothing")
        elif what == "link to itself":
            place.symlink_to(place)
        elif what == "folder":
            place.mkdir()
        elif what == "socket":
            short = f"/proc/self/fd/{stack.enter_context(_opened(place.parent))}"
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(f"{short}/{place.name}")
        elif what == "device":
            try:
                os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("this user may make no device")
        else:
            os.mkfifo(place)
            if what == "pipe with bytes":
                pipe = stack.enter_context(_opened(place, os.O_RDWR))
                os.write(pipe, (folder / "healthy").read_bytes())
        yield


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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


class TestReadOnly:
    def test_only_reads(self, tmp_path: Path) -> None:
        root, block = Root(str(tmp_path / "kv")), sample_block(sample_layout())
        assert not root.open(read_only=True).contains(KEY)
        assert not (tmp_path / "kv").exists()
        root.open().store(KEY, block)

        def consume() -> None:
            reader = root.open(read_only=True)
            assert reader.contains(KEY)
            assert reader.load(KEY, bytearray(block.nbytes))

        assert set(_audited(consume)) == {"open"}

    def test_a_folder_of_another_user(self) -> None:
        """Modes bind everybody but root, who becomes somebody else in a child."""
        folder = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
        try:
            root, block = Root(str(folder)), sample_block(sample_layout())
            root.open().store(KEY, block)
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)

            def child() -> None:
                if not os.geteuid():
                    os.setuid(65534)
                with pytest.raises(StorageAccessError, match="cannot write below"):
                    root.open()
                reader = root.open(read_only=True)
                assert reader.contains(KEY)
                assert reader.load(KEY, bytearray(block.nbytes))

            assert in_child(child) == 0
        finally:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755)
            shutil.rmtree(folder)

    def test_a_mount_that_is_read_only(self, tmp_path: Path) -> None:
        block = sample_block(sample_layout())
        Root(str(tmp_path)).open().store(KEY, block)
        script = (
            "import sys\n"
            "from kvstore import StorageError\n"
            "from kvstore.testing import Root, sample_block, sample_layout\n"
            "root, block = Root(sys.argv[1]), sample_block(sample_layout())\n"
            "try:\n"
            "    root.open()\n"
            "except StorageError as error:\n"
            "    assert 'Read-only file system' in str(error), error\n"
            "reader = root.open(read_only=True)\n"
            "buffer = bytearray(block.nbytes)\n"
            "assert reader.contains(bytes(range(36)))\n"
            "assert reader.load(bytes(range(36)), buffer)\n"
            "print(buffer == block.tobytes())\n"
        )
        mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, str(tmp_path)]
        can = subprocess.run([*command, "true"], check=False, capture_output=True)
        if can.returncode:
            pytest.skip(f"no mount of its own: {can.stderr.decode().strip()}")
        told = subprocess.check_output(
            [*command, sys.executable, "-c", script, str(tmp_path)], text=True
        )
        assert told == "True\n"

    def test_what_is_recorded_is_compared(self, root: Root) -> None:
        url = root.open().url
        other = sample_layout(backend=None)
        with pytest.raises(LayoutMismatchError, match="backend"):
            root.open(other, read_only=True)
        assert root.open(other, read_only=True, on_mismatch="isolate").url != url
        document = f"{url.removesuffix('/r0/g0')}/zarr.json"
        root.write(document, root.read(document).replace(b"org/model", b"org/other"))
        with pytest.raises(LayoutMismatchError, match="model_name"):
            root.open(read_only=True)
        root.remove(document)  # it expired: the other one is compared all the same
        root.open(read_only=True)
        with pytest.raises(LayoutMismatchError, match="backend"):
            root.open(other, read_only=True)
        root.write(f"{url}/zarr.json", b"")
        with pytest.raises(FormatError, match="JSON"):
            root.open(read_only=True)

    def test_nothing_recorded_is_told_once(
        self, root: Root, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "kvstore")
        reader = root.open(read_only=True)
        told = [record for record in caplog.records if "nothing is recorded" in record.msg]
        assert [(record.levelname, record.name) for record in told] == [
            ("INFO", "kvstore.namespace")
        ]
        theirs = sample_layout(backend=None)
        root.open(theirs).store(KEY, sample_block(theirs))
        assert not reader.contains(KEY)  # another layout, which came later
        with pytest.raises(DamagedBlockError):
            reader.load(KEY, bytearray(theirs.nbytes))
        caplog.clear()
        root.open(theirs, read_only=True)
        assert "nothing is recorded" not in caplog.text

    def test_another_process_only_reads_too(self, tmp_path: Path) -> None:
        Root(str(tmp_path)).open()
        reader = Root(str(tmp_path)).open(read_only=True)
        assert reader.read_only
        blocks = pickle.loads(pickle.dumps(reader.blocks))
        with pytest.raises(InvalidInputError, match=r"^read_only: store is refused"):
            blocks.store(KEY, memoryview(bytes(blocks.nbytes)), suspect=False)

    def test_nothing_is_swept(self, tmp_path: Path) -> None:
        (tmp_path / ".kvstore-tmp" / "0123456789abcdef-0").mkdir(parents=True)
        os.utime(tmp_path / ".kvstore-tmp" / "0123456789abcdef-0", (0, 0))
        assert Upkeep(tmp_path, read_only=True).sweep() == 0
        assert Upkeep(tmp_path).sweep() == 1

    def test_a_bucket_that_is_not_there(self, s3_server: Server) -> None:
        with pytest.raises(StorageError, match=r"cannot read s3://nowhere/kv"):
            Root("s3://nowhere/kv", s3_server.storage_options).open(read_only=True)


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

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"group": True}, "group: expected int, found True"),
            ({"group": 1.5}, r"group: expected int, found 1\.5"),
            ({"rank": "0"}, "rank: expected int, found '0'"),
            ({"timeout": "3"}, "timeout: expected float, found '3'"),
            ({"timeout": None}, "timeout: expected float, found None"),
            ({"fsync": "false"}, "fsync: expected bool, found 'false'"),
            ({"read_only": 0}, "read_only: expected bool, found 0"),
            ({"config": {}}, "config: expected Config, found dict"),
            ({"layout": None}, "layout: expected Layout, found NoneType"),
            ({"provenance": "me"}, "provenance: expected Mapping, found str"),
            ({"provenance": {"who": 7}}, "provenance.who: expected str, found int"),
            ({"provenance": {"who": "a" * 2_000_000}}, "provenance: expected a document"),
            ({"storage_options": []}, "storage_options: expected an object, found list"),
            ({"storage_options": {7: "x"}}, "keywords must be strings"),
            ({"url": b"/kv"}, "url: expected a str or path, found bytes"),
            ({"url": None}, "url: expected a str or path, found NoneType"),
        ],
    )
    def test_arguments_of_another_type(
        self, tmp_path: Path, changes: dict[str, Any], problem: str
    ) -> None:
        given: dict[str, Any] = {
            "url": tmp_path / "kv",
            "config": sample_config(),
            "layout": sample_layout(),
            **changes,
        }
        with pytest.raises(InvalidInputError, match=problem):
            BlockStore.open(**given)
        assert not list(tmp_path.rglob("zarr.json"))

    @pytest.mark.parametrize(
        "key", [bytearray(b"a key"), "a key", memoryview(b"a key"), 7, None]
    )
    def test_keys_of_another_type(self, tmp_path: Path, key: Any) -> None:
        store = Root(str(tmp_path)).open()
        buffer = bytearray(store.layout.nbytes)
        kind = type(key).__name__
        calls: list[Callable[[], object]] = [
            lambda: store.contains(key),
            lambda: store.load(key, buffer),
            lambda: store.store(key, buffer),
            lambda: store.delete(key),
            lambda: store.block_url(key),
        ]
        for call in calls:
            with pytest.raises(
                InvalidInputError, match=f"key: expected bytes, found {kind}"
            ):
                call()

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
