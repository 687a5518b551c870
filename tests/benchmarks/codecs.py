"""What compression does to real KV: how small, how fast, and where it pays.

    python tests/benchmarks/codecs.py FOLDER

FOLDER is a store that an engine has written, in a local folder. Every namespace in it is
measured for itself; blocks that a CPU backend has tiled are measured a second time in the
order (…, token, value) that other backends have. The figures of one namespace are one
table in Markdown.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import zarr
from numcodecs import zstd
from numcodecs.blosc import BITSHUFFLE, NOSHUFFLE, SHUFFLE

import kvstore.zarr_dtype  # noqa: F401  # zarr 3.1 opens bfloat16 only after this
from kvstore import Layout, unpack
from kvstore.arrays import recorded_layout
from kvstore.layout import ITEM_BYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROUNDS = 3
_FILTERS = {NOSHUFFLE: "no", SHUFFLE: "byte", BITSHUFFLE: "bit"}


@dataclass(frozen=True)
class Candidate:
    """One way to make a block smaller.

    Attributes:
        encode: one block's bytes and the bytes of a value -> what would be written.
        decode: what was written, and where the block's bytes go.
    """

    name: str
    encode: Callable[[Bytes, int], bytes]
    decode: Callable[[bytes, Bytes], object]


def candidates() -> Iterator[Candidate]:
    """Zstandard alone, and Blosc with each of its filters."""
    for level in (1, 3):
        yield _zstd(level)
    for shuffle in _FILTERS:
        for compressor, levels in (("lz4", (1, 5, 9)), ("zstd", (1, 3, 5))):
            for level in levels:
                yield _blosc(compressor, level, shuffle)


def _zstd(level: int) -> Candidate:
    return Candidate(
        f"zstd {level}",
        lambda block, itemsize: bytes(zstd.compress(block, level)),
        zstd.decompress,
    )


def _blosc(compressor: str, level: int, shuffle: int) -> Candidate:
    def encode(block: Bytes, itemsize: int) -> bytes:
        name = compressor.encode()
        return bytes(
            numcodecs.blosc.compress(block, name, level, shuffle, 0, typesize=itemsize)
        )

    name = f"blosc {compressor} {level}, {_FILTERS[shuffle]} shuffle"
    return Candidate(name, encode, numcodecs.blosc.decompress)


def measure(blocks: Sequence[Bytes], itemsize: int) -> list[dict[str, Any]]:
    """Every candidate on the same blocks, on one core.

    Args:
        blocks: each one block's bytes.
        itemsize: bytes of one value.

    Returns:
        One row for each candidate, `none` first:

        - `codec`: its name;
        - `ratio`: bytes of the blocks by bytes that would be written;
        - `encode`, `decode`: GB of blocks in a second of CPU time; None for `none`;
        - `store_below`, `load_below`: GB/s of storage below which one core that encodes
          and then writes, or reads and then decodes, is faster than without a codec;
          None for `none`, 0 where the blocks get no smaller.
    """
    rows: list[dict[str, Any]] = [
        {"codec": "none", "ratio": 1.0}
        | dict.fromkeys(("encode", "decode", "store_below", "load_below"))
    ]
    threads = numcodecs.blosc.use_threads
    numcodecs.blosc.use_threads = False  # the speed of one core is asked for
    try:
        rows += (_measured(candidate, blocks, itemsize) for candidate in candidates())
    finally:
        numcodecs.blosc.use_threads = threads
    return rows


def _measured(
    candidate: Candidate, blocks: Sequence[Bytes], itemsize: int
) -> dict[str, Any]:
    plain = sum(block.nbytes for block in blocks)
    target = [np.empty_like(block) for block in blocks]
    encoded: list[bytes] = []
    encode = decode = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        encoded = [candidate.encode(block, itemsize) for block in blocks]
        between = time.thread_time()
        for data, block in zip(encoded, target, strict=True):
            candidate.decode(data, block)
        encode = min(encode, between - start)
        decode = min(decode, time.thread_time() - between)
    assert all(map(np.array_equal, blocks, target)), candidate.name
    ratio = plain / sum(map(len, encoded))
    saved = max(0.0, 1 - 1 / ratio)
    speeds = {"encode": plain / encode / 1e9, "decode": plain / decode / 1e9}
    # Without: 1/B seconds for each byte. With: 1/speed + 1/(ratio B).
    return {
        "codec": candidate.name,
        "ratio": ratio,
        **speeds,
        "store_below": speeds["encode"] * saved,
        "load_below": speeds["decode"] * saved,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `measure` as Markdown."""
    lines = [
        "| Codec | Ratio | Encode, GB/s | Decode, GB/s | Store pays below, GB/s "
        "| Load pays below, GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        codec, *figures = row.values()
        shown = ("–" if figure is None else f"{figure:.2f}" for figure in figures)
        lines.append(f"| {codec} | {' | '.join(shown)} |")
    return "\n".join(lines)


def stored(group: Path, limit: int) -> list[Bytes]:
    """At most `limit` blocks of a KV group's folder, spread evenly over all of them."""
    blocks = sorted(path.parent for path in group.glob("*/*/zarr.json"))
    return [
        np.asarray(zarr.open_array(path, mode="r")[...]).reshape(-1).view(np.uint8)
        for path in blocks[:: -(-len(blocks) // limit) or 1]
    ]


def untiled(layout: Layout, block: Bytes) -> Bytes:
    """A block in the order (…, head, token, K's and then V's values)."""
    joined = np.concatenate(unpack(layout, block), axis=-1)
    return joined.reshape(-1).view(np.uint8)


def main(folder: Path, limit: int) -> None:
    """Print one table for each KV group, or two."""
    for document in sorted(folder.glob("*/r*/g*/zarr.json")):
        layout = recorded_layout(document.read_bytes(), place=str(document))
        blocks = stored(document.parent, limit)
        itemsize = ITEM_BYTES.get(layout.dtype, 1)
        orders = {layout.packing or "unknown packing": blocks}
        if (layout.packing or "").startswith("cpu-"):
            orders["token-kv"] = [untiled(layout, block) for block in blocks]
        for order, each in orders.items():
            print(f"{len(each)} blocks of {layout.nbytes:,} bytes, {layout.dtype}, {order}")
            print(f"\n{table(measure(each, itemsize))}\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Codecs, measured on a store's blocks")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=24, help="of each KV group")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.blocks)
