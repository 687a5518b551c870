"""Four readers of Zarr read the same block equally: zarr-python, tensorstore, xarray and
zarrita.js, each for the data types that it knows.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from stored import chunk_url, document_url, folder

import kvstore.zarr_dtype  # noqa: F401  # zarr 3.1 needs it for a direct open_array
from kvstore import BlockStore, Layout
from kvstore.layout import ITEM_BYTES
from kvstore.offline import Root
from kvstore.testing import sample_block, sample_config, sample_layout

KEY = bytes(range(36))
ZARRITA = Path(__file__).with_name("zarrita")
LAYOUTS = {
    dtype: sample_layout(dtype=dtype, page_bytes=3 * 16 * 8 * size)
    for dtype, size in ITEM_BYTES.items()
} | {"bytes": Layout.of_bytes(48, dtype="bfloat16", reason="a hybrid model")}

Found = tuple[bytes, tuple[str, ...], tuple[int, ...], dict[str, Any]]
"""Bytes, names and lengths of the dimensions, and what kvstore recorded."""


def write(path: Path, layout: Layout, codec: Any = "none") -> tuple[BlockStore, bytes]:
    config = sample_config(dtype=layout.dtype)
    store = BlockStore.open(path, config, layout, codec=codec)
    # Of values that can be compressed.
    payload = sample_block(layout, values=40).tobytes()
    assert store.store(KEY, payload)
    return store, payload


def by_zarr(path: Path) -> Found:
    array: Any = zarr.open_array(path, mode="r")
    dims = array.metadata.dimension_names
    return np.asarray(array[...]).tobytes(), dims, array.shape, dict(array.attrs["kvstore"])


def by_tensorstore(path: Path) -> Found:
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/"}
    array = tensorstore.open(spec, open=True, read=True).result()
    attributes = array.spec(retain_context=False).to_json()["metadata"]["attributes"]
    return (
        array.read().result().tobytes(),
        array.domain.labels,
        array.shape,
        attributes["kvstore"],
    )


def by_xarray(path: Path) -> Found:
    """It opens groups: the fan-out is one."""
    opened = xarray.open_dataset(
        path.parent, engine="zarr", consolidated=False, mask_and_scale=False
    )
    array = opened[path.name]
    dims = tuple(map(str, array.dims))
    return array.values.tobytes(), dims, array.shape, array.attrs["kvstore"]


READERS = [by_zarr, by_tensorstore, by_xarray]
CODECS = ["none", "zstd", "blosc"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("reader", READERS)
def test_readers_for_python(
    reader: Callable[[Path], Found], name: str, codec: str, tmp_path: Path
) -> None:
    store, payload = write(tmp_path, LAYOUTS[name], codec)
    found, dims, shape, attributes = reader(folder(store.block_url(KEY)))
    assert found == payload
    assert (tuple(dims), tuple(shape)) == (store.layout.axes, store.layout.shape)
    assert attributes["key"] == KEY.hex()


@pytest.mark.parametrize("reader", READERS)
def test_readers_for_python_look_at_the_checksum(
    reader: Callable[[Path], Found], tmp_path: Path
) -> None:
    store, _ = write(tmp_path, LAYOUTS["float32"])
    chunk = folder(chunk_url(store, KEY))
    damage(chunk)
    with pytest.raises(ValueError, match=r"(?i)checksum|crc32c|digest"):
        reader(chunk.parent)


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_chunk_reads_as_not_a_number(
    reader: Callable[[Path], Found], tmp_path: Path
) -> None:
    store, _ = write(tmp_path, LAYOUTS["float32"])
    chunk = folder(chunk_url(store, KEY))
    chunk.unlink()
    assert np.isnan(np.frombuffer(reader(chunk.parent)[0], np.float32)).all()


def damage(chunk: Path) -> bytes:
    """Another first byte, and nothing else; the chunk then."""
    first, *others = chunk.read_bytes()
    chunk.write_bytes(damaged := bytes([first ^ 1, *others]))
    return damaged


def test_zarr_python_reads_the_storage_itself(root: Any) -> None:
    """Without kvstore, by zarr's own way to every URL, with the same options."""
    store = root.open()
    payload = sample_block(store.layout).tobytes()
    assert store.store(KEY, payload)
    options = dict(root.storage_options) or None
    url = store.block_url(KEY)
    array: Any = zarr.open_array(url, mode="r", storage_options=options)
    assert np.asarray(array[...]).tobytes() == payload
    [group] = Root(root.url, root.storage_options, client=root.client).groups()
    block = group.open(KEY)
    assert block is not None
    assert (block.url, block.payload) == (url, payload)


