"""Things that are wrong below a root: a plant makes one, and tells its path."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c

from kvstore import BlockStore
from kvstore.offline.faults import Fault
from kvstore.paths import block_path
from kvstore.testing import Root, sample_block
from kvstore.testing.roots import sample_config

SOURCE = b"\x07" * 36
"""A block that is whole, in every namespace with a plant."""

CHUNK = "c.0.0.0.0"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a plant may do its work: one block, and what is above it. Paths are relative to
    the root.
    """

    root: Root
    store: BlockStore
    key: bytes

    @property
    def namespace(self) -> str:
        return self.store.path.partition("/")[0]

    @property
    def fan_out(self) -> str:
        return self.key.hex()[:3]

    @property
    def block(self) -> str:
        return f"{self.store.path}/{block_path(self.key)}"

    @property
    def chunk(self) -> str:
        return f"{self.block}/{CHUNK}"

    @property
    def source(self) -> str:
        return f"{self.store.path}/{block_path(SOURCE)}"

    def read(self, path: str) -> bytes:
        return self.root.read(f"{self.root.url}/{path}")

    def put(self, path: str, data: bytes) -> str:
        self.root.write(f"{self.root.url}/{path}", data)
        return path

    def put_in(self, folder: str, name: str) -> None:
        filesystem, path = self.root._fs(f"{self.root.url}/{folder}")
        filesystem.makedirs(path, exist_ok=True)
        filesystem.pipe_file(f"{path}/{name}", b"anything")

    def take(self, path: str) -> str:
        self.root.remove(f"{self.root.url}/{path}")
        return path

    def edit(self, path: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a document."""
        document = json.loads(self.read(f"{path}/zarr.json"))
        change(document)
        self.put(f"{path}/zarr.json", json.dumps(document).encode())

    def set_member(self, name: str, value: object) -> str:
        """Change what kvstore recorded in the block's document."""
        self.edit(
            self.block, lambda found: found["attributes"]["kvstore"].update({name: value})
        )
        return self.block


Plant = Callable[[Spot], str]


class Plants(dict[str, tuple[Fault, Plant]]):
    """All plants by name: `plants(fault)` adds the function below it."""

    def __call__(self, fault: Fault) -> Callable[[Plant], Plant]:
        def add(plant: Plant) -> Plant:
            self[plant.__name__] = (fault, plant)
            return plant

        return add


PLANTS = Plants()
"""What every backend can have."""
LOCAL = Plants()
"""What only a folder can have."""


def spot(root: Root, name: str) -> Spot:
    """A namespace with two blocks, one of them for the plant of this name."""
    store = root.open(config=sample_config(model_name=f"org/{name}"))
    store.store(SOURCE, sample_block(store.layout, 1))
    return one_more(root, store, name)


def one_more(root: Root, store: BlockStore, name: str) -> Spot:
    key = hashlib.sha256(name.encode()).digest()
    store.store(key, sample_block(store.layout, 2))
    return Spot(root, store, key)


def make(root: Root, name: str) -> tuple[str, str]:
    """One thing that is wrong, in a namespace of its own: what, and where."""
    fault, plant = (PLANTS | LOCAL)[name]
    return fault.value, plant(spot(root, name))


def make_all(root: Root) -> list[tuple[str, str]]:
    """All that can be wrong there: what, and where, sorted. In a bucket, where each plant
    costs many requests, one of each kind.
    """
    made, shared = [], spot(root, "shared").store
    plants = PLANTS | LOCAL if shared.local else PLANTS
    if not shared.local and shared.shared:
        of_a_kind = {fault: name for name, (fault, _) in plants.items()}
        plants = {name: plants[name] for name in of_a_kind.values()}
    for name, (fault, plant) in plants.items():
        above = fault.startswith(("namespace", "rank", "group"))
        at = spot(root, name) if above else one_more(root, shared, name)
        made.append((fault.value, plant(at)))
    return sorted(made)


# ---- above the blocks


@PLANTS(Fault.NAMESPACE_MISSING)
def no_config(at: Spot) -> str:
    return at.take(f"{at.namespace}/zarr.json")


@PLANTS(Fault.NAMESPACE_UNREADABLE)
def torn_config(at: Spot) -> str:
    return at.put(f"{at.namespace}/zarr.json", b'{"zarr_format": 3')


@PLANTS(Fault.NAMESPACE_UNREADABLE)
def config_of_nothing(at: Spot) -> str:
    path = at.namespace
    at.edit(path, lambda found: found["attributes"]["kvstore"]["config"].clear())
    return f"{path}/zarr.json"


@PLANTS(Fault.NAMESPACE_MISNAMED)
def another_config(at: Spot) -> str:
    path = at.namespace
    change = {"dtype": "bfloat16"}
    at.edit(path, lambda found: found["attributes"]["kvstore"]["config"].update(change))
    return path


@PLANTS(Fault.RANK_MISSING)
def no_rank(at: Spot) -> str:
    return at.take(f"{at.namespace}/r0/zarr.json")


@PLANTS(Fault.RANK_UNREADABLE)
def rank_is_an_array(at: Spot) -> str:
    at.edit(f"{at.namespace}/r0", lambda found: found.update(node_type="array"))
    return f"{at.namespace}/r0/zarr.json"


@PLANTS(Fault.GROUP_MISSING)
def no_layout(at: Spot) -> str:
    return at.take(f"{at.store.path}/zarr.json")


@PLANTS(Fault.GROUP_UNREADABLE)
def layout_of_terabytes(at: Spot) -> str:
    change = {"shape": [1 << 20, 3, 1 << 20, 8]}
    at.edit(
        at.store.path,
        lambda found: found["attributes"]["kvstore"]["layout"].update(change),
    )
    return f"{at.store.path}/zarr.json"


@PLANTS(Fault.FAN_OUT_MISSING)
def no_fan_out(at: Spot) -> str:
    return at.take(f"{at.store.path}/{at.fan_out}/zarr.json")


@PLANTS(Fault.FAN_OUT_UNREADABLE)
def empty_fan_out(at: Spot) -> str:
    return at.put(f"{at.store.path}/{at.fan_out}/zarr.json", b"")


# ---- documents of blocks


@PLANTS(Fault.DOCUMENT_MISSING)
def chunk_alone(at: Spot) -> str:
    at.take(f"{at.block}/zarr.json")
    return at.block


@PLANTS(Fault.DOCUMENT_UNREADABLE)
def torn_document(at: Spot) -> str:
    data = at.read(f"{at.block}/zarr.json")
    at.put(f"{at.block}/zarr.json", data[:-100])
    return at.block


@PLANTS(Fault.DOCUMENT_UNREADABLE)
def no_json(at: Spot) -> str:
    at.put(f"{at.block}/zarr.json", b"\xff\xfe")
    return at.block


@PLANTS(Fault.OTHER_FORMAT)
def later_format(at: Spot) -> str:
    return at.set_member("format", 2)


@PLANTS(Fault.OTHER_KEY)
def block_of_another_key(at: Spot) -> str:
    for name in ("zarr.json", "c.0.0.0.0"):
        data = at.read(f"{at.source}/{name}")
        at.put(f"{at.block}/{name}", data)
    return at.block


@PLANTS(Fault.OTHER_GROUP)
def block_of_another_group(at: Spot) -> str:
    return at.set_member("group", 1)


@PLANTS(Fault.OTHER_LAYOUT)
def block_of_another_runner(at: Spot) -> str:
    return at.set_member("runner", "v1")


@PLANTS(Fault.OTHER_LAYOUT)
def another_layout_digest(at: Spot) -> str:
    return at.set_member("layout", "0" * 32)


@PLANTS(Fault.UNKNOWN_CODEC)
def gzip(at: Spot) -> str:
    codec = {"name": "gzip", "configuration": {"level": 1}}
    at.edit(at.block, lambda found: found["codecs"].insert(1, codec))
    return at.block


@PLANTS(Fault.UNKNOWN_CODEC)
def zstd_with_a_new_member(at: Spot) -> str:
    configuration = {"level": 1, "checksum": False, "window": 20}
    codec = {"name": "zstd", "configuration": configuration}
    at.edit(at.block, lambda found: found["codecs"].insert(1, codec))
    return at.block


@PLANTS(Fault.UNKNOWN_CODEC)
def another_checksum(at: Spot) -> str:
    at.edit(at.block, lambda found: found["codecs"][-1].update(name="xxh3"))
    return at.block


@PLANTS(Fault.DOCUMENT_DIFFERS)
def swapped_axes(at: Spot) -> str:
    at.edit(at.block, lambda found: found["dimension_names"].reverse())
    return at.block


@PLANTS(Fault.DOCUMENT_DIFFERS)
def checksum_is_no_digits(at: Spot) -> str:
    return at.set_member("crc32c", "unknown!")


@PLANTS(Fault.DOCUMENT_DIFFERS)
def unknown_member(at: Spot) -> str:
    return at.set_member("mood", "good")


# ---- chunks


@PLANTS(Fault.CHUNK_MISSING)
def document_alone(at: Spot) -> str:
    at.take(at.chunk)
    return at.block


@PLANTS(Fault.WRONG_LENGTH)
def cut_chunk(at: Spot) -> str:
    at.put(at.chunk, at.read(at.chunk)[:-1])
    return at.block


@PLANTS(Fault.WRONG_LENGTH)
def long_chunk(at: Spot) -> str:
    at.put(at.chunk, at.read(at.chunk) + b"\0")
    return at.block


@PLANTS(Fault.WRONG_CHECKSUM)
def flipped_bit(at: Spot) -> str:
    data = bytearray(at.read(at.chunk))
    data[500] ^= 1
    at.put(at.chunk, bytes(data))
    return at.block


@PLANTS(Fault.WRONG_CHECKSUM)
def flipped_bit_of_the_encoded(at: Spot) -> str:
    encoded(at)
    data = bytearray(at.read(at.chunk))
    data[50] ^= 1
    at.put(at.chunk, bytes(data))
    return at.block


@PLANTS(Fault.UNDECODABLE)
def nonsense_with_its_checksum(at: Spot) -> str:
    encoded(at)
    nonsense = b"nonsense" * 8
    at.put(at.chunk, nonsense + crc32c.crc32c(nonsense).to_bytes(4, "little"))
    return at.block


@PLANTS(Fault.OTHER_PAYLOAD)
def chunk_of_another_block(at: Spot) -> str:
    at.put(at.chunk, at.read(f"{at.source}/{CHUNK}"))
    return at.block


def encoded(at: Spot) -> None:
    """The block is compressed."""
    store = at.root.open(config=at.store.config, codec="zstd")
    store.delete(at.key)
    store.store(at.key, sample_block(store.layout, values=4))


# ---- what lies where it should not


@PLANTS(Fault.MISPLACED)
def block_in_another_fan_out(at: Spot) -> str:
    path = f"{at.store.path}/{SOURCE.hex()[:3]}/{at.key.hex()}"
    for name in ("zarr.json", "c.0.0.0.0"):
        data = at.read(f"{at.block}/{name}")
        at.put_in(path, name)
        at.put(f"{path}/{name}", data)
    return path


@PLANTS(Fault.UNKNOWN_FILE)
def notes_beside_a_chunk(at: Spot) -> str:
    return at.put(f"{at.block}/notes.txt", b"anything")


@PLANTS(Fault.UNKNOWN_NAME)
def notes_in_a_fan_out(at: Spot) -> str:
    return at.put(f"{at.store.path}/{at.fan_out}/notes.txt", b"anything")


@PLANTS(Fault.UNKNOWN_NAME)
def key_in_capitals(at: Spot) -> str:
    path = f"{at.store.path}/{at.fan_out}/{at.key.hex().upper()}"
    at.put_in(path, "zarr.json")
    return path


@PLANTS(Fault.UNKNOWN_NAME)
def fan_out_of_four_digits(at: Spot) -> str:
    at.put_in(f"{at.store.path}/{at.fan_out}a/below", "c.0")
    return f"{at.store.path}/{at.fan_out}a"


@PLANTS(Fault.UNKNOWN_NAME)
def name_behind_all_fan_outs(at: Spot) -> str:
    return at.put(f"{at.store.path}/zoo", b"anything")


@PLANTS(Fault.UNKNOWN_NAME)
def name_before_all_fan_outs(at: Spot) -> str:
    return at.put(f"{at.store.path}/%20 -.#?", b"anything")


@PLANTS(Fault.UNKNOWN_NAME)
def group_with_a_leading_zero(at: Spot) -> str:
    at.put_in(f"{at.namespace}/r0/g00", "zarr.json")
    return f"{at.namespace}/r0/g00"


@PLANTS(Fault.UNKNOWN_NAME)
def notes_in_a_namespace(at: Spot) -> str:
    return at.put(f"{at.namespace}/notes.txt", b"anything")


@PLANTS(Fault.UNKNOWN_NAME)
def folder_in_the_root(at: Spot) -> str:
    at.put_in("backup/deep/below", "notes.txt")
    return "backup"


@PLANTS(Fault.UNKNOWN_NAME)
def file_in_the_root(at: Spot) -> str:
    return at.put("notes.txt", b"anything")


# ---- what only a folder can have


@LOCAL(Fault.NOT_A_FILE)
def linked_chunk(at: Spot) -> str:
    path = Path(at.root.url, at.chunk)
    path.unlink()
    path.symlink_to(Path(at.root.url, at.source, CHUNK))
    return at.block


@LOCAL(Fault.NOT_A_FILE)
def pipe_for_a_document(at: Spot) -> str:
    path = Path(at.root.url, at.block, "zarr.json")
    path.unlink()
    os.mkfifo(path)
    return at.block


@LOCAL(Fault.NOT_A_FILE)
def folder_for_a_chunk(at: Spot) -> str:
    path = Path(at.root.url, at.chunk)
    path.unlink()
    path.mkdir()
    return at.block


@LOCAL(Fault.LEFTOVER)
def left_by_a_dead_writer(at: Spot) -> str:
    path = Path(at.root.url, ".kvstore-tmp", "0123456789abcdef-0")
    path.mkdir(parents=True)
    (path / "c.0").write_bytes(b"half")
    before = time.time() - 3 * 86_400
    for name in (path / "c.0", path):
        os.utime(name, (before, before))
    return ".kvstore-tmp/0123456789abcdef-0"
