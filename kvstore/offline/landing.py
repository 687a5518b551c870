"""`Landing`: where blocks that come from elsewhere are stored, each one read back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.blocks import Stored
from kvstore.codecs import Codec
from kvstore.errors import DamagedBlockError, StorageError
from kvstore.offline.group import StoredGroup


class Landing:
    """Stores one block after the other at a group, which is claimed. Of one thread.

    Attributes:
        nbytes: bytes of one block.
    """

    def __init__(self, group: StoredGroup, codec: Codec) -> None:
        """Touches nothing."""
        self.nbytes = group.layout.nbytes
        self._steps = group.steps(codec)
        self._found = np.empty(self.nbytes, np.uint8)

    def land(self, key: bytes, made: Callable[[], memoryview | None]) -> Stored | None:
        """Store a block, unless one that holds its proof is there.

        Args:
            key: the engine's key.
            made: makes the block's bytes, if they are wanted; None if there are none.

        Returns:
            What was done; None if nothing was made.

        Raises:
            StorageError: storage failed, or what was written cannot be read back.
        """
        suspect = False
        try:
            if self._steps.load(key, memoryview(self._found), None) is not None:
                return Stored.KEPT
        except DamagedBlockError:
            suspect = True
        block = made()
        if block is None:
            return None
        stored, _ = self._steps.store(key, block, suspect=suspect)
        return stored if self._is_there(key, block) else Stored.KEPT

    def _is_there(self, key: bytes, block: memoryview) -> bool:
        """Read back. Proved bytes that are not ours are another's, who wrote at once."""
        place = self._steps.url(key)
        try:
            proof = self._steps.load(key, memoryview(self._found), None)
        except DamagedBlockError as error:
            raise StorageError(error.place, "read back", error.problem) from error
        if proof is None:
            raise StorageError(place, "read back", "it was written and is not there")
        return np.array_equal(self._found, np.asarray(block))
