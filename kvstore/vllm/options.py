"""The options that people write into vLLM's config, parsed strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.codecs import CODECS
from kvstore.errors import InvalidInputError, shown
from kvstore.records import MAX_NUMBER, Record

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


MAX_PROCESSES = 64

MAX_AGE = 100 * 366 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TierOptions(Record):
    """Options of a tier; docs/configuration.md is checked against this.

    Attributes:
        url: where the blocks go: any fsspec URL, or a bare local path.
        storage_options: what the URL's fsspec filesystem takes, e.g. `endpoint_url`.
        client: what talks to S3 and Google Cloud Storage: `obstore`, or the URL's
            `fsspec` filesystem.
        on_mismatch: `reject` stops the engine when another layout is recorded under the
            URL; `isolate` gives this layout a namespace of its own; `convert` loads and
            stores through a conversion where only the order of axes differs.
        codec: how new blocks are written: `none`, `zstd` or `blosc`. All are read.
        threads: blocks that are transferred at once.
        processes: processes that transfer them beside the engine; 0 for threads of the
            engine's own process. Up to 4, as many as there are cores, if it is not given.
        io_timeout: seconds that one request may take, and after which a load that still
            waits is given up.
        lookup_timeout: seconds after which a block that is still looked up is a miss.
        fsync: whether a block in a folder survives a power failure once it is stored.
        read_only: whether blocks are only loaded, and nothing is written to the URL.
        max_bytes: what may lie under the URL; the least recently used blocks go first.
        max_age: seconds since its last use after which a block is removed.
        locality: `LOCAL` or `REMOTE`, passed on to vLLM's load filters and events.
        enable_kv_events: whether vLLM's event stream is told which blocks are stored and
            removed, if vLLM's own events are on.
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
    lookup_timeout: float = 5.0
    fsync: bool = False
    read_only: bool = False
    max_bytes: int | None = None
    max_age: float | None = None
    locality: str | None = None
    enable_kv_events: bool = False
    kv_heads: int | None = None
    head_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that could not work."""
        for name, choices in (
            ("client", ("obstore", "fsspec")),
            ("on_mismatch", ("reject", "isolate", "convert")),
            ("codec", CODECS),
            ("locality", (None, "LOCAL", "REMOTE")),
        ):
            if getattr(self, name) not in choices:
                raise InvalidInputError(
                    f"{name}: expected one of {choices}, found {shown(getattr(self, name))}"
                )
        for name in ("threads", "io_timeout", "lookup_timeout", "kv_heads", "head_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_NUMBER:  # nor is NaN
                raise InvalidInputError(
                    f"{name}: expected more than 0, at most {MAX_NUMBER}, "
                    f"found {shown(value)}"
                )
        if self.max_age is not None and not 0 < self.max_age <= MAX_AGE:
            raise InvalidInputError(
                f"max_age: expected more than 0, at most {MAX_AGE} seconds, found "
                f"{shown(self.max_age)}"
            )
        if self.read_only and (self.max_bytes is not None or self.max_age is not None):
            raise InvalidInputError(
                "read_only: an engine that only loads removes nothing. Leave out max_bytes "
                "and max_age, and set them on the engines that store"
            )
        if self.processes is not None and not 0 <= self.processes <= MAX_PROCESSES:
            raise InvalidInputError(
                f"processes: expected 0 to {MAX_PROCESSES}, found {shown(self.processes)}"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, where: str) -> TierOptions:
        """The options of one tier, every one of which must be known.

        Raises:
            InvalidInputError: an option is unknown, missing, or of another type.
        """
        return cls.from_dict(dict(options), where=where)
