"""The options that people write into vLLM's config, parsed strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.codecs import CODECS
from kvstore.errors import InvalidInputError
from kvstore.records import Record

VLLM_OPTIONS = frozenset(
    (
        "backpressure",
        "block_size",
        "blocks_per_chunk",
        "cache_policy_module_path",
        "canonical_layout",
        "cpu_bytes_to_use",
        "enable_telemetry",
        "eviction_policy",
        "max_tracker_size",
        "offload_prompt_only",
        "secondary_tiers",
        "self_describing_kv_events",
        "store_threshold",
        "sync_load_budget_bytes",
        "tier_poll_interval_s",
    )
)
"""What vLLM's own offloading reads from `kv_connector_extra_config`."""


MAX_NUMBER = 86_400
"""More seconds, threads, heads or values than any engine has a use for."""


MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions(Record):
    """Options of a tier; docs/configuration.md is checked against this.

    Attributes:
        url: where the blocks go: any fsspec URL, or a bare local path.
        storage_options: what the URL's fsspec filesystem takes, e.g. `endpoint_url`.
        client: what talks to S3 and Google Cloud Storage: `obstore`, or the URL's
            `fsspec` filesystem.
        on_mismatch: `reject` stops the engine when another layout is recorded under the
            URL; `isolate` gives this layout a namespace of its own.
        codec: how new blocks are written: `none`, `zstd` or `blosc`. All are read.
        threads: blocks that are transferred at once.
        processes: processes that transfer them beside the engine; 0 for threads of the
            engine's own process. Up to 4, as many as there are cores, if it is not given.
        io_timeout: seconds that one request may take, and after which a transfer that
            still waits is given up.
        locality: `LOCAL` or `REMOTE`, passed on to vLLM's load filters.
        kv_heads: KV heads on one worker. For the bare tier, which cannot see them.
        head_size: values of one head. For the bare tier, which cannot see it.
    """

    url: str
    storage_options: dict[str, Any] | None = None
    client: str = "obstore"
    on_mismatch: str = "reject"
    codec: str = "none"
    threads: int = 8
    processes: int | None = None
    io_timeout: float = 30.0
    locality: str | None = None
    kv_heads: int | None = None
    head_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that could not work."""
        for name, choices in (
            ("client", ("obstore", "fsspec")),
            ("on_mismatch", ("reject", "isolate")),
            ("codec", CODECS),
            ("locality", (None, "LOCAL", "REMOTE")),
        ):
            if getattr(self, name) not in choices:
                raise InvalidInputError(
                    f"{name}: expected one of {choices}, found {getattr(self, name)!r}"
                )
        for name in ("threads", "io_timeout", "kv_heads", "head_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_NUMBER:  # nor is NaN
                raise InvalidInputError(
                    f"{name}: expected more than 0, at most {MAX_NUMBER}, found {value}"
                )
        if self.processes is not None and not 0 <= self.processes <= MAX_PROCESSES:
            raise InvalidInputError(
                f"processes: expected 0 to {MAX_PROCESSES}, found {self.processes}"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, where: str) -> TierOptions:
        """The options of one tier, every one of which must be known.

        Raises:
            InvalidInputError: an option is unknown, missing, or of another type.
        """
        return cls.from_dict(dict(options), where=where)
