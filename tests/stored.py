"""What the tests of cases share: one block's files, and what a load gives."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from work import ended

from kvstore import BlockStore
from kvstore.job import Job
from kvstore.jobs import JobRunner
from kvstore.parts import Operation
from kvstore.processes import ThreadMover
from kvstore.testing import Root
from kvstore.transfer import Transfer

KEY = bytes(range(36))
OTHER_KEY = bytes(range(1, 37))


def folder(url: str) -> Path:
    """The folder of a `file://` URL."""
    return Path(url.removeprefix("file://"))


def chunk_url(store: BlockStore, key: bytes = KEY) -> str:
    """The URL of a block's chunk."""
    return f"{store.block_url(key)}/" + ".".join("c" + "0" * len(store.layout.axes))


def document_url(store: BlockStore, key: bytes = KEY) -> str:
    """The URL of a block's document."""
    return f"{store.block_url(key)}/zarr.json"


def loaded(store: BlockStore, key: bytes = KEY) -> bytes | None:
    """What a load gives; None if the block is absent."""
    buffer = bytearray(store.layout.nbytes)
    return bytes(buffer) if store.load(key, buffer) else None


def run_keys(
    store: BlockStore, operation: Operation, keys: Sequence[bytes], *, threads: int = 1
) -> list[str]:
    """How keys of the first KV group end as one job, whose rows are all ones."""
    rows = np.ones((len(keys), store.layout.nbytes), np.uint8)
    perform = Transfer({0: store.blocks}, rows)
    mover = ThreadMover(perform, threads=threads, lookups=1, name="test-run")
    runner = JobRunner([mover], deadline=600, grace=600)
    try:
        runner.submit(Job(1, operation, keys, range(len(keys))))
        [outcome] = ended(runner, 1)
        return list(outcome.words)
    finally:
        runner.shutdown()


def copy_block(
    root: Root, source: BlockStore, key: bytes, target: BlockStore, to: bytes
) -> None:
    """Put a block's two files where another block belongs, behind kvstore's back."""
    files = [(url(source, key), url(target, to)) for url in (chunk_url, document_url)]
    for old, new in files:
        if root.url.startswith("/"):
            folder(new).parent.mkdir(parents=True, exist_ok=True)
        root.write(new, root.read(old))


def temporaries(path: Path) -> list[Path]:
    """What lies in a local root's place for blocks that are not finished."""
    return list((path / ".kvstore-tmp").glob("*/*"))


def run_python(script: str, *arguments: str, **environment: str) -> str:
    """What a new Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment or None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def child(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A new Python beside the test, which talks to it and does not outlive it."""
    command = [sys.executable, "-c", script, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]") -> str:
    """The child's next line."""
    assert process.stdout
    return process.stdout.readline().rstrip("\n")
