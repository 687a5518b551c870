"""What happens to a folder, and to the processes that use it: each for one block of code.

A mount, and what root may not be forbidden, need root.
"""

import errno
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


class CannotMount(RuntimeError):
    """There is no mounting here: a reason to skip."""


@contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    """A folder with a file system of its own, of so many bytes.

    Raises:
        CannotMount: only root may, and not everywhere.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvstore-test", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotMount(str(error)) from None
    if done.returncode:
        raise CannotMount(done.stderr.strip())
    try:
        yield place
    finally:
        # Who has it open may still be on its way out.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def full(mount: Path) -> Iterator[None]:
    """No byte is left."""
    filler = mount / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    yield
    filler.unlink()


@contextmanager
def read_only(mount: Path) -> Iterator[None]:
    """As a file system is after an error of its disk."""
    _remount(mount, "ro")
    try:
        yield
    finally:
        _remount(mount, "rw")


def _remount(mount: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(mount)], check=True)


@contextmanager
def moved(root: Path) -> Iterator[None]:
    """The root is somewhere else, and comes back as it was."""
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    yield
    assert not root.exists(), "somebody has made another root"
    elsewhere.rename(root)


@contextmanager
def limited(kind: int, value: int, processes: Iterable[int]) -> Iterator[None]:
    """Processes may have or write no more than this; what they have stays."""
    with ExitStack() as undo:
        for process in processes:
            before = resource.prlimit(process, kind)
            undo.callback(_set_limit, process, kind, before)
            resource.prlimit(process, kind, (value, before[1]))
        yield


def _set_limit(process: int, kind: int, limits: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(process, kind, limits)


@contextmanager
def frozen(processes: Callable[[], list[int]]) -> Iterator[None]:
    """All of them, those that begin meanwhile included: as when a folder never answers."""
    try:
        with _signalled(processes, signal.SIGSTOP, every=0.05):
            yield
    finally:
        _signal(processes(), signal.SIGCONT)


@contextmanager
def killed(processes: Callable[[], list[int]]) -> Iterator[None]:
    """All of them, again and again."""
    with _signalled(processes, signal.SIGKILL, every=0.5):
        yield


@contextmanager
def _signalled(
    processes: Callable[[], list[int]], number: signal.Signals, *, every: float
) -> Iterator[None]:
    """All of them at once, and whoever is there after so many seconds, and so on."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(every):
            _signal(processes(), number)

    thread = threading.Thread(target=go_on, daemon=True)
    _signal(processes(), number)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
