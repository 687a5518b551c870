"""`BlockProof`: whether a block is what its place and its group's document say, and if not,
what is wrong with it. The steps are those of a load, so what passes here is served.

Threads: one at a time, since all blocks are read into one buffer.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.arrays import (
    FORMAT,
    MAX_DOCUMENT_BYTES,
    ArrayFormat,
    Proof,
    array_document,
    parse_document,
)
from kvstore.chunks import of_block, read_chunk
from kvstore.codecs import codec_of
from kvstore.errors import DamagedBlockError, FormatError
from kvstore.layout import Layout
from kvstore.offline.faults import Fault
from kvstore.offline.group import room
from kvstore.paths import DOCUMENT, block_path
from kvstore.upkeep import Upkeep

_OF_LAYOUT = ("layout", "dtype", "packing", "runner", "kv_cache_layout")
"""Members of a block's document that its layout gives."""


class Faulty(NamedTuple):
    """What is wrong with a block, and what was expected and found."""

    fault: Fault
    detail: str


class BlockProof:
    """Of one group's blocks.

    Attributes:
        chunk_name: file name of a block's only chunk.
    """

    def __init__(self, filesystem: Upkeep, path: str, group: int, layout: Layout) -> None:
        """Reads nothing yet.

        Args:
            filesystem: the root.
            path: the group's folder, relative to the root.
            group: its number.
            layout: of its blocks.
        """
        self._filesystem = filesystem
        self._path = path
        self._format = ArrayFormat.of(layout, group)
        self._payload = memoryview(b"")  # until there is a block to fill it
        self.chunk_name = self._format.chunk_name

    def look(self, key: bytes) -> Faulty | None:
        """What is wrong with a block; None if it holds its proof, or is absent.

        What is wrong is looked at twice: an engine may have replaced or removed the block
        between two reads, and a network may have spoilt one.

        Raises:
            StorageError: storage could not tell.
        """
        for _ in range(2):
            faulty = self._look(key)
            if faulty is None:
                break
        return faulty

    def _look(self, key: bytes) -> Faulty | None:
        path = f"{self._path}/{block_path(key)}"
        try:
            document = self._read(f"{path}/{DOCUMENT}", MAX_DOCUMENT_BYTES + 1)
            if document is None:
                if self._read(f"{path}/{self.chunk_name}", 1) is None:
                    return None
                detail = "the chunk is there, the document is missing"
                return Faulty(Fault.DOCUMENT_MISSING, detail)
            try:
                proof = self._format.proved(document, key, place=path)
            except DamagedBlockError as error:
                return Faulty(document_fault(document, self._format, key), error.problem)
            self._read_chunk(path, proof)
        except DamagedBlockError as error:
            return Faulty(Fault(error.damage), error.problem)
        return None

    def _read_chunk(self, block: str, proof: Proof) -> None:
        path = f"{block}/{self.chunk_name}"
        try:
            if not self._payload:
                layout = self._format.layout
                self._payload = memoryview(room(self._filesystem, block, layout, proof))
            read_chunk(self._filesystem, path, self._payload, proof)
        except DamagedBlockError as error:
            if error.damage == "wrong-length":
                self._read(path, 1)  # a folder has a length too
            raise

    def _read(self, path: str, limit: int) -> bytes | None:
        return of_block(lambda: self._filesystem.read(path, limit))


def document_fault(document: bytes, expected: ArrayFormat, key: bytes) -> Fault:
    """What is wrong with a block's document that did not prove itself."""
    try:
        found = parse_document(document, place="")
    except FormatError:
        return Fault.DOCUMENT_UNREADABLE
    attributes = found.get("attributes")
    ours = attributes.get("kvstore") if isinstance(attributes, dict) else None
    if not isinstance(ours, dict):
        return Fault.DOCUMENT_DIFFERS
    binding = (
        ("format", FORMAT, Fault.OTHER_FORMAT),
        ("key", key.hex(), Fault.OTHER_KEY),
        ("group", expected.group, Fault.OTHER_GROUP),
    )
    for name, value, fault in binding:
        if ours.get(name) != value:
            return fault
    layout = expected.layout
    values = (layout.digest, layout.dtype, layout.packing, layout.runner)
    for name, told in zip(_OF_LAYOUT, (*values, layout.kv_cache_layout), strict=True):
        if ours.get(name) != told:
            return Fault.OTHER_LAYOUT
    codecs = found.get("codecs")
    ends = array_document(layout, expected.group, "none")["codecs"]
    if isinstance(codecs, list) and (
        codec_of(codecs[1:-1]) is None or codecs[:1] + codecs[-1:] != ends
    ):
        return Fault.UNKNOWN_CODEC
    return Fault.DOCUMENT_DIFFERS
