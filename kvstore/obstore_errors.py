"""obstore's errors -> the builtins that `Client` names.

They tell by class what kvstore must know, except the server's status and a timeout, which
only their text has.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from kvstore.client import RANGE_NOT_SATISFIABLE, REFUSED, SOMEBODY_WAS_FIRST
from kvstore.retries import TransientError

_BROKEN = re.compile(r"HTTP error: |invalid list response")
"""In the first line of what may go better the next time, unless a status was told."""

_STATUS = re.compile(r"status code: (\d{3})")
_EXPIRED = re.compile(r"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired)</Code>")
"""What S3 answers, with status 400, to credentials of yesterday."""

_SAID = re.compile(r"<Message>(.*?)</Message>|\"message\":\s*\"(.*?)\"", re.DOTALL)
_REASON = re.compile(r"(?:message|error): \"(.*?)\"|(InvalidCertificate)")
"""Where the first line ends in "error sending request"."""


class EmptyObject(Exception):
    """An object without bytes has no range."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """obstore's errors as the builtins that `Client` names.

    Their text goes on for a screen. What the server said is kept, or the first lines.
    """
    try:
        yield
    except TransientError:
        raise
    except BaseException as error:
        # A panic of Rust's is no Exception, but no more than a failure of this request.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = str(error)
        told = _STATUS.search(text)
        status = int(told[1]) if told else None
        name = type(error).__name__
        if status == RANGE_NOT_SATISFIABLE:
            raise EmptyObject from error
        cause = _cause(text, status)
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text:
            raise FileNotFoundError(cause) from error
        if name == "AlreadyExistsError" or status in SOMEBODY_WAS_FIRST:
            raise FileExistsError(cause) from error
        refused = name in ("PermissionDeniedError", "UnauthenticatedError")
        if refused or status in REFUSED or _EXPIRED.search(text):
            raise PermissionError(cause) from error
        if isinstance(error, TimeoutError) or "TimedOut" in text or "kind: Timeout" in text:
            raise TimeoutError("no answer in time") from error
        if status is None and _BROKEN.search(text) and "InvalidCertificate" not in text:
            raise TransientError(cause) from error
        raise OSError(cause) from error


def odd_name(error: OSError) -> bool:
    """Whether a listing came upon a name that obstore cannot stand."""
    return type(error.__cause__).__name__ == "InvalidPathError"


def _cause(text: str, status: int | None) -> str:
    if status is not None and (said := _SAID.search(text)):
        return f"HTTP {status}: {said[1] or said[2]}"
    summary, _, details = text.partition("Debug source:")
    reason = _REASON.search(details)
    return " ".join(summary.split()) + (f": {reason[1] or reason[2]}" if reason else "")
