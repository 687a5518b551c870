"""A block's payload <-> its chunk: Zarr's standard codecs, the checksum last. Pure, no I/O.

What may stand between the values' bytes and the checksum is `zstd`, `blosc` or none. The
option says only how a new block is written. How a block that is there was written, its
own document says, and every reader reads all of them. docs/format.md, section 8.

Both codecs work outside the GIL. Encoded bytes come from storage and may be anything: a
header is believed only where it says what the layout says, so nothing is ever allocated
by a number in it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import crc32c
from numcodecs import blosc, zstd

from kvstore.errors import DamagedBlockError, InvalidInputError, shown

Codec = Literal["none", "zstd", "blosc"]
CODECS: tuple[Codec, ...] = get_args(Codec)

Chunk = tuple[memoryview | bytes, bytes]
"""What is written: the payload, encoded or as it is, and the crc32c of that."""

TRAILER_BYTES = 4

_ZSTD_LEVEL = 1
_BLOSC_LEVEL = 9
"""Chosen by docs/performance-codecs.md: higher levels of Zstandard make KV no smaller, and
LZ4 decodes as fast at all of its levels."""

_ACCEPTED: Mapping[Codec, Mapping[str, Sequence[object]]] = {
    "zstd": {"level": range(-131_072, 23), "checksum": (False, True)},
    "blosc": {
        "typesize": range(1, 256),
        "cname": ("lz4", "zstd"),
        "clevel": range(10),
        "shuffle": ("noshuffle", "shuffle", "bitshuffle"),
        "blocksize": range(1 << 31),
    },
}
"""Every member that a codec's configuration must have, and its values: what the writer
chose changes nothing for a reader, so other levels may come without another format."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER = struct.Struct("<BxBBIII")
"""Version, flags, bytes of a value, then in bytes: decoded, of a block, encoded."""
_BLOSC_VERSION = 2
_BLOSC_FORMATS = (1, 4)
"""LZ4 and Zstandard, in the three highest bits of the flags."""


def parse_codec(name: object) -> Codec:
    """A codec's name as people write it.

    Raises:
        InvalidInputError: there is no such codec.
    """
    for codec in CODECS:
        if name == codec:
            return codec
    raise InvalidInputError(f"codec: expected one of {CODECS}, found {shown(name)}")


