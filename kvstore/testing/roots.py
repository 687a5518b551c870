"""Where a backend is tested, and what is stored there: `Root`, and samples.

Nothing here asks the store under test what lies in storage: a `Root` looks, and damages,
through fsspec itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fsspec.core import url_to_fs

from kvstore.codecs import Codec
from kvstore.config import Config, Group
from kvstore.filesystem import ClientName, Filesystem
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.paths import namespace_path
from kvstore.store import BlockStore

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(2))


def sample_config(**changes: Any) -> Config:
    """A small engine's config."""
    groups = (Group(tokens_per_block=16, layer_names=LAYERS),)
    config = Config(
        model_name="org/model", dtype="float16", tokens_per_hash=16, kv_cache_groups=groups
    )
    return replace(config, **changes)


def sample_layout(**changes: Any) -> Layout:
    """The same engine's layout: 2 layers × 3 heads × 16 tokens × 8 values."""
    layout = Layout(
        axes=("layer", "head", "token", "value"),
        shape=(2, 3, 16, 8),
        dtype="float16",
        packing="token-kv",
        backend="FLASH_ATTN",
        runner="v2",
        kv_cache_layout="LBHNC",
        layer_names=LAYERS,
        tokens_per_block=16,
        page_bytes=3 * 16 * 8 * 2,
    )
    return replace(layout, **changes)


def sample_block(
    layout: Layout, seed: int = 0, values: int = 256
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A block of bytes, all of which matter. Of fewer `values`, it can be compressed."""
    return np.random.default_rng(seed).integers(0, values, layout.nbytes, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Root:
    """An empty place to test in."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    client: ClientName = "obstore"

    def open(self, layout: Layout | None = None, **options: Any) -> BlockStore:
        """A store below the root."""
        config = options.pop("config", None) or sample_config()
        options = {
            "client": self.client,
            "storage_options": self.storage_options,
            **options,
        }
        return BlockStore.open(self.url, config, layout or sample_layout(), **options)

    def filesystem(self) -> Filesystem:
        """The root as a store has it, for whoever puts something in between."""
        return Filesystem(self.url, self.storage_options, client=self.client)

    def read(self, url: str) -> bytes:
        """What storage holds at `url`, asked without kvstore."""
        filesystem, path = self._fs(url)
        data: bytes = filesystem.cat_file(path)
        return data

    def peek(self, url: str) -> bytes | None:
        """As `read`; None if there is nothing."""
        try:
            return self.read(url)
        except FileNotFoundError:
            return None

    def write(self, url: str, data: bytes) -> None:
        """Put `data` at `url`, behind kvstore's back."""
        filesystem, path = self._fs(url)
        filesystem.pipe_file(path, data)

    def remove(self, url: str) -> None:
        """Remove what lies at `url`, behind kvstore's back."""
        filesystem, path = self._fs(url)
        filesystem.rm_file(path)

    def clear(self, *, folders: bool) -> None:
        """Remove every file below the root; with `folders`, a folder's folders too."""
        filesystem, path = self._fs(self.url)
        for name in self.files():
            filesystem.rm_file(name)
        if folders and filesystem.protocol[0] == "file":
            filesystem.rm(path, recursive=True)
            filesystem.mkdirs(path)

    def below(self, name: str) -> Root:
        """Another root inside this one."""
        return replace(self, url=f"{self.url}/{name}")

    def files(self) -> list[str]:
        """Every file below the root."""
        filesystem, path = self._fs(self.url)
        filesystem.invalidate_cache()
        found: list[str] = filesystem.find(path)
        return found

    def _fs(self, url: str) -> tuple[Any, str]:
        return url_to_fs(url, **self.storage_options)  # type: ignore[no-any-return]


def open_on(
    filesystem: Filesystem, layout: Layout | None = None, *, codec: Codec = "none"
) -> BlockStore:
    """A store of the sample config whose every operation goes through `filesystem`."""
    filesystem.probe()
    config = sample_config()
    namespace = Namespace(
        filesystem,
        namespace_path(config),
        config,
        layout or sample_layout(),
        rank=0,
        group=0,
        provenance={},
    )
    return BlockStore(filesystem, namespace, codec, namespace.layout)
