"""What the many backends of fsspec raise: which status it has, and what that means."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http import HTTPStatus

from kvstore.client import ABSENT, REFUSED

_BROKEN = frozenset(
    (
        "AssertionError",  # gcsfs, of a body that is too short
        "ChecksumError",  # gcsfs
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",  # aiohttp
        "ConnectionError",  # Python's, and requests'
        "HTTPClientError",  # botocore
        "IncompleteReadError",  # botocore
        "JSONDecodeError",  # gcsfs, of half a listing
        "ResponseParserError",  # botocore, of half a listing
        "TransferEncodingError",  # aiohttp
    )
)
"""Errors of connections and of what came over them, by a name in their family."""


def status(error: BaseException | None) -> int | None:
    """The server's status below a backend's error, if it answered at all."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):  # botocore's, below s3fs's
            told = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:  # gcsfs's
            told = getattr(error, "code", None)
        if isinstance(told, int):
            return told
        error = error.__cause__
    return None


def refused(error: Exception) -> bool:
    """Whether the server refused. gcsfs tells 403 in words only."""
    return status(error) in REFUSED or str(error).startswith("Forbidden: ")


def absent(error: Exception) -> bool:
    """Whether there is nothing, by whatever class: SMB has its own for it."""
    return isinstance(error, OSError) and error.errno == errno.ENOENT


def transient(error: Exception) -> bool:
    """Whether another attempt may do better, by what the many backends raise."""
    if isinstance(error, (TimeoutError, PermissionError, FileExistsError, *ABSENT)):
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    if any("Timeout" in name for name in names):
        return False
    if names & _BROKEN or (isinstance(error, OSError) and error.errno == errno.EBUSY):
        return True  # s3fs says EBUSY for SlowDown
    told = status(error) or HTTPStatus.OK
    return told == HTTPStatus.TOO_MANY_REQUESTS or told >= 500
