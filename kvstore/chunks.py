"""A block's chunk in storage: read with its proof, and written with its checksum.

Threads: any, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.arrays import Proof, split_proof
from kvstore.codecs import (
    TRAILER_BYTES,
    Chunk,
    Codec,
    checksum,
    decode_chunk,
    encode_chunk,
    require_crc,
    require_length,
)
from kvstore.errors import DamagedBlockError, FormatError
from kvstore.filesystem import Filesystem

Result = TypeVar("Result")

SLICE_BYTES = 256 << 10
"""How much is summed and written at once: what stays in a core's cache in between."""


def read_chunk(
    filesystem: Filesystem, path: str, payload: memoryview, proof: Proof
) -> Sequence[memoryview | bytes]:
    """Read a chunk, which must be the one that the document vouches for.

    Args:
        filesystem: the root.
        path: the chunk's.
        payload: is filled; what it holds after an error is undefined.
        proof: what the document says.

    Returns:
        The chunk's bytes as they are stored, in parts.

    Raises:
        DamagedBlockError: it is missing, or another.
        StorageError: storage failed.
    """
    place = filesystem.place(path)
    longest = payload.nbytes + TRAILER_BYTES
    vouched, codec = split_proof(proof)
    parts: tuple[memoryview | bytes, ...]
    if codec == "none":
        trailer = bytearray(TRAILER_BYTES)
        buffers = [payload, memoryview(trailer)]
        parts = tuple(buffers)
        length = of_block(lambda: filesystem.read_into(path, buffers))
        require_length(place, length, longest, longest)
        crc, own = checksum(payload), int.from_bytes(trailer, "little")
        require_crc(place, own, crc, "wrong-checksum")
    else:
        chunk = of_block(lambda: filesystem.read(path, longest))
        decode_chunk(chunk, payload, codec, place=place)
        crc, parts = checksum(payload), (chunk or b"",)
    require_crc(place, vouched, crc, "other-payload")
    return parts


def of_block(read: Callable[[], Result]) -> Result:
    """Read a file of a block: what is no file, in the place of one, is damage."""
    try:
        return read()
    except FormatError as error:
        raise DamagedBlockError(error.place, error.problem, "not-a-file") from error


class WrittenChunk:
    """What is written of a payload: encoded or as it is, then the checksum of that.

    A payload that is not encoded is summed while it is written, so that each byte is
    fetched from memory once.

    Attributes:
        crc: the payload's checksum, once the chunk has been written.
        codec: how the chunk holds it.
    """

    def __init__(self, payload: memoryview, codec: Codec, itemsize: int) -> None:
        self.crc = 0
        self.codec: Codec = "none"
        self._payload = payload
        self._encoded: Chunk | None = None
        if codec != "none":
            self.crc = checksum(payload)
            self._encoded, self.codec = encode_chunk(payload, self.crc, codec, itemsize)

    def __iter__(self) -> Iterator[memoryview | bytes]:
        if self._encoded is not None:
            yield from self._encoded
            return
        crc = 0
        for start in range(0, self._payload.nbytes, SLICE_BYTES):
            part = self._payload[start : start + SLICE_BYTES]
            crc = checksum(part, crc)
            yield part
        self.crc = crc
        yield crc.to_bytes(TRAILER_BYTES, "little")
