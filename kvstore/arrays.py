"""Block <-> Zarr v3 array: documents, names and the proof of a block. Pure, no I/O.

A block is one array with one chunk: the payload, encoded or not, then the crc32c of what
was written. The array's document binds key, layout and payload to each other.
docs/format.md is the normative text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore.codecs import CODECS, Codec, codec_of, zarr_codecs
from kvstore.config import Config
from kvstore.errors import (
    MAX_SHOWN,
    DamagedBlockError,
    FormatError,
    InvalidInputError,
    shown,
)
from kvstore.layout import ITEM_BYTES, Layout

Proof = int
"""What a block's document vouches for, as one number: the payload's crc32c, and above it
the index in `CODECS` of how the chunk holds the payload. Every lookup makes one, and a
number is no work for Python's garbage collector."""

_CRC_BITS = 32


def make_proof(crc: int, codec: Codec) -> Proof:
    """Join a payload's checksum and its codec."""
    return crc | CODECS.index(codec) << _CRC_BITS


def split_proof(proof: Proof) -> tuple[int, Codec]:
    """The inverse of `make_proof`."""
    return proof & (1 << _CRC_BITS) - 1, CODECS[proof >> _CRC_BITS]


FORMAT = 1
MAX_DOCUMENT_BYTES = 1 << 20
"""Longest document that is read; a group's layout record names every layer."""

_ZARR_TYPES: Mapping[str, tuple[str, Any]] = {
    "bfloat16": ("bfloat16", "NaN"),
    "float16": ("float16", "NaN"),
    "float32": ("float32", "NaN"),
    "float8_e4m3fnuz": ("uint8", 128),
}
"""Zarr data type and fill value by dtype; all others are stored as `uint8`."""

_UINT8 = ("uint8", 255)
"""A missing chunk must not read as zeros: 255 is a NaN in the common 8-bit floats, and 128
in the one that has its only NaN there."""

_KEY, _CRC = "@key@", "@crc32c@"
_CRC_DIGITS = re.compile("[0-9a-f]{8}")
_CRC_BYTES = re.compile(b"[0-9a-f]{8}")
_GROUP_FIELDS = frozenset(("zarr_format", "node_type", "attributes"))


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """How the blocks of one layout and group are written as Zarr arrays.

    Attributes:
        layout: the blocks' layout.
        chunk_name: file name of the only chunk, e.g. `c.0.0.0.0`.
    """

    layout: Layout
    group: int
    chunk_name: str
    _heads: Mapping[Codec, bytes]
    _middle: bytes
    _tail: bytes

    @classmethod
    def of(cls, layout: Layout, group: int) -> ArrayFormat:
        """Prepare the document once: between blocks only key, checksum and codec change."""
        heads = {}
        for codec in CODECS:
            text = json.dumps(array_document(layout, group, codec), indent=2).encode()
            heads[codec], rest = text.split(_KEY.encode(), 1)
        middle, tail = rest.rsplit(_CRC.encode(), 1)  # the document's last text
        name = ".".join(["c", *("0" for _ in layout.shape)])
        return cls(layout, group, name, heads, middle, tail)

    def document(self, key: bytes, crc: int, codec: Codec = "none") -> bytes:
        """The `zarr.json` of the block `key` whose payload has the checksum `crc`."""
        key_digits, crc_digits = key.hex().encode(), b"%08x" % crc
        return b"".join(
            (self._heads[codec], key_digits, self._middle, crc_digits, self._tail)
        )

    def proved(self, document: bytes, key: bytes, *, place: str) -> Proof:
        """What a block's document, which must be this key's, says of its chunk.

        Raises:
            DamagedBlockError: it is another key's, another layout's or group's, or not a
                document that this version reads.
        """
        behind = key.hex().encode() + self._middle
        for codec, head in self._heads.items():
            prefix = head + behind
            start, end = len(prefix), len(prefix) + 8
            if (
                document.startswith(prefix)
                and document[end:] == self._tail
                and _CRC_BYTES.fullmatch(document, start, end)
            ):
                return make_proof(int(document[start:end], 16), codec)
        return self._parse(document, key, place)

    def _parse(self, document: bytes, key: bytes, place: str) -> Proof:
        """The slow way: another writer may format the same document otherwise."""
        try:
            found = parse_document(document, place=place)
        except FormatError as error:
            raise DamagedBlockError(place, error.problem) from error
        codec, found["codecs"] = _split_codecs(found.get("codecs"), place)
        expected = array_document(self.layout, self.group, "none")
        ours, theirs = _attributes(expected), _attributes(found)
        crc = _parse_crc(theirs.get("crc32c"), place)
        ours |= {"key": key.hex(), "crc32c": theirs.get("crc32c")}
        for name in ours:
            _require(place, name, ours[name], theirs.get(name))
        for name in theirs.keys() - ours.keys():
            _require(place, shown(name), None, theirs[name])
        for name in expected.keys() - {"attributes"}:
            _require(place, name, expected[name], found.get(name))
        for name in found.keys() - expected.keys():
            if not _may_ignore(name, found[name]):
                _require(place, shown(name), None, found[name])
        return make_proof(crc, codec)


