"""`Layout`: all that fixes the bytes of one block. Pure values, no I/O."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kvstore.errors import Difference, InvalidInputError, shown
from kvstore.records import Record

AXES = ("worker", "layer", "block", "head", "token", "value", "packed", "byte")
"""Every axis name a block can have, in the words of docs/glossary.md."""

KV_CACHE_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "LBHNC": ("layer", "block", "head", "token", "value"),
    "LBNHC": ("layer", "block", "token", "head", "value"),
    "BLHNC": ("block", "layer", "head", "token", "value"),
    "BLNHC": ("block", "layer", "token", "head", "value"),
    "BHLNC": ("block", "head", "layer", "token", "value"),
}
"""One worker's row by vLLM's `kv_cache_layout`, outermost axis first.

The name is a permutation of Layer, Block, Head, N (token) and Content (value). Names that
put a layer or head outside the block in another way give rows that vLLM never offloads
whole, and are refused.
"""

_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}

ITEM_BYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one value, for each dtype whose values can be named by axes."""

TILED = "cpu-"
"""Packings of this prefix tile (token, value) inside a head: neither axis is true."""


def canonical_kv_cache_layout(name: str) -> str:
    """Resolve vLLM's alias names (`HND` is `LBHNC`, `NHD` is `LBNHC`).

    Raises:
        InvalidInputError: `name` is not a layout whose rows can be described.
    """
    resolved = _ALIASES.get(name, name)
    if resolved not in KV_CACHE_LAYOUTS:
        known = ", ".join((*KV_CACHE_LAYOUTS, *_ALIASES))
        raise InvalidInputError(
            f"kv_cache_layout: expected one of {known}, found {shown(name)}. "
            "Set VLLM_KV_CACHE_LAYOUT, or the connector's layout, to one of these."
        )
    return resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Record):
    """The memory order, shape, dtype and origin of one block's bytes.

    Two engines may share blocks only if their layouts have no `differences`. `None` means
    unknown, and unknown equals only unknown.

    Attributes:
        axes: names from `AXES`, outermost first. `worker` and `block` are left out when
            they would be 1; a block that cannot be described is one axis `byte`.
        shape: length of each axis, in values (in bytes for `byte`).
        dtype: what the engine takes the values for, e.g. `bfloat16`, `float8_e4m3fn`.
        packing: how the values inside the innermost axes are arranged, where that is not
            what the axis names say (e.g. `cpu-amx`).
        backend: the engine's attention backend, e.g. `FLASH_ATTN`.
        runner: vLLM's model runner, `v1` or `v2`.
        kv_cache_layout: vLLM's name for the order, e.g. `LBHNC`.
        layer_names: the engine's layer names in the order of the `layer` axis.
        tokens_per_block: tokens that one step along the `block` axis holds. An engine
            may split its blocks for its kernels; these are the parts.
        page_bytes: bytes of one layer in one such step; of one worker, unless the
            workers' heads are joined.
        tensors_digest: digest of every layer's tensor, where the block is opaque and the
            engine's tensors were seen: equal sizes do not make equal bytes.
        reason: why the block is opaque (`byte`). Told to people, never compared.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    packing: str | None = None
    backend: str | None = None
    runner: str | None = None
    kv_cache_layout: str | None = None
    layer_names: tuple[str, ...] = ()
    tokens_per_block: int | None = None
    page_bytes: int | None = None
    tensors_digest: str | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        """Refuse a field of another type, and a layout that contradicts itself."""
        self._parse_fields("layout")
        if not self.axes or len(self.axes) != len(self.shape):
            self._refuse("axes", "one name for each length in shape", self.axes)
        if len(set(self.axes)) != len(self.axes) or not set(self.axes) <= set(AXES):
            self._refuse("axes", f"distinct names from {AXES}", self.axes)
        if any(length < 1 for length in self.shape):
            self._refuse("shape", "lengths of at least 1", self.shape)
        if "byte" in self.axes and self.axes != ("byte",):
            self._refuse("axes", "'byte' alone", self.axes)
        if not self.dtype or self.dtype == "auto":
            self._refuse("dtype", "a resolved dtype, never 'auto'", self.dtype)
        if not self.opaque and self.dtype not in ITEM_BYTES:
            self._refuse("dtype", f"one of {tuple(ITEM_BYTES)}", self.dtype)
        if self.runner not in (None, "v1", "v2"):
            self._refuse("runner", "'v1' or 'v2'", self.runner)
        if self.kv_cache_layout is not None:
            resolved = canonical_kv_cache_layout(self.kv_cache_layout)
            object.__setattr__(self, "kv_cache_layout", resolved)

    @staticmethod
    def _refuse(field: str, expected: str, found: object) -> None:
        raise InvalidInputError(
            f"layout {field}: expected {expected}, found {shown(found)}"
        )

    @property
    def opaque(self) -> bool:
        """Whether nothing but the bytes is known of the block."""
        return self.axes == ("byte",)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * (1 if self.opaque else ITEM_BYTES[self.dtype])

    @property
    def digest(self) -> str:
        """Names this layout in each block's metadata: 32 hex digits of a SHA-256.

        What is unknown takes no part, so that no digest moves when a field is added.
        """
        record = {
            name: value for name, value in self.to_dict().items() if value is not None
        }
        record.pop("reason", None)
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def differences(self, stored: Layout) -> tuple[Difference, ...]:
        """Every field in which the recorded layout `stored` differs from this one."""
        return tuple(
            Difference(field.name, getattr(self, field.name), getattr(stored, field.name))
            for field in fields(self)
            if field.name != "reason"
            and getattr(self, field.name) != getattr(stored, field.name)
        )

    @classmethod
    def from_strides(
        cls,
        dims: Sequence[str],
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        dtype: str,
        layer_names: Sequence[str],
        blocks: int = 1,
        packing: str | None = None,
        backend: str | None = None,
        runner: str | None = None,
        kv_cache_layout: str | None = None,
    ) -> Self:
        """Read one worker's layout off an engine tensor.

        A tensor with a `layer` dimension holds all layers of a block side by side, and a
        row is whole blocks of it. One without is a single layer's, and a row is one page
        of each layer in turn.

        Args:
            dims: the tensor's dimension names, among them `block`.
            shape: the tensor's shape, as `torch.Tensor.shape`.
            strides: the tensor's strides in values, as `torch.Tensor.stride()`.
            dtype: what the engine takes the values for.
            layer_names: the layers in memory order.
            blocks: engine blocks in one stored block.
            packing: tiling inside a head, or None where the axes tell all.
            backend: the attention backend's name.
            runner: `v1` or `v2`.
            kv_cache_layout: vLLM's name for the order.

        Raises:
            InvalidInputError: the dimensions do not lie densely in memory, so that no
                axis order describes a block.
        """
        lengths = dict(zip(dims, shape, strict=True))
        steps = dict(zip(dims, strides, strict=True))
        inner = sorted(
            (dim for dim in dims if dim != "block"),
            key=lambda dim: (-steps[dim], lengths[dim] > 1),
        )
        _check_dense(inner, lengths, steps)
        if lengths.get("layer", len(layer_names)) != len(layer_names):
            raise InvalidInputError(
                f"layer_names: expected {lengths['layer']} names, found {len(layer_names)}"
            )
        step, room = steps.get("block", 0), math.prod(lengths[dim] for dim in inner)
        if lengths.get("block", 1) > 1 and step < room:
            raise InvalidInputError(
                f"strides: expected block to step by at least {room} values, found {step}: "
                "the engine's blocks overlap"
            )
        page_values = math.prod(lengths[dim] for dim in inner if dim != "layer")
        tokens = lengths.get("token")
        outer = ["block"] if "layer" in dims else ["layer", "block"]
        lengths |= {"block": blocks, "layer": len(layer_names)}
        axes = [axis for axis in (*outer, *inner) if axis != "block" or blocks > 1]
        if packing is not None and packing.startswith(TILED):
            axes, lengths = _pack(axes, lengths, packing)
        return cls(
            axes=tuple(axes),
            shape=tuple(lengths[axis] for axis in axes),
            dtype=dtype,
            packing=packing,
            backend=backend,
            runner=runner,
            kv_cache_layout=kv_cache_layout,
            layer_names=tuple(layer_names),
            tokens_per_block=tokens,
            page_bytes=page_values * ITEM_BYTES.get(dtype, 1),
        )

    @classmethod
    def of_bytes(
        cls,
        nbytes: int,
        *,
        dtype: str,
        reason: str,
        packing: str | None = None,
        backend: str | None = None,
        runner: str | None = None,
        kv_cache_layout: str | None = None,
        layer_names: Sequence[str] = (),
        tokens_per_block: int | None = None,
        page_bytes: int | None = None,
        tensors_digest: str | None = None,
    ) -> Self:
        """An opaque block of `nbytes` bytes; `reason` tells people why."""
        return cls(
            axes=("byte",),
            shape=(nbytes,),
            dtype=dtype,
            packing=packing,
            backend=backend,
            runner=runner,
            kv_cache_layout=kv_cache_layout,
            layer_names=tuple(layer_names),
            tokens_per_block=tokens_per_block,
            page_bytes=page_bytes,
            tensors_digest=tensors_digest,
            reason=reason,
        )

    def with_workers(self, workers: int, *, heads_sharded: bool) -> Layout:
        """The layout of a row in which `workers` such rows follow each other.

        Where each worker holds a share of the heads (`heads_sharded`) and `head` is
        outermost, the rows join along `head`, and the result is that of one worker which
        holds them all. Otherwise a `worker` axis is put outermost.
        """
        if workers == 1:
            return self
        if self.opaque:
            return replace(self, shape=(self.shape[0] * workers,))
        if heads_sharded and self.axes[0] == "head":
            page_bytes = None if self.page_bytes is None else self.page_bytes * workers
            shape = (self.shape[0] * workers, *self.shape[1:])
            return replace(self, shape=shape, page_bytes=page_bytes)
        return replace(self, axes=("worker", *self.axes), shape=(workers, *self.shape))


def _check_dense(
    inner: Sequence[str], lengths: Mapping[str, int], steps: Mapping[str, int]
) -> None:
    expected = 1
    for dim in reversed(inner):
        if lengths[dim] > 1 and steps[dim] != expected:
            raise InvalidInputError(
                f"strides: expected {dim} to step by {expected} values, found "
                f"{steps[dim]}: the engine's blocks have gaps or overlaps"
            )
        expected *= lengths[dim]


def _pack(
    axes: list[str], lengths: dict[str, int], packing: str
) -> tuple[list[str], dict[str, int]]:
    """Fold (token, value) into `packed`, the only name that is true of a tile."""
    if axes[-2:] != ["token", "value"]:
        raise InvalidInputError(
            f"packing: {packing} tiles (token, value) inside a head, but the engine's "
            f"order is {tuple(axes)}"
        )
    packed: Any = lengths["token"] * lengths["value"]
    return [*axes[:-2], "packed"], lengths | {"packed": packed}
