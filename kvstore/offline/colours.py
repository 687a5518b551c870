"""Numbers as colours, and colours as a picture, without a library for either. Pure.

The colours are viridis': they become lighter evenly, also in print and for eyes that tell
fewer colours apart.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

_VIRIDIS: tuple[Colour, ...] = (
    (68, 1, 84),
    (72, 40, 120),
    (62, 74, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (110, 206, 88),
    (181, 222, 43),
    (253, 231, 37),
)

NONE: Colour = (214, 39, 40)
"""Of what has no number: a colour that the others do not come near."""


def colour(fraction: float | None) -> Colour:
    """The colour of a number from 0 to 1, or of none."""
    if fraction is None:
        return NONE
    at = min(max(fraction, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    below = min(int(at), len(_VIRIDIS) - 2)
    rest = at - below
    first, second = _VIRIDIS[below], _VIRIDIS[below + 1]
    red, green, blue = (
        round(a + (b - a) * rest) for a, b in zip(first, second, strict=True)
    )
    return red, green, blue


def png(rows: Sequence[Sequence[float | None]]) -> bytes:
    """A PNG of one pixel for each number from 0 to 1."""
    lines = b"".join(
        b"\0" + b"".join(bytes(colour(fraction)) for fraction in row) for row in rows
    )
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(lines, 9)),
            (b"IEND", b""),
        )
    )
