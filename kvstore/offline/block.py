"""`Block`: one block that held its proof, as NumPy has it. Pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.conversion import Conversion
from kvstore.layout import Layout
from kvstore.packing import Array, unpack, unpacked_axes, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block's bytes, proved when they were read.

    They are this object's own: nothing that happens in storage changes them, and all arrays
    that are views of them can only be read.

    Attributes:
        url: of the Zarr array that was read.
        key: the engine's.
        group: the KV group's number.
        layout: of the payload.
        payload: `layout.nbytes` bytes.
    """

    url: str
    key: bytes
    group: int
    layout: Layout
    payload: bytes = field(repr=False)

    @property
    def values(self) -> Array:
        """All of it, with the layout's axes and logical dtype, uncopied.

        bfloat16 and the 8-bit floats are types of `ml_dtypes`.
        """
        return values(self.layout, self.payload)

    @property
    def kv_axes(self) -> tuple[str, ...]:
        """The axes of what `keys_and_values` gives."""
        return unpacked_axes(self.layout)

    def keys_and_values(self) -> tuple[Array, Array]:
        """K and V apart, whatever the packing, each with `kv_axes`.

        Raises:
            InvalidInputError: nobody knows which value is which.
        """
        return unpack(self.layout, self.payload)

    def converted(self, layout: Layout) -> Block:
        """The same values in another layout. Nothing is written.

        Args:
            layout: another order, packing, or number of workers, as from `target_of`.

        Raises:
            InvalidInputError: the two layouts do not hold the same values, and why.
        """
        payload = Conversion(self.layout, layout).convert_bytes(self.payload)
        return replace(self, layout=layout, payload=bytes(payload))
