"""`Check`: one thing that was looked at, what was found, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import (
    FormatError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from kvstore.records import Record


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # it works, and there is something to know
    FAIL = "fail"  # an engine would not start, or not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Record):
    """One finding.

    Attributes:
        name: of what was looked at, e.g. `clock`.
        verdict: a `Verdict`'s word.
        found: what was found.
        advice: what to change; empty where all is well.
    """

    name: str
    verdict: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name=name, verdict=Verdict.OK, found=found)


def warn(name: str, found: str, advice: str) -> Check:
    """It works, and there is something to know."""
    return Check(name=name, verdict=Verdict.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Check:
    """It does not work."""
    return Check(name=name, verdict=Verdict.FAIL, found=found, advice=advice)


class Failed(Exception):
    """Ends a row of checks that build on each other; `check` says why."""

    def __init__(self, check: Check) -> None:
        """The check that failed."""
        super().__init__(check)
        self.check = check


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Make a `Failed` of what storage says, with what to do about it."""
    try:
        yield
    except StorageAccessError as error:
        advice = (
            "Check the credentials, the bucket's policy, or the folder's owner and mode."
        )
        raise Failed(fail(name, str(error), advice)) from error
    except StorageTimeoutError as error:
        advice = "Check the endpoint and the network; --timeout gives it longer."
        raise Failed(fail(name, str(error), advice)) from error
    except (StorageError, FormatError) as error:
        advice = "Check that the URL is right, and that its bucket or mount is there."
        raise Failed(fail(name, str(error), advice)) from error


@contextlib.contextmanager
def of_folder(name: str) -> Iterator[None]:
    """Make a `Failed` of what a local folder's file system says."""
    try:
        yield
    except OSError as error:
        advice = "Check the folder's mount, owner and mode."
        raise Failed(fail(name, str(error), advice)) from error
