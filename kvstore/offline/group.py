"""`StoredGroup`: one KV group below a root, by what its documents record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.arrays import MAX_DOCUMENT_BYTES, Proof, recorded_layout, split_proof
from kvstore.blocks import Blocks
from kvstore.codecs import Codec
from kvstore.config import Config
from kvstore.errors import DamagedBlockError, FormatError, StorageError
from kvstore.filesystem import Filesystem
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.offline.block import Block
from kvstore.offline.shares import WIDTH, Share
from kvstore.paths import DOCUMENT, FAN_OUT, block_path, group_path
from kvstore.records import Record
from kvstore.survey import FAN_OUTS, StoredBlock, stored_blocks
from kvstore.upkeep import Upkeep

LARGE = 1 << 28
"""Bytes of a block from which its chunk's length is looked at before memory is taken."""

MAX_BLOCK_BYTES = 1 << 34
"""A recorded layout of larger blocks is not believed: nobody has memory for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts(Record):
    """What there is to say of one block.

    Attributes:
        key: in hex.
        url: of its Zarr array.
        nbytes: of all its files; 0 where there is none.
        used: when it was last used, in seconds since the epoch by the storage's clock.
        codec, crc32c: how the chunk holds the payload, and the payload's checksum in hex.
            None unless the whole block holds its proof.
        problem: what is wrong with it; None if it is whole.
    """

    key: str
    url: str
    nbytes: int
    used: float | None
    codec: str | None
    crc32c: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The blocks of one layout.

    Threads: every method may be called from any thread. Pickles, credentials included.

    Attributes:
        filesystem: the root's.
        namespace: the namespace's folder.
        rank, group: numbers.
        config: of the namespace.
        layout: of the blocks.
    """

    filesystem: Upkeep
    namespace: str
    rank: int
    group: int
    config: Config
    layout: Layout

    @property
    def path(self) -> str:
        """The group's folder, relative to the root."""
        return group_path(self.namespace, self.rank, self.group)

    @property
    def url(self) -> str:
        """The URL of the group, which any Zarr tool can open."""
        return self.filesystem.place(self.path)

    def blocks(self, first: int = 0, stop: int = FAN_OUTS) -> Iterator[StoredBlock]:
        """The blocks as they are listed, in the order of their keys; none is read.

        Args:
            first: a fan-out, from 0.
            stop: the fan-out behind the last, up to 4,096.

        Raises:
            StorageError: at any step. A listing that ends without it is whole.
        """
        return stored_blocks(self.filesystem, self.path, first, stop)

    def shares(self) -> list[Share]:
        """The fan-outs that are there; see `shares_of`."""
        return shares_of(self.filesystem, self.path)

    def load(self, key: bytes) -> bytes | None:
        """A block's bytes, proved; None if it is absent.

        Raises:
            DamagedBlockError: the block does not hold its proof.
            StorageError: storage failed.
        """
        loaded = self._load(key)
        return None if loaded is None else bytes(loaded[1])

    def open(self, key: bytes) -> Block | None:
        """A block to look at, read whole and proved; None if it is absent.

        Raises:
            DamagedBlockError: the block does not hold its proof.
            StorageError: storage failed.
        """
        payload = self.load(key)
        if payload is None:
            return None
        return Block(
            url=self.filesystem.place(f"{self.path}/{block_path(key)}"),
            key=key,
            group=self.group,
            layout=self.layout,
            payload=payload,
        )

    def steps(self, codec: Codec = "none") -> Blocks:
        """The steps on single blocks; new ones are written with `codec`.

        For whoever takes many steps: it is not made anew for each.
        """
        return Blocks(self.filesystem, self.below(self.filesystem), codec)

    def below(self, filesystem: Filesystem) -> Namespace:
        """The same namespace and group below any root. Touches nothing."""
        return Namespace(
            filesystem,
            self.namespace,
            self.config,
            self.layout,
            rank=self.rank,
            group=self.group,
            provenance={},
        )

    def facts(self, key: bytes) -> BlockFacts:
        """What there is to say of one block, which is read whole. Raises `StorageError`."""
        path = f"{self.path}/{block_path(key)}"
        files = list(self.filesystem.files(path))
        proof, problem = self._proved(key)
        crc, codec = (None, None) if proof is None else split_proof(proof)
        return BlockFacts(
            key=key.hex(),
            url=self.filesystem.place(path),
            nbytes=sum(file.nbytes for file in files),
            used=max((file.modified for file in files), default=None),
            codec=codec,
            crc32c=None if crc is None else f"{crc:08x}",
            problem=problem,
        )

    def _proved(self, key: bytes) -> tuple[Proof | None, str | None]:
        try:
            loaded = self._load(key)
        except DamagedBlockError as error:
            return None, str(error)
        return (None, "absent") if loaded is None else (loaded[0], None)

    def _load(self, key: bytes) -> tuple[Proof, memoryview] | None:
        steps = self.steps()
        if (proof := steps.prove(key)) is None:
            return None
        block = f"{self.path}/{block_path(key)}"
        payload = memoryview(room(self.filesystem, block, self.layout, proof))
        held = steps.load(key, payload, proof)
        return None if held is None else (held, payload)


def room(filesystem: Upkeep, block: str, layout: Layout, proof: Proof) -> bytearray:
    """Memory for a block that is there. A recorded layout may be of any length: memory for
    a large one is taken only if the chunk is long enough to fill it.

    Args:
        filesystem: the root.
        block: the block's folder.
        layout: which the group records.
        proof: what the block's document vouches for.

    Raises:
        DamagedBlockError: the chunk is too short.
        StorageError: storage failed, or there is no such memory.
    """
    nbytes, (_, codec) = layout.nbytes, split_proof(proof)
    if nbytes > LARGE and codec == "none":
        listed = sum(file.nbytes for file in filesystem.files(block))
        if listed < nbytes:
            problem = f"length: expected a chunk of {nbytes} bytes, found {listed} in all"
            raise DamagedBlockError(filesystem.place(block), problem, "wrong-length")
    try:
        return bytearray(nbytes)
    except MemoryError as error:
        cause = f"there is no memory of {nbytes} bytes"
        raise StorageError(filesystem.place(block), "load", cause) from error


def shares_of(filesystem: Upkeep, group: str) -> list[Share]:
    """A group's fan-outs that are there, in shares that begin at the same places whatever
    is there.
    """
    names = filesystem.folders(group)
    starts = {int(name, 16) // WIDTH * WIDTH for name in names if FAN_OUT.fullmatch(name)}
    return [Share(group, start, start + WIDTH) for start in sorted(starts)]


def read_document(filesystem: Filesystem, folder: str) -> bytes | None:
    """A group's document; None if there is none. Raises `FormatError`, `StorageError`."""
    return filesystem.read(f"{folder}/{DOCUMENT}", MAX_DOCUMENT_BYTES + 1)


def read_layout(filesystem: Filesystem, folder: str) -> Layout | None:
    """The layout that a KV group records; None if it has no document.

    Raises:
        FormatError: it cannot be read.
        StorageError: storage failed.
    """
    document = read_document(filesystem, folder)
    if document is None:
        return None
    place = filesystem.place(f"{folder}/{DOCUMENT}")
    layout = recorded_layout(document, place=place)
    if problem := too_large(layout):
        raise FormatError(place, problem)
    return layout


def too_large(layout: Layout) -> str | None:
    """Why a recorded layout is not believed; None if its blocks may be so large."""
    if layout.nbytes <= MAX_BLOCK_BYTES:
        return None
    return (
        f"layout: expected blocks of at most {MAX_BLOCK_BYTES} bytes, found {layout.nbytes}"
    )
