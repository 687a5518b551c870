"""A conformance suite for any fsspec URL: does a backend keep what kvstore relies on?

Subclass `BlockStoreTests` in a pytest module and give it a fixture `root` that yields a
fresh, empty `Root`. Nothing in the suite asks the store under test what lies in storage:
it looks, and damages, through fsspec itself.

    class TestMyBackend(BlockStoreTests):
        @pytest.fixture
        def root(self) -> Root:
            return Root("myproto://bucket/fresh", {"option": 1})
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvstore.codecs import CODECS, Codec
from kvstore.errors import DamagedBlockError, InvalidInputError, LayoutMismatchError
from kvstore.layout import Layout
from kvstore.store import BlockStore
from kvstore.testing.roots import Root, sample_block, sample_config, sample_layout


def _flip(data: bytes, offset: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1
    return bytes(changed)


class BlockStoreTests:
    """What every backend must do. Needs a fixture `root`."""

    KEY = bytes(range(36))

    @pytest.fixture
    def root(self) -> Root:
        """A fresh, empty root; every subclass has its own."""
        raise NotImplementedError

    def chunk_url(self, store: BlockStore, key: bytes) -> str:
        """The URL of a block's chunk."""
        return f"{store.block_url(key)}/" + ".".join("c" + "0" * len(store.layout.axes))

    def loaded(self, store: BlockStore, key: bytes) -> bytes:
        """What a load gives, of a block that must be there."""
        buffer = bytearray(store.layout.nbytes)
        assert store.load(key, buffer)
        return bytes(buffer)

    def document_url(self, store: BlockStore, key: bytes) -> str:
        """The URL of a block's document."""
        return f"{store.block_url(key)}/zarr.json"

    def test_stores_and_loads_bit_exact(self, root: Root) -> None:
        store = root.open()
        block = sample_block(store.layout)
        assert not store.contains(self.KEY)
        assert not store.load(self.KEY, bytearray(store.layout.nbytes))
        assert store.store(self.KEY, block)
        again = root.open()
        assert again.contains(self.KEY)
        for reader in (again, root.open()):  # a load needs no contains
            assert self.loaded(reader, self.KEY) == block.tobytes()
        assert root.read(self.chunk_url(store, self.KEY))[:-4] == block.tobytes()

    def test_healthy_block_is_not_written_again(self, root: Root) -> None:
        store = root.open()
        first, second = sample_block(store.layout, 1), sample_block(store.layout, 2)
        assert store.store(self.KEY, first)
        assert not store.store(self.KEY, second)
        assert root.read(self.chunk_url(store, self.KEY))[:-4] == first.tobytes()

    @pytest.mark.parametrize("codec", CODECS)
    def test_blocks_of_every_codec_are_read(self, root: Root, codec: Codec) -> None:
        store = root.open(codec=codec)
        block = sample_block(store.layout, values=16)
        store.store(self.KEY, block)
        url = self.chunk_url(store, self.KEY)
        chunk = root.read(url)
        assert (len(chunk) < block.nbytes) == (codec != "none")
        for reader in [root.open(codec=other) for other in CODECS]:
            assert not reader.store(self.KEY, block)
            assert self.loaded(reader, self.KEY) == block.tobytes()
        root.write(url, chunk[:-5] + bytes([chunk[-5] ^ 1]) + chunk[-4:])
        with pytest.raises(DamagedBlockError, match="crc32c"):
            store.load(self.KEY, block.copy())
        assert store.store(self.KEY, block)

    def test_delete(self, root: Root) -> None:
        store = root.open()
        store.store(self.KEY, sample_block(store.layout))
        store.delete(self.KEY)
        assert not store.contains(self.KEY)
        assert not store.load(self.KEY, bytearray(store.layout.nbytes))
        store.delete(self.KEY)
        assert not any(self.KEY.hex() in name for name in root.files())
        assert store.store(self.KEY, sample_block(store.layout))

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            *[(partial(_flip, offset=n), "crc32c") for n in (0, 777, -5, -1)],
            (lambda d: d[:-1], "bytes"),
            (lambda d: d + b"\0", "bytes"),
            (lambda d: d[: len(d) // 2], "bytes"),
            (lambda d: b"", "bytes"),
        ],
        ids=["first", "mid", "last", "crc", "shorter", "longer", "half", "empty"],
    )
    def test_damaged_chunk_is_not_served_and_repaired(
        self, root: Root, change: Any, told: str
    ) -> None:
        store = root.open()
        block = sample_block(store.layout)
        store.store(self.KEY, block)
        url = self.chunk_url(store, self.KEY)
        root.write(url, change(root.read(url)))
        with pytest.raises(DamagedBlockError, match=told):
            store.load(self.KEY, bytearray(store.layout.nbytes))
        assert not store.contains(self.KEY)
        assert store.store(self.KEY, block)
        assert self.loaded(store, self.KEY) == block.tobytes()
        assert store.counts() == {"stored": 1, "repaired": 1, "loaded": 1, "damaged": 1}

    def test_missing_chunk_is_never_zeros(self, root: Root) -> None:
        store = root.open()
        store.store(self.KEY, sample_block(store.layout))
        root.remove(self.chunk_url(store, self.KEY))
        with pytest.raises(DamagedBlockError, match="missing"):
            store.load(self.KEY, bytearray(store.layout.nbytes))
        assert store.store(self.KEY, sample_block(store.layout))

    def test_chunk_without_document_is_absent(self, root: Root) -> None:
        store = root.open()
        store.store(self.KEY, sample_block(store.layout))
        root.remove(self.document_url(store, self.KEY))
        assert not store.contains(self.KEY)
        assert not store.load(self.KEY, bytearray(store.layout.nbytes))
        assert store.store(self.KEY, sample_block(store.layout))
        assert root.open().load(self.KEY, bytearray(store.layout.nbytes))

    @pytest.mark.parametrize("document", [b"", b"{", b"null", b"\xff\xfe", b"[" * 9999])
    def test_malformed_document_is_a_miss_and_repaired(
        self, root: Root, document: bytes
    ) -> None:
        store = root.open()
        block = sample_block(store.layout)
        store.store(self.KEY, block)
        root.write(self.document_url(store, self.KEY), document)
        assert not store.contains(self.KEY)
        assert store.store(self.KEY, block)
        assert root.open().load(self.KEY, bytearray(store.layout.nbytes))

    def test_another_blocks_bytes_are_not_served(self, root: Root) -> None:
        store = root.open()
        other = bytes(reversed(self.KEY))
        for seed, key in enumerate((self.KEY, other)):
            store.store(key, sample_block(store.layout, seed))
        for url in (self.chunk_url, self.document_url):
            root.write(url(store, self.KEY), root.read(url(store, other)))
        with pytest.raises(DamagedBlockError, match="key"):
            store.load(self.KEY, bytearray(store.layout.nbytes))

    def test_another_layouts_block_is_not_served(self, root: Root) -> None:
        v1 = sample_layout(runner="v1", axes=("head", "layer", "token", "value"))
        v1 = replace(v1, shape=(3, 2, 16, 8), kv_cache_layout="BHLNC")
        config = replace(sample_config(), parallel_agnostic=True)
        theirs, ours = root.open(v1, config=config), root.open()
        assert theirs.url != ours.url
        theirs.store(self.KEY, sample_block(v1))
        ours.store(self.KEY, sample_block(ours.layout))
        for url in (self.chunk_url, self.document_url):
            root.write(url(ours, self.KEY), root.read(url(theirs, self.KEY)))
        assert not ours.contains(self.KEY)
        with pytest.raises(DamagedBlockError):
            root.open().load(self.KEY, bytearray(ours.layout.nbytes))

    def test_another_layout_is_refused_with_every_difference(self, root: Root) -> None:
        root.open()
        other = sample_layout(
            axes=("layer", "token", "head", "value"),
            shape=(2, 16, 3, 8),
            kv_cache_layout="LBNHC",
            backend=None,
        )
        with pytest.raises(LayoutMismatchError) as caught:
            root.open(other)
        fields = {difference.field for difference in caught.value.differences}
        assert fields == {"axes", "shape", "kv_cache_layout", "backend"}
        assert "LBHNC" in str(caught.value)
        assert "LBNHC" in str(caught.value)
        isolated = root.open(other, on_mismatch="isolate")
        isolated.store(self.KEY, sample_block(other))
        assert not root.open().contains(self.KEY)
        assert root.open(other, on_mismatch="isolate").contains(self.KEY)

    def test_reader_writes_nothing(self, root: Root) -> None:
        early = root.open(read_only=True)
        assert not early.contains(self.KEY)
        assert root.files() == []
        writer, block = root.open(), sample_block(sample_layout())
        writer.store(self.KEY, block)
        before = root.files()
        for reader in (early, root.open(read_only=True)):
            assert reader.contains(self.KEY)
            assert self.loaded(reader, self.KEY) == block.tobytes()
            with pytest.raises(InvalidInputError, match="read_only"):
                reader.store(self.KEY, block)
            with pytest.raises(InvalidInputError, match="read_only"):
                reader.delete(self.KEY)
        with pytest.raises(LayoutMismatchError):
            root.open(sample_layout(backend=None), read_only=True)
        assert root.files() == before

    def test_writers_of_one_key_all_succeed(self, root: Root) -> None:
        stores = [root.open() for _ in range(8)]
        block = sample_block(stores[0].layout)

        def write(store: BlockStore) -> None:
            for n in range(5):
                store.store(bytes([n]) * 36, block)

        with ThreadPoolExecutor(len(stores)) as pool:
            list(pool.map(write, stores))  # raises what a writer has raised
        for n in range(5):
            assert self.loaded(root.open(), bytes([n]) * 36) == block.tobytes()

    def test_repair_by_another_engine_is_kept(self, root: Root) -> None:
        ours, theirs = root.open(), root.open()
        block = sample_block(ours.layout, 1)
        ours.store(self.KEY, block)
        url = self.chunk_url(ours, self.KEY)
        root.write(url, root.read(url)[:-1] + b"!")
        for store in (ours, theirs):
            with pytest.raises(DamagedBlockError):
                store.load(self.KEY, bytearray(block.nbytes))
        assert theirs.store(self.KEY, block)
        assert not ours.store(self.KEY, sample_block(ours.layout, 2))
        assert root.read(url)[:-4] == block.tobytes()
        assert ours.contains(self.KEY)

    @pytest.mark.parametrize("nbytes", [2, 6051, 65_536, 3_098_112])
    def test_any_size(self, root: Root, nbytes: int) -> None:
        layout = Layout.of_bytes(nbytes, dtype="bfloat16", reason="a test of sizes")
        store = root.open(layout)
        block = sample_block(layout)
        store.store(self.KEY, block)
        assert self.loaded(store, self.KEY) == block.tobytes()

    def test_keys_that_look_alike_are_apart(self, root: Root) -> None:
        store = root.open()
        base = os.urandom(36)
        keys = [base, base[:-1] + bytes([base[-1] ^ 1]), bytes([base[0] ^ 1]) + base[1:]]
        for seed, key in enumerate(keys):
            store.store(key, sample_block(store.layout, seed))
        for seed, key in enumerate(keys):
            assert self.loaded(store, key) == sample_block(store.layout, seed).tobytes()
