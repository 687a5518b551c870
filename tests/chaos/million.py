"""The command: `python tests/chaos/million.py FOLDER --blocks 1000000`.

Fills a root with very many tiny blocks, runs `kvstore` on it as people do, and prints the
seconds that each command took and the most memory that it had. The root is removed in the
end.

Every block has the same bytes, so its chunk is one more name of a few files. What only
lists never looks into a document, so by default that is one more name as well.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # not this folder: the package is `chaos`

from kvstore import Layout  # noqa: E402  # path first
from kvstore.arrays import ArrayFormat, group_document  # noqa: E402  # likewise
from kvstore.codecs import checksum  # noqa: E402  # likewise
from kvstore.paths import DOCUMENT, FAN_OUT_DIGITS  # noqa: E402  # likewise
from kvstore.testing import Root  # noqa: E402  # likewise

NBYTES = 64
LINKS = 60_000
"""Names of one file: ext4 ends at 65,000."""
KEY_BYTES = 36
ODD = 0x9E3779B97F4A7C15
"""Multiplied by it, numbers are spread over all fan-outs."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a command took.

    Attributes:
        printed: on stdout.
        seconds: until it ended.
        peak: the most memory that it had, in bytes.
    """

    printed: str
    seconds: float
    peak: int


def fill(root: Root, blocks: int, *, own_documents: bool, fan_outs: int = 4096) -> None:
    """Store so many blocks by links, in so many fan-outs, which are spread evenly."""
    layout = Layout.of_bytes(NBYTES, dtype="float16", reason="one of very many")
    group = Path(root.open(layout).url.removeprefix("file://"))
    written = ArrayFormat.of(layout, 0)
    payload = bytes(NBYTES)
    crc = checksum(memoryview(payload))
    apart = 16**FAN_OUT_DIGITS // fan_outs
    for name in range(0, fan_outs * apart, apart):
        (group / f"{name:03x}").mkdir()
        (group / f"{name:03x}" / DOCUMENT).write_bytes(group_document())
    for number in range(blocks):
        if not number % LINKS:
            chunk, document = group.parent / f"chunk{number}", group.parent / f"d{number}"
            chunk.write_bytes(payload + crc.to_bytes(4, "little"))
            document.write_bytes(written.document(bytes(KEY_BYTES), crc))
        digits = f"{number % fan_outs * apart:03x}{number * ODD % 2**64:016x}{number:053x}"
        folder = f"{group}/{digits[:FAN_OUT_DIGITS]}/{digits}"
        os.mkdir(folder)
        os.link(chunk, f"{folder}/{written.chunk_name}")
        if own_documents:
            with open(f"{folder}/{DOCUMENT}", "xb") as file:
                file.write(written.document(bytes.fromhex(digits), crc))
        else:
            os.link(document, f"{folder}/{DOCUMENT}")


def take(*arguments: str) -> Taken:
    """Run `kvstore` with these arguments, in a process of its own."""
    code = "from kvstore.cli.app import main; main()"
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"kvstore {' '.join(arguments)} ended with {process.returncode}")
    return Taken(printed, time.monotonic() - begun, usage.ru_maxrss << 10)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="is made, and removed in the end")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--commands", nargs="+", default=["ls", "du"])
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    try:
        begun = time.monotonic()
        fill(Root(str(asked.folder)), asked.blocks, own_documents=False)
        print(f"{asked.blocks:,} blocks in {time.monotonic() - begun:.0f} s", flush=True)
        for command in asked.commands:
            taken = take(command, str(asked.folder))
            print(taken.printed)
            peak = taken.peak / (1 << 20)
            print(f"{command}: {taken.seconds:.1f} s, {peak:.0f} MiB at most", flush=True)
    finally:
        shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
