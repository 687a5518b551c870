"""What a block store may do, as a model: the conditions a key can be in, and what each
operation may tell and leave. Pure; `kvstore.testing.stateful` holds a store against it.

A key has a set of possible conditions: after a failure nobody knows what took effect. Each
answer narrows it down. An answer that fits none of them is a defect of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Payload = int
"""Names the bytes that are stored: a payload of its own for each number."""

State = Literal["absent", "orphan", "malformed", "damaged", "whole"]


@dataclass(frozen=True, slots=True)
class Condition:
    """What lies under a key.

    Attributes:
        state: nothing is there (`absent`), or a chunk without a document (`orphan`), or a
            document that is not this block's (`malformed`), or one that is, beside a chunk
            that it does not vouch for (`damaged`), or a block (`whole`).
        payload: what a whole block holds.
    """

    state: State
    payload: Payload | None = None


ABSENT = Condition("absent")
ORPHAN = Condition("orphan")
MALFORMED = Condition("malformed")
DAMAGED = Condition("damaged")


def whole(payload: Payload) -> Condition:
    """A block is there that holds `payload`."""
    return Condition("whole", payload)


Strike = Literal["none", "failure", "lie"]
"""What befell an operation: nothing; storage failed; or storage told untruths, and may have
failed as well."""

Answer = bool | Payload | Literal["absent", "refused", "failed"]
"""What an operation told: `contains`, `store` and `delete` a truth value; a load the
payload that it found, or `absent`. `refused` is a `DamagedBlockError`, `failed` a
`StorageError`."""

Ending = tuple[Answer, Condition]
"""What an operation may tell, and the condition that it then leaves."""


@dataclass(slots=True)
class Knowledge:
    """What one store may remember of a key.

    Attributes:
        suspect: whether it has found the block damaged, and nothing has told it better.
        proof: whether it may still have a proof of what lies, or once lay, there.
    """

    suspect: Literal["no", "yes", "maybe"] = "no"
    proof: bool = False


class Key:
    """What is known of one key.

    Attributes:
        conditions: those that are possible.
        payloads: all that anybody has tried to store under it.
    """

    def __init__(self) -> None:
        self.conditions = {ABSENT}
        self.payloads: set[Payload] = set()

    def observe(
        self, answer: Answer, endings: Callable[[Condition], Iterable[Ending]]
    ) -> None:
        """Keep what fits an answer.

        Raises:
            AssertionError: nothing does, so the store must not have answered that.
        """
        left = {
            condition
            for before in self.conditions
            for told, condition in endings(before)
            if _same(told, answer)
        }
        allowed = {told for before in self.conditions for told, _ in endings(before)}
        assert left, f"answered {answer!r}; in {self.conditions} it may answer {allowed}"
        self.conditions = left

    def become(self, change: Callable[[Condition], Iterable[Condition]]) -> None:
        """Somebody has changed what lies there."""
        self.conditions = {after for before in self.conditions for after in change(before)}

    def restored(self) -> set[Condition]:
        """What damage to a block that is damaged already may bring back."""
        return {whole(payload) for payload in self.payloads}


def contains(condition: Condition, strike: Strike, known: Knowledge) -> Iterator[Ending]:
    """An error is not "absent", and what is not this block's is never there."""
    if strike == "failure":
        yield "failed", condition
        return
    if strike == "lie":
        yield True, condition
        yield False, condition
        yield "failed", condition
        return
    if condition.state not in ("whole", "damaged"):
        yield False, condition
        return
    yield True, condition
    if known.suspect != "no":
        yield False, condition


def load(
    condition: Condition, strike: Strike, known: Knowledge, payloads: Iterable[Payload]
) -> Iterator[Ending]:
    """Nothing comes back that was not stored under this very key."""
    if strike == "failure":
        yield "failed", condition
        return
    if strike == "lie":
        yield "failed", condition
        yield "refused", condition
        yield "absent", condition
        yield from ((payload, condition) for payload in payloads)
        return
    if condition.state == "absent":
        yield "absent", condition
        return
    if condition.payload is not None:
        yield condition.payload, condition
        return
    yield "absent" if condition == ORPHAN else "refused", condition
    if known.proof:
        # The chunk may be what the store remembers, whatever became of its document.
        yield from ((payload, condition) for payload in payloads)


def store(
    condition: Condition, payload: Payload, strike: Strike, known: Knowledge
) -> Iterator[Ending]:
    """A whole block is never lost to a failure, and one that returns is there."""
    stored = whole(payload)
    if strike == "none":
        if condition.state == "whole":
            yield False, condition
            return
        if condition.state != "damaged" or known.suspect != "no":
            yield True, stored
        if condition.state == "damaged" and known.suspect != "yes":
            yield False, condition  # its document is all that a store looks at
        return
    yield "failed", condition
    if condition.state != "whole" or strike == "lie":
        yield "failed", stored
        yield "failed", ORPHAN if condition == ABSENT else condition
    if strike == "lie":
        yield False, condition
        yield True, stored
        yield True, condition  # in a folder, who was there first stays
        yield "failed", DAMAGED


def delete(condition: Condition, strike: Strike) -> Iterator[Ending]:
    """The document goes first."""
    if strike == "none":
        yield True, ABSENT
        return
    yield "failed", condition
    yield "failed", ABSENT
    yield "failed", ORPHAN


def _same(told: Answer, answer: Answer) -> bool:
    return type(told) is type(answer) and told == answer
