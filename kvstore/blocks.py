"""`Blocks`: the steps of one group's operations on storage. Remembers no block.

What a process has learnt of its blocks is `Memory`'s business; here a proof or a suspicion
comes in as an argument, so that the same steps run in any process.

Threads: any, at once. Pickles, so that another process can take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from kvstore.chunks import WrittenChunk, of_block, read_chunk
from kvstore.codecs import Codec
from kvstore.errors import DamagedBlockError, StorageError
from kvstore.filesystem import Files, Filesystem
from kvstore.namespace import Namespace
from kvstore.paths import DOCUMENT, FAN_OUT_DIGITS, block_path

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
            DamagedBlockError: the document is not this block's; in an object store it was
                not at a second look either.
            StorageError: storage could not tell.
        """
        try:
            return self._read_proof(key)
        except DamagedBlockError:
            if self._filesystem.local:
                raise
            return self._read_proof(key)  # an answer may have been spoilt on its way

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
            InvalidInputError: the root was opened with `read_only`.
            StorageError: storage failed.
            LayoutMismatchError: the folders were removed meanwhile, and another engine
                has recorded another layout there.
        """
        self._filesystem.require_writable("store")
        try:
            proof = self.prove(key)
            if proof is not None and suspect:
                self._read_payload(key, memoryview(bytearray(self.nbytes)), proof)
        except DamagedBlockError:
            return Stored.REPAIRED, self._publish(key, payload, replace=True)
        if proof is not None:
            return Stored.KEPT, proof
        return Stored.STORED, self._publish(key, payload, replace=False)

    def touch(self, key: bytes) -> bool:
        """Note that the block is used now: see `Collector`.

        An object store is asked first, whatever is known of the block: a document that is
        written after another engine has removed the block would be half a block.

        Returns:
            False if it is absent from an object store. A folder is not asked.

        Raises:
            DamagedBlockError: the document is not this block's.
            StorageError: storage failed.
        """
        document = b""  # a folder needs none
        if not self._filesystem.local:
            if (proof := self.prove(key)) is None:
                return False
            document = self._format.document(key, *split_proof(proof))
        self._filesystem.touch(self._path(key), document)
        return True

    def delete(self, key: bytes) -> None:
        """Remove the block, if it is there."""
        names = (self._format.chunk_name, DOCUMENT)
        self._filesystem.delete(self._path(key), names)

    # ---- steps

    def _path(self, key: bytes) -> str:
        return f"{self._namespace.path}/{block_path(key)}"

    def _read_proof(self, key: bytes) -> Proof | None:
        document = self._read_document(key)
        return None if document is None else self._proved(document, key)

    def _read_document(self, key: bytes) -> bytes | None:
        path = f"{self._path(key)}/{DOCUMENT}"
        return of_block(lambda: self._filesystem.read(path, MAX_DOCUMENT_BYTES + 1))

    def _proved(self, document: bytes, key: bytes) -> Proof:
        place = self._filesystem.place(f"{self._path(key)}/{DOCUMENT}")
        return self._format.proved(document, key, place=place)

    def _read_payload(self, key: bytes, payload: memoryview, proof: Proof) -> None:
        path = f"{self._path(key)}/{self._format.chunk_name}"
        read_chunk(self._filesystem, path, payload, proof)

    def _publish(self, key: bytes, payload: memoryview, *, replace: bool) -> Proof | None:
        """Returns the proof of what is there now, unless another writer was first."""
        chunk = WrittenChunk(payload, self._codec, self._item_bytes)
        ours = self._put(key, lambda: self._files(key, chunk), replace=replace)
        return make_proof(chunk.crc, chunk.codec) if ours else None

    def _put(self, key: bytes, files: Callable[[], Files], *, replace: bool) -> bool:
        """Returns whether these files are there now; see `Filesystem.publish`."""
        path = self._path(key)
        try:
            self._ensure_fan_out(key)
            return self._filesystem.publish(path, files(), replace=replace)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        # Somebody removed the folders above; put the documents back, or fail.
        self._fan_outs.clear()
        self._namespace.claim()
        self._ensure_fan_out(key)
        return self._filesystem.publish(path, files(), replace=replace)

    def _files(self, key: bytes, chunk: WrittenChunk) -> Files:
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
