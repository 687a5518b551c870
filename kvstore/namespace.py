"""`Namespace`: one config under a root, and in it one rank's KV group of one layout.

Its documents are written by whoever comes first, and compared by everybody else. A path
names; only a comparison proves.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.arrays import (
    MAX_DOCUMENT_BYTES,
    group_document,
    recorded_config,
    recorded_layout,
)
from kvstore.config import Config
from kvstore.errors import LayoutMismatchError, StorageError
from kvstore.filesystem import Filesystem
from kvstore.layout import Layout
from kvstore.paths import DOCUMENT, group_path


class Namespace:
    """The groups above the blocks.

    Attributes:
        path: the KV group's folder, relative to the root.
        config: the engine's config.
        layout: the engine's layout.
        group: index of the KV group.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        folder: str,
        config: Config,
        layout: Layout,
        *,
        rank: int,
        group: int,
        provenance: Mapping[str, str],
    ) -> None:
        """Touches nothing yet.

        Args:
            filesystem: the root.
            folder: the namespace's folder below the root.
            config: the engine's config.
            layout: the engine's layout.
            rank: the rank whose blocks these are.
            group: index of the KV group.
            provenance: who writes, for people; recorded, never compared.
        """
        self.path = group_path(folder, rank, group)
        self.config = config
        self.layout = layout
        self.group = group
        self._filesystem = filesystem
        self._folder = folder
        self._provenance = dict(provenance)

    def claim(self) -> None:
        """Record config and layout where nothing is, then compare what is recorded.

        Raises:
            LayoutMismatchError: with every field that differs.
            FormatError: what is recorded cannot be read.
            StorageError: storage failed.
        """
        place, document = self._recorded(
            self._folder,
            group_document(config=self.config.fields(), provenance=self._provenance),
        )
        differences = self.config.differences(recorded_config(document, place=place))
        if differences:
            raise LayoutMismatchError(place, differences)
        self._recorded(self.path.rpartition("/")[0], group_document())
        place, document = self._recorded(
            self.path,
            group_document(layout=self.layout.to_dict(), provenance=self._provenance),
        )
        differences = self.layout.differences(recorded_layout(document, place=place))
        if differences:
            raise LayoutMismatchError(place, differences)

    def _recorded(self, path: str, document: bytes) -> tuple[str, bytes]:
        """The place and bytes of a group's document; `document` if there was none."""
        name = f"{path}/{DOCUMENT}"
        place = self._filesystem.place(name)
        recorded = self._filesystem.read(name, MAX_DOCUMENT_BYTES + 1)
        if recorded is None:
            self._filesystem.create(name, document)
            # What was written may not be what stayed: another engine came at once.
            recorded = self._filesystem.read(name, MAX_DOCUMENT_BYTES + 1)
        if recorded is None:
            raise StorageError(place, "read back", "it was written and is not there")
        return place, recorded
