"""`ConvertedBlocks`: blocks whose axes are stored in another order than the engine's.

What is stored is what its layout says, as ever: only what comes out of a proved block, and
what goes into one, is put into the other order. It costs a copy of each block.

Threads: as `Blocks`. Pickles.
"""

from __future__ import annotations

from kvstore.arrays import Proof
from kvstore.blocks import Blocks
from kvstore.codecs import Codec
from kvstore.conversion import Conversion
from kvstore.filesystem import Filesystem
from kvstore.layout import Layout
from kvstore.namespace import Namespace


class ConvertedBlocks(Blocks):
    """The blocks of one namespace's group, for an engine of another layout."""

    def __init__(
        self, filesystem: Filesystem, namespace: Namespace, codec: Codec, layout: Layout
    ) -> None:
        """Touches nothing. The namespace must have been claimed.

        Args:
            filesystem: the root.
            namespace: of the layout that is stored.
            codec: how new blocks are written.
            layout: the engine's.

        Raises:
            InvalidInputError: one layout cannot be converted to the other.
        """
        super().__init__(filesystem, namespace, codec)
        self._loading = Conversion(namespace.layout, layout)
        self._storing = Conversion(layout, namespace.layout)

    def _read_payload(self, key: bytes, payload: memoryview, proof: Proof) -> None:
        stored = bytearray(self.nbytes)
        super()._read_payload(key, memoryview(stored), proof)
        payload[:] = self._loading.convert_bytes(memoryview(stored))

    def _publish(self, key: bytes, payload: memoryview, *, replace: bool) -> Proof | None:
        return super()._publish(key, self._storing.convert_bytes(payload), replace=replace)