def zarr_codecs(codec: Codec, itemsize: int) -> list[dict[str, Any]]:
    """What stands between `bytes` and `crc32c` in the documents of new blocks.

    Args:
        codec: how they are written.
        itemsize: bytes of one value.
    """
    if codec == "zstd":
        return [
            {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
        ]
    if codec == "blosc":
        configuration = {
            "typesize": itemsize,
            "cname": "lz4",
            "clevel": _BLOSC_LEVEL,
            "shuffle": "bitshuffle",
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": configuration}]
    return []


def codec_of(found: Sequence[object]) -> Codec | None:
    """The codec that a document names between `bytes` and `crc32c`; None if unknown."""
    if not found:
        return "none"
    [first, *others] = found
    if others or not isinstance(first, dict) or first.keys() != {"name", "configuration"}:
        return None
    name, configuration = first["name"], first["configuration"]
    for codec, fields in _ACCEPTED.items():
        if name == codec and _is_accepted(configuration, fields):
            return codec
    return None


def _is_accepted(configuration: object, fields: Mapping[str, Sequence[object]]) -> bool:
    if not isinstance(configuration, dict) or configuration.keys() != fields.keys():
        return False
    # By type as well, since True == 1 == 1.0 in Python.
    return all(
        type(configuration[name]) is type(values[0]) and configuration[name] in values
        for name, values in fields.items()
    )


def checksum(data: memoryview, crc: int = 0) -> int:
    """The crc32c of `data`, continued from `crc`; computed without the GIL."""
    summed: int = crc32c.crc32c(data, crc)
    return summed


def encode_chunk(
    payload: memoryview, crc: int, codec: Codec, itemsize: int
) -> tuple[Chunk, Codec]:
    """A payload, whose checksum is `crc`, as a chunk, and the codec that was used.

    That is `none` where `codec` would make the payload no smaller.
    """
    encoded = _encode(payload, codec, itemsize)
    if encoded is None or len(encoded) >= payload.nbytes:
        return (payload, _trailer(crc)), "none"
    return (encoded, _trailer(checksum(memoryview(encoded)))), codec


def decode_chunk(
    chunk: bytes | None, payload: memoryview, codec: Codec, *, place: str
) -> None:
    """Fill `payload` from a chunk that `codec` has encoded, without a copy in between.

    The payload is still to be proved, by the checksum in the document.

    Raises:
        DamagedBlockError: not a chunk that was written. What `payload` then holds is
            undefined.
    """
    length = None if chunk is None else len(chunk)
    # A payload that would not get smaller is not encoded.
    require_length(place, length, TRAILER_BYTES + 1, payload.nbytes + TRAILER_BYTES - 1)
    assert chunk is not None
    encoded, trailer = memoryview(chunk)[:-TRAILER_BYTES], chunk[-TRAILER_BYTES:]
    vouched = int.from_bytes(trailer, "little")
    require_crc(place, vouched, checksum(encoded), "wrong-checksum")
    try:
        _decode(encoded, payload, codec)
    except ValueError as error:
        raise DamagedBlockError(place, f"{codec}: {error}", "undecodable") from error


def require_length(place: str, length: int | None, least: int, most: int) -> None:
    """Refuse a chunk that is missing, or of another length.

    Args:
        place: the chunk's URL.
        length: its bytes, counted no further than one more than `most`; None if missing.
        least: the fewest bytes that it may have.
        most: the most.

    Raises:
        DamagedBlockError: that is so.
    """
    if length is None:
        problem = "the document is there, the chunk is missing"
        raise DamagedBlockError(place, problem, "chunk-missing")
    if not least <= length <= most:
        expected = most if least == most else f"{least} to {most}"
        found = "more" if length > most else length
        problem = f"expected {expected} bytes, found {found}"
        raise DamagedBlockError(place, problem, "wrong-length")


def require_crc(
    place: str,
    vouched: int,
    crc: int,
    damage: Literal["wrong-checksum", "other-payload"],
) -> None:
    """Compare a checksum that somebody vouches for with that of the bytes.

    Args:
        place: the chunk's URL.
        vouched: by the chunk's own end, or by the document.
        crc: of the bytes.
        damage: what it is if they differ, which says who vouches.

    Raises:
        DamagedBlockError: they differ.
    """
    if vouched != crc:
        voucher = "the document" if damage == "other-payload" else "the chunk"
        problem = f"crc32c: {voucher} says {vouched:08x}, the bytes give {crc:08x}"
        raise DamagedBlockError(place, problem, damage)


def _trailer(crc: int) -> bytes:
    return crc.to_bytes(TRAILER_BYTES, "little")


def _encode(payload: memoryview, codec: Codec, itemsize: int) -> bytes | None:
    encoded: bytes | None = None
    if codec == "zstd":
        encoded = zstd.compress(payload, _ZSTD_LEVEL)
    elif codec == "blosc" and payload.nbytes <= blosc.MAX_BUFFERSIZE:
        encoded = blosc.compress(
            payload, b"lz4", _BLOSC_LEVEL, blosc.BITSHUFFLE, 0, typesize=itemsize
        )
    return encoded


def _decode(encoded: memoryview, payload: memoryview, codec: Codec) -> None:
    """Fill `payload` with exactly what `encoded` holds, or raise `ValueError`."""
    decoders = {
        "zstd": (_zstd_length, zstd.decompress),
        "blosc": (_blosc_length, blosc.decompress),
    }
    decoded_length, decompress = decoders[codec]
    length = decoded_length(encoded)
    if length != payload.nbytes:
        raise ValueError(f"expected {payload.nbytes} decoded bytes, found {length}")
    try:
        decompress(encoded, payload)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _zstd_length(encoded: memoryview) -> int:
    """The content's length by a frame's header: RFC 8878, section 3.1.1.1."""
    if len(encoded) < 6 or encoded[:4] != _ZSTD_MAGIC:
        raise ValueError("expected a frame of Zstandard, found other bytes")
    descriptor = encoded[4]
    one_segment = descriptor >> 5 & 1
    size = (one_segment, 2, 4, 8)[descriptor >> 6]
    start = 6 - one_segment + (0, 1, 2, 4)[descriptor & 3]
    length = encoded[start : start + size]
    if not size or len(length) < size:
        raise ValueError("expected a frame that says its content's length")
    return int.from_bytes(length, "little") + (256 if size == 2 else 0)


def _blosc_length(encoded: memoryview) -> int:
    """The content's length by Blosc's header, all of which must hold.

    The library believes the encoded length in it, and decodes a block that is no whole
    number of values short.
    """
    if len(encoded) < _BLOSC_HEADER.size:
        raise ValueError("expected a header of Blosc, found fewer bytes")
    version, flags, typesize, length, blocksize, size = _BLOSC_HEADER.unpack_from(encoded)
    if version != _BLOSC_VERSION or flags >> 5 not in _BLOSC_FORMATS:
        raise ValueError("expected LZ4 or Zstandard in Blosc's format 2, found another")
    if size != len(encoded):
        raise ValueError(f"expected {size} encoded bytes, found {len(encoded)}")
    if not typesize or not blocksize or blocksize % typesize:
        raise ValueError(
            f"expected blocks of whole values, found {blocksize} bytes for {typesize}"
        )
    return int(length)