# ---- zarrita.js


@pytest.fixture(scope="module")
def zarrita(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Has zarrita read arrays: folders in, what it tells of each out."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    place = tmp_path_factory.mktemp("zarrita") / "reader"
    shutil.copytree(ZARRITA, place)
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"zarrita cannot be installed: {done.stderr.strip()[:500]}")

    def read(folders: Sequence[Path]) -> list[Any]:
        command = ["node", "read.js", *map(str, folders)]
        told = subprocess.run(
            command, cwd=place, capture_output=True, text=True, check=True
        )
        return [json.loads(line) for line in told.stdout.splitlines()]

    return read


def node_has_float16() -> bool:
    script = ["node", "-p", "typeof Float16Array"]
    return subprocess.run(script, capture_output=True, check=True).stdout != b"undefined\n"


ZARRITA_READS = [name for name in LAYOUTS if name not in ("bfloat16", "float16")]


@pytest.mark.parametrize("codec", CODECS)
def test_zarrita_reads(
    codec: str, zarrita: Callable[..., list[Any]], tmp_path: Path
) -> None:
    names = ZARRITA_READS + ["float16"] * node_has_float16()
    written = [write(tmp_path / name, LAYOUTS[name], codec) for name in names]
    told = zarrita([folder(store.block_url(KEY)) for store, _ in written])
    for name, (store, payload), found in zip(names, written, told, strict=True):
        assert bytes.fromhex(found["bytes"]) == payload, name
        assert tuple(found["dimensions"]) == store.layout.axes
        assert tuple(found["shape"]) == store.layout.shape
        assert found["attributes"]["kvstore"]["dtype"] == store.layout.dtype
        document = json.loads(folder(document_url(store, KEY)).read_bytes())
        assert found["dtype"] == document["data_type"]
        if codec != "none" and name != "bytes":  # 48 bytes get no smaller
            assert document["codecs"][1]["name"] == codec


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_zarrita_refuses_what_it_does_not_know(
    dtype: str, zarrita: Callable[..., list[Any]], tmp_path: Path
) -> None:
    if dtype == "float16" and node_has_float16():
        pytest.skip("this node has float16, and zarrita with it")
    store, _ = write(tmp_path, LAYOUTS[dtype])
    [found] = zarrita([folder(store.block_url(KEY))])
    assert found.keys() == {"error"}
    assert dtype in found["error"]


def test_zarrita_does_not_look_at_the_checksum(
    zarrita: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Which is why its users are told to have blocks proved first."""
    store, payload = write(tmp_path, LAYOUTS["float32"])
    chunk = folder(chunk_url(store, KEY))
    damaged = damage(chunk)
    [found] = zarrita([chunk.parent])
    assert bytes.fromhex(found["bytes"]) == damaged[: len(payload)] != payload


def test_a_missing_chunk_is_not_a_number_to_zarrita_either(
    zarrita: Callable[..., list[Any]], tmp_path: Path
) -> None:
    store, _ = write(tmp_path, LAYOUTS["float32"])
    chunk = folder(chunk_url(store, KEY))
    chunk.unlink()
    [found] = zarrita([chunk.parent])
    assert np.isnan(np.frombuffer(bytes.fromhex(found["bytes"]), np.float32)).all()
