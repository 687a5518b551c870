"""Compressed blocks: what is written, what is accepted, and what hostile bytes can do.

Run this file as a script to write the golden trees anew; they may change only where the
parameters of a codec do, and then the old ones stay readable.
"""

import contextlib
import json
import shutil
import struct
import tempfile
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc, zstd
from strategies import json_values, unhurried
from test_format import tree

from kvstore import BlockStore, DamagedBlockError, InvalidInputError, Layout, codecs
from kvstore.arrays import ArrayFormat, split_proof
from kvstore.codecs import (
    CODECS,
    TRAILER_BYTES,
    Codec,
    checksum,
    codec_of,
    decode_chunk,
    encode_chunk,
    parse_codec,
    zarr_codecs,
)
from kvstore.testing import Root, sample_block, sample_config, sample_layout

GOLDEN = Path(__file__).parent / "data" / "v1-codecs"
KEY = bytes.fromhex("a3f09c") + bytes(range(29)) + bytes(4)
PLACE = "memory://root/block/c.0.0.0.0"
COMPRESSED: tuple[Codec, ...] = ("zstd", "blosc")


def chunk_of(codec: Codec, payload: bytes, itemsize: int = 2) -> tuple[bytes, Codec]:
    view = memoryview(payload)
    parts, used = encode_chunk(view, checksum(view), codec, itemsize)
    return b"".join(parts), used


def sealed(encoded: bytes) -> bytes:
    """A chunk whose own checksum holds, whatever it is."""
    crc = checksum(memoryview(encoded))
    return encoded + crc.to_bytes(TRAILER_BYTES, "little")


def decoded(chunk: bytes | None, nbytes: int, codec: Codec) -> bytes:
    payload = bytearray(nbytes)
    decode_chunk(chunk, memoryview(payload), codec, place=PLACE)
    return bytes(payload)


