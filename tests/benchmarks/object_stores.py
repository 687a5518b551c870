"""How fast blocks go to object stores and back: kvstore, and its clients used directly.

    python tests/benchmarks/object_stores.py [s3] [gcs] [--threads 8] [--rounds 9] …

Three ways move the same bytes by the same requests, each in turn, round after round, in
this one process and on as many threads: store is a GET of an absent document and a PUT of
the chunk and of the document; load is a GET of the document and of the chunk, to a buffer.

    obstore   obstore's own put and get
    kvstore   `BlockStore.store`, and `contains` then `load`: checksums and proofs included
    fsspec    s3fs or gcsfs, called as their documentation says

The servers are real ones on loopback, and take most of the machine: trust ratios, and the
CPU seconds, which are this process's own. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
# gcsfs would try gRPC first, which no plain HTTP server answers; read at its import.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import obstore
from fsspec.core import url_to_fs
from servers import Server, fake_gcs, seaweedfs

from kvstore import BlockStore, Layout
from kvstore.filesystem import Filesystem
from kvstore.testing import sample_config

SERVERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "s3": seaweedfs,
    "gcs": fake_gcs,
}
DOCUMENT_BYTES = 1000
TRAILER = bytes(4)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store and load block number `n`; `load` fills the buffer."""

    name: str
    store: Callable[[int, memoryview], object]
    load: Callable[[int, memoryview], object]
    delete: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """What one run of one way took."""

    seconds: float
    cpu_seconds: float
    gigabytes: float

    @property
    def rate(self) -> float:
        """Megabytes per second."""
        return 1000 * self.gigabytes / self.seconds

    @property
    def cpu(self) -> float:
        """CPU seconds of this process for a gigabyte."""
        return self.cpu_seconds / self.gigabytes


def by_kvstore(server: Server, nbytes: int) -> Way:
    """Through the front door."""
    layout = Layout.of_bytes(nbytes, dtype="uint8", reason="a benchmark")
    store = BlockStore.open(
        f"{server.url}/kvstore",
        sample_config(),
        layout,
        storage_options=server.storage_options,
    )

    def load(n: int, buffer: memoryview) -> None:
        assert store.contains(_key(n))
        assert store.load(_key(n), buffer)

    def put(n: int, buffer: memoryview) -> None:
        assert store.store(_key(n), buffer)

    return Way("kvstore", put, load, lambda n: store.delete(_key(n)))


def by_obstore(server: Server, nbytes: int) -> Way:
    """obstore alone, with the settings that kvstore gives it."""
    client: Any = Filesystem(server.url, server.storage_options)._client
    bucket, document = client._store, bytes(DOCUMENT_BYTES)

    def at(n: int, name: str) -> str:
        return f"obstore/{_folder(n)}/{name}"

    def put(n: int, buffer: memoryview) -> None:
        try:
            obstore.get(bucket, at(n, "zarr.json"), options={"range": (0, 65536)})
        except FileNotFoundError:
            chunk = b"".join((buffer, TRAILER))
            obstore.put(bucket, at(n, "c.0"), chunk, use_multipart=False)
            obstore.put(bucket, at(n, "zarr.json"), document, use_multipart=False)

    def load(n: int, buffer: memoryview) -> None:
        found = obstore.get(bucket, at(n, "zarr.json"), options={"range": (0, 65536)})
        assert len(found.bytes()) == DOCUMENT_BYTES
        chunk = obstore.get(bucket, at(n, "c.0"), options={"range": (0, nbytes + 5)})
        buffer[:] = memoryview(chunk.bytes())[:nbytes]

    def delete(n: int) -> None:
        for name in ("zarr.json", "c.0"):
            obstore.delete(bucket, at(n, name))

    return Way("obstore", put, load, delete)


