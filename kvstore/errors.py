"""Every error that kvstore raises, grouped by what a handler would do about it.

    KVStoreError
    ├── InvalidInputError (ValueError)         a call or setting is wrong: fix it
    ├── LayoutMismatchError (ValueError)       other bytes lie there: choose another place
    ├── FormatError (ValueError)               a document cannot be read by this version
    │   └── DamagedBlockError                  a block failed its proof: it is as absent
    ├── UnsupportedVersionError (ImportError)  this vLLM is not one that is tested
    └── StorageError (OSError)                 storage failed: nothing is known of the data
        ├── StorageAccessError (PermissionError)
        └── StorageTimeoutError (TimeoutError)

A missing block is an answer (`False`), never an error. All errors pickle with their
fields, so that they cross process borders whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MAX_SHOWN = 300
"""Characters of a value that a message repeats: it may be anybody's, and of any length."""


def shown(value: object) -> str:
    """`repr(value)` for a message, cut where it is too long to read."""
    text = repr(value)
    return (
        text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters)"
    )


def printable(text: str) -> str:
    """`text` for a message or a log: one line, and nothing that a terminal would obey.

    What is not printable is shown as Python would write it. Text without it stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class KVStoreError(Exception):
    """Base of every error raised by kvstore."""


class InvalidInputError(KVStoreError, ValueError):
    """A URL, option, key or buffer that cannot be used as given."""


class FormatError(KVStoreError, ValueError):
    """A stored document is malformed, or of a format that this version cannot read."""

    def __init__(self, place: str, problem: str) -> None:
        """`place` is the document's path or URL; `problem` says expected and found."""
        super().__init__(place, problem)
        self.place = place
        self.problem = problem

    def __str__(self) -> str:
        """One line: where, and what."""
        return f"{self.place}: {self.problem}"


Damage = Literal[
    "document",
    "not-a-file",
    "chunk-missing",
    "wrong-length",
    "wrong-checksum",
    "undecodable",
    "other-payload",
]
"""What of a block does not hold its proof."""


class DamagedBlockError(FormatError):
    """A block is present but its key, layout, length or checksum does not hold.

    Its bytes were not served. The next `store` of the key repairs it.

    Attributes:
        damage: which of them, as `kvstore verify` calls it; `document` for all that the
            block's document says.
    """

    def __init__(self, place: str, problem: str, damage: Damage = "document") -> None:
        """`place` and `problem` as of every `FormatError`."""
        super().__init__(place, problem)
        self.damage = damage


class UnsupportedVersionError(KVStoreError, ImportError):
    """The installed vLLM is not one of the releases that kvstore supports."""


class StorageError(KVStoreError, OSError):
    """The storage failed; nothing is known about the data, and nothing was deleted."""

    def __init__(self, place: str, action: str, cause: str) -> None:
        """`place` is the path or URL without credentials; `cause` the backend's words."""
        # One argument: OSError would take three for errno, text and file name.
        super().__init__(f"cannot {action} {place}: {cause}")
        self.place = place
        self.action = action
        self.cause = cause

    def __reduce__(self) -> tuple[type[StorageError], tuple[str, str, str]]:
        """Pickles with its fields."""
        return type(self), (self.place, self.action, self.cause)


class StorageAccessError(StorageError, PermissionError):
    """The storage refused: check credentials, bucket policy, or file modes."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer in time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a stored record and the engine differ."""

    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        """`field: expected …, found …`."""
        expected, found = self.expected, self.found
        where = ""
        both = isinstance(expected, tuple) and isinstance(found, tuple)
        if both and len(expected) == len(found) and len(repr(expected)) > MAX_SHOWN:
            # The first that differs tells more than two long beginnings that do not.
            first = next(i for i, ours in enumerate(expected) if ours != found[i])
            where, expected, found = f"[{first}]", expected[first], found[first]
        return f"{self.field}{where}: expected {shown(expected)}, found {shown(found)}"


class LayoutMismatchError(KVStoreError, ValueError):
    """What is stored at a place is of another layout or config than this engine's.

    Attributes:
        place: URL of the namespace or group that was opened.
        differences: every field that differs, `expected` being the engine's value and
            `found` the recorded one.
    """

    def __init__(self, place: str, differences: tuple[Difference, ...]) -> None:
        """Keeps the fields, so that the error pickles and a tool can read them."""
        super().__init__(place, differences)
        self.place = place
        self.differences = differences

    def __str__(self) -> str:
        """The place, every difference on a line of its own, and what to do."""
        lines = "\n".join(f"  {difference}" for difference in self.differences)
        return (
            f"{self.place} was written with another layout or config:\n{lines}\n"
            "Serving it would give wrong answers, so it is refused. Use another URL, "
            'or set "on_mismatch": "isolate" to keep a namespace of its own for this '
            "layout under the same URL."
        )
