"""`Namespace`: one config under a root, and in it one rank's KV group of one layout.

Its documents are written by whoever comes first, and compared by everybody else. A path
names; only a comparison proves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstore.arrays import (
    MAX_DOCUMENT_BYTES,
    group_document,
    recorded_config,
    recorded_layout,
)
from kvstore.config import Config
from kvstore.errors import FormatError, LayoutMismatchError, StorageError
from kvstore.filesystem import Filesystem
from kvstore.layout import Layout
from kvstore.paths import DOCUMENT, group_path

logger = logging.getLogger(__name__)


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

        Below a root that is only read, nothing is recorded, and only what is there is
        compared: a block proves itself in any case.

        Raises:
            LayoutMismatchError: with every field that differs.
            FormatError: what is recorded cannot be read.
            StorageError: storage failed.
        """
        place, document = self._recorded(
            self._folder,
            group_document(config=self.config.fields(), provenance=self._provenance),
        )
        if document is not None:
            recorded = recorded_config(document, place=place)
            if differences := self.config.differences(recorded):
                raise LayoutMismatchError(place, differences)
        if not self._filesystem.read_only:
            self._recorded(self.path.rpartition("/")[0], group_document())
        place, document = self._recorded(
            self.path,
            group_document(layout=self.layout.to_dict(), provenance=self._provenance),
        )
        if document is None:
            logger.info(
                "nothing is recorded at %s yet: only blocks prove themselves", place
            )
            return
        differences = self.layout.differences(recorded_layout(document, place=place))
        if differences:
            raise LayoutMismatchError(place, differences)

    def recorded_layout(self) -> Layout | None:
        """The layout that the group's document records; None if there is no document.

        Raises:
            FormatError: it cannot be read.
            StorageError: storage failed.
        """
        name = f"{self.path}/{DOCUMENT}"
        document = self._read(name)
        if document is None:
            return None
        return recorded_layout(document, place=self._filesystem.place(name))

    def _recorded(self, path: str, document: bytes) -> tuple[str, bytes | None]:
        """The place and bytes of a group's document; `document` if there was none, or None
        where nothing may be written.
        """
        name = f"{path}/{DOCUMENT}"
        place = self._filesystem.place(name)
        recorded = self._read(name)
        if recorded is None and self._filesystem.read_only:
            return place, None
        if recorded is None:
            # Torn by a power failure, it would keep every engine from starting.
            self._filesystem.create(name, document, fsync=True)
            # What was written may not be what stayed: another engine came at once.
            recorded = self._read(name)
        if recorded is None:
            raise StorageError(place, "read back", "it was written and is not there")
        return place, recorded

    def _read(self, name: str) -> bytes | None:
        try:
            return self._filesystem.read(name, MAX_DOCUMENT_BYTES + 1)
        except FormatError as error:
            remedy = (
                "Remove it: the document is written anew, and every block proves itself"
            )
            raise FormatError(error.place, f"{error.problem}. {remedy}") from error
