"""An engine that is asked while its storage fails, and what came of it.

Every prompt has its one right answer, told by an engine that computed it: a counting
sentence, whose words are its own from the first block on.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from chaos.dialogue import Dialogue, Said

BLOCKS, BLOCK_TOKENS = 5, 32
"""Blocks of one prompt that can be found again."""

LOOKUP_TIMEOUT, IO_TIMEOUT = 1.0, 3.0

MARGIN = 2.0
"""Seconds beyond what is promised, for a machine that has other things to do."""

MAY_WAIT = LOOKUP_TIMEOUT + 2 * IO_TIMEOUT + MARGIN
"""Seconds that a request may take longer than the same one cold: for its lookups, and for a
load, whose time for a turn and whose own time are `IO_TIMEOUT` each."""

RECOVERY = 60.0
"""Seconds after which an engine that has not recovered is taken for one that never will."""

OPENS, CLOSES = "given up until a trial succeeds: ", "works again after "

FAILED, NOT_TRIED = ("timeout", "late", "access", "other"), ("circuit_open",)

_SORTS = ("red", "blue", "black", "white", "brown", "grey", "old", "lazy", "tiny", "wild")
_BEASTS = ("fox", "bear", "eagle", "tiger", "panda", "camel", "whale", "otter", "ox", "pig")


def prompt(number: int) -> str:
    """One of 100, each of `BLOCKS` blocks and a bit."""
    name = f"{_SORTS[number % 10]} {_BEASTS[number // 10]}"
    return f"The {name} number {number:02} jumps over the lazy dog. " * 13 + f"The {name}"


@dataclass(frozen=True)
class Cold:
    """What an engine computed.

    Attributes:
        answers: their tokens, by the prompt's number.
        seconds: the median of what one took; they are all of one length.
    """

    answers: Mapping[int, list[int]]
    seconds: float


@dataclass(frozen=True)
class State:
    """What storage is like for a while.

    Attributes:
        name: for people.
        begin: makes it so, and ends it when its block ends.
        serves: whether what is known is still found meanwhile.
        fails: what must be counted, as `operation/kind`: one of each group.
        gives_up: `lookups`, `loads` and `stores`, as far as the circuit must open.
        rounds: how often all is asked.
    """

    name: str
    begin: Callable[[], AbstractContextManager[None]]
    serves: bool = False
    fails: Sequence[tuple[str, ...]] = ()
    gives_up: tuple[str, ...] = ()
    rounds: int = 1


@dataclass
class Row:
    """What came of one state.

    Attributes:
        waits: seconds that each request took longer than the same one cold.
        answers: to all of them; any that was not the cold one is among the problems.
        hits_after, stores_after: seconds from the end of the state until what storage has
            was loaded, and what it lacked was stored and loaded.
        failed, not_tried: blocks, by operation and kind.
        lines: what the circuits said.
        problems: what should have been otherwise.
    """

    state: str
    waits: list[float] = field(default_factory=list)
    answers: int = 0
    hits_after: float = 0.0
    stores_after: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    not_tried: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Asked:
    """Attributes:
    engine: who is asked.
    rows: what came of each state.
    """

    def __init__(self, engine: Dialogue, cold: Cold, known: Iterable[int]) -> None:
        """Args:
        engine: ready, with nothing in its caches.
        cold: the right answers.
        known: prompts whose blocks are in storage; the others are new.
        """
        self.engine = engine
        self.rows: list[Row] = []
        self._cold = cold
        self._known = list(known)
        self._new = [number for number in cold.answers if number not in self._known]
        self._row = Row("healthy")
        self._seen = [self._known.pop(), self._known.pop()]
        engine.poke()
        self._ask(self._new.pop())
        self._ask(*self._seen)
        said = engine.poke()
        found = said.count("blocks", "operation=load", "result=loaded")
        assert found == BLOCKS * len(self._seen), f"storage lacks blocks: {said.metrics}"
        self._end_row()

    def during(self, state: State) -> Row:
        """Ask in one state, and after it until all is well again."""
        before = self.engine.poke()
        said_before = self._circuit_lines()
        self._row = Row(state.name)
        known = [self._known.pop() for _ in range(3)]
        new = [self._new.pop() for _ in range(2)]
        self.engine.forget()
        with state.begin():
            for number in range(state.rounds):
                if number:
                    self.engine.forget()
                for numbers in self._questions(known, new):
                    self._ask(*numbers)
            last = self.engine.poke()
        self._row.hits_after = self._until_found(known[:1])
        self._row.stores_after = self._until_found(new)
        self._seen = [known[0], known[1]]
        after = self._until_closed()
        self._row.failed = counted("errors", FAILED, before, after)
        self._row.not_tried = counted("not_tried_blocks", NOT_TRIED, before, after)
        self._row.lines = self._circuit_lines()[len(said_before) :]
        self._check(state, before, last)
        return self._end_row()

    def _questions(self, known: list[int], new: list[int]) -> Iterator[list[int]]:
        """Known to storage, seen by this engine, and new; alone and together."""
        yield [known[0]]
        yield [new[0]]
        yield [known[1], self._seen[0]]
        yield [self._seen[1], new[1]]
        yield [known[2]]

    def _ask(self, *numbers: int) -> Said:
        said = self.engine.ask([prompt(number) for number in numbers])
        row = self._row
        row.waits.append(said.seconds - len(numbers) * self._cold.seconds)
        for number, tokens in zip(numbers, said.tokens, strict=True):
            row.answers += 1
            if tokens != self._cold.answers[number]:
                self._problem(f"prompt {number} was answered by {tokens}")
        return said

    def _until_found(self, numbers: Sequence[int]) -> float:
        """Seconds until prompts are wholly found in storage, asked again and again."""
        begun = time.monotonic()
        while time.monotonic() - begun < RECOVERY:
            self.engine.forget()
            said = self._ask(*numbers)
            if all(cached >= BLOCKS * BLOCK_TOKENS for cached in said.cached):
                break
        else:
            self._problem(f"prompts {numbers} are never found again: {said.metrics}")
        return time.monotonic() - begun

    def _until_closed(self) -> Said:
        """The circuit of loads has a trial of its own, and a busy machine may open one."""
        end = time.monotonic() + RECOVERY
        while (said := self.engine.poke()).count("circuit_open"):
            if time.monotonic() > end:
                self._problem(f"a circuit stays open: {self._circuit_lines()}")
                break
        return said

    def _check(self, state: State, before: Said, last: Said) -> None:
        row = self._row
        loaded = [said.count("blocks", "result=loaded") for said in (before, last)]
        if state.serves != (loaded[1] > loaded[0]):
            self._problem(f"expected hits to be {state.serves}, loaded {loaded}")
        for kinds in state.fails:
            if not any(row.failed.get(kind) for kind in kinds):
                self._problem(f"expected failures {kinds}, found {row.failed}")
        for what in ("lookups", "loads", "stores"):
            said = [line for line in row.lines if f": {what} of " in line]
            turns = [OPENS in line for line in said]
            if turns != [True, False] * (len(turns) // 2) or (
                not turns and what in state.gives_up
            ):
                self._problem(f"the circuit of {what} said {said}")

    def _circuit_lines(self) -> list[str]:
        return self.engine.lines(OPENS, CLOSES)

    def _problem(self, text: str) -> None:
        self._row.problems.append(f"{self._row.state}: {text}")

    def _end_row(self) -> Row:
        row = self._row
        if max(row.waits) > MAY_WAIT:
            self._problem(f"one waited {max(row.waits):.1f} s of {MAY_WAIT:.1f}")
        self.rows.append(row)
        return row


def counted(name: str, kinds: Sequence[str], before: Said, after: Said) -> dict[str, int]:
    """What a metric counted between, by `operation/kind`."""
    found = {}
    for operation in ("lookup", "load", "store"):
        for kind in kinds:
            labels = (f"operation={operation}", f"={kind}")
            count = after.count(name, *labels) - before.count(name, *labels)
            if count:
                found[f"{operation}/{kind}"] = int(count)
    return found
