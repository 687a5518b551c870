"""The connector without an engine: options, handshake, identity, metrics."""

import copy
import json
import struct
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from specs import LAYERS, model_config, offloading_config, tensors
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore import InvalidInputError, Layout
from kvstore.vllm import KVStoreConnector, KVStoreTier
from kvstore.vllm.connector import ConnectorTier, inject_tier
from kvstore.vllm.host_worker import HostWorker, KVStoreOffloadingSpec
from kvstore.vllm.identity import known_identity, offloading_identity
from kvstore.vllm.layout import engine_layout
from kvstore.vllm.weights import weights_digest


def vllm_config(**extra: Any) -> Any:
    """The parts of a VllmConfig that options and metrics read."""
    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
    )


def test_every_abstract_method_of_vllm_is_there() -> None:
    for ours, theirs in (
        (KVStoreTier, SecondaryTierManager),
        (KVStoreConnector, OffloadingConnector),
        (KVStoreOffloadingSpec, OffloadingSpec),
        (HostWorker, OffloadingWorker),
    ):
        assert issubclass(ours, theirs)
        assert not ours.__abstractmethods__


class TestOptions:
    def test_they_become_vllms_own(self) -> None:
        other = {"type": "fs", "root_dir": "/cache"}
        config = vllm_config(url="s3://bucket/kv", threads=4, secondary_tiers=[other])
        inject_tier(config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        assert extra["secondary_tiers"] == [
            other,
            {
                "type": "ConnectorTier",
                "module_path": "kvstore.vllm.connector",
                "url": "s3://bucket/kv",
                "threads": 4,
            },
        ]
        assert 0 < extra["cpu_bytes_to_use"] <= 4 << 30
        assert OffloadingSpecFactory.get_spec_cls(extra) is KVStoreOffloadingSpec
        before = copy.deepcopy(extra)
        inject_tier(config)
        assert config.kv_transfer_config.kv_connector_extra_config == before

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({}, "url: expected a value"),
            ({"url": "kv", "thread": 8}, "Did you mean 'threads'"),
            ({"url": "kv", "cpu_bytes_to_us": 1}, "Did you mean 'cpu_bytes_to_use'"),
            ({"url": "kv", "kv_heads": 3}, "unknown option 'kv_heads'"),
            (
                {
                    "url": "kv",
                    "spec_name": "KVStoreOffloadingSpec",
                    "spec_module_path": "kvstore.vllm.host_worker",
                },
                "unknown option 'spec_name'",
            ),
            ({"urll": "kv", "spec_name": "KVStoreOffloadingSpec"}, "Did you mean 'url'"),
            ({"url": "kv", "secondary_tiers": None}, "secondary_tiers: expected a list"),
            ({"url": "kv", "secondary_tiers": {"type": "fs"}}, "a list, found dict"),
            ({"url": "kv", "secondary_tiers": ["fs"]}, r"\[0\]: expected an object, found"),
            ({"url": "kv", "io_timeout": "30"}, "io_timeout: expected float, found '30'"),
        ],
    )
    def test_refused(self, extra: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            inject_tier(vllm_config(**extra))

    def test_several_nodes_are_refused(self) -> None:
        config = vllm_config(url="kv")
        config.parallel_config.nnodes_within_dp = 2
        with pytest.raises(InvalidInputError, match="found 2 nodes"):
            KVStoreConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())

    def test_the_front_end_that_never_builds_the_connector_has_its_metrics(self) -> None:
        made: list[str] = []

        class Metric:
            def __init__(self, name: str, **_: Any) -> None:
                made.append(name)

            def labels(self, *_: object, **__: object) -> "Metric":
                return self

            def info(self, *_: object) -> None:
                """As a prometheus Info."""

        from prometheus_client import Counter, Gauge, Histogram

        config = vllm_config(url="kv")
        kinds: Any = dict.fromkeys((Counter, Gauge, Histogram), Metric)
        metrics = KVStoreConnector.build_prom_metrics(
            config, kinds, ["model_name"], {0: ["m"]}
        )
        assert metrics is not None
        assert "vllm:kv_offload_tiering_read_bytes" in made


