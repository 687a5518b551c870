"""Changes to bytes that parsers may trip over: the same ones for the same seed."""

import random
from collections.abc import Callable, Iterator, Sequence

TOKENS = (
    b'null true false NaN Infinity -0 1e400 0.0 1.0 -1 0 2 [] {} [[]] "" "auto" "byte" '
    b'"kvstore" "must_understand":false, "zarr_format":3, \\ud800 \\u0000 \xff '
    b"\xef\xbb\xbf :// :: @ .. ~ %00"
).split()
"""What JSON and URLs are made of, and what they should not be."""


def _nested(chance: random.Random) -> bytes:
    depth = chance.choice((10, 500, 990, 1000, 1490, 5000))
    return b"[" * depth + b"]" * chance.choice((depth, 0))


def _number(chance: random.Random) -> bytes:
    digits = chance.choice((3, 20, 400, 4299, 5000))
    return chance.choice((b"", b"-")) + b"9" * digits


def _flip(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) or 1)
    return (
        data[:at]
        + bytes(b ^ 1 << chance.randrange(8) for b in data[at : at + 1])
        + data[at + 1 :]
    )


def _cut(data: bytes, other: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _drop(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at + chance.choice((1, 2, 8, 64)) :]


def _repeat(data: bytes, other: bytes, chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last] * chance.choice((1, 1, 30)) + data[last:]


def _splice(data: bytes, other: bytes, chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(other) + 1) for _ in range(2))
    at = chance.randrange(len(data) + 1)
    return data[:at] + other[first:last] + data[at + chance.choice((0, last - first)) :]


def _insert(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """In the place of a value, if one is found."""
    told = chance.choice((chance.choice(TOKENS), _nested(chance), _number(chance)))
    starts = [at + 2 for at in range(len(data)) if data[at : at + 2] == b": "]
    if not starts or chance.random() < 0.3:
        at = chance.randrange(len(data) + 1)
        return data[:at] + told + data[at:]
    at = chance.choice(starts)
    ends = [end for end in range(at, len(data)) if data[end] in b",]}\n"]
    return data[:at] + told + data[ends[0] if ends else len(data) :]


CHANGES: Sequence[Callable[[bytes, bytes, random.Random], bytes]] = (
    _flip,
    _cut,
    _drop,
    _repeat,
    _splice,
    _insert,
    _insert,
)


def mutations(seeds: Sequence[bytes], seed: int, longest: int = 1 << 16) -> Iterator[bytes]:
    """Each of `seeds`, then changed ones without end."""
    yield from seeds
    chance = random.Random(seed)
    while True:
        data = chance.choice(seeds)
        for _ in range(chance.choice((1, 1, 2, 3, 8))):
            data = chance.choice(CHANGES)(data, chance.choice(seeds), chance)[:longest]
        yield data
