"""`BlockStore`: the library's front door. One rank's blocks of one KV group under a URL.

    open      compare what is recorded with what the engine has, or record it
    contains  is there a block that is this key's, in this layout?
    load      fill a buffer with a block's bytes, which are then proved
    store     publish a block, whole or not at all
    delete    remove a block

Locking: `memory` is guarded by its own lock; everything else is fixed after `open`, so
every method may be called from any thread, and from any number of processes at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from kvstore.__about__ import __version__
from kvstore.blocks import Blocks, Stored
from kvstore.buffers import readable, writable
from kvstore.codecs import Codec, parse_codec
from kvstore.config import Config, require_proof
from kvstore.conversion import only_reordered
from kvstore.converted import ConvertedBlocks
from kvstore.errors import DamagedBlockError, InvalidInputError, LayoutMismatchError
from kvstore.filesystem import ClientName, Filesystem
from kvstore.layout import Layout
from kvstore.memory import Memory
from kvstore.namespace import Namespace
from kvstore.paths import isolated_path, namespace_path, require_key

logger = logging.getLogger(__name__)

OnMismatch = Literal["reject", "isolate", "convert"]


class BlockStore:
    """The blocks of one layout. Made by `BlockStore.open`.

    Attributes:
        url: the group's URL, which any Zarr tool can open.
        path: the same, relative to the root.
        layout, config: what every block is to the engine, and what names the namespace.
        local: whether the blocks lie in a folder of this machine.
        read_only: whether `store` and `delete` are refused.
        shared: whether other processes see the same blocks under this URL.
        blocks, memory: the steps on storage, and what this process has learnt: for whoever
            runs the steps elsewhere, as vLLM's tier does.
    """

    def __init__(
        self, filesystem: Filesystem, namespace: Namespace, codec: Codec, layout: Layout
    ) -> None:
        """Records or compares the documents. Callers use `open`."""
        namespace.claim()
        self.config = namespace.config
        self.layout = layout
        self.path = namespace.path
        self.url = filesystem.place(self.path)
        self.local = filesystem.local
        self.read_only = filesystem.read_only
        self.shared = filesystem.shared
        self.blocks = (
            Blocks(filesystem, namespace, codec)
            if layout == namespace.layout
            else ConvertedBlocks(filesystem, namespace, codec, layout)
        )
        self.memory = Memory()
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
        codec: Codec = "none",
        timeout: float = 30.0,
        fsync: bool = False,
        read_only: bool = False,
        provenance: Mapping[str, str] | None = None,
    ) -> BlockStore:
        """Open a namespace, making it if it is not there. Lists nothing.

        With `read_only` nothing is made nor written, here or later. Config and layout are
        compared where they are recorded; where they are not, the store opens, and each
        block still proves itself.

        Args:
            url: the root: any fsspec URL, or a bare local path.
            config: the fields that name the namespace.
            layout: what the engine's blocks are.
            group: index of the KV-cache group.
            rank: the rank whose blocks these are; 0 where one block holds every worker.
            storage_options: what the URL's fsspec filesystem takes.
            client: `obstore` or `fsspec`: what talks to S3 and Google Cloud Storage.
            on_mismatch: `reject` raises; `isolate` opens a namespace that only this
                layout uses, and says so in the log; `convert` puts each block into the
                order of `layout` where nothing but the order of the axes differs, and
                raises otherwise.
            codec: how new blocks are written; those of every codec are read.
            timeout: seconds that one request to an object store may take.
            fsync: whether a block in a local folder survives a power failure once it is
                stored. Otherwise it may be found damaged after one, and is never served.
            read_only: for those who only load: `store` and `delete` are refused.
            provenance: who writes, for people; recorded, never compared.

        Raises:
            InvalidInputError: an argument cannot be used.
            LayoutMismatchError: another layout or config is recorded there.
            FormatError: what is recorded there cannot be read.
            StorageError: the root cannot be read or, but with `read_only`, written and
                deleted from.
        """
        if on_mismatch not in (choices := get_args(OnMismatch)):
            raise InvalidInputError(
                f"on_mismatch: expected one of {choices}, found {on_mismatch!r}"
            )
        codec = parse_codec(codec)
        _require(config, Config, "config")
        _require(layout, Layout, "layout")
        _require(provenance or {}, Mapping, "provenance")
        for name, said in (provenance or {}).items():
            _require(name, str, "provenance")
            _require(said, str, f"provenance.{name}")
        require_proof(config, layout)
        filesystem = Filesystem(
            url,
            storage_options,
            client=client,
            timeout=timeout,
            fsync=fsync,
            read_only=read_only,
        )
        filesystem.probe()

        def at(folder: str, stored: Layout) -> Namespace:
            return Namespace(
                filesystem,
                folder,
                config,
                stored,
                rank=rank,
                group=group,
                provenance={"kvstore": __version__, **(provenance or {})},
            )

        namespace = at(namespace_path(config), layout)
        try:
            return cls(filesystem, namespace, codec, layout)
        except LayoutMismatchError as error:
            if on_mismatch == "reject":
                raise
            if on_mismatch == "convert":
                stored = namespace.recorded_layout()
                if stored is None or not only_reordered(layout, stored):
                    raise
                require_proof(config, stored)
                logger.warning(
                    "blocks at %s have their axes in the order %s, and are converted to %s",
                    filesystem.place(namespace.path),
                    stored.axes,
                    layout.axes,
                )
                return cls(filesystem, at(namespace_path(config), stored), codec, layout)
            isolated = isolated_path(config, layout.digest)
            logger.warning(
                "%s Opening %s instead.",
                str(error).rpartition("\n")[0],
                filesystem.place(isolated),
            )
            return cls(filesystem, at(isolated, layout), codec, layout)

    # ---- blocks

    def contains(self, key: bytes) -> bool:
        """Whether a block of this key and layout is there, in one request.

        A block that was found damaged is not there until it is repaired, or a minute has
        passed in which another engine may have repaired it. What is proved here is
        remembered, so that a `load` that follows need not prove it again.

        Raises:
            StorageError: storage could not tell. This is not "absent".
        """
        require_key(key)
        if self.memory.was_damaged_lately(key):
            return False
        try:
            proof = self.blocks.prove(key)
        except DamagedBlockError as error:
            self.note_damage(key, str(error))
            return False
        if proof is None:
            self.memory.forget(key)
            return False
        self.memory.remember(key, proof)
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
        require_key(key)
        try:
            with writable(buffer, self.layout.nbytes) as payload:
                proof = self.blocks.load(key, payload, self.memory.recall(key))
                if proof is None:
                    raise _Absent  # leaves a device's tensor as it is
        except DamagedBlockError as error:
            self.note_damage(key, str(error))
            raise
        except _Absent:
            self.memory.forget(key)
            return False
        self.memory.remember(key, proof)
        self.memory.note_loaded(key)
        return True

    def store(self, key: bytes, buffer: Any) -> bool:
        """Publish the block, unless a healthy one is there. The buffer is only read, and
        not again after the return.

        Returns:
            Whether anything was written.

        Raises:
            InvalidInputError: the buffer is not one block's, or the store is `read_only`.
            StorageError: storage failed. The block is as it was, or, where a damaged one
                was being replaced in an object store, still damaged.
            LayoutMismatchError: the folders were removed meanwhile, and another engine
                has recorded another layout there.
        """
        require_key(key)
        with readable(buffer, self.layout.nbytes) as payload:
            suspect = self.memory.is_damaged(key)
            stored, _ = self.blocks.store(key, payload, suspect=suspect)
        self.memory.note_stored(key, stored)
        return stored is not Stored.KEPT

    def delete(self, key: bytes) -> None:
        """Remove the block, if it is there; refused where `read_only`."""
        require_key(key)
        self.memory.forget(key)
        self.blocks.delete(key)

    def block_url(self, key: bytes) -> str:
        """The URL of the block's Zarr array."""
        return self.blocks.url(key)

    def counts(self) -> dict[str, int]:
        """What happened since `open`: blocks `stored`, `repaired`, `loaded`, `damaged`."""
        return self.memory.counts()

    def note_damage(self, key: bytes, problem: str) -> None:
        """Remember that a block did not hold its proof, and say so."""
        self.memory.note_damage(key)
        logger.warning("damaged block, to be repaired by its next store: %s", problem)


def _require(value: object, kind: type[Any], name: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInputError(
            f"{name}: expected {kind.__name__}, found {type(value).__name__}"
        )


class _Absent(Exception):
    """Ends the filling of a buffer: there is no block."""
