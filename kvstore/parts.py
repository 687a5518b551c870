"""`Part`, `Reply`, `Answer`: what a runner of jobs and its movers tell each other. Data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvstore.arrays import Proof

Operation = Literal["lookup", "load", "store", "touch", "sweep", "collect"]
"""The last three are the storage's upkeep. They have no slots."""

AWAITED = frozenset[Operation](("lookup", "load", "store"))
"""Those for whose end somebody waits."""

Hint = Proof | bool | None
"""What the other end knows of a key: for a load its proof, for a store whether the block
is suspect."""

UPKEEP_SECONDS = 1800.0
"""How long upkeep may take before it counts as hanging. A million files, as many as a look
lists of a group, are 1,000 requests of a bucket: half of this, where each takes a second.
"""

NO_SLOT = -(1 << 32)
"""For a load whose bytes nobody wants: that it succeeds is all that is to be known. No
engine's number of a row, which has 32 bits, is taken for it by mistake.
"""

READY = 0
"""The number of the reply to nothing, which a mover sends when it can take parts."""

FAILED, LATE, INVALID = "failed", "late", "invalid"
"""The words for a key that did not run, or whose storage failed; for one that waited too
long for its turn; and for one that was asked for wrongly, which tells nothing of storage.
"""

UNKNOWN = ""
"""Instead of a word, in a reply that is not the last: this key has not ended."""

NEWS_SECONDS = 0.05
"""Lookups that ended are told after so long, although others of their job have not: one
that hangs keeps nobody waiting but those who need it.
"""

MAX_MESSAGE_BYTES = 160 << 10
"""A message must fit into a socket's default buffer of 208 KiB."""


class Part(NamedTuple):
    """Some keys of one job. `deadline` is by `time.monotonic`, one clock for a machine."""

    number: int
    operation: Operation
    keys: Sequence[bytes]
    slots: Sequence[int]
    hints: Sequence[Hint]
    deadline: float


class Reply(NamedTuple):
    """How a part ended: for each key a word, and the proof of the block that is there now
    if it is known; what went wrong with the first few; and reports of upkeep. To lookups
    there may be several, each with what is known so far.
    """

    number: int
    words: Sequence[str]
    proofs: Sequence[Proof | None]
    problems: Mapping[int, str]
    reports: Sequence[object] = ()
    last: bool = True


class Answer(NamedTuple):
    """How one key ended: its word, its proof, what went wrong if anything did, and what
    upkeep has to tell.
    """

    word: str
    proof: Proof | None = None
    problem: str | None = None
    report: object = None


Perform = Callable[[Operation, bytes, int, Hint], Answer]
"""Does one key."""
