"""`Config`: the fields that name a namespace. Pure values, no I/O.

The path digest is vLLM's own (`FileMapper` in `vllm/v1/kv_offload/file_mapper.py`)
wherever the fields are, so that a namespace has the name that vLLM's `fs` tier would give
it. What else changes the *values* of KV takes part only when it is known, so that no
digest moves because a field was added.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.errors import Difference, InvalidInputError, shown
from kvstore.layout import Layout
from kvstore.records import Record

DIGEST_DIGITS = 12

_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")


class HubSnapshot(NamedTuple):
    """One commit of a model of the hub."""

    name: str
    commit: str


def hub_snapshot(model_name: str) -> HubSnapshot | None:
    """Which model of the hub is meant by its place in the hub's cache on some machine.

    Offline, that is vLLM's name of a model. None for any other name.
    """
    if (match := _SNAPSHOT.search(model_name)) is None:
        return None
    return HubSnapshot(match["name"].replace("--", "/"), match["commit"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Record):
    """One KV-cache group: layers that share a block table.

    Attributes:
        tokens_per_block: tokens that one engine block of this group holds.
        layer_names: the group's layers, in the engine's order.
    """

    tokens_per_block: int
    layer_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse a field of another type."""
        self._parse_fields("group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Record):
    """What two engines must have in common to share a namespace.

    Attributes:
        model_name: the model's identifier as the engine was given it.
        dtype: the KV cache's resolved dtype; the word `auto` is refused.
        tokens_per_hash: tokens that one block hash covers.
        blocks_per_file: engine blocks in one stored block.
        kv_cache_groups: the engine's KV-cache groups.
        tp_size: tensor-parallel size, likewise pp, pcp and dcp. All are 1 when the bytes
            are `parallel_agnostic`.
        inference_engine: who computed the values.
        parallel_agnostic: whether the bytes are the same under every parallel layout. To
            be proved with `prove_parallel_agnostic`, not believed.
        replicated_layout: every worker held the same bytes, and one copy is stored.
        canonical_format: vLLM's canonical byte format, e.g. `v1-hnd`.
        revision: the model repository's commit.
        model_config_digest: digest of the model's architecture settings (RoPE included).
        weights_digest: fingerprint of weights that lie in a local folder.
        prefix_hash: algorithm, and seed where one was set, of the engine's block hashes.
    """

    model_name: str
    dtype: str
    tokens_per_hash: int
    blocks_per_file: int = 1
    kv_cache_groups: tuple[Group, ...] = ()
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    inference_engine: str = "vllm"
    parallel_agnostic: bool = False
    replicated_layout: bool = False
    canonical_format: str | None = None
    revision: str | None = None
    model_config_digest: str | None = None
    weights_digest: str | None = None
    prefix_hash: str | None = None

    def __post_init__(self) -> None:
        """Refuse what must never be hashed, and fold sizes that do not matter."""
        self._parse_fields("config")
        if not self.model_name or "\0" in self.model_name:
            raise InvalidInputError(
                f"model_name: expected a name, found {shown(self.model_name)}"
            )
        if self.dtype in ("", "auto"):
            raise InvalidInputError(
                f"dtype: expected a resolved dtype such as 'bfloat16', found "
                f"{self.dtype!r}: two models' 'auto' would share a namespace"
            )
        if self.parallel_agnostic:
            for size in ("tp_size", "pp_size", "pcp_size", "dcp_size"):
                object.__setattr__(self, size, 1)

    def fields(self) -> dict[str, Any]:
        """The hashed and recorded fields: vLLM's, then those that are known."""
        named: dict[str, Any] = {
            "model_name": self.model_name,
            "tokens_per_hash": self.tokens_per_hash,
            "blocks_per_file": self.blocks_per_file,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "pcp_size": self.pcp_size,
            "dcp_size": self.dcp_size,
            "dtype": self.dtype,
            "kv_cache_groups": [group.to_dict() for group in self.kv_cache_groups],
            "inference_engine": self.inference_engine,
        }
        if not self.parallel_agnostic:
            named["parallel_agnostic"] = False
        if self.replicated_layout:
            named["replicated_layout"] = True
        known = {
            "canonical_format": self.canonical_format,
            "revision": self.revision,
            "model_config_digest": self.model_config_digest,
            "weights_digest": self.weights_digest,
            "prefix_hash": self.prefix_hash,
        }
        return named | {name: value for name, value in known.items() if value is not None}

    @classmethod
    def from_fields(cls, data: object, *, where: str) -> Config:
        """The inverse of `fields`: `parallel_agnostic` is true where it is absent.

        Raises:
            InvalidInputError: a field is missing, unknown or of another type.
        """
        if isinstance(data, dict):
            data = {"parallel_agnostic": True} | data
        return cls.from_dict(data, where=where)

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the fields as sorted compact JSON."""
        text = json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]

    def differences(self, stored: Config) -> tuple[Difference, ...]:
        """Every field in which the recorded config `stored` differs from this one.

        Equal digests do not prove equal configs: 48 bits can collide.
        """
        unnamed = {"parallel_agnostic": True}  # as `fields` leaves it out
        ours, theirs = unnamed | self.fields(), unnamed | stored.fields()
        return tuple(
            Difference(name, ours.get(name), theirs.get(name))
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        )


def prove_parallel_agnostic(
    layout: Layout,
    *,
    claimed: bool,
    replicated_layout: bool = False,
    canonical_format: str | None = None,
) -> bool:
    """Whether `layout`'s bytes are the same under every parallel configuration.

    The engine must claim it, and one of these must hold, for which it is a fact:
    `head` is outermost, so that the shares of any number of ranks concatenate to the same
    bytes; one copy is stored of what every rank holds; or the bytes are in vLLM's
    canonical format. A claim alone is not believed: vLLM makes it for rank-major rows.
    """
    head_outermost = layout.axes[0] == "head"
    return claimed and (head_outermost or replicated_layout or canonical_format is not None)


def require_proof(config: Config, layout: Layout) -> None:
    """Refuse a config that says `parallel_agnostic` where that is not a fact.

    Raises:
        InvalidInputError: the bytes of `layout` differ between parallel sizes.
    """
    if config.parallel_agnostic and not prove_parallel_agnostic(
        layout,
        claimed=True,
        replicated_layout=config.replicated_layout,
        canonical_format=config.canonical_format,
    ):
        raise InvalidInputError(
            "parallel_agnostic: expected false for blocks whose outermost axis is "
            f"{layout.axes[0]!r}: their bytes differ between parallel sizes. Use "
            "prove_parallel_agnostic for this field"
        )