def smooth(nbytes: int) -> bytes:
    """Bytes that every codec makes fewer."""
    return bytes(n // 7 % 16 for n in range(nbytes))


# ---- a payload and its chunk


@unhurried
@given(
    st.sampled_from(CODECS),
    st.binary(min_size=1, max_size=600)
    | st.builds(lambda part, n: part * n, st.binary(min_size=1, max_size=9), st.just(400)),
    st.sampled_from([1, 2, 4]),
)
def test_any_payload_comes_back(codec: Codec, payload: bytes, itemsize: int) -> None:
    chunk, used = chunk_of(codec, payload, itemsize)
    assert used in (codec, "none")
    assert checksum(memoryview(chunk)[:-4]) == int.from_bytes(chunk[-4:], "little")
    if used == "none":
        assert chunk[:-4] == payload
    else:
        assert len(chunk) < len(payload) + TRAILER_BYTES
        assert decoded(chunk, len(payload), used) == payload


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("nbytes", [600, 6051, 1 << 20, 3_098_112])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_smooth_payload_gets_smaller(codec: Codec, nbytes: int, itemsize: int) -> None:
    payload = smooth(nbytes)
    chunk, used = chunk_of(codec, payload, itemsize)
    assert used == codec
    assert len(chunk) < nbytes * 3 // 4
    assert decoded(chunk, nbytes, codec) == payload


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("nbytes", [1, 2, 16, 6144, 1 << 20])
def test_noise_is_written_without_a_codec(codec: Codec, nbytes: int) -> None:
    payload = np.random.default_rng(0).bytes(nbytes)
    assert chunk_of(codec, payload) == (sealed(payload), "none")


def test_a_payload_too_large_for_blosc_is_written_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blosc, "MAX_BUFFERSIZE", 4095)
    assert chunk_of("blosc", bytes(4096)) == (sealed(bytes(4096)), "none")
    assert chunk_of("blosc", bytes(4095))[1] == "blosc"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_other_threads_run_meanwhile(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that held the GIL would leave a counter where it was."""
    noise = np.random.default_rng(0).integers(0, 16, 32 << 20, dtype=np.uint8)
    payload = noise.tobytes()
    monkeypatch.setattr(codecs, "checksum", lambda data: 0)  # it lets others run as well
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        chunk, _ = chunk_of(codec, payload)
        while_encoding, turns = turns, 0
        decode_chunk(chunk, memoryview(bytearray(len(payload))), codec, place=PLACE)
        while_decoding = turns
    finally:
        over.set()
        counter.join()
    assert while_encoding > 3
    assert while_decoding > 3


@pytest.mark.parametrize("name", ["lz4", "ZSTD", "", "gzip", None, 1, True, ["zstd"]])
def test_an_unknown_codec_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"codec: expected one of .*'blosc'"):
        parse_codec(name)
    with pytest.raises(InvalidInputError, match="codec: expected one of"):
        Root(str(tmp_path)).open(codec=name)
    assert not list(tmp_path.iterdir())


# ---- hostile chunks


def zstd_frame(descriptor: int, *header: int) -> bytes:
    return bytes((0x28, 0xB5, 0x2F, 0xFD, descriptor, *header)).ljust(40, b"\0")


def blosc_header(encoded: bytes, **changes: int) -> bytes:
    names = ("version", "inner", "flags", "typesize", "nbytes", "blocksize", "cbytes")
    fields = dict(zip(names, struct.unpack_from("<BBBBIII", encoded), strict=True))
    assert changes.keys() <= fields.keys()
    return struct.pack("<BBBBIII", *(fields | changes).values()) + encoded[16:]


N = 4096
SMOOTH_ZSTD, SMOOTH_BLOSC = (chunk_of(codec, smooth(N))[0][:-4] for codec in COMPRESSED)
BOMB = bytes(1 << 28)
FOREIGN_ZSTD = [
    pytest.param(b"\0", "frame", id="a-byte"),
    pytest.param(b"\x28\xb5\x2f\xfd\x60", "frame", id="no-room-for-a-length"),
    pytest.param(smooth(N - 1), "frame", id="no-frame"),
    pytest.param(SMOOTH_BLOSC, "frame", id="blosc"),
    pytest.param(b"\x50\x2a\x4d\x18" + bytes(40), "frame", id="skippable-frame"),
    pytest.param(zstd_frame(0x00, 0), "length", id="says-no-length"),
    pytest.param(zstd_frame(0xA0, *bytes(4)), "found 0", id="length-0"),
    pytest.param(zstd_frame(0xE0, *b"\xff" * 8), "found 184467", id="length-2-64"),
    pytest.param(zstd_frame(0xC3)[:9], "length", id="cut-in-the-length"),
    pytest.param(zstd_frame(0x60, 0, 15), "decompression", id="no-blocks"),
    pytest.param(SMOOTH_ZSTD[:-1], "decompression", id="cut"),
    pytest.param(SMOOTH_ZSTD + b"\0", "decompression", id="a-byte-more"),
    pytest.param(SMOOTH_ZSTD * 2, "too small|decompression", id="two-frames"),
    pytest.param(bytes(zstd.compress(smooth(N - 1))), f"found {N - 1}", id="short"),
    pytest.param(bytes(zstd.compress(smooth(N + 1))), f"found {N + 1}", id="long"),
]
FOREIGN_BLOSC = [
    pytest.param(b"\2", "header", id="a-byte"),
    pytest.param(SMOOTH_BLOSC[:15], "header", id="no-header"),
    pytest.param(smooth(N - 1), "format 2", id="no-blosc"),
    pytest.param(SMOOTH_ZSTD, "format 2", id="zstd"),
    pytest.param(blosc_header(SMOOTH_BLOSC, version=3), "format 2", id="version"),
    pytest.param(
        bytes(blosc.compress(smooth(N), b"zlib", 5, 0)), "format 2", id="another-compressor"
    ),
    pytest.param(SMOOTH_BLOSC[:-1], "encoded bytes", id="cut"),
    pytest.param(SMOOTH_BLOSC + b"\0", "encoded bytes", id="a-byte-more"),
    pytest.param(
        blosc_header(SMOOTH_BLOSC, cbytes=1 << 31), "encoded bytes", id="encoded-length"
    ),
    pytest.param(
        blosc_header(SMOOTH_BLOSC, nbytes=(1 << 32) - 1), "decoded", id="length-4-GiB"
    ),
    pytest.param(blosc_header(SMOOTH_BLOSC, blocksize=0), "values", id="no-blocks"),
    pytest.param(blosc_header(SMOOTH_BLOSC, typesize=0), "values", id="no-values"),
    pytest.param(blosc_header(SMOOTH_BLOSC, typesize=7), "values", id="odd-values"),
    pytest.param(
        blosc_header(SMOOTH_BLOSC, blocksize=(1 << 31) - 2), "decompression", id="huge"
    ),
    pytest.param(
        blosc_header(SMOOTH_BLOSC, blocksize=2), "decompression", id="many-blocks"
    ),
    pytest.param(
        bytes(blosc.compress(smooth(N - 2), b"lz4", 5, 2)), f"found {N - 2}", id="short"
    ),
    pytest.param(bytes(blosc.compress(BOMB, b"lz4", 9, 2))[: N - 1], "bytes", id="bomb"),
]


@pytest.mark.parametrize(
    ("codec", "encoded", "problem"),
    [
        pytest.param(codec, *case.values, id=f"{codec}-{case.id}")
        for codec, cases in (("zstd", FOREIGN_ZSTD), ("blosc", FOREIGN_BLOSC))
        for case in cases
    ],
)
def test_foreign_bytes_under_a_checksum_that_holds(
    codec: Codec, encoded: bytes, problem: str
) -> None:
    with pytest.raises(DamagedBlockError, match=problem) as refused:
        decoded(sealed(encoded), N, codec)
    assert refused.value.place == PLACE


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("length", [None, 0, 1, 4, N + 4, N + 5, 1 << 20])
def test_a_chunk_of_another_length(codec: Codec, length: int | None) -> None:
    chunk = None if length is None else bytes(length)
    with pytest.raises(DamagedBlockError, match="missing" if length is None else "bytes"):
        decoded(chunk, N, codec)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_bomb_takes_no_memory(codec: Codec) -> None:
    """256 MiB of zeros in a chunk that is no longer than the payload may be."""
    encoded = {
        "zstd": lambda: bytes(zstd.compress(BOMB, 19)),
        "blosc": lambda: bytes(blosc.compress(BOMB, b"zstd", 9, 0, 1 << 28)),
    }[codec]()
    nbytes = len(encoded) + 1
    tracemalloc.start()
    try:
        with pytest.raises(DamagedBlockError, match=f"found {len(BOMB)}"):
            decoded(sealed(encoded), nbytes, codec)
        assert tracemalloc.get_traced_memory()[1] < 4 * nbytes + 65_536
    finally:
        tracemalloc.stop()


@unhurried
@given(st.sampled_from(COMPRESSED), st.data())
def test_changed_bytes_under_a_checksum_that_holds(codec: Codec, data: Any) -> None:
    """Whatever a decoder makes of them, it ends, and fills no more than the payload."""
    encoded = bytearray(SMOOTH_ZSTD if codec == "zstd" else SMOOTH_BLOSC)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(encoded) - 1, 64)))
        encoded[place] = data.draw(st.integers(0, 255))
    around = bytearray(b"\xaa" * (N + 128))
    payload = memoryview(around)[64 : 64 + N]
    with contextlib.suppress(DamagedBlockError):
        decode_chunk(sealed(bytes(encoded)), payload, codec, place=PLACE)
    assert around[:64] == around[-64:] == b"\xaa" * 64


# ---- documents


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_what_is_written_is_known(codec: Codec, itemsize: int) -> None:
    assert codec_of(zarr_codecs(codec, itemsize)) == codec


def named(name: object, **configuration: object) -> list[Any]:
    return [{"name": name, "configuration": configuration}]


BLOSC: dict[str, Any] = {
    "typesize": 2,
    "cname": "lz4",
    "clevel": 5,
    "shuffle": "bitshuffle",
    "blocksize": 0,
}


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        ("zstd", named("zstd", level=22, checksum=True)),
        ("zstd", named("zstd", level=-131_072, checksum=False)),
        ("blosc", named("blosc", **BLOSC | {"cname": "zstd", "clevel": 0})),
        ("blosc", named("blosc", **BLOSC | {"shuffle": "noshuffle", "typesize": 255})),
        ("blosc", named("blosc", **BLOSC | {"shuffle": "shuffle", "blocksize": 1 << 20})),
    ],
)
def test_other_parameters_are_read(codec: Codec, found: list[Any]) -> None:
    assert codec_of(found) == codec
    assert proof_of(found) == codec


@pytest.mark.parametrize(
    "found",
    [
        named("gzip", level=1),
        named("none"),
        named(["zstd"], level=1, checksum=False),
        named("zstd"),
        named("zstd", level=1),
        named("zstd", level=23, checksum=False),
        named("zstd", level=True, checksum=False),
        named("zstd", level=1.0, checksum=False),
        named("zstd", level=1, checksum=0),
        named("zstd", level=1, checksum=False, window=31),
        named("blosc", **BLOSC | {"cname": "zlib"}),
        named("blosc", **BLOSC | {"cname": ["lz4"]}),
        named("blosc", **BLOSC | {"typesize": 0}),
        named("blosc", **BLOSC | {"typesize": "2"}),
        named("blosc", **BLOSC | {"clevel": 10}),
        named("blosc", **BLOSC | {"shuffle": 2}),
        named("blosc", **BLOSC | {"blocksize": -1}),
        named("blosc", **{k: v for k, v in BLOSC.items() if k != "typesize"}),
        named("zstd", level=1, checksum=False) * 2,
        [*named("zstd", level=1, checksum=False), *named("blosc", **BLOSC)],
        [named("zstd", level=1, checksum=False)[0] | {"must_understand": False}],
        [{"name": "zstd"}],
        [{"name": "zstd", "configuration": None}],
        ["zstd"],
        [None],
        [{"name": "crc32c"}],
    ],
    ids=lambda found: json.dumps(found)[:60],
)
def test_another_pipeline_is_a_damaged_block(found: list[Any]) -> None:
    assert codec_of(found) is None
    with pytest.raises(DamagedBlockError, match="codecs"):
        proof_of(found)


@unhurried
@given(st.lists(json_values, max_size=3))
def test_any_json_for_a_pipeline(found: list[Any]) -> None:
    assert codec_of(found) == (None if found else "none")


def proof_of(found: list[Any]) -> str:
    """What a block's document says with `found` between `bytes` and `crc32c`."""
    array = ArrayFormat.of(sample_layout(), 0)
    document = json.loads(array.document(KEY, 7))
    document["codecs"][1:1] = found
    proof = array.proved(json.dumps(document).encode(), KEY, place=PLACE)
    crc, codec = split_proof(proof)
    assert crc == 7
    return codec


@pytest.mark.parametrize("codec", CODECS)
def test_documents_of_every_codec_prove_themselves(codec: Codec) -> None:
    array = ArrayFormat.of(sample_layout(), 0)
    document = array.document(KEY, 7, codec)
    assert split_proof(array.proved(document, KEY, place=PLACE)) == (7, codec)
    respelt = json.dumps(json.loads(document), sort_keys=True).encode()
    assert split_proof(array.proved(respelt, KEY, place=PLACE)) == (7, codec)
    for other in (document.replace(b"float16", b"bfloat16"), document + b"}"):
        with pytest.raises(DamagedBlockError):
            array.proved(other, KEY, place=PLACE)


@pytest.mark.parametrize(
    ("layout", "typesize"),
    [
        (sample_layout(), 2),
        (sample_layout(dtype="float32", page_bytes=1536), 4),
        (sample_layout(dtype="float8_e5m2", page_bytes=384), 1),
        (Layout.of_bytes(48, dtype="bfloat16", reason="a hybrid model"), 2),
        (Layout.of_bytes(48, dtype="int4", reason="quantised"), 1),
    ],
)
def test_bits_are_shuffled_by_the_engines_values(layout: Layout, typesize: int) -> None:
    document = json.loads(ArrayFormat.of(layout, 0).document(KEY, 7, "blosc"))
    assert document["codecs"][1]["configuration"]["typesize"] == typesize


# ---- blocks in storage


def files_of(root: Root, store: BlockStore) -> tuple[str, str]:
    chunk = "c" + ".0" * len(store.layout.axes)
    return f"{store.block_url(KEY)}/{chunk}", f"{store.block_url(KEY)}/zarr.json"


def test_a_namespace_of_all_codecs(root: Root) -> None:
    """Written by engines of different settings, read by each of them."""
    stores = [root.open(codec=codec) for codec in CODECS]
    keys = {}
    for seed in range(12):
        store = stores[seed % 3]
        values = 256 if seed > 8 else 16  # the last three are noise
        block = sample_block(store.layout, seed, values)
        keys[bytes([seed]) * 36] = block.tobytes()
        assert store.store(bytes([seed]) * 36, block)
    for store in (*stores, *(root.open(codec=codec) for codec in CODECS)):
        for key, payload in keys.items():
            loaded = bytearray(len(payload))
            assert store.contains(key)
            assert store.load(key, loaded)
            assert loaded == payload
            assert not store.store(key, payload)


DAMAGES: dict[str, Any] = {
    "first": lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:],
    "mid": lambda chunk: chunk[:99] + bytes([chunk[99] ^ 128]) + chunk[100:],
    "last": lambda chunk: chunk[:-5] + bytes([chunk[-5] ^ 1]) + chunk[-4:],
    "crc": lambda chunk: chunk[:-1] + bytes([chunk[-1] ^ 1]),
    "empty": lambda chunk: b"",
    "crc alone": lambda chunk: chunk[-4:],
    "a byte short": lambda chunk: chunk[:-1],
    "half": lambda chunk: chunk[: len(chunk) // 2],
    "a byte more": lambda chunk: chunk + b"\0",
    "longer than the payload": lambda chunk: chunk.ljust(1 << 20, b"\0"),
    "not encoded": lambda chunk: sealed(smooth(6144)),
    "other bytes, encoded": lambda chunk: sealed(
        bytes(zstd.compress(smooth(6144)))
        if chunk.startswith(b"\x28\xb5\x2f\xfd")
        else bytes(blosc.compress(smooth(6144), b"lz4", 5, 2, typesize=2))
    ),
    "a bomb": lambda chunk: sealed(bytes(zstd.compress(bytes(1 << 26)))),
}


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_not_served_and_repaired(
    root: Root, codec: Codec, damage: str
) -> None:
    store = root.open(codec=codec)
    block = sample_block(store.layout, values=16)
    store.store(KEY, block)
    url, _ = files_of(root, store)
    root.write(url, DAMAGES[damage](root.read(url)))
    for reader in (store, root.open()):
        with pytest.raises(DamagedBlockError):
            reader.load(KEY, bytearray(block.nbytes))
        assert not reader.contains(KEY)
    assert store.store(KEY, block)
    loaded = bytearray(block.nbytes)
    assert store.load(KEY, loaded)
    assert loaded == block.tobytes()
    assert store.counts() == {"stored": 1, "repaired": 1, "loaded": 1, "damaged": 1}


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_missing_chunk_is_damage(root: Root, codec: Codec) -> None:
    store = root.open(codec=codec)
    store.store(KEY, sample_block(store.layout, values=16))
    root.remove(files_of(root, store)[0])
    with pytest.raises(DamagedBlockError, match="missing"):
        store.load(KEY, bytearray(store.layout.nbytes))


@pytest.mark.parametrize("written", CODECS)
@pytest.mark.parametrize("said", CODECS)
def test_a_document_of_another_codec(root: Root, written: Codec, said: Codec) -> None:
    """Two writers raced: the chunk is of one, the document of the other."""
    store = root.open(codec=written)
    block = sample_block(store.layout, values=16)
    store.store(KEY, block)
    _, url = files_of(root, store)
    array = ArrayFormat.of(store.layout, 0)
    root.write(url, array.document(KEY, checksum(memoryview(block.tobytes())), said))
    if said == written:
        assert root.open().load(KEY, bytearray(block.nbytes))
        return
    with pytest.raises(DamagedBlockError):
        root.open().load(KEY, bytearray(block.nbytes))
    repairer = root.open(codec=said)
    with pytest.raises(DamagedBlockError):
        repairer.load(KEY, bytearray(block.nbytes))
    assert repairer.store(KEY, block)
    assert root.open().load(KEY, bytearray(block.nbytes))


def test_a_repair_with_another_codec_is_noticed(root: Root) -> None:
    """The document was proved before another engine replaced the block."""
    ours, theirs = root.open(codec="zstd"), root.open(codec="blosc")
    block = sample_block(ours.layout, values=16)
    ours.store(KEY, block)
    assert ours.contains(KEY)
    theirs.delete(KEY)
    theirs.store(KEY, block)
    loaded = bytearray(block.nbytes)
    assert ours.load(KEY, loaded)
    assert loaded == block.tobytes()


# ---- other readers and writers


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "bytes"])
def test_zarr_python_and_tensorstore_read(codec: Codec, dtype: str, tmp_path: Path) -> None:
    layout = sample_layout(dtype=dtype) if dtype != "bytes" else opaque()
    store = Root(str(tmp_path)).open(layout, codec=codec)
    block = sample_block(layout, values=16)
    store.store(KEY, block)
    group = zarr.open_group(store.url.removeprefix("file://"), mode="r")
    array: Any = group[f"{KEY.hex()[:3]}/{KEY.hex()}"]
    assert np.asarray(array[...]).tobytes() == block.tobytes()
    spec = {"driver": "zarr3", "kvstore": f"{store.block_url(KEY)}/"}
    read = tensorstore.open(spec, open=True).result().read().result()
    assert read.tobytes() == block.tobytes()
    assert len(array.metadata.to_dict()["codecs"]) == (2 if codec == "none" else 3)