def by_fsspec(server: Server, nbytes: int) -> Way:
    """s3fs or gcsfs alone, with the options of the server."""
    filesystem, root = url_to_fs(server.url, **server.storage_options)
    document = bytes(DOCUMENT_BYTES)

    def at(n: int, name: str) -> str:
        return f"{root}/fsspec/{_folder(n)}/{name}"

    def put(n: int, buffer: memoryview) -> None:
        try:
            filesystem.cat_file(at(n, "zarr.json"), start=0, end=65536)
        except FileNotFoundError:
            filesystem.pipe_file(at(n, "c.0"), b"".join((buffer, TRAILER)))
            filesystem.pipe_file(at(n, "zarr.json"), document)

    def load(n: int, buffer: memoryview) -> None:
        found = filesystem.cat_file(at(n, "zarr.json"), start=0, end=65536)
        assert len(found) == DOCUMENT_BYTES
        chunk = filesystem.cat_file(at(n, "c.0"), start=0, end=nbytes + 5)
        buffer[:] = memoryview(chunk)[:nbytes]

    def delete(n: int) -> None:
        for name in ("zarr.json", "c.0"):
            filesystem.rm_file(at(n, name))

    return Way("fsspec", put, load, delete)


def measure(
    operation: Callable[[int, memoryview], object],
    numbers: range,
    buffers: list[memoryview],
    threads: int,
) -> Figure:
    """Run `operation` for each number, `threads` at once, each with a buffer of its own."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.001] * threads))  # threads cost nothing below
        jobs = zip(numbers, itertools.cycle(buffers), strict=False)
        cpu, start = time.process_time(), time.perf_counter()
        list(pool.map(lambda job: operation(*job), jobs))
        end, end_cpu = time.perf_counter(), time.process_time()
    return Figure(end - start, end_cpu - cpu, len(numbers) * buffers[0].nbytes / 1e9)


def rounds(
    ways: list[Way], *, blocks: int, nbytes: int, threads: int, count: int
) -> Iterator[tuple[str, str, Figure]]:
    """What each way took to store and to load, round by round; the first is a warm-up."""
    source = memoryview(os.urandom(nbytes))
    buffers = [memoryview(bytearray(nbytes)) for _ in range(2 * threads)]
    for number in range(count + 1):
        numbers = range(number * blocks, (number + 1) * blocks)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            stored = measure(way.store, numbers, [source], threads)
            loaded = measure(way.load, numbers, buffers, threads)
            assert buffers[0] == source, way.name
            for n in numbers:
                way.delete(n)
            if number:
                yield way.name, "store", stored
                yield way.name, "load", loaded


def report(backend: str, figures: dict[tuple[str, str], list[Figure]]) -> None:
    """Print the medians; the ratio is the median of the rounds' own ratios."""
    for (name, verb), found in figures.items():
        ours = figures["kvstore", verb]
        ratio = statistics.median(
            our.rate / other.rate for our, other in zip(ours, found, strict=True)
        )
        rate = statistics.median(figure.rate for figure in found)
        cpu = statistics.median(figure.cpu for figure in found)
        print(
            f"{backend:4} {verb:6} {name:8} {rate:6.0f} MB/s {cpu:6.2f} CPU s/GB"
            f"   kvstore is {ratio:4.2f} times as fast"
        )


def _folder(n: int) -> str:
    """As deep as kvstore's: a server may make each level."""
    return f"org_model_000000000000/r0/g0/000/{_key(n).hex()}"


def _key(n: int) -> bytes:
    return bytes(2) + n.to_bytes(34, "big")  # all in one fan-out


def main() -> None:
    """Measure the backends that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backends", nargs="*", default=list(SERVERS), metavar="s3 gcs")
    parser.add_argument("--block", type=int, default=2048, help="KiB of a block")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of a round")
    parser.add_argument("--threads", type=int, default=8, help="transfers at once")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--dir", default=None, help="where the servers keep their data")
    given = parser.parse_args()
    nbytes = given.block * 1024
    for backend in given.backends:
        figures: dict[tuple[str, str], list[Figure]] = {}
        with (
            tempfile.TemporaryDirectory(prefix="kvstore-", dir=given.dir) as folder,
            SERVERS[backend](Path(folder)) as server,
        ):
            ways = [make(server, nbytes) for make in (by_obstore, by_kvstore, by_fsspec)]
            for name, verb, figure in rounds(
                ways,
                blocks=given.blocks,
                nbytes=nbytes,
                threads=given.threads,
                count=given.rounds,
            ):
                figures.setdefault((name, verb), []).append(figure)
        report(backend, dict(sorted(figures.items(), key=lambda item: item[0][::-1])))


if __name__ == "__main__":
    main()
