"""What a backend raises -> one of our errors of storage, without a secret in it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from kvstore.errors import (
    InvalidInputError,
    KVStoreError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
    printable,
)

MAX_CAUSE = 1000
"""Characters of a backend's words: a server may have chosen them."""

_LOOKED_AT = 20 * MAX_CAUSE
"""Characters that are searched for what is not to be told: a body may be of any length."""

_QUOTE = r"""(?:\\*["']|&quot;|%22)"""
_IS = rf"(?:{_QUOTE}\s*,|{_QUOTE}?\s*(?:[:=>]|%(?:25)*3[ad]))"
_OPEN = rf"(?:b?{_QUOTE})?"
_VALUE = r"""[^\s"'\\&<>,;(){}\[\]|]"""
_NAMES = (
    r"token(?:-\d+)?|signature(?:provided)?|\bsig|secret|password|assertion"
    r"|(?:access|account|customer|encryption|private|secret)[-_]?key"
)
_IN_WORDS = re.compile(
    r"(://)[^\s/@:]*:[^\s/@]*(?=@)"
    rf"|((?:{_NAMES}){_IS}{_OPEN}){_VALUE}+"
    rf"|((?:{_NAMES}){_IS}\s+{_OPEN}){_VALUE}{{16,}}"
    rf"|(authorization{_IS}\s*{_OPEN}[\w-]+\s+){_VALUE}{{8,}}"
    rf"|(\bbearer\s){_VALUE}{{16,}}",
    re.IGNORECASE,
)
"""Credentials as they stand in a URL, a header, JSON or XML, whoever they are from: clients
repeat what they have asked, and a server may repeat what it was told. Behind a space only
what is long: there it may be a sentence. No name has a pattern of any length before it, or
a long answer would take for ever."""

_OF_SETTINGS = (
    "ConfigParseError",
    "EndpointResolutionError",
    "InfiniteLoopConfigError",
    "InvalidConfigError",
    "InvalidS3AddressingStyleError",
    "NoRegionError",
    "ParamValidationError",
    "PartialCredentialsError",
    "ProfileNotFound",
)
"""What botocore raises for what people wrote, beside `ValueError` and `TypeError`."""


def storage_error(
    error: Exception, action: str, place: str, secrets: Sequence[str] | None
) -> StorageError:
    """Translate, most specific first.

    Backends raise far more than `OSError` (botocore, aiohttp and gcsfs each have their
    own), so whatever else it is, it is an error of storage, never an absence.

    Args:
        error: what was raised.
        action: what could not be done, as a verb.
        place: where.
        secrets: not to be told; None where nobody but the operating system has words.
    """
    kind = StorageError
    if isinstance(error, PermissionError):
        kind = StorageAccessError
    elif isinstance(error, TimeoutError):
        kind = StorageTimeoutError
    cause = str(error) or "no answer in time"
    if not isinstance(error, OSError):
        cause = f"{type(error).__name__}: {cause}"
    if secrets is None:
        translated = kind(place, action, _one_line(cause))
        translated.__cause__ = error
    else:
        translated = kind(place, action, _told(cause, secrets))
        translated.__cause__ = _if_harmless(error, secrets)
    return translated


@contextlib.contextmanager
def settings_errors(place: str, secrets: Sequence[str]) -> Iterator[None]:
    """What a client raises of its settings while it is made is for people to fix: trying
    again would not help.
    """
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:
        name = type(error).__name__
        if not isinstance(error, ValueError | TypeError) and name not in _OF_SETTINGS:
            raise
        raise InvalidInputError(
            "storage_options: expected what the client can use, there and in the "
            f"environment, found for {place}: {name}: {_told(str(error), secrets)}"
        ) from _if_harmless(error, secrets)


def _one_line(text: str) -> str:
    told = printable(" ".join(text.split()))
    return told if len(told) <= MAX_CAUSE else f"{told[:MAX_CAUSE]}…"


def _told(text: str, secrets: Sequence[str]) -> str:
    text = text[:_LOOKED_AT]
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the start of another
        text = text.replace(secret, "***")
    return _one_line(_IN_WORDS.sub(r"\1\2\3\4\5***", text))


def _if_harmless(error: Exception, secrets: Sequence[str]) -> Exception | None:
    """The error, if a traceback that shows it and all below it shows nothing that a message
    would not tell as it is: no secret, and no answer of a server at length.
    """
    below: BaseException | None = error
    while below is not None:
        if _told(text := str(below), secrets) != text:
            return None
        below = below.__cause__ or below.__context__
    return error
