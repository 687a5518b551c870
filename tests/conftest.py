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
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    yield from _server("s3", seaweedfs)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Server]:
    pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
    yield from _server("gcs", fake_gcs)


@pytest.fixture(params=BACKENDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A fresh, empty root on each backend that this run is for."""
    backend = request.param
    fresh = uuid.uuid4().hex
    if backend == "file":
        return Root(str(tmp_path / "kv"))
    if backend == "memory":
        return Root(f"memory://{fresh}")
    server: Server = request.getfixturevalue(f"{backend}_server")
    return Root(f"{server.url}/{fresh}", server.storage_options)