def opaque() -> Layout:
    return Layout.of_bytes(6048, dtype="bfloat16", reason="a test of sizes")


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("writer", ["zarr", "tensorstore"])
def test_blocks_that_others_wrote_are_accepted(
    codec: Codec, writer: str, tmp_path: Path
) -> None:
    store = Root(str(tmp_path)).open(codec=codec)
    block = sample_block(store.layout, values=16).view("<f2").reshape(store.layout.shape)
    store.store(KEY, block)
    folder = Path(store.block_url(KEY).removeprefix("file://"))
    metadata = json.loads((folder / "zarr.json").read_text())
    (folder / "c.0.0.0.0").unlink()
    if writer == "zarr":
        zarr.open_array(folder, mode="r+")[...] = block
    else:
        shutil.rmtree(folder)
        spec = {"driver": "zarr3", "kvstore": f"file://{folder}/", "metadata": metadata}
        tensorstore.open(spec, create=True).result().write(block).result()
    loaded = np.zeros_like(block)
    assert Root(str(tmp_path)).open().load(KEY, loaded)
    assert loaded.tobytes() == block.tobytes()


# ---- golden trees


def write(folder: Path, codec: Codec) -> BlockStore:
    layout = sample_layout(shape=(2, 3, 16, 8))
    config = sample_config(model_name="org/golden")
    store = BlockStore.open(
        folder, config, layout, codec=codec, provenance={"kvstore": "0.1.0"}
    )
    store.store(KEY, smooth(layout.nbytes))
    return store


@pytest.mark.parametrize("codec", COMPRESSED)
def test_what_is_written_today_is_the_golden_tree(codec: Codec, tmp_path: Path) -> None:
    """All but the encoded bytes, which another release of a compressor may choose."""
    write(tmp_path, codec)
    written, golden = tree(tmp_path), tree(GOLDEN / codec)
    assert written.keys() == golden.keys()
    for name in written:
        if name.endswith("zarr.json"):
            assert written[name] == golden[name]


@pytest.mark.parametrize("codec", COMPRESSED)
def test_the_golden_tree_is_read_today(codec: Codec, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / codec, tmp_path / "kv")
    layout = sample_layout()
    store = BlockStore.open(tmp_path / "kv", sample_config(model_name="org/golden"), layout)
    loaded = bytearray(layout.nbytes)
    assert store.load(KEY, loaded)
    assert loaded == smooth(layout.nbytes)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in COMPRESSED:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), name)
            shutil.rmtree(Path(folder, ".kvstore-tmp"))
            shutil.copytree(folder, GOLDEN / name)
