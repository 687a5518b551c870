"""`Share`: some fan-outs of one group: what is worked on at once, and done as a whole.

Keys are hashes, so shares of equally many fan-outs are about equally much work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import TypeVar, cast

from kvstore.records import Record

Result = TypeVar("Result")

WIDTH = 16
"""Fan-outs in one share: a group is at most 256 shares."""


@dataclass(frozen=True, slots=True)
class Share(Record):
    """The fan-outs from `first` to before `stop`.

    Attributes:
        group: the group's folder, relative to the root.
        first, stop: numbers of fan-outs.
    """

    group: str
    first: int
    stop: int


class Unfinished(Exception):
    """What a task raises that failed in the middle of a share.

    Attributes:
        done: what came of the share until then.
        error: why there is no more.
    """

    def __init__(self, done: object, error: Exception) -> None:
        """Keeps both, so that it pickles."""
        super().__init__(done, error)
        self.done = done
        self.error = error


def run(
    task: Callable[[Share], Result],
    shares: Iterable[Share],
    executor: Executor,
    *,
    ahead: int,
) -> Iterator[tuple[Share, Result]]:
    """Have `task` done for every share, and yield what came of each as it comes.

    An error of one ends all. What has not begun is cancelled. What runs on threads is
    waited for, and what comes of it is yielded before the error is raised. (Dask cancels
    what runs too, without a wait.)

    Args:
        task: pickles, where the executor is elsewhere.
        shares: asked for as there is room.
        executor: threads, or `distributed.Client.get_executor()`.
        ahead: shares that are under way at once.
    """
    running: dict[Future[Result], Share] = {}
    try:
        for share in shares:
            if len(running) >= ahead:
                yield from _finished(running)
            running[executor.submit(task, share)] = share
        while running:
            yield from _finished(running)
    except Exception:
        yield from _last(running)
        raise
    finally:
        begun = [future for future in running if not future.cancel()]
        with contextlib.suppress(KeyboardInterrupt):
            wait(begun)


def _finished(
    running: dict[Future[Result], Share],
) -> Iterator[tuple[Share, Result]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        share = running.pop(future)
        try:
            result = future.result()
        except Unfinished as unfinished:
            yield share, cast("Result", unfinished.done)
            raise unfinished.error from unfinished
        yield share, result


def _last(running: dict[Future[Result], Share]) -> Iterator[tuple[Share, Result]]:
    """What came of those that had begun, but for their errors: one is told already."""
    begun = [future for future in running if not future.cancel()]
    for future in wait(begun).done:
        share, error = running.pop(future), future.exception()
        if isinstance(error, Unfinished):
            yield share, cast("Result", error.done)
        elif error is None:
            yield share, future.result()
