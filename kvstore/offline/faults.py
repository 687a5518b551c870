"""What can be wrong below a root: one word for each kind, and problems that were found.

The list is closed. docs/commands/verify.md says what each word means.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.records import Record


class Fault(StrEnum):
    """A kind of problem."""

    # Documents above the blocks.
    NAMESPACE_MISSING = "namespace-missing"
    NAMESPACE_UNREADABLE = "namespace-unreadable"
    NAMESPACE_MISNAMED = "namespace-misnamed"
    RANK_MISSING = "rank-missing"
    RANK_UNREADABLE = "rank-unreadable"
    GROUP_MISSING = "group-missing"
    GROUP_UNREADABLE = "group-unreadable"
    FAN_OUT_MISSING = "fan-out-missing"
    FAN_OUT_UNREADABLE = "fan-out-unreadable"

    # A block's document.
    DOCUMENT_MISSING = "document-missing"
    DOCUMENT_UNREADABLE = "document-unreadable"
    OTHER_FORMAT = "other-format"
    OTHER_KEY = "other-key"
    OTHER_GROUP = "other-group"
    OTHER_LAYOUT = "other-layout"
    UNKNOWN_CODEC = "unknown-codec"
    DOCUMENT_DIFFERS = "document-differs"

    # A block's chunk.
    CHUNK_MISSING = "chunk-missing"
    WRONG_LENGTH = "wrong-length"
    WRONG_CHECKSUM = "wrong-checksum"
    UNDECODABLE = "undecodable"
    OTHER_PAYLOAD = "other-payload"

    # What lies where it should not.
    NOT_A_FILE = "not-a-file"
    MISPLACED = "misplaced"
    UNKNOWN_FILE = "unknown-file"
    UNKNOWN_NAME = "unknown-name"
    LEFTOVER = "leftover"

    # Nothing is known.
    UNREAD = "unread"


HALF = frozenset((Fault.DOCUMENT_MISSING, Fault.CHUNK_MISSING))
"""One file of a block, as it is for a moment while an object store is written to."""

REMOVABLE = HALF | {
    Fault.DOCUMENT_UNREADABLE,
    Fault.OTHER_KEY,
    Fault.OTHER_GROUP,
    Fault.DOCUMENT_DIFFERS,
    Fault.WRONG_LENGTH,
    Fault.WRONG_CHECKSUM,
    Fault.UNDECODABLE,
    Fault.OTHER_PAYLOAD,
    Fault.NOT_A_FILE,
    Fault.MISPLACED,
}
"""A block with one of these is served to no engine, of whichever version. That of another
format or codec may be served by another version, and that of another layout is whole if it
is its group's document that is the wrong one."""


LISTED = 100
"""Problems that are told one by one, of a share and of a whole work. All are counted."""

REMOVED, WRITTEN = "removed", "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Record):
    """One thing that is wrong.

    Attributes:
        path: where, relative to the root.
        fault: a `Fault`'s word.
        detail: what was expected and found.
        done: what was done about it: `removed`, `written`, or `kept` and why; empty where
            nothing was asked for.
    """

    path: str
    fault: str
    detail: str
    done: str = ""

    @property
    def mended(self) -> bool:
        """Whether it is not there any more."""
        return self.done in (REMOVED, WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Record):
    """What was found in some shares.

    Attributes:
        blocks, nbytes: those that were looked at, and the bytes of all their files.
        unproved: of these, blocks of a group whose layout cannot be read.
        found: how many problems there are, by the word of their fault.
        mended: of these, how many were removed or written anew.
        problems: the first of them.
    """

    blocks: int = 0
    nbytes: int = 0
    unproved: int = 0
    found: dict[str, int] = field(default_factory=dict)
    mended: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Findings:
        """One problem."""
        mended = {problem.fault: 1} if problem.mended else {}
        return cls(found={problem.fault: 1}, mended=mended, problems=(problem,))

    def __add__(self, other: Findings) -> Findings:
        """Of both."""
        return Findings(
            blocks=self.blocks + other.blocks,
            nbytes=self.nbytes + other.nbytes,
            unproved=self.unproved + other.unproved,
            found=dict(Counter(self.found) + Counter(other.found)),
            mended=dict(Counter(self.mended) + Counter(other.mended)),
            problems=(self.problems + other.problems)[:LISTED],
        )
