import inspect
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import Kvstore
from fsspec.asyn import sync
from hypothesis import settings
from servers import (
    Server,
    ServerUnavailable,
    another_bucket,
    fake_gcs,
    seaweedfs,
    write_profile,
)

pytest.register_assert_rewrite("kvstore.testing")

from faulty import Faulty  # noqa: E402  # only after the line above

from kvstore.testing import Root  # noqa: E402

# gcsfs would try gRPC first, which no plain HTTP server answers; read at its import.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# An engine's threads wait for each other by spinning: beside other work, for ages.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

# Behind a shell's `&` it is ignored, here and in every child that is to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Of the same examples each time where a failure would be somebody else's; of many at night.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(
    os.environ.get("KVSTORE_TEST_PROFILE", "ci" if "CI" in os.environ else "default")
)

NAMED = os.environ.get("KVSTORE_TEST_BACKENDS")
BACKENDS = (NAMED or "file,memory,s3,gcs").split(",")


_OF_BACKENDS = {"root", "s3_server", "gcs_server"}
_CLIENTS = ("obstore", "s3fs", "gcsfs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would be shown twice.

    A run that is for other backends than a folder leaves out what no backend can change:
    the run for folders has all of that, and those on other Pythons have it with every
    client installed, but for the cases. And the offline tools make no other requests than
    the store and its upkeep, so that one client of each bucket is enough.
    """
    texts = {path: path.read_text() for path in {item.path for item in items}}
    kept = [item for item in items if _is_worth_while(item, texts[item.path])]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_worth_while(item: pytest.Item, text: str) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    params = getattr(getattr(item, "callspec", None), "params", {})
    if "file" not in BACKENDS and not _OF_BACKENDS & fixtures:
        own = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
        of_clients = {"client", "backend"} & set(params) or any(c in own for c in _CLIENTS)
        return bool(of_clients) and "cases" in item.path.parts
    if any(client in text for client in _CLIENTS):
        return True
    offline = any(package in text for package in ("kvstore.offline", "kvstore.cli"))
    return not offline or params.get("root", ("", ""))[1] != "fsspec"


def _server(
    backend: str, run: Callable[[Path], AbstractContextManager[Server]]
) -> Iterator[Server]:
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not among KVSTORE_TEST_BACKENDS")
    folder = tempfile.mkdtemp(prefix="kvstore-server-")
    try:
        with run(Path(folder)) as server:
            yield server
    except ServerUnavailable as reason:
        if NAMED:  # a run that is for this backend must not pass without it
            raise
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    for package in ("s3fs", "obstore"):
        pytest.importorskip(package, reason="the extra s3 is not installed")
    yield from _server("s3", seaweedfs)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Server]:
    for package in ("gcsfs", "obstore"):
        pytest.importorskip(package, reason="the extra gcs is not installed")
    yield from _server("gcs", fake_gcs)


def _with_clients(backends: list[str]) -> Iterator[object]:
    """Each backend, and each client of those that have two."""
    for backend in backends:
        yield pytest.param((backend, "obstore"), id=backend)
        if backend in ("s3", "gcs"):
            yield pytest.param((backend, "fsspec"), id=f"{backend}-fsspec")


@pytest.fixture(params=_with_clients(BACKENDS))
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A fresh, empty root on each backend that this run is for, and by each client."""
    backend, client = request.param
    fresh = uuid.uuid4().hex
    if backend == "file":
        return Root(str(tmp_path / "kv"))
    if backend == "memory":
        return Root(f"memory://{fresh}")
    server: Server = request.getfixturevalue(f"{backend}_server")
    if backend == "gcs":
        server = another_bucket(server)
    return Root(f"{server.url}/{fresh}", server.storage_options, client)


@pytest.fixture
def seen(root: Root) -> Root:
    """`root`, for commands that take none which no other process sees: memory elsewhere."""
    return Faulty().root if root.url.startswith("memory") else root


@pytest.fixture
def kvstore(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvstore:
    """The command line in this process: its exit code, stdout and stderr."""
    from kvstore.cli.app import main

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of S3 credentials, in which those of yesterday are. There are no others, nor
    instances of s3fs that have some: the test's own are closed at its end.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    made: dict[str, Any] = {}
    # The others stay: those of zarr-python are asynchronous, and as garbage warn that
    # nobody has closed them.
    monkeypatch.setattr(s3fs.S3FileSystem, "_cache", made)
    write_profile(path, "yesterdays-key", "yesterdays-secret")
    yield path
    for filesystem in made.values():
        if filesystem._s3 is not None:
            # s3fs itself would give it a tenth of a second, when it is garbage.
            sync(filesystem.loop, filesystem._s3creator.__aexit__, None, None, None)


@pytest.fixture
def tiers() -> Iterator[list[Any]]:
    """vLLM tiers that a test made, shut down at its end."""
    made: list[Any] = []
    yield made
    for tier in made:
        tier.shutdown()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform for vLLM whose attention keeps tokens and values apart."""
    name = "kvstore.vllm.layout.current_platform"
    current = pkgutil.resolve_name(name)
    platform = SimpleNamespace(is_cpu=lambda: False, fp8_dtype=current.fp8_dtype)
    monkeypatch.setattr(name, platform)
