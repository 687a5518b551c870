"""`LayerTensor`: what a worker sees of one layer's KV tensor. Pure values, no I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_LOGICAL_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """What a worker sees of one layer's KV tensor.

    Attributes:
        name: the layer's name.
        shape: the tensor's shape.
        strides: its strides, in values.
        dtype: its dtype, e.g. `bfloat16`.
        offset: its storage offset, in values.
        storage: a number that equals only for tensors in one allocation.
        storage_bytes: bytes of that allocation.
        page_bytes: bytes of one block's page, padding included.
        payload_bytes: bytes of the page that mean anything.
        cache_dtype: vLLM's resolved name of the cache's dtype.
        plain: whether a cell is K and V of one head and token, each of the head's size,
            and nothing else (no scales, no compressed states).
        backend: the layer's attention backend, if it has one.
        isa: the instruction set whose tiles a CPU backend writes.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    storage: int
    storage_bytes: int
    page_bytes: int
    payload_bytes: int
    cache_dtype: str
    plain: bool
    backend: str | None = None
    isa: str | None = None


def logical_dtype(cache_dtype: str, tensor_dtype: str) -> str:
    """What the values are: vLLM keeps 8-bit floats in `uint8` tensors."""
    if tensor_dtype.startswith("float8"):
        return tensor_dtype
    return _LOGICAL_DTYPES.get(cache_dtype, tensor_dtype)


_SHARDED = ("shape", "strides", "offset", "storage", "page_bytes", "payload_bytes")
"""Facts of a tensor that differ between parallel sizes."""


def tensors_digest(layers: Sequence[LayerTensor], *, sharded: bool = True) -> str:
    """Names what all tensors are together, for blocks that no axes describe.

    Args:
        layers: the worker's layers in the order of the row.
        sharded: whether what differs between parallel sizes takes part.
    """
    places = list(dict.fromkeys((layer.storage, layer.offset) for layer in layers))
    start = min(layer.offset for layer in layers)
    facts = []
    for layer in layers:
        fact = asdict(layer)
        # How far apart layers lie says how many blocks the engine has, unless they lie
        # within one block; which of them share their bytes says what a row is.
        inside = layer.offset - start
        fact["offset"] = inside if inside < layer.strides[0] else None
        fact["storage"] = places.index((layer.storage, layer.offset))
        fact["shape"] = layer.shape[1:]
        del fact["storage_bytes"]
        if not sharded:
            fact = {name: value for name, value in fact.items() if name not in _SHARDED}
        facts.append(fact)
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
