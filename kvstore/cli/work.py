"""How long work is done: on threads or a Dask cluster, with a journal, and told by a bar.

Commands that go through all blocks call `work`, and take `--jobs`, `--dask` and `--journal`
alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvstore.cli.output import bar
from kvstore.errors import InvalidInputError, KVStoreError, StorageError, shown
from kvstore.filesystem import Filesystem
from kvstore.offline.group import read_document, shares_of
from kvstore.offline.journal import Journal
from kvstore.offline.shares import WIDTH, Share, run
from kvstore.records import Record
from kvstore.upkeep import Upkeep

MEETING_SECONDS = 10
"""How long a Dask scheduler is waited for."""

_ADDRESS = re.compile(r"([a-z]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):\d{1,5}")


class Counted(Protocol):
    """What comes of a share, as far as the bar tells it."""

    @property
    def blocks(self) -> int:
        """Blocks that were worked on."""

    @property
    def nbytes(self) -> int:
        """Their bytes."""


C = TypeVar("C", bound=Counted)
R = TypeVar("R", bound=Record)


def work(
    doing: str,
    task: Callable[[Share], C],
    shares: Sequence[Share],
    *,
    jobs: int,
    dask: str | None = None,
    journal: Journal[Any] | None = None,
) -> Iterator[tuple[Share, C]]:
    """Have `task` done for every share, and yield what came of each as it comes.

    Args:
        doing: what the bar says, e.g. `counting`.
        task: pickles, where `dask` is given; may be done twice for one share.
        shares: of all groups.
        jobs: shares that are worked on at once.
        dask: a scheduler's address; None for threads of this process.
        journal: recalls the shares that were done before, and notes the others.

    Raises:
        InvalidInputError: the journal tells that nothing is left to do, at once; the
            cluster cannot be used.
        KVStoreError: of the task.
        StorageError: the cluster failed, or the journal could not be written.
    """
    known = {} if journal is None else journal.recall_all(shares)
    if known:
        told = f"{len(known):,} of {len(shares):,} shares are told from the journal"
        sys.stderr.write(f"{told}: they are not looked at again\n")
    left = [share for share in shares if share not in known]

    def results() -> Iterator[tuple[Share, C]]:
        with bar(doing, len(shares)) as progress:
            for share, done in known.items():
                progress.advance(done.blocks, done.nbytes, fresh=False)
                yield share, done
            for share, done in _running(task, left, jobs, dask):
                if journal is not None:
                    journal.add(share, done)
                progress.advance(done.blocks, done.nbytes)
                yield share, done

    return results()


def require_there(
    journal: Journal[Any] | None,
    shares: Sequence[Share],
    destination: Upkeep,
    groups: Mapping[str, Sequence[str]],
) -> None:
    """Refuse a journal that tells of blocks which are not at the destination any more.

    Args:
        journal: of results that say how many blocks are `there`.
        shares: all that there are.
        destination: the root; only read.
        groups: by the name that shares have, the paths of the groups they are written to.

    Raises:
        InvalidInputError: nothing is there of a share that is done: it is another disk.
        FormatError, StorageError: as `read_document`.
    """
    if journal is None:
        return
    done = {share for share, told in journal.recall_all(shares).items() if told.there}
    for name in {share.group for share in done}:
        # An object store may list folders that are empty.
        paths = [p for p in groups[name] if read_document(destination, p) is not None]
        found = [share for path in paths for share in shares_of(destination, path)]
        firsts = {share.first for share in found}
        expected = [share for share in done if share.group == name]
        lost = [s for s in expected if s.first // WIDTH * WIDTH not in firsts]
        if lost:
            places = ", ".join(map(destination.place, groups[name]))
            raise InvalidInputError(
                f"journal: {journal.path} tells of blocks in {len(expected)} shares of "
                f"{places}, found none in {len(lost)} of them: it is another disk, or was "
                "emptied. Mount the one that was written to, or delete the journal to have "
                "all done anew"
            )


def recalled(journal: Journal[Any] | None) -> dict[str, int] | None:
    """How many shares are told from the journal, as the JSON of each command says it."""
    if journal is None:
        return None
    return {"recalled": journal.recalled, "shares": journal.asked}


def storages(**ends: Filesystem) -> dict[str, str]:
    """What a journal says of where the work is, beside URLs; of folders that is nothing."""
    told = {f"{name}_storage": end.storage() for name, end in ends.items()}
    return {name: digest for name, digest in told.items() if digest}


@contextlib.contextmanager
def journal_of(
    path: Path | None,
    about: Mapping[str, Any],
    kind: type[R],
    *,
    journal: type[Journal[R]] = Journal,
) -> Iterator[Journal[R] | None]:
    """The journal that `--journal` names; None without one. See `Journal` for errors."""
    if path is None:
        yield None
        return
    with journal(path, about, kind) as notes:
        yield notes


def _running(
    task: Callable[[Share], C], shares: Sequence[Share], jobs: int, dask: str | None
) -> Iterator[tuple[Share, C]]:
    if dask is None:
        with ThreadPoolExecutor(jobs) as pool:
            yield from run(task, shares, pool, ahead=2 * jobs)
        return
    pickle.dumps(task)  # refuses what other processes do not see
    with _cluster(dask) as (executor, threads):
        try:
            yield from run(task, shares, executor, ahead=2 * max(jobs, threads))
        except KVStoreError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise StorageError(f"the Dask cluster at {dask}", "work on", cause) from error


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[tuple[Executor, int]]:
    """A cluster as an executor, and how many threads its workers have now."""
    try:
        from distributed import Client, Security
    except ImportError as error:
        raise InvalidInputError(
            "--dask: needs the package distributed: pip install 'kvstore-zarr[dask]'"
        ) from error
    expected = "expected the address of a Dask scheduler, such as tcp://10.0.0.1:8786"
    if "@" in address:
        raise InvalidInputError(f"--dask: {expected}, found one with a user or password")
    if _ADDRESS.fullmatch(address) is None:
        raise InvalidInputError(f"--dask: {expected}, found {shown(address)}")
    try:
        security = Security()
        asyncio.run(_meet(address, security))
        client = Client(address, security=security, set_as_default=False)
    except Exception as error:  # of any kind, where something else listens there
        cause = f"{type(error).__name__}: {error}".rstrip(": ")  # some have no words
        raise InvalidInputError(
            f"--dask: {expected}, found {shown(address)}, where none answers: {cause}"
        ) from error
    with client:
        # No task stands for another one: what is done again has its reason.
        yield client.get_executor(pure=False), sum(client.nthreads().values())


async def _meet(address: str, security: Any) -> None:
    """Raises what goes wrong, if no scheduler answers there in time.

    A `Client` waits longer, in part for ever, and once more when the process ends.
    """
    from distributed import rpc

    there = rpc(address, connection_args=security.get_connection_args("client"))
    async with there, asyncio.timeout(MEETING_SECONDS):
        found = (await there.identity())["type"]
    if found != "Scheduler":
        raise ValueError(f"a {found} is there")
