"""KV cache blocks of LLM engines as Zarr arrays at any fsspec URL."""

from kvstore.__about__ import __version__
from kvstore.config import Config, Group, prove_parallel_agnostic
from kvstore.errors import (
    DamagedBlockError,
    Difference,
    FormatError,
    InvalidInputError,
    KVStoreError,
    LayoutMismatchError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
    UnsupportedVersionError,
)
from kvstore.layout import Layout
from kvstore.packing import unpack
from kvstore.store import BlockStore

__all__ = [
    "BlockStore",
    "Config",
    "DamagedBlockError",
    "Difference",
    "FormatError",
    "Group",
    "InvalidInputError",
    "KVStoreError",
    "Layout",
    "LayoutMismatchError",
    "StorageAccessError",
    "StorageError",
    "StorageTimeoutError",
    "UnsupportedVersionError",
    "__version__",
    "prove_parallel_agnostic",
    "unpack",
]