def array_document(layout: Layout, group: int, codec: Codec) -> dict[str, Any]:
    """A block's document, with placeholders for its key and checksum."""
    data_type, fill_value = zarr_type(layout)
    endian = {"configuration": {"endian": "little"}} if data_type != "uint8" else {}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": data_type,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(layout.shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value,
        "codecs": [
            {"name": "bytes", **endian},
            *zarr_codecs(codec, item_bytes(layout)),
            {"name": "crc32c"},
        ],
        "dimension_names": list(layout.axes),
        "attributes": {
            "kvstore": {
                "format": FORMAT,
                "key": _KEY,
                "group": group,
                "dtype": layout.dtype,
                "packing": layout.packing,
                "runner": layout.runner,
                "kv_cache_layout": layout.kv_cache_layout,
                "layout": layout.digest,
                "crc32c": _CRC,
            }
        },
    }


def zarr_type(layout: Layout) -> tuple[str, Any]:
    """The Zarr data type and fill value under which a layout's blocks are stored."""
    return _UINT8 if layout.opaque else _ZARR_TYPES.get(layout.dtype, _UINT8)


def item_bytes(layout: Layout) -> int:
    """Bytes of one value as the engine takes it, of an opaque block as well."""
    return ITEM_BYTES.get(layout.dtype, 1)


def _split_codecs(found: object, place: str) -> tuple[Codec, object]:
    """The codec between the first and the last, and those two."""
    if not isinstance(found, list) or len(found) < 3:
        return "none", found
    codec = codec_of(found[1:-1])
    if codec is None:
        raise DamagedBlockError(
            place, f"codecs: expected {' or '.join(CODECS)}, found {shown(found[1:-1])}"
        )
    return codec, [found[0], found[-1]]


def group_document(**attributes: Any) -> bytes:
    """The `zarr.json` of a group, with `attributes` under `kvstore`.

    Raises `InvalidInputError` if it were longer than any reader takes.
    """
    ours = {"format": FORMAT, **attributes}
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"kvstore": ours}}
    text = json.dumps(document, indent=2).encode()
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidInputError(
            f"{', '.join(attributes)}: expected a document of at most "
            f"{MAX_DOCUMENT_BYTES} bytes, found {len(text)}. Record less"
        )
    return text


@contextmanager
def _remedied(place: str) -> Iterator[None]:
    """Raise what is wrong with a group's document as `FormatError`, and say what to do."""
    try:
        yield
    except (FormatError, InvalidInputError) as error:
        problem = error.problem if isinstance(error, FormatError) else str(error)
        remedy = (
            "If a later kvstore wrote it, use that one or another URL. If not, remove this "
            "one document: it is written anew, and every block proves itself"
        )
        raise FormatError(place, f"{problem.rstrip('.')}. {remedy}") from error


def group_attributes(document: bytes, *, place: str) -> dict[str, Any]:
    """What kvstore recorded in a group's document.

    Raises:
        FormatError: not a Zarr v3 group, or not of a format that this version reads.
    """
    with _remedied(place):
        found = parse_document(document, place=place)
        _require(place, "node_type", "group", found.get("node_type"), error=FormatError)
        for name in found.keys() - _GROUP_FIELDS:
            if not _may_ignore(name, found[name]):
                _require(place, shown(name), None, found[name], error=FormatError)
        attributes = _attributes(found)
        version = attributes.get("format")
        _require(place, "kvstore.format", FORMAT, version, error=FormatError)
    return attributes


def recorded_config(document: bytes, *, place: str) -> Config:
    """The config that a namespace's document records. Raises `FormatError`."""
    attributes = group_attributes(document, place=place)
    with _remedied(place):
        return Config.from_fields(attributes.get("config"), where="config")


def recorded_layout(document: bytes, *, place: str) -> Layout:
    """The layout that a group's document records. Raises `FormatError`."""
    attributes = group_attributes(document, place=place)
    with _remedied(place):
        return Layout.from_dict(attributes.get("layout"), where="layout")


def parse_document(document: bytes, *, place: str) -> dict[str, Any]:
    """Untrusted bytes to a Zarr v3 document. Raises `FormatError`."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise FormatError(
            place,
            f"expected at most {MAX_DOCUMENT_BYTES} bytes of metadata, found more",
        )
    try:
        found = json.loads(
            document.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(
            place, f"expected JSON, found {str(error)[:MAX_SHOWN]}"
        ) from error
    if not isinstance(found, dict) or found.get("zarr_format") != 3:
        raise FormatError(place, "expected a Zarr v3 document, found another")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two equal names, two readers could take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same name twice in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is not JSON")


def _attributes(document: Mapping[str, Any]) -> dict[str, Any]:
    attributes = document.get("attributes")
    ours = attributes.get("kvstore") if isinstance(attributes, dict) else None
    return dict(ours) if isinstance(ours, dict) else {}


def _may_ignore(name: str, value: object) -> bool:
    """Zarr v3: an unknown field may be ignored only if it says so itself.

    The two that zarr-python may write without a meaning are not unknown.
    """
    if (name, value) in (("storage_transformers", []), ("consolidated_metadata", None)):
        return True
    return isinstance(value, dict) and value.get("must_understand") is False


def _parse_crc(digits: object, place: str) -> int:
    if isinstance(digits, str) and _CRC_DIGITS.fullmatch(digits):
        return int(digits, 16)
    raise DamagedBlockError(place, f"crc32c: expected 8 hex digits, found {shown(digits)}")


def _require(
    place: str,
    field: str,
    expected: object,
    found: object,
    *,
    error: type[FormatError] = DamagedBlockError,
) -> None:
    # As JSON, since 2 == 2.0 == True in Python at every depth.
    if json.dumps(found, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise error(place, f"{field}: expected {shown(expected)}, found {shown(found)}")