class TestHandshake:
    def test_one_worker(self) -> None:
        layout = engine_layout([tensors()], offloading_config(), "v2")
        assert layout.axes == ("layer", "head", "token", "value")
        assert layout.shape == (12, 12, 16, 128)
        assert (layout.packing, layout.runner) == ("token-kv", "v2")
        assert layout.nbytes == 589_824

    def test_tensor_parallel_rows_are_rank_major(self) -> None:
        config = offloading_config(
            tp_size=2,
            world_size=2,
            is_parallelism_agnostic=True,
            worker_kv_bytes_per_block=589_824 // 2,
        )
        layout = engine_layout([tensors(0, heads=6), tensors(1, heads=6)], config, "v1")
        assert layout.axes == ("worker", "layer", "head", "token", "value")
        assert layout.shape == (2, 12, 6, 16, 128)
        assert not offloading_identity(config, layout).parallel_agnostic

    def test_groups_are_told_by_their_numbers_and_not_by_their_place(self) -> None:
        parts = ((0, 16, LAYERS[:6]), (1, 16, LAYERS[6:]))
        swapped = tuple((1 - group, *rest) for group, *rest in parts)
        digests = [
            offloading_identity(offloading_config(groups=groups), layout).digest
            for layout in [engine_layout([tensors()], offloading_config(), "v2")]
            for groups in (parts, parts[::-1], swapped)
        ]
        assert digests[0] == digests[1] != digests[2]

    def test_workers_that_differ_are_refused(self) -> None:
        config = offloading_config(tp_size=2, world_size=2)
        with pytest.raises(InvalidInputError, match=r"workers 0 and 1 .*backend: expected"):
            engine_layout([tensors(0), tensors(1, backend="TRITON_ATTN")], config, "v1")

    def test_uneven_stages_are_refused_and_even_ones_named(self) -> None:
        config = offloading_config(
            pp_size=2, world_size=2, worker_kv_bytes_per_block=589_824 // 2
        )
        stages = [tensors(0, LAYERS[:6]), tensors(1, LAYERS[6:])]
        layout = engine_layout(stages, config, "v1")
        assert layout.axes[0] == "worker"
        assert layout.layer_names == LAYERS
        with pytest.raises(InvalidInputError, match="workers 0 and 1"):
            engine_layout([stages[0], tensors(1, LAYERS[5:])], config, "v1")

    def test_opaque_stages_count_with_all_their_tensors(self) -> None:
        config = offloading_config(
            pp_size=2, world_size=2, worker_kv_bytes_per_block=589_824 // 2
        )

        def layout(second: str) -> Layout:
            stages = [
                tensors(rank, LAYERS[6 * rank : 6 * rank + 6], backend="MYSTERY")
                for rank in range(2)
            ]
            last = replace(stages[1].layers[-1], dtype=second)
            stages[1] = replace(stages[1], layers=(*stages[1].layers[:-1], last))
            return engine_layout(stages, config, "v1")

        assert layout("float16").axes == ("byte",)
        assert layout("float16").differences(layout("float16")) == ()
        [difference] = layout("float16").differences(layout("int16"))
        assert difference.field == "tensors_digest"

    def test_canonical_rows_are_bytes(self) -> None:
        """The workers' pages are joined, so their own order is not the row's."""
        layouts = [
            engine_layout(
                [tensors(rank, heads=12 // tp) for rank in range(tp)],
                offloading_config(
                    tp_size=tp,
                    world_size=tp,
                    canonical_layout=True,
                    is_parallelism_agnostic=True,
                    worker_kv_bytes_per_block=589_824 // tp,
                ),
                "v1",
            )
            for tp in (1, 2)
        ]
        assert layouts[0].axes == ("byte",)
        assert layouts[0].differences(layouts[1]) == ()

    @pytest.mark.parametrize(
        "change",
        [
            {"strides": (24576, 128, 1536, 1)},
            {"backend": "FLASH_ATTN (rocm_aiter_fa.AiterFlashAttentionBackend)"},
            {"dtype": "float32"},
            {"isa": "amx"},
        ],
        ids=["strides", "backend", "dtype", "isa"],
    )
    def test_opaque_rows_are_told_apart_by_every_tensor(
        self, change: dict[str, Any]
    ) -> None:
        """Two groups take turns, and only a layer of the second is another."""
        groups = ((0, 16, LAYERS[:6]), (1, 16, LAYERS[6:]))
        config = offloading_config(groups=groups)
        plain = tensors()
        changed = replace(
            plain, layers=(*plain.layers[:-1], replace(plain.layers[-1], **change))
        )
        ours, theirs = (engine_layout([told], config, "v2") for told in (plain, changed))
        assert ours.axes == theirs.axes == ("byte",)
        assert [d.field for d in ours.differences(theirs)] == ["tensors_digest"]

    def test_the_size_of_the_cache_is_not_the_layout(self) -> None:
        config = offloading_config()
        small = tensors(backend="MYSTERY")
        large = replace(
            small,
            num_blocks=200,
            layers=tuple(
                replace(t, shape=(200, *t.shape[1:]), offset=2 * t.offset, storage=9)
                for t in small.layers
            ),
        )
        ours, theirs = (engine_layout([told], config, "v2") for told in (small, large))
        assert ours.differences(theirs) == ()

    def test_unknown_backend_is_opaque(self) -> None:
        layout = engine_layout([tensors(backend="MYSTERY")], offloading_config(), "v2")
        assert layout.axes == ("byte",)
        assert "MYSTERY" in str(layout.reason)


class TestKnownIdentity:
    COMMIT = "a" * 40

    @pytest.mark.parametrize(
        "changes",
        [
            {"text": {"rope_parameters": {"rope_theta": 1e6}}},
            {"quantization": "fp8"},
            {"dtype": "float16"},
            {"code_revision": "b" * 40},
            {"model_impl": "transformers"},
        ],
        ids=["RoPE", "quantization", "dtype", "code", "implementation"],
    )
    def test_what_changes_values_changes_the_digest(self, changes: dict[str, Any]) -> None:
        plain = known_identity(model_config(revision=self.COMMIT))
        other = known_identity(model_config(revision=self.COMMIT, **changes))
        assert plain["model_config_digest"] != other["model_config_digest"]

    def test_length_counts_where_positions_are_scaled_by_it(self) -> None:
        def digest(**changes: Any) -> str:
            config = model_config(revision=self.COMMIT, **changes)
            return known_identity(config)["model_config_digest"]

        scaled = {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}
        assert digest() == digest(max_model_len=8192)
        assert digest(text=scaled) != digest(text=scaled, max_model_len=8192)

    def test_a_models_place_in_the_hubs_cache_is_its_name(self) -> None:
        place = f"/home/me/hub/models--org--model/snapshots/{self.COMMIT}"
        known = known_identity(model_config(model=place))
        assert (known["model_name"], known["revision"]) == ("org/model", self.COMMIT)

    def test_what_does_not_does_not(self) -> None:
        plain = known_identity(model_config(revision=self.COMMIT))
        moved = {"_name_or_path": "elsewhere", "transformers_version": "6.0"}
        assert plain == known_identity(model_config(revision=self.COMMIT, text=moved))

    def test_a_revision_that_may_move_is_said(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        known_identity(model_config(revision="main"))
        assert "Set --revision to a commit" in caplog.text

    def test_a_seed_is_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        plain = known_identity(model_config(revision=self.COMMIT))
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        seeded = known_identity(model_config(revision=self.COMMIT))
        assert (plain["prefix_hash"], seeded["prefix_hash"]) == ("sha256", "sha256:7")


def safetensors(folder: Path, changed: int | None = None) -> None:
    """Two tensors of 100 KB; the byte `changed` is another."""
    payload = bytearray(range(250)) * 800
    if changed is not None:
        payload[changed] ^= 1
    header = {
        name: {"dtype": "U8", "shape": [100_000], "data_offsets": [start, start + 100_000]}
        for name, start in (("a", 0), ("b", 100_000))
    }
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    data = struct.pack("<Q", len(text)) + text + payload
    (folder / "model.safetensors").write_bytes(data)


class TestWeights:
    def test_a_copy_is_the_same_and_a_change_is_not(self, tmp_path: Path) -> None:
        for name, changed in (("a", None), ("copy", None), ("b", 3), ("c", 150_000)):
            safetensors(tmp_path / name, changed)
        digests = {
            name: weights_digest(tmp_path / name) for name in ("a", "copy", "b", "c")
        }
        assert digests["a"] == digests["copy"]
        assert len(set(digests.values())) == 3

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "readme.txt").write_text("none")
        assert weights_digest(tmp_path) is None
        assert weights_digest(tmp_path / "org/model") is None

    def test_a_single_file_and_a_malformed_header(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"\xff" * 20_000)
        first = weights_digest(file)
        file.write_bytes(b"\xff" * 19_999 + b"\0")
        assert None is not first != weights_digest(file)


@pytest.mark.parametrize("runs", [False, True], ids=["at the start", "while it runs"])
def test_a_handshake_that_fails_ends_a_start_and_no_running_engine(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may refuse for a moment; the CPU tier's memory has a name until an end."""
    engine = f"test-{uuid.uuid4()}"
    memory = Path(f"/dev/shm/vllm_offload_{engine}.mmap")
    memory.touch()
    tier: Any = object.__new__(ConnectorTier)
    tier._opened = SimpleNamespace(stores={0: None}) if runs else None
    connector: Any = object.__new__(KVStoreConnector)
    transfer = SimpleNamespace(engine_id=engine)
    connector._vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    scheduler = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=[tier]))
    monkeypatch.setattr(KVStoreConnector, "scheduler", scheduler)
    ended = []

    def refuse(told: object) -> None:
        raise OSError("HTTP 503")

    connector._open = refuse
    connector.shutdown = lambda: ended.append(True)
    try:
        with pytest.raises(OSError, match="HTTP 503"):
            connector.set_xfer_handshake_metadata({})
        assert ended == ([] if runs else [True])
        assert memory.exists() == runs
    finally:
        memory.unlink(missing_ok=True)
