"""`WholeBlocks`: blocks as they are stored: read with their proof, put elsewhere as is.

Nothing is encoded again: of a document and a chunk that hold their proof, every byte is
kept.

Threads: as `Blocks`. Pickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.arrays import split_proof
from kvstore.blocks import Blocks
from kvstore.chunks import read_chunk
from kvstore.codecs import (
    TRAILER_BYTES,
    Codec,
    require_length,
)
from kvstore.errors import DamagedBlockError
from kvstore.filesystem import Filesystem
from kvstore.namespace import Namespace
from kvstore.paths import DOCUMENT
from kvstore.survey import StoredBlock


@dataclass(frozen=True, slots=True)
class Whole:
    """A block that held its proof.

    Attributes:
        document: its `zarr.json`.
        chunk: the bytes of its chunk, in parts.
    """

    document: bytes
    chunk: Sequence[memoryview | bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return len(self.document) + sum(len(part) for part in self.chunk)


class WholeBlocks(Blocks):
    """The blocks of one namespace's group, in files."""

    def __init__(self, filesystem: Filesystem, namespace: Namespace) -> None:
        """Touches nothing. Before anything is given, the namespace must be claimed."""
        super().__init__(filesystem, namespace, "none")

    def take(self, key: bytes) -> Whole | None:
        """A block's files, proved; None if it is absent.

        Raises:
            DamagedBlockError: it does not hold its proof, and did not at a second look.
            StorageError: storage failed.
        """
        try:
            return self._take(key)
        except DamagedBlockError:
            # Another engine may have replaced it meanwhile, or a network spoilt it.
            return self._take(key)

    def give(self, key: bytes, whole: Whole, *, replace: bool) -> bool:
        """Publish a block that another root's `take` gave.

        Args:
            key: the engine's key.
            whole: of the same key, group and layout.
            replace: put it in the place of a damaged one.

        Returns:
            Whether it is this one that is there now; False if another writer was first.

        Raises:
            DamagedBlockError: the document is not this key's, group's or layout's.
            StorageError: storage failed.
            LayoutMismatchError: as `Blocks.store`.
        """
        self._proved(whole.document, key)
        files = ((self._format.chunk_name, whole.chunk), (DOCUMENT, (whole.document,)))
        return self._put(key, lambda: files, replace=replace)

    def looks_healthy(self, key: bytes, listed: StoredBlock | None) -> bool:
        """Whether the block is there; only its document is read, in one request.

        Args:
            key: the engine's key.
            listed: what a listing told of it: its chunk must be as long as it should be.
                None if it was not there yet.

        Raises:
            DamagedBlockError: something is there and does not hold.
            StorageError: storage failed.
        """
        document = self._read_document(key)
        if document is None:
            return False
        _, codec = split_proof(self._proved(document, key))
        if listed is not None:
            length = None if listed.orphan else listed.nbytes - len(document)
            require_length(self.url(key), length, *self._lengths(codec))
        return True

    def _take(self, key: bytes) -> Whole | None:
        document = self._read_document(key)
        if document is None:
            return None
        proof = self._proved(document, key)
        payload = memoryview(bytearray(self.nbytes))
        path = f"{self._path(key)}/{self._format.chunk_name}"
        return Whole(document, read_chunk(self._filesystem, path, payload, proof))

    def _lengths(self, codec: Codec) -> tuple[int, int]:
        """The least and the most bytes that a chunk may have."""
        longest = self.nbytes + TRAILER_BYTES
        return (longest, longest) if codec == "none" else (TRAILER_BYTES + 1, longest - 1)
