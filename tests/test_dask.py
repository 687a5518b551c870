"""Long work on a Dask cluster of two processes."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from failing import fails
from typer.testing import CliRunner

from kvstore import StorageError
from kvstore import testing as kit
from kvstore.cli.app import app
from kvstore.cli.work import work
from kvstore.offline.shares import Share
from kvstore.testing import sample_block

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a scheduler that has two workers."""
    # It has a page in any case; on a port of its own, since 8787 may be taken.
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def fill(root: kit.Root, count: int = 12) -> None:
    store = root.open()
    for number in range(count):
        store.store(bytes([number]) * 36, sample_block(store.layout, number))


def run(*arguments: str) -> dict[str, object]:
    """What a command prints as JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def at(root: kit.Root) -> list[str]:
    """The arguments that name a root."""
    return [
        root.url,
        "--storage-options",
        json.dumps(root.storage_options or {}),
        "--client",
        root.client,
    ]


def test_sizes_are_those_that_threads_count(root: kit.Root, address: str) -> None:
    if root.url.startswith("memory"):
        pytest.skip("no other process sees it")
    fill(root)
    assert run("du", *at(root), "--dask", address) == run("du", *at(root))


def test_a_copy_has_every_byte(root: kit.Root, address: str) -> None:
    if root.url.startswith("memory"):
        pytest.skip("no other process sees it")
    source, target = root.below("from"), root.below("to")
    fill(source)
    store = source.open()
    source.write(f"{store.block_url(bytes([7]) * 36)}/zarr.json", b"{")
    command = ["cp", source.url, target.url, *at(root)[1:]]
    command += ["--dst-storage-options", command[4], "--dask", address]
    told = run(*command)
    assert (told["copied"], told["kept"], told["damaged"]) == (11, 0, 1)
    assert len(target.files()) == len(source.files()) - 3  # a block and its fan-out's
    again = run(*command)
    assert (again["copied"], again["kept"], again["damaged"]) == (0, 11, 1)
    for number in {*range(12)} - {7}:
        found = bytearray(store.layout.nbytes)
        assert target.open().load(bytes([number]) * 36, found)
        assert found == sample_block(store.layout, number).tobytes()


def test_what_is_damaged_is_found_by_any_worker(address: str, tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root)
    store = root.open()
    for number in (3, 7):
        root.write(f"{store.block_url(bytes([number]) * 36)}/c.0.0.0.0", b"")
    on_threads, on_dask = (
        CliRunner().invoke(app, ["verify", root.url, "--json", *cluster])
        for cluster in ([], ["--dask", address])
    )
    assert on_threads.exit_code == on_dask.exit_code == 1
    assert on_threads.stdout.count('"wrong-length", "detail"') == 2
    lines = [sorted(ran.stdout.splitlines()) for ran in (on_threads, on_dask)]
    assert lines[0] == lines[1]


def test_a_conversion_is_the_same_as_on_threads(root: kit.Root, address: str) -> None:
    if root.url.startswith("memory"):
        pytest.skip("no other process sees it")
    source = root.below("from")
    fill(source)
    command = ["convert", source.url, "--axes", "head,layer,token,value", "--runner", "v1"]
    command += at(root)[1:]
    more = ["--dst-storage-options", at(root)[2]]
    told = [
        run(*command[:2], root.below(name).url, *command[2:], *more, *dask_or_not)
        for name, dask_or_not in (("a", ["--dask", address]), ("b", []))
    ]
    assert told[0]["done"] == told[1]["done"]
    protocol = root.url.partition("://")[0] if "://" in root.url else "file"
    files = [
        [f"{protocol}://{file}" for file in sorted(root.below(name).files())]
        for name in "ab"
    ]
    assert len(files[0]) == len(files[1]) > 36
    for ours, theirs in zip(*files, strict=True):
        assert ours.endswith("/g0/zarr.json") or root.read(ours) == root.read(theirs)


def test_what_only_this_process_has_is_refused(address: str) -> None:
    root = kit.Root("memory://here")
    fill(root, 1)
    with pytest.raises(ValueError, match=r"that other processes see, found memory://here"):
        run("du", *at(root), "--dask", address)


@pytest.mark.parametrize(
    "nowhere", ["x", "tcp://h", "tcp://h:1/", "bogus://h:1", "inproc://h:1", "tls://h:1"]
)
def test_what_is_no_address_is_refused_at_once(nowhere: str, tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    with pytest.raises(ValueError, match=f"^--dask: expected the address .* '{nowhere}'"):
        run("du", *at(root), "--dask", nowhere)


def test_a_password_in_an_address_is_not_repeated(tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    with pytest.raises(ValueError, match=r"^--dask: .* with a user or password$"):
        run("du", *at(root), "--dask", "tcp://u:PASSWORD@127.0.0.1:1")


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_is_no_scheduler_is_not_waited_for(
    tmp_path: Path, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cli.work.MEETING_SECONDS", 2)
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    met: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # the end
            while True:
                met.append(server.accept()[0])
                if answer is not None:
                    met[-1].sendall(answer)
                    met[-1].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        nowhere = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"found '{nowhere}', where none answers: "):
            run("du", *at(root), "--dask", nowhere)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in met:
        connection.close()


@pytest.mark.parametrize("nowhere", ["tcp://127.0.0.1:1", "bogus://h:1"])
def test_nobody_listens_and_nothing_hangs_at_the_end(tmp_path: Path, nowhere: str) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    code = (
        "import sys, kvstore.cli.work, kvstore.cli.app; "
        "kvstore.cli.work.MEETING_SECONDS = 1; kvstore.cli.app.main()"
    )
    call = ["du", root.url, "--dask", nowhere]
    done = subprocess.run(
        [sys.executable, "-c", code, *call], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: --dask: .*, where none answers: .*\n", done.stderr)


def test_a_worker_is_no_scheduler(address: str, tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    with distributed.Client(address, set_as_default=False) as client:
        worker, *_ = client.scheduler_info()["workers"]
    with pytest.raises(ValueError, match="where none answers: ValueError: a Worker is the"):
        run("du", *at(root), "--dask", worker)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    fill(root, 1)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ValueError, match=r"^--dask: .* pip install 'kvstore-zarr\[dask\]'$"
    ):
        run("du", *at(root), "--dask", "tcp://127.0.0.1:1")


def test_a_failure_of_the_cluster_is_told(address: str) -> None:
    with pytest.raises(StorageError, match=f"work on the Dask cluster at {address}: "):
        list(work("failing", fails, [Share("a", 0, 1)], jobs=1, dask=address))
