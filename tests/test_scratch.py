"""Temporary names and the sweep: what dead writers left goes, what lives stays."""

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import in_child

from kvstore import scratch
from kvstore.local import create, discard, publish
from kvstore.scratch import ABANDONED_SECONDS, ROOTS, TEMPORARY, fresh, sweep
from kvstore.testing import Root, sample_block, sample_layout
from kvstore.upkeep import Upkeep

NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}-[0-9a-f]+")

WRITER = """
import os, sys
from kvstore.local import create, publish
root, rename = sys.argv[1], os.rename
create(root, "a/zarr.json", b"")
def stop(source, target):
    print(source, flush=True)
    sys.stdin.readline()
    rename(source, target)
os.rename = stop
print(publish(root, "a/b", [("c", [b"chunk"]), ("zarr.json", [b"{}"])], replace=False))
"""
"""A writer that waits before it renames its block into place."""


@contextmanager
def writer(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A second process that has built a block, and where it has."""
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        built = Path(process.stdout.readline().strip())
        assert sorted(os.listdir(built)) == ["c", "zarr.json"]
        try:
            yield process, built
        finally:
            process.kill()


def folders(root: Path) -> list[str]:
    """The folders of writers, but for this process's own."""
    own = f"-{scratch._process_name().rpartition('-')[2]}-"
    return [name for name in os.listdir(root / TEMPORARY) if own not in name]


def killed(root: Path) -> Path:
    """What a writer has left that was killed before its rename."""
    with writer(root) as (process, built):
        process.kill()
        process.wait()
    assert built.exists()
    return built.parent


def test_what_a_killed_writer_left_is_removed_at_once(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert NAME.fullmatch(left.name)
    assert Upkeep(tmp_path).sweep() == 1
    assert folders(tmp_path) == []
    assert not list((tmp_path / TEMPORARY).glob("*/*"))
    assert not (tmp_path / "a/b").exists()
    assert sweep(str(tmp_path)) == 0


def test_what_a_live_writer_builds_stays(tmp_path: Path) -> None:
    with writer(tmp_path) as (process, built):
        os.utime(built.parent, (0, 0))  # age does not matter where locks tell
        assert sweep(str(tmp_path)) == 0
        assert sorted(os.listdir(built)) == ["c", "zarr.json"]
        assert process.communicate("go on\n")[0] == "True\n"
    assert (tmp_path / "a/b/c").read_bytes() == b"chunk"


def test_a_process_keeps_its_own_folder(tmp_path: Path) -> None:
    built = Path(fresh(str(tmp_path)))
    assert sweep(str(tmp_path)) == 0
    assert built.is_dir()


def test_what_no_writer_named_stays(tmp_path: Path) -> None:
    top = tmp_path / TEMPORARY
    name = killed(tmp_path).name
    foreign = ["notes", f"{name}x", f"x{name}", name.upper(), f"{name}-1", ".hidden"]
    for other in foreign:
        (top / other).mkdir()
        os.utime(top / other, (0, 0))
    (top / "0123456789abcdef-0").write_text("a file with a writer's name")
    assert sweep(str(tmp_path)) == 1
    assert sorted(folders(tmp_path)) == sorted([*foreign, "0123456789abcdef-0"])


def test_a_root_without_temporaries_is_left_as_it_is(tmp_path: Path) -> None:
    assert sweep(str(tmp_path)) == 0
    assert sweep(str(tmp_path / "absent")) == 0
    assert Upkeep("memory://swept").sweep() == 0
    assert os.listdir(tmp_path) == []


# ---- symbolic links


def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("precious")
    os.utime(folder, (0, 0))
    return folder


def test_no_link_is_followed(tmp_path: Path) -> None:
    folder, root = outside(tmp_path), tmp_path / "root"
    root.mkdir()
    left = killed(root)
    (left / "link").symlink_to(folder)
    (root / TEMPORARY / left.name.replace("-", "-0", 1)[:-1]).symlink_to(folder)
    (root / TEMPORARY / "0123456789abcdef-0").symlink_to(folder)
    assert sweep(str(root)) == 1
    assert not left.exists()
    assert (folder / "below" / "file").read_text() == "precious"
    assert (root / TEMPORARY / "0123456789abcdef-0").is_symlink()


def test_the_folder_itself_may_not_be_a_link(tmp_path: Path) -> None:
    folder, root = outside(tmp_path), tmp_path / "root"
    (folder / "0123456789abcdef-0").mkdir()
    os.utime(folder / "0123456789abcdef-0", (0, 0))
    root.mkdir()
    (root / TEMPORARY).symlink_to(folder)
    assert sweep(str(root)) == 0
    assert (folder / "0123456789abcdef-0").is_dir()


# ---- age, where a lock tells nothing

OLD = time.time() - ABANDONED_SECONDS - 60


def other_machines(root: Path, name: str) -> Path:
    """A folder with a block in it that another machine, or an old release, has left."""
    folder = root / TEMPORARY / name
    (folder / "7").mkdir(parents=True)
    (folder / "7" / "c").write_bytes(b"half")
    return folder


@pytest.mark.parametrize("name", ["00000000-0123456789abcdef-0", "0123456789abcdef-1f"])
@pytest.mark.parametrize("young", [None, "", "7", "7/c"])
def test_others_are_judged_by_age(tmp_path: Path, name: str, young: str | None) -> None:
    folder = other_machines(tmp_path, name)
    for path in ("7/c", "7", ""):
        os.utime(folder / path, (OLD, OLD))
    if young is not None:
        now = time.time() - ABANDONED_SECONDS + 600
        os.utime(folder / young, (now, now))
    assert sweep(str(tmp_path)) == (1 if young is None else 0)
    assert folder.exists() == (young is not None)


def test_without_locks_age_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    left = killed(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert sweep(str(tmp_path)) == 0
    for path in [*left.rglob("*"), left]:
        os.utime(path, (OLD, OLD))
    assert sweep(str(tmp_path)) == 1
    create(str(tmp_path), "c/zarr.json", b"")  # writers do without as well
    assert (tmp_path / "c/zarr.json").exists()


def test_a_kernel_that_does_not_tell_its_boot_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed(tmp_path)
    monkeypatch.setattr(scratch, "_BOOT_ID", tmp_path / "absent")
    scratch._boot.cache_clear()
    try:
        assert sweep(str(tmp_path)) == 0
        assert left.exists()
    finally:
        scratch._boot.cache_clear()


# ---- processes and threads


def test_a_child_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    ours = Path(fresh(str(tmp_path)))

    def child() -> None:
        theirs = Path(fresh(str(tmp_path)))
        assert theirs.parent != ours.parent

    assert in_child(child) == 0
    assert len(folders(tmp_path)) == 1  # it ended without a word
    assert sweep(str(tmp_path)) == 1
    assert ours.is_dir()


def test_a_child_that_lives_on_does_not_keep_its_parents_folder(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from kvstore.scratch import fresh\n"
        "fresh(sys.argv[1])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    print('forked', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "forked\n"
        assert process.wait() == -9
        assert sweep(str(tmp_path)) == 1
        process.communicate("end\n")


def test_a_folder_that_is_swept_before_it_is_locked_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper of another process comes between the folder and its lock."""
    flock = fcntl.flock
    swept: list[list[str]] = []

    def late(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and len(swept) < 3:
            script = "import sys; from kvstore.scratch import sweep; sweep(sys.argv[1])"
            subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
            swept.append(os.listdir(tmp_path / TEMPORARY))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    create(str(tmp_path), "a/zarr.json", b"")
    assert swept == [[], [], []]
    assert len(os.listdir(tmp_path / TEMPORARY)) == 1


def test_a_folder_that_a_sweeper_holds_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    holding: list[int] = []

    def held(descriptor: int, operation: int) -> None:
        if not holding:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            holding.append(os.open(name, os.O_RDONLY))
            flock(holding[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", held)
    create(str(tmp_path), "a/zarr.json", b"")
    assert (tmp_path / "a/zarr.json").exists()
    os.close(holding[0])


def test_a_thread_may_stay_in_a_folder_that_others_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "NAMES", 2)
    old = Path(fresh(str(tmp_path)))
    for _ in range(4):
        os.rmdir(fresh(str(tmp_path)))
    assert old.is_dir()
    script = "import sys; from kvstore.scratch import sweep; print(sweep(sys.argv[1]))"
    told = subprocess.check_output([sys.executable, "-c", script, str(tmp_path)], text=True)
    assert told == "0\n"  # it is locked as long as it is there
    os.rmdir(old)
    for _ in range(2):
        os.rmdir(fresh(str(tmp_path)))
    assert len(os.listdir(tmp_path / TEMPORARY)) == 1


def test_a_process_keeps_no_file_open_for_each_root(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3 * ROOTS):
        root = tmp_path / str(number)
        root.mkdir()
        create(str(root), "a/zarr.json", b"")
    assert len(os.listdir("/proc/self/fd")) <= before + ROOTS
    create(str(tmp_path / "0"), "b/zarr.json", b"")
    assert len(list(tmp_path.glob(f"*/{TEMPORARY}/*"))) <= ROOTS


def test_folders_that_somebody_removed_cost_no_open_file(tmp_path: Path) -> None:
    create(str(tmp_path), "a/zarr.json", b"")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        shutil.rmtree(tmp_path / TEMPORARY)
        create(str(tmp_path), f"{number}/zarr.json", b"")
        discard(str(tmp_path), str(number), ["zarr.json"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_whose_writer_lived_is_begun_again(tmp_path: Path) -> None:
    """As where a machine's clone has its boot: the store fails, and is made again whole."""
    store = Root(str(tmp_path)).open()
    block = sample_block(sample_layout())
    parts = iter([block])

    class Taken:
        def __iter__(self) -> Iterator[memoryview]:
            for folder in (tmp_path / TEMPORARY).iterdir():
                folder.rename(tmp_path / "taken")
            return (memoryview(part) for part in parts)

    with pytest.raises(FileNotFoundError):
        publish(str(tmp_path), "a", [("c", Taken()), ("d", [b""])], replace=False)
    assert store.store(bytes(36), block)
    assert store.load(bytes(36), bytearray(block.nbytes))


STORES = """
import sys
import numpy as np
from kvstore import scratch
from kvstore.testing import Root, sample_block, sample_layout
scratch.NAMES = 7  # so that many folders begin and end
store, block = Root(sys.argv[1]).open(), sample_block(sample_layout())
for n in range(500):
    key = n.to_bytes(36, "big") if n % 2 else (n + int(sys.argv[2])).to_bytes(36, "big")
    store.store(key, block)
"""


def test_stores_go_on_while_others_sweep(tmp_path: Path) -> None:
    """Nothing fails, nothing is lost and nothing is left."""
    done = threading.Event()

    def sweeping() -> None:
        while not done.is_set():
            sweep(str(tmp_path))

    commands = [
        [sys.executable, "-c", STORES, str(tmp_path), str(1000 * i)] for i in range(4)
    ]
    with ThreadPoolExecutor(2) as pool:
        sweepers = [pool.submit(sweeping) for _ in range(2)]
        try:
            processes = [subprocess.Popen(command) for command in commands]
            assert [process.wait(100) for process in processes] == [0] * 4
        finally:
            done.set()
    for sweeper in sweepers:
        sweeper.result()  # raises what a sweep has raised
    store, block = Root(str(tmp_path)).open(), sample_block(sample_layout())
    loaded = bytearray(block.nbytes)
    numbers = {
        *range(1, 500, 2),
        *(n + 1000 * i for i in range(4) for n in range(0, 500, 2)),
    }
    for n in numbers:
        assert store.load(n.to_bytes(36, "big"), loaded)
        assert loaded == block.tobytes()
    assert folders(tmp_path) == []
    assert not list((tmp_path / TEMPORARY).glob("*/*"))
