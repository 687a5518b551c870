"""One proved block as zarr-python, xarray and torch have arrays.

Importing this module imports zarr-python. xarray and torch are imported where they are
asked for: `pip install "kvstore-zarr[xarray]"`, and torch as its own page says. What comes
back is in memory, so that nothing is read later, or without a proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

import kvstore.zarr_dtype  # noqa: F401  # zarr 3.1 does not look for bfloat16 by itself
from kvstore.arrays import ArrayFormat
from kvstore.codecs import TRAILER_BYTES, checksum
from kvstore.offline.block import Block
from kvstore.packing import Array
from kvstore.paths import DOCUMENT

if TYPE_CHECKING:
    import torch
    import xarray


def zarr_array(block: Block) -> zarr.Array[Any]:
    """The Zarr array that holds the block, not compressed; in memory, only to be read.

    Its data type is Zarr's: `uint8` where Zarr has no name for the logical one, which
    `attrs["kvstore"]["dtype"]` tells.
    """
    layout = ArrayFormat.of(block.layout, block.group)
    crc = checksum(memoryview(block.payload))
    chunk = block.payload + crc.to_bytes(TRAILER_BYTES, "little")
    buffer = default_buffer_prototype().buffer
    files = {DOCUMENT: layout.document(block.key, crc), layout.chunk_name: chunk}
    store = MemoryStore(
        {name: buffer.from_bytes(data) for name, data in files.items()}, read_only=True
    )
    return zarr.open_array(store, mode="r", zarr_format=3)


def data_array(block: Block) -> xarray.DataArray:
    """The block with named dimensions and its logical dtype.

    The coordinates of `layer` are the layers' names, where the layout has them.
    """
    import xarray

    return xarray.DataArray(
        block.values,
        dims=block.layout.axes,
        coords=_coords(block),
        name=block.key.hex(),
        attrs=_attrs(block),
    )


def dataset(block: Block) -> xarray.Dataset:
    """K and V apart, as the variables `K` and `V` of the same dimensions.

    Raises:
        InvalidInputError: nobody knows which value is which.
    """
    import xarray

    keys, content = block.keys_and_values()
    return xarray.Dataset(
        {"K": (block.kv_axes, keys), "V": (block.kv_axes, content)},
        coords=_coords(block),
        attrs=_attrs(block),
    )


def tensor(block: Block) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The block as a tensor of its own memory and logical dtype, and its dimensions' names.

    The names stand beside it: torch's own named tensors are a prototype, and few of its
    operations take them.
    """
    return _tensor(block.values, block), block.layout.axes


def kv_tensors(block: Block) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """K and V apart, and the names of the dimensions of each.

    Raises:
        InvalidInputError: nobody knows which value is which.
    """
    keys, content = block.keys_and_values()
    return _tensor(keys, block), _tensor(content, block), block.kv_axes


def _coords(block: Block) -> dict[str, list[str]]:
    layout = block.layout
    lengths = dict(zip(layout.axes, layout.shape, strict=True))
    if lengths.get("layer") != len(layout.layer_names):
        return {}
    return {"layer": list(layout.layer_names)}


def _attrs(block: Block) -> dict[str, Any]:
    return {
        "url": block.url,
        "key": block.key.hex(),
        "group": block.group,
        "dtype": block.layout.dtype,
        "packing": block.layout.packing,
    }


def _tensor(array: Array, block: Block) -> torch.Tensor:
    # torch takes no types of ml_dtypes, and no memory that can only be read.
    import torch

    data = torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))
    dtype = torch.uint8 if block.layout.opaque else getattr(torch, block.layout.dtype)
    return data.view(dtype).reshape(array.shape)
