"""Where movers run: `ProcessMover`, or `ThreadMover` where a process could not help.

A process takes nothing from the engine's interpreter, whatever the backend, and one that
hangs can be killed. It is started afresh and not forked: engines have threads, and maybe a
device. It ends when the engine's end of its socket closes, or the engine is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

from kvstore.blocks import Blocks
from kvstore.collector import Collector
from kvstore.errors import InvalidInputError
from kvstore.links import Launched
from kvstore.mover import Mover
from kvstore.parts import MAX_MESSAGE_BYTES, Perform
from kvstore.region import Region, populate
from kvstore.transfer import Rows, Transfer

logger = logging.getLogger(__name__)

DEFAULT_PROCESSES = 4
"""Processes where nobody says how many; no more than there are cores."""

NICE = 10
"""How much a process yields to the engine where cores are few."""

POPULATE_SECONDS = 5.0
"""How long a start waits until all rows are mapped; the rest is mapped beside transfers."""

_MAIN = (
    "import pickle, signal, sys; "
    # Whoever interrupts or ends all processes of a group means the engine, and the engine
    # says when it is over.
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    # The same modules as in the engine, wherever it has them from.
    "file = open(int(sys.argv[2]), 'rb'); file.seek(0); sys.path[:] = pickle.load(file); "
    "from kvstore.processes import main; main(file)"
)

_REMEDY = 'Set "processes": 0 to transfer on threads of the engine instead.'


def launch(
    blocks: Mapping[int, Blocks],
    rows: Rows,
    *,
    processes: int | None,
    threads: int,
    lookups: int,
    name: str,
    collector: Collector | None = None,
) -> list[Launched]:
    """The movers between `blocks` and `rows`: processes, unless they could not map `rows`.

    Args:
        blocks: the steps on storage, by KV group.
        rows: the memory to load into and to store from.
        processes: how many; 0 for threads of this process; None for a number that fits
            the machine.
        threads: how many blocks are transferred at once, in all processes together.
        lookups: 1, or how many lookups run at once for each thread.
        name: the threads' name, for debuggers.
        collector: does the upkeep of the root, if this engine may.

    Raises:
        InvalidInputError: processes cannot be prepared; nothing is left open.
    """
    count = processes
    if count is None:
        count = min(DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))
    with scarce():
        region = Region.of(rows) if count else None
    threads = -(-threads // (count if region else 1))
    lookups = 1 if lookups == 1 else lookups * threads
    if region is None:
        logger.info("%d threads of the engine transfer blocks", threads)
        perform = Transfer(blocks, rows, collector)
        return [ThreadMover(perform, threads=threads, lookups=lookups, name=name)]
    logger.info("%d processes transfer blocks, %d at once in each", count, threads)
    task = Task(blocks, region, threads, lookups, collector)
    movers: list[Launched] = []
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, region.descriptor)  # each mover has its own
        with scarce(), contextlib.ExitStack() as unless_all:
            for _ in range(count):
                movers.append(mover := ProcessMover(task))
                unless_all.callback(mover.close)
            unless_all.pop_all()
    return movers


@contextlib.contextmanager
def scarce() -> Iterator[None]:
    """What the system has no more of is for people to grant."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(
            f"processes: expected files and memory for their start, found {error}. Raise "
            f"the limit, as with ulimit -n. {_REMEDY}"
        ) from error


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is told at its start. Pickled; never leaves the machine."""

    blocks: Mapping[int, Blocks]
    region: Region
    threads: int
    lookups: int
    collector: Collector | None


class ThreadMover:
    """A mover on threads of this process."""

    def __init__(self, perform: Perform, *, threads: int, lookups: int, name: str) -> None:
        """See `Mover`."""
        self._perform = perform
        self._threads = threads
        self._lookups = lookups
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> socket.socket:
        """Start the threads."""
        ours, theirs = _socket_pair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(theirs.close)
            mover = Mover(
                theirs,
                self._perform,
                threads=self._threads,
                lookups=self._lookups,
                name=self._name,
            )
            thread = threading.Thread(
                target=mover.serve, name=f"{self._name}-reader", daemon=True
            )
            thread.start()
            self._thread = thread
            undo.pop_all()
        return ours

    def kill(self) -> bool:
        """No: a thread cannot be ended."""
        return False

    def join(self, seconds: float) -> bool:
        """Wait for the threads' end."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Nothing is kept."""


class ProcessMover:
    """A mover in a process of its own."""

    def __init__(self, task: Task) -> None:
        """Starts nothing yet. The task's region stays the caller's to close.

        Raises:
            InvalidInputError: the task cannot be handed to a process.
            OSError: no descriptor or memory is left for it.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._task = -1
        self._region = os.dup(task.region.descriptor)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            region = replace(task.region, descriptor=self._region)
            try:
                pickled = pickle.dumps(replace(task, region=region))
            except Exception as error:  # whatever an option's own class raises
                raise InvalidInputError(
                    "processes: expected storage_options that can be handed to a process, "
                    f"found {type(error).__name__}: {error}. {_REMEDY}"
                ) from error
            # A file without a name, so that a restart needs nothing but its number.
            self._task = os.memfd_create("kvstore-task", os.MFD_CLOEXEC)
            os.fchmod(self._task, 0o400)  # credentials may be in it
            with open(self._task, "wb", closefd=False) as file:
                file.write(pickle.dumps(_module_path()) + pickled)
            undo.pop_all()

    def start(self) -> socket.socket:
        """Start the process; it takes its parts when it is ready."""
        ours, theirs = _socket_pair()
        numbers = [theirs.fileno(), self._task, os.getpid()]
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *map(str, numbers)],
                pass_fds=(theirs.fileno(), self._task, self._region),
                stdin=subprocess.DEVNULL,
            )
            undo.pop_all()
        return ours

    def kill(self) -> bool:
        """End it at once, with whatever it is waiting for."""
        if self._process is not None:
            self._process.kill()
        return True

    def join(self, seconds: float) -> bool:
        """Wait for its end."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the files that a start needs."""
        for descriptor in (self._task, self._region):
            if descriptor >= 0:
                os.close(descriptor)
        self._task = self._region = -1


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep messages apart, with room for the longest whatever is set here."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
    return pair


def _module_path() -> list[str]:
    """Where modules are found, wherever a later start finds itself.

    Entries that are no strings are Python's to ignore. Names of nothing that is there may
    mean something to an import hook, and stay as they are.
    """
    folders = []
    entries: list[object] = [*sys.path]
    for entry in entries:
        if not isinstance(entry, str):
            continue
        there = not entry or os.path.exists(entry)
        with contextlib.suppress(OSError):  # the current folder is gone
            folders.append(os.path.abspath(entry) if there else entry)
    return folders


def main(file: BinaryIO) -> None:
    """The life of a mover's process. What is left in `file` is its task."""
    channel, _, engine = map(int, sys.argv[1:])
    with file:
        task: Task = pickle.load(file)
    rows = task.region.map()
    populating = threading.Thread(target=populate, args=(rows,), daemon=True)
    populating.start()
    populating.join(POPULATE_SECONDS)
    # Not before, since the engine waits for the start; and threads inherit it.
    os.nice(NICE)
    mover = Mover(
        socket.socket(fileno=channel),
        Transfer(task.blocks, rows, task.collector),
        threads=task.threads,
        lookups=task.lookups,
        name="kvstore-mover",
        still_wanted=lambda: os.getppid() == engine,
    )
    mover.serve()
