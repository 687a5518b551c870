"""Config, rank, group and key <-> relative path. Pure strings, no I/O.

<model>_<digest>/r<rank>/g<group>/<first 3 hex digits of the key>/<key in hex>
"""

from __future__ import annotations

import re

from kvstore.config import Config
from kvstore.errors import InvalidInputError
from kvstore.records import parse

DOCUMENT = "zarr.json"
"""File name of every Zarr v3 metadata document."""

FAN_OUT_DIGITS = 3

MAX_KEY_BYTES = 96
"""192 hex digits: with room to spare under the 255 bytes of a file name."""

_MAX_LABEL = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
FAN_OUT = re.compile("[0-9a-f]{3}")
"""Names of fan-outs."""

CHUNK = re.compile(r"c(?:\.0)+")
"""Names of a block's only chunk, of any layout."""

_BLOCK = re.compile(r"[0-9a-f]{3}/(?P<key>(?:[0-9a-f]{2})+)")


def namespace_path(config: Config) -> str:
    """The namespace's folder name: a readable label, then the config's digest.

    The label is vLLM's for ordinary names (`/` becomes `_`); every other character that a
    path, URL or glob could take for its own becomes `_` too. It need not be injective:
    the digest covers the name, and opening compares it.
    """
    label = _UNSAFE.sub("_", config.model_name)[:_MAX_LABEL]
    return f"{label}_{config.digest}"


def isolated_path(config: Config, layout_digest: str) -> str:
    """The folder name of a namespace that only one layout uses."""
    return f"{namespace_path(config)}_{layout_digest[:12]}"


def group_path(namespace: str, rank: int, group: int) -> str:
    """The folder of one rank's KV group.

    Raises:
        InvalidInputError: a number is negative, or no integer.
    """
    for name, number in (("rank", rank), ("group", group)):
        if parse(number, int, name) < 0:
            raise InvalidInputError(f"{name}: expected 0 or more, found {number}")
    return f"{namespace}/r{rank}/g{group}"


def block_path(key: bytes) -> str:
    """A block's folder below its group's: fan-out, then the whole key in hex.

    Raises:
        InvalidInputError: see `require_key`.
    """
    require_key(key)
    digits = key.hex()
    return f"{digits[:FAN_OUT_DIGITS]}/{digits}"


def require_key(key: bytes) -> None:
    """Refuse what is no key.

    Raises:
        InvalidInputError: the key is no `bytes`, or shorter than 2 or longer than 96.
    """
    kind = type(key)
    if not issubclass(kind, bytes):
        raise InvalidInputError(f"key: expected bytes, found {kind.__name__}")
    if not 2 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidInputError(
            f"key: expected 2 to {MAX_KEY_BYTES} bytes, found {len(key)}"
        )


def block_key(path: str) -> bytes:
    """The inverse of `block_path`.

    Raises:
        InvalidInputError: no key has this path.
    """
    match = _BLOCK.fullmatch(path)
    if match is None or block_path(bytes.fromhex(match["key"])) != path:
        raise InvalidInputError(f"path: expected a block's, found {path!r}")
    return bytes.fromhex(match["key"])
