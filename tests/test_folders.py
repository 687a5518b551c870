"""fsspec filesystems with real folders: this machine's under another protocol, and SFTP."""

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from kvstore import StorageError
from kvstore.collector import Collector, Limits
from kvstore.filesystem import Filesystem
from kvstore.testing import BlockStoreTests, Root, sample_block
from kvstore.upkeep import Upkeep

EVICT_ALL = Limits(1, None, 1e9)
NAMES = ("c.0", "zarr.json")
FAN_OUTS = ["n/r0/g0/a3f/zarr.json", "n/r0/g0/b00/zarr.json"]


class Odd(OSError):
    """A class of its own, as SMB has one."""


class FolderFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`folders://path`: this machine's. An odd one has its own words for a path that is not
    there, and with each folder that it makes another writer is first.
    """

    protocol = "folders"
    made: ClassVar[list[str]] = []

    def __init__(self, odd: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.odd = odd

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("folders://").strip("/")

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        try:
            return super().open(path, *arguments, **options)
        except FileNotFoundError as error:
            if self.odd:
                raise Odd(error.errno, "no such thing") from None
            raise

    def mkdir(self, path: str, *arguments: Any, **options: Any) -> None:
        super().mkdir(path, *arguments, **options)
        self.made.append(path)
        if self.odd:
            raise Odd(None, "Failure")


fsspec.register_implementation("folders", FolderFileSystem, clobber=True)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    from sftp import sftp

    with sftp() as port:
        yield port


@pytest.fixture
def connected(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a connection, which ends with the test."""
    from fsspec.implementations.sftp import SFTPFileSystem
    from sftp import PASSWORD, USER

    login = {"username": USER, "password": PASSWORD}
    made: dict[str, Any] = {}
    monkeypatch.setattr(SFTPFileSystem, "_cache", made)
    yield login | {"look_for_keys": False, "allow_agent": False}
    for filesystem in made.values():
        filesystem.client.close()


@pytest.fixture(params=["folders", "sftp"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if "file" not in os.environ.get("KVSTORE_TEST_BACKENDS", "file"):
        pytest.skip("the run for folders has this")
    if request.param == "folders":
        return Root(f"folders:/{tmp_path}/not/there")
    options = request.getfixturevalue("connected")
    port = request.getfixturevalue("server")
    return Root(f"sftp://127.0.0.1:{port}{tmp_path}/not/there", options)


class TestFolders(BlockStoreTests):
    """As every other backend."""

    @pytest.fixture
    def root(self, root: Root) -> Root:
        return root


def below(tmp_path: Path) -> list[str]:
    found = (tmp_path / "not/there").rglob("*")
    return sorted(str(path.relative_to(tmp_path / "not/there")) for path in found)


def test_the_probe_makes_the_root_and_leaves_nothing(root: Root, tmp_path: Path) -> None:
    Filesystem(root.url, root.storage_options).probe()
    assert below(tmp_path) == []
    assert (tmp_path / "not/there").is_dir()


def test_folders_are_listed_and_removed(root: Root, tmp_path: Path) -> None:
    filesystem = Upkeep(root.url, root.storage_options)
    blocks = ["n/r0/g0/a3f/a3f1", "n/r0/g0/a3f/a3f2", "n/r0/g0/b00/b001"]
    for block in blocks:
        filesystem.publish(block, [(name, [b"{}"]) for name in NAMES], replace=False)
        filesystem.create(f"{block[:11]}/zarr.json", b"{}")
    assert filesystem.folders("n/r0/g0") == ["a3f", "b00"]
    assert filesystem.folders("absent") == []
    found = list(filesystem.files(""))
    paths = sorted([f"{b}/{n}" for b in blocks for n in NAMES] + FAN_OUTS)
    assert [file.path for file in found] == paths
    assert {file.nbytes for file in found} == {2}
    after = filesystem.files("n/r0/g0", after=f"{blocks[1]}/c.0")
    assert [file.path for file in after] == paths[paths.index(f"{blocks[1]}/zarr.json") :]
    (tmp_path / "not/there" / blocks[0] / "somebody's").touch()
    assert filesystem.delete_many([(block, NAMES) for block in blocks]) == (blocks, None)
    left = [name for name in below(tmp_path) if name.startswith("n/r0/g0/a3f/")]
    assert left == [blocks[0], f"{blocks[0]}/somebody's", FAN_OUTS[0]]
    assert filesystem.folders("n/r0/g0/b00") == []


def test_what_is_collected_leaves_no_folder(root: Root, tmp_path: Path) -> None:
    store = root.open()
    block = sample_block(store.layout)
    for n in range(20):
        store.store(bytes([n]) * 36, block)
    store.delete(bytes(36))
    told = Collector(Upkeep(root.url, root.storage_options), EVICT_ALL).collect()
    assert told.evicted == 19
    assert not [
        name for name in below(tmp_path) if name.count("/") == 4 and "zarr" not in name
    ]
    assert store.store(bytes(36), block)


def test_threads_do_not_take_each_others_answers(root: Root) -> None:
    """SFTP's client would: some threads would wait for ever."""
    filesystem = Filesystem(root.url, root.storage_options, timeout=10.0)

    def use(thread: int) -> None:
        for n in range(5):
            path = f"{n}/{thread}/{'deep/' * thread}"
            filesystem.publish(path, [("zarr.json", [b"%d" % thread])], replace=False)
            assert filesystem.read(f"{path}/zarr.json", 9) == b"%d" % thread
            filesystem.delete(path, ["zarr.json"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))


def test_only_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    FolderFileSystem.made.clear()
    filesystem = Filesystem(f"folders:/{tmp_path}/kv")
    filesystem.probe()
    assert FolderFileSystem.made == [f"{tmp_path}/kv", f"{tmp_path}/kv/.kvstore-tmp"]
    for _ in range(2):
        filesystem.publish("a/b", [("zarr.json", [b"{}"])], replace=True)
    filesystem.create("a/zarr.json", b"{}")
    filesystem.create("a/zarr.json", b"[]")
    assert filesystem.read("a/zarr.json", 9) == b"{}"
    assert FolderFileSystem.made[2:] == [f"{tmp_path}/kv/a", f"{tmp_path}/kv/a/b"]


def test_the_first_part_of_a_path_is_not_made() -> None:
    """It may be the name of a bucket, which is not there by mistake."""
    name = f"kvstore-{uuid.uuid4().hex}"
    with pytest.raises(StorageError, match="No such file"):
        Filesystem(f"folders://{name}/kv").probe()
    assert not Path(f"/{name}").exists()


def test_backends_may_have_their_own_words_for_it(tmp_path: Path) -> None:
    store = Root(f"folders:/{tmp_path}/not/there", {"odd": True}).open()
    assert not store.contains(bytes(36))
    assert store.store(bytes(36), sample_block(store.layout))
    assert store.contains(bytes(36))
    with pytest.raises(StorageError, match="No such file"):
        Filesystem("folders://proc/1/kv", {"odd": True}).probe()
