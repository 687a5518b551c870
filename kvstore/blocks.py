"""`Blocks`: the steps of one group's operations on storage. Remembers no block.

What a process has learnt of its blocks is `Memory`'s business; here a proof or a suspicion
comes in as an argument, so that the same steps run in any process.

Threads: any, at once. Pickles, so that another process can take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from kvstore.arrays import (
    MAX_DOCUMENT_BYTES,
    ArrayFormat,
    Proof,
    group_document,
    item_bytes,
    make_proof,
    split_proof,
)
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
from kvstore.errors import DamagedBlockError, StorageError
from kvstore.filesystem import Files, Filesystem
from kvstore.namespace import Namespace
from kvstore.paths import DOCUMENT, FAN_OUT_DIGITS, block_path

SLICE_BYTES = 256 << 10
"""How much is summed and written at once: what stays in a core's cache in between."""


_FAN_OUT_DOCUMENT = group_document()


class Stored(StrEnum):
    """What a store did."""

    STORED = "stored"
    KEPT = "kept"  # a healthy block was there, so nothing was written
    REPAIRED = "repaired"


class Blocks:
    """The blocks of one namespace's group.

    Attributes:
        nbytes: bytes of one block's payload.
    """

    def __init__(self, filesystem: Filesystem, namespace: Namespace, codec: Codec) -> None:
        """Touches nothing. The namespace must have been claimed."""
        self.nbytes = namespace.layout.nbytes
        self._filesystem = filesystem
        self._namespace = namespace
        self._codec = codec
        self._item_bytes = item_bytes(namespace.layout)
        self._format = ArrayFormat.of(namespace.layout, namespace.group)
        self._fan_outs: set[str] = set()  # at most 4,096

    def url(self, key: bytes) -> str:
        """The URL of the block's Zarr array."""
        return self._filesystem.place(self._path(key))

    def prove(self, key: bytes) -> Proof | None:
        """What the block's document vouches for; None if it is absent.

        Raises:
            DamagedBlockError: the document is not this block's.
            StorageError: storage could not tell.
        """
        path = f"{self._path(key)}/{DOCUMENT}"
        document = self._filesystem.read(path, MAX_DOCUMENT_BYTES + 1)
        if document is None:
            return None
        return self._format.proved(document, key, place=self._filesystem.place(path))

    def look(self, key: bytes) -> tuple[bool, Proof | None]:
        """Whether a load is worth while, in the cheapest way that storage has.

        In a folder it is whether the block's document is there, without a look into it: the
        load will prove it. In an object store that costs as much as the proof, so that is
        what comes with it.

        Raises:
            DamagedBlockError: the document is not this block's.
            StorageError: storage could not tell.
        """
        if self._filesystem.local:
            return self._filesystem.exists(f"{self._path(key)}/{DOCUMENT}"), None
        proof = self.prove(key)
        return proof is not None, proof

    def load(self, key: bytes, payload: memoryview, proof: Proof | None) -> Proof | None:
        """Fill `payload` with the block, proved.

        Args:
            key: the engine's key.
            payload: `nbytes` writable bytes.
            proof: what `look` told of this key, if it did.

        Returns:
            The proof that held; None if the block is absent.

        Raises:
            DamagedBlockError: the block is there but did not hold its proof.
            StorageError: storage failed.
        """
        if proof is None and (proof := self.prove(key)) is None:
            return None
        try:
            self._read_payload(key, payload, proof)
        except DamagedBlockError:
            # Another engine may have replaced or removed the block meanwhile.
            if (proof := self.prove(key)) is None:
                return None
            self._read_payload(key, payload, proof)
        return proof

    def store(
        self, key: bytes, payload: memoryview, *, suspect: bool
    ) -> tuple[Stored, Proof | None]:
        """Publish the block, unless a healthy one is there.

        Args:
            key: the engine's key.
            payload: `nbytes` bytes, only read.
            suspect: whether the block was found damaged, so that its document is not
                enough to call it healthy.

        Returns:
            What was done, and the proof of the block that is there now.

        Raises:
            StorageError: storage failed.
            LayoutMismatchError: the folders were removed meanwhile, and another engine
                has recorded another layout there.
        """
        try:
            proof = self.prove(key)
            if proof is not None and suspect:
                self._read_payload(key, memoryview(bytearray(self.nbytes)), proof)
        except DamagedBlockError:
            return Stored.REPAIRED, self._publish(key, payload, replace=True)
        if proof is not None:
            return Stored.KEPT, proof
        return Stored.STORED, self._publish(key, payload, replace=False)

    def delete(self, key: bytes) -> None:
        """Remove the block, if it is there."""
        names = (self._format.chunk_name, DOCUMENT)
        self._filesystem.delete(self._path(key), names)

    # ---- steps

    def _path(self, key: bytes) -> str:
        return f"{self._namespace.path}/{block_path(key)}"

    def _read_payload(self, key: bytes, payload: memoryview, proof: Proof) -> None:
        """Read the chunk, which must be the one that the document vouches for."""
        path = f"{self._path(key)}/{self._format.chunk_name}"
        place = self._filesystem.place(path)
        longest = payload.nbytes + TRAILER_BYTES
        vouched, codec = split_proof(proof)
        if codec == "none":
            trailer = bytearray(TRAILER_BYTES)
            length = self._filesystem.read_into(path, [payload, memoryview(trailer)])
            require_length(place, length, longest, longest)
            crc = checksum(payload)
            require_crc(place, "the chunk", int.from_bytes(trailer, "little"), crc)
        else:
            chunk = self._filesystem.read(path, longest)
            decode_chunk(chunk, payload, codec, place=place)
            crc = checksum(payload)
        require_crc(place, "the document", vouched, crc)

    def _publish(self, key: bytes, payload: memoryview, *, replace: bool) -> Proof | None:
        """Returns the proof of what is there now, unless another writer was first."""
        path = self._path(key)
        chunk = _Chunk(payload, self._codec, self._item_bytes)
        try:
            self._ensure_fan_out(key)
            ours = self._filesystem.publish(path, self._files(key, chunk), replace=replace)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # Somebody removed the folders above; put the documents back, or fail.
            self._fan_outs.clear()
            self._namespace.claim()
            self._ensure_fan_out(key)
            ours = self._filesystem.publish(path, self._files(key, chunk), replace=replace)
        return make_proof(chunk.crc, chunk.codec) if ours else None

    def _files(self, key: bytes, chunk: _Chunk) -> Files:
        def document() -> Iterator[bytes]:
            # The chunk has been written, and is summed.
            yield self._format.document(key, chunk.crc, chunk.codec)

        return ((self._format.chunk_name, chunk), (DOCUMENT, document()))

    def _ensure_fan_out(self, key: bytes) -> None:
        fan_out = key.hex()[:FAN_OUT_DIGITS]
        if fan_out not in self._fan_outs:
            self._filesystem.create(
                f"{self._namespace.path}/{fan_out}/{DOCUMENT}", _FAN_OUT_DOCUMENT
            )
            self._fan_outs.add(fan_out)


class _Chunk:
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
