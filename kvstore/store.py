"""`BlockStore`: the library's front door. One rank's blocks of one KV group under a URL.

    open      compare what is recorded with what the engine has, or record it
    contains  is there a block that is this key's, in this layout?
    load      fill a buffer with a block's bytes, which are then proved
    store     publish a block, whole or not at all
    delete    remove a block

Locking: `_memory` is guarded by its own lock; everything else is fixed after `open`, so
every method may be called from any thread, and from any number of processes at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from kvstore.__about__ import __version__
from kvstore.arrays import (
    MAX_DOCUMENT_BYTES,
    TRAILER_BYTES,
    ArrayFormat,
    checksum,
    group_document,
)
from kvstore.buffers import readable, writable
from kvstore.config import Config, require_proof
from kvstore.errors import (
    DamagedBlockError,
    InvalidInputError,
    LayoutMismatchError,
    StorageError,
)
from kvstore.filesystem import ClientName, Filesystem
from kvstore.layout import Layout
from kvstore.memory import Memory
from kvstore.namespace import Namespace
from kvstore.paths import (
    DOCUMENT,
    FAN_OUT_DIGITS,
    block_path,
    isolated_path,
    namespace_path,
)

logger = logging.getLogger(__name__)

OnMismatch = Literal["reject", "isolate"]


class BlockStore:
    """The blocks of one layout. Made by `BlockStore.open`.

    Attributes:
        url: the group's URL, which any Zarr tool can open.
        layout, config: what every block is, and what names the namespace.
        local: whether the blocks lie in a folder of this machine.
    """

    def __init__(self, filesystem: Filesystem, namespace: Namespace) -> None:
        """Records or compares the documents. Callers use `open`."""
        self.config = namespace.config
        self.layout = namespace.layout
        self.url = filesystem.place(namespace.path)
        self.local = filesystem.local
        self._filesystem = filesystem
        self._namespace = namespace
        self._format = ArrayFormat.of(namespace.layout, namespace.group)
        self._memory = Memory()
        namespace.claim()
        logger.info("opened %s with axes %s", self.url, self.layout.axes)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        config: Config,
        layout: Layout,
        *,
        group: int = 0,
        rank: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        client: ClientName = "obstore",
        on_mismatch: OnMismatch = "reject",
        timeout: float = 30.0,
        provenance: Mapping[str, str] | None = None,
    ) -> BlockStore:
        """Open a namespace, making it if it is not there. Lists nothing.

        Args:
            url: the root: any fsspec URL, or a bare local path.
            config: the fields that name the namespace.
            layout: what the engine's blocks are.
            group: index of the KV-cache group.
            rank: the rank whose blocks these are; 0 where one block holds every worker.
            storage_options: what the URL's fsspec filesystem takes.
            client: `obstore` or `fsspec`: what talks to S3 and Google Cloud Storage.
            on_mismatch: `reject` raises; `isolate` opens a namespace that only this
                layout uses, and says so in the log.
            timeout: seconds that one request to an object store may take.
            provenance: who writes, for people; recorded, never compared.

        Raises:
            InvalidInputError: an argument cannot be used.
            LayoutMismatchError: another layout or config is recorded there.
            FormatError: what is recorded there cannot be read.
            StorageError: the root cannot be read, written and deleted from.
        """
        if on_mismatch not in (choices := get_args(OnMismatch)):
            raise InvalidInputError(
                f"on_mismatch: expected one of {choices}, found {on_mismatch!r}"
            )
        require_proof(config, layout)
        filesystem = Filesystem(url, storage_options, client=client, timeout=timeout)
        filesystem.probe()

        def at(folder: str) -> BlockStore:
            namespace = Namespace(
                filesystem,
                folder,
                config,
                layout,
                rank=rank,
                group=group,
                provenance={"kvstore": __version__, **(provenance or {})},
            )
            return cls(filesystem, namespace)

        try:
            return at(namespace_path(config))
        except LayoutMismatchError as error:
            if on_mismatch == "reject":
                raise
            isolated = isolated_path(config, layout.digest)
            logger.warning(
                "%s Opening %s instead.",
                str(error).rpartition("\n")[0],
                filesystem.place(isolated),
            )
            return at(isolated)

    # ---- blocks

    def contains(self, key: bytes) -> bool:
        """Whether a block of this key and layout is there, in one request.

        A block that was found damaged is not there until it is repaired, or a minute has
        passed in which another engine may have repaired it. What is proved here is
        remembered, so that a `load` that follows need not prove it again.

        Raises:
            StorageError: storage could not tell. This is not "absent".
        """
        if self._memory.was_damaged_lately(key):
            return False
        try:
            crc = self._proof(key)
        except DamagedBlockError as error:
            self._note_damage(key, error)
            return False
        if crc is None:
            return False
        self._memory.remember(key, crc)
        return True

    def load(self, key: bytes, buffer: Any) -> bool:
        """Fill `buffer` with the block's bytes.

        Args:
            key: the engine's key.
            buffer: `layout.nbytes` writable bytes: anything with the buffer protocol, a
                NumPy array or a torch tensor, C-contiguous.

        Returns:
            True if the buffer holds the block, proved; False if the block is absent. Only
            after True do the buffer's bytes mean anything.

        Raises:
            DamagedBlockError: the block is there but did not hold its proof.
            StorageError: storage failed; nothing was deleted.
        """
        try:
            with writable(buffer, self.layout.nbytes) as payload:
                if not self._load(key, payload):
                    raise _Absent  # leaves a device's tensor as it is
        except DamagedBlockError as error:
            self._note_damage(key, error)
            raise
        except _Absent:
            return False
        return True

    def store(self, key: bytes, buffer: Any) -> bool:
        """Publish the block, unless a healthy one is there. The buffer is only read, and
        not again after the return.

        Returns:
            Whether anything was written.

        Raises:
            StorageError: storage failed. The block is as it was, or, where a damaged one
                was being replaced in an object store, still damaged.
            LayoutMismatchError: the folders were removed meanwhile, and another engine
                has recorded another layout there.
        """
        with readable(buffer, self.layout.nbytes) as payload:
            damaged = self._memory.is_damaged(key)
            try:
                if self._is_whole(key) if damaged else self._proof(key) is not None:
                    return False
                replace = False
            except DamagedBlockError as error:
                if not damaged:
                    self._note_damage(key, error)
                replace = True
            self._publish(key, payload, replace=replace)
        self._memory.note_stored(key, repaired=replace)
        return True

    def delete(self, key: bytes) -> None:
        """Remove the block, if it is there."""
        self._memory.forget(key)
        names = (self._format.chunk_name, DOCUMENT)
        self._filesystem.delete(self._block(key), names)

    def block_url(self, key: bytes) -> str:
        """The URL of the block's Zarr array."""
        return self._filesystem.place(self._block(key))

    def counts(self) -> dict[str, int]:
        """What happened since `open`: blocks `stored`, `repaired`, `loaded`, `damaged`."""
        return self._memory.counts()

    # ---- steps

    def _block(self, key: bytes) -> str:
        return f"{self._namespace.path}/{block_path(key)}"

    def _proof(self, key: bytes) -> int | None:
        """The checksum that the block's document vouches for; None if it is absent."""
        path = f"{self._block(key)}/{DOCUMENT}"
        document = self._filesystem.read(path, MAX_DOCUMENT_BYTES + 1)
        if document is None:
            return None
        place = self._filesystem.place(path)
        return self._format.proved_crc(document, key, place=place)

    def _is_whole(self, key: bytes) -> bool:
        """Whether another engine has repaired a block that was found damaged here.

        Raises:
            DamagedBlockError: it has not.
        """
        return self._load(key, memoryview(bytearray(self.layout.nbytes)))

    def _load(self, key: bytes, payload: memoryview) -> bool:
        proof = self._memory.recall(key)
        if proof is None:
            proof = self._proof(key)
        if proof is None:
            return False
        try:
            self._read_payload(key, payload, proof)
        except DamagedBlockError:
            # Another engine may have replaced or removed the block meanwhile.
            proof = self._proof(key)
            if proof is None:
                return False
            self._read_payload(key, payload, proof)
        self._memory.note_loaded(key)
        return True

    def _read_payload(self, key: bytes, payload: memoryview, proof: int) -> None:
        """Read the chunk, which must be the one that the document vouches for."""
        path = f"{self._block(key)}/{self._format.chunk_name}"
        place = self._filesystem.place(path)
        trailer = bytearray(TRAILER_BYTES)
        length = self._filesystem.read_into(path, [payload, memoryview(trailer)])
        if length is None:
            raise DamagedBlockError(place, "the document is there, the chunk is missing")
        expected = payload.nbytes + TRAILER_BYTES
        if length != expected:
            more = "more" if length > expected else str(length)
            raise DamagedBlockError(place, f"expected {expected} bytes, found {more}")
        crc = checksum(payload)
        recorded = int.from_bytes(trailer, "little")
        for name, vouched in (("the chunk", recorded), ("the document", proof)):
            if vouched != crc:
                raise DamagedBlockError(
                    place, f"crc32c: {name} says {vouched:08x}, the bytes give {crc:08x}"
                )

    def _publish(self, key: bytes, payload: memoryview, *, replace: bool) -> None:
        crc = checksum(payload)
        trailer = crc.to_bytes(TRAILER_BYTES, "little")
        files = (
            (self._format.chunk_name, (payload, trailer)),
            (DOCUMENT, (self._format.document(key, crc),)),
        )
        try:
            self._ensure_fan_out(key)
            self._filesystem.publish(self._block(key), files, replace=replace)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # Somebody removed the folders above; put the documents back, or fail.
            self._memory.forget_fan_outs()
            self._namespace.claim()
            self._ensure_fan_out(key)
            self._filesystem.publish(self._block(key), files, replace=replace)

    def _ensure_fan_out(self, key: bytes) -> None:
        fan_out = key.hex()[:FAN_OUT_DIGITS]
        if not self._memory.knows_fan_out(fan_out):
            self._filesystem.create(
                f"{self._namespace.path}/{fan_out}/{DOCUMENT}", group_document()
            )
            self._memory.note_fan_out(fan_out)

    def _note_damage(self, key: bytes, error: DamagedBlockError) -> None:
        self._memory.note_damage(key)
        logger.warning("damaged block, to be repaired by its next store: %s", error)


class _Absent(Exception):
    """Ends the filling of a buffer: there is no block."""
