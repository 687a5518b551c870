"""The format, by golden trees and by readers that know nothing of kvstore.

Run this file as a script to write the golden trees anew; they may change only with the
format's version.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from kvstore import BlockStore, Layout
from kvstore.packing import values
from kvstore.testing import Root, sample_config, sample_layout

GOLDEN = Path(__file__).parent / "data" / "v1"
KEY = bytes.fromhex("a3f09c") + bytes(range(29)) + bytes(4)
DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
PROVENANCE = {"kvstore": "0.1.0", "engine": "written by hand"}


def layout_of(name: str) -> Layout:
    if name == "bytes":
        return Layout.of_bytes(48, dtype="bfloat16", reason="a hybrid model")
    shape = (2, 3, 4, 2)
    page = math.prod(shape[1:]) * (1 if name.startswith("float8") else 2)
    return sample_layout(dtype=name, shape=shape, tokens_per_block=4, page_bytes=page)


def payload_of(layout: Layout) -> bytes:
    return bytes((7 * n) % 251 for n in range(layout.nbytes))


def write(folder: Path, name: str) -> BlockStore:
    layout = layout_of(name)
    config = sample_config(model_name="org/golden", dtype=layout.dtype)
    store = BlockStore.open(folder, config, layout, provenance=PROVENANCE)
    store.store(KEY, payload_of(layout))
    return store


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", [*DTYPES, "bytes"])
def test_what_is_written_today_is_the_golden_tree(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    assert tree(tmp_path) == tree(GOLDEN / name)


@pytest.mark.parametrize("name", [*DTYPES, "bytes"])
def test_the_golden_tree_is_read_today(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "kv")
    layout = layout_of(name)
    config = sample_config(model_name="org/golden", dtype=layout.dtype)
    store = BlockStore.open(tmp_path / "kv", config, layout)
    loaded = bytearray(layout.nbytes)
    assert store.load(KEY, loaded)
    assert bytes(loaded) == payload_of(layout)


@pytest.fixture(params=DTYPES)
def golden(request: pytest.FixtureRequest) -> tuple[Path, Layout]:
    name = request.param
    [namespace] = (path for path in (GOLDEN / name).iterdir() if path.name[0] != ".")
    return namespace, layout_of(name)


def block_of(namespace: Path) -> Path:
    return namespace / "r0" / "g0" / KEY.hex()[:3] / KEY.hex()


def test_zarr_python_walks_and_reads(golden: tuple[Path, Layout]) -> None:
    namespace, layout = golden
    root = zarr.open_group(namespace, mode="r")
    # Long names are wrapped where a terminal is narrow.
    assert KEY.hex() in "".join(str(root.tree()).split())
    block: Any = root[f"r0/g0/{KEY.hex()[:3]}/{KEY.hex()}"]
    assert block.metadata.to_dict()["dimension_names"] == layout.axes
    assert block.shape == layout.shape
    assert np.asarray(block[...]).tobytes() == payload_of(layout)
    assert block.attrs["kvstore"]["dtype"] == layout.dtype


def test_tensorstore_reads(golden: tuple[Path, Layout]) -> None:
    namespace, layout = golden
    spec = {"driver": "zarr3", "kvstore": f"file://{block_of(namespace)}/"}
    block = tensorstore.open(spec, open=True, read=True).result()
    assert block.domain.labels == layout.axes
    read = block.read().result()
    assert read.tobytes() == payload_of(layout)
    if layout.dtype == "bfloat16":
        assert read.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn"])
def test_xarray_reads(name: str) -> None:
    """Its Zarr reader opens groups of arrays: the fan-out folder is one."""
    [namespace] = (path for path in (GOLDEN / name).iterdir() if path.name[0] != ".")
    layout = layout_of(name)
    opened = xarray.open_dataset(
        block_of(namespace).parent,
        engine="zarr",
        consolidated=False,
        mask_and_scale=False,
    )
    block = opened[KEY.hex()]
    assert block.dims == layout.axes
    assert block.values.tobytes() == payload_of(layout)


def test_tree_without_kvstore(tmp_path: Path) -> None:
    """A process in which kvstore cannot be imported, and no package names it."""
    script = (
        "import importlib.metadata as metadata, sys\n"
        "sys.modules['kvstore'] = None\n"
        "metadata.entry_points = lambda: metadata.EntryPoints()\n"
        "import zarr\n"
        "group = zarr.open_group(sys.argv[1], mode='r')\n"
        "print(group.tree())\n"
        "print(group[sys.argv[2]][...].tobytes().hex())\n"
    )
    [namespace] = (p for p in (GOLDEN / "float16").iterdir() if p.name[0] != ".")
    done = subprocess.run(
        [sys.executable, "-c", script, str(namespace), str(block_of(Path("")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert KEY.hex() in "".join(done.stdout.split())
    assert payload_of(layout_of("float16")).hex() in done.stdout


def test_a_missing_chunk_is_never_zeros(
    golden: tuple[Path, Layout], tmp_path: Path
) -> None:
    namespace, layout = golden
    shutil.copytree(namespace, tmp_path / "kv")
    (block_of(tmp_path / "kv") / "c.0.0.0.0").unlink()
    root = zarr.open_group(tmp_path / "kv", mode="r")
    block: Any = root[f"r0/g0/{KEY.hex()[:3]}/{KEY.hex()}"]
    read = np.asarray(block[...])
    typed = values(layout, read.reshape(-1).view(np.uint8))
    assert np.isnan(typed.astype(np.float32)).all()


def test_zarr_python_refuses_a_damaged_chunk(
    golden: tuple[Path, Layout], tmp_path: Path
) -> None:
    namespace, _ = golden
    shutil.copytree(namespace, tmp_path / "kv")
    chunk = block_of(tmp_path / "kv") / "c.0.0.0.0"
    damaged = bytearray(chunk.read_bytes())
    damaged[3] ^= 1
    chunk.write_bytes(damaged)
    block: Any = zarr.open_group(tmp_path / "kv")[f"r0/g0/{KEY.hex()[:3]}/{KEY.hex()}"]
    with pytest.raises(ValueError, match="checksum"):
        block[...]


def test_a_block_that_tensorstore_wrote_is_accepted(tmp_path: Path) -> None:
    """Another writer of the same array: other spacing and order, the same meaning."""
    root = Root(str(tmp_path / "kv"))
    store = root.open()
    block = values(store.layout, payload_of(store.layout))
    store.store(KEY, block)
    document = Path(f"{store.block_url(KEY).removeprefix('file://')}/zarr.json")
    metadata = json.loads(document.read_text())
    shutil.rmtree(document.parent)
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{document.parent}/",
        "metadata": metadata,
    }
    tensorstore.open(spec, create=True).result().write(block).result()
    loaded = bytearray(store.layout.nbytes)
    assert root.open().load(KEY, loaded)
    assert bytes(loaded) == payload_of(store.layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_survives(dtype: str, tmp_path: Path) -> None:
    """NaN payloads, -0 and infinities included, through kvstore, zarr and tensorstore."""
    item = 2 if dtype == "bfloat16" else 1
    count = 256**item
    layout = replace(
        sample_layout(),
        axes=("token", "value"),
        shape=(256, count // 256),
        dtype=dtype,
        packing=None,
    )
    store = Root(str(tmp_path)).open(layout)
    patterns = np.arange(count, dtype=f"<u{item}").tobytes()
    store.store(KEY, patterns)
    loaded = bytearray(len(patterns))
    assert store.load(KEY, loaded)
    assert bytes(loaded) == patterns
    group = zarr.open_group(store.url.removeprefix("file://"), mode="r")
    block: Any = group[f"{KEY.hex()[:3]}/{KEY.hex()}"]
    assert np.asarray(block[...]).tobytes() == patterns
    spec = {"driver": "zarr3", "kvstore": f"{store.block_url(KEY)}/"}
    assert tensorstore.open(spec, open=True).result().read().result().tobytes() == patterns


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in (*DTYPES, "bytes"):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), name)
            shutil.rmtree(Path(folder, ".kvstore-tmp"))
            shutil.copytree(folder, GOLDEN / name)
