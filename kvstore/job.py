"""`Job` and `Outcome`: what is to be moved, and how it ended. Data, never a closure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstore.arrays import Proof
from kvstore.parts import AWAITED, UNKNOWN, Hint, Operation, Reply

NO_ROOM = "no room"
"""The word for a store that found no room in time. Storage was not asked for it."""

OWN = -1
"""Number of the jobs that a tier gives itself: vLLM is told nothing of their end."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: `operation` on each of `keys`, whose bytes lie in the slot beside it.

    `hints` are handed to the mover: one for each key, or none. Only loads and stores have
    slots. `seconds` is how long its keys may wait for their turn. A job that is the trial
    of a `Circuit` says so.
    """

    job_id: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]
    hints: Sequence[Hint] = ()
    seconds: float = float("inf")
    trial: bool = False

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for its end: for upkeep nobody does."""
        return self.operation in AWAITED


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: for each key a word and maybe a proof, as in `mover.Reply`; what
    went wrong with some of them, by their index; its seconds; and reports of upkeep.

    A job of lookups may end in several of these, each for some of its keys.
    """

    job: Job
    words: Sequence[str]
    proofs: Sequence[Proof | None]
    problems: Mapping[int, str]
    seconds: float
    reports: Sequence[object] = ()

    def part(self, indices: Sequence[int]) -> Outcome:
        """Of some keys alone, for a job without slots."""
        job = replace(self.job, keys=[self.job.keys[i] for i in indices], hints=())
        words = [self.words[i] for i in indices]
        proofs = [self.proofs[i] for i in indices]
        numbers = {i: n for n, i in enumerate(indices)}
        told = {numbers[i]: said for i, said in self.problems.items() if i in numbers}
        return replace(self, job=job, words=words, proofs=proofs, problems=told)


@dataclass(slots=True, eq=False)
class Running:
    """A job that has not ended, and what is known of it so far.

    `parts` are those that are still under way.
    """

    job: Job
    started: float
    parts: int = 0
    words: list[str] = field(init=False)
    proofs: list[Proof | None] = field(init=False)
    problems: dict[int, str] = field(default_factory=dict)
    reports: list[object] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        count = len(self.job.keys)
        self.words, self.proofs = [UNKNOWN] * count, [None] * count

    def take(self, start: int, reply: Reply) -> None:
        """Learn how keys from `start` on ended."""
        stop = start + len(reply.words)
        self.words[start:stop] = reply.words
        self.proofs[start:stop] = reply.proofs
        self.problems.update((start + i, said) for i, said in reply.problems.items())
        self.reports += reply.reports

    def fail(self, start: int, stop: int, word: str, problem: str) -> None:
        """What is still unknown of these keys ended so."""
        failed = [i for i in range(start, stop) if self.words[i] == UNKNOWN]
        for i in failed:
            self.words[i] = word
        self.problems.update((i, problem) for i in failed[:1])

    def outcome(self) -> Outcome:
        """How it ended, just now, but for what `news` has told."""
        seconds, reports = time.monotonic() - self.started, tuple(self.reports)
        whole = Outcome(self.job, self.words, self.proofs, self.problems, seconds, reports)
        if not self._told:
            return whole
        return whole.part([i for i in range(len(self.words)) if i not in self._told])

    def news(self) -> Outcome | None:
        """How some keys ended that were not told of before, if there are any."""
        known = [i for i, word in enumerate(self.words) if word != UNKNOWN]
        indices = [i for i in known if i not in self._told]
        if not indices:
            return None
        whole = Outcome(
            self.job,
            self.words,
            self.proofs,
            self.problems,
            time.monotonic() - self.started,
        )
        self._told.update(indices)
        return whole.part(indices)
