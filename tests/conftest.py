import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from servers import Server, ServerUnavailable, fake_gcs, seaweedfs

pytest.register_assert_rewrite("kvstore.testing")

from kvstore.testing import Root  # noqa: E402  # only after the line above

# gcsfs would try gRPC first, which no plain HTTP server answers; read at its import.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

NAMED = os.environ.get("KVSTORE_TEST_BACKENDS")
BACKENDS = (NAMED or "file,memory,s3,gcs").split(",")


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
    return Root(f"{server.url}/{fresh}", server.storage_options, client)
