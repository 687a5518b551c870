"""A root URL -> protocol and one spelling of the root. Pure strings, no I/O.

A URL may come from a file that anybody wrote, and an error may end in a log that anybody
reads: so what cannot be meant is refused here, and no message repeats a credential.
"""

from __future__ import annotations

import os
import re

from kvstore.errors import InvalidInputError, shown

_LOCAL = ("file", "local")
_BUCKETS = ("s3", "s3a", "gs", "gcs")
_NAMED = ("abfs", "abfss", "adl", "arrow_hdfs", "az", "hdfs", "oci", "sftp", "smb", "ssh")
"""Where a container's or a user's name may stand before @: it tells one root from another.
Elsewhere it may be a token."""

_NAME_AND_HOST = re.compile(r"[\w.$+-]{1,63}@[^@]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Also what breaks or turns a line elsewhere than in ASCII."""

_ONE_SLASH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/(?!/)")


def safe_url(url: str) -> str:
    """`url` without user, password, query and fragment, for messages and logs.

    A secret may itself hold slashes and @. A local path is shown as it is: whatever looks
    like a user or a query there is a name. So is the name of a container, or of a user who
    has no password there.
    """
    protocol, separator, rest = url.partition("://")
    if not separator or (protocol.lower() in _LOCAL and rest.startswith("/")):
        return url
    host = re.split("[/?]", rest, maxsplit=1)[0]
    named = (
        protocol.lower() in _NAMED
        and _NAME_AND_HOST.fullmatch(host)
        and not _has_password(rest.split("/"))
    )
    if not named and "@" in rest and (":" in host or "@" in host):
        rest = "***@" + rest.rpartition("@")[2]
    return f"{protocol}://{re.split('[?#]', rest, maxsplit=1)[0]}"


def parse_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The protocol of a URL or bare path, and the root's URL in one spelling.

    Raises:
        InvalidInputError: not a URL whose folder can be a root.
    """
    if not isinstance(given := _fspath(url), str):
        raise InvalidInputError(
            f"url: expected a str or path, found {type(given).__name__}"
        )
    text = given
    if not text.strip():
        raise InvalidInputError(f"url: expected a URL or path, found {shown(text)}")
    safe = shown(safe_url(text))
    if _CONTROL.search(text) or not _has_bytes(text):
        raise InvalidInputError(f"url: control characters in {safe}")
    if "::" in text:
        raise InvalidInputError(
            f"url: chained URLs are not supported, found {safe}: a cache or archive "
            "in between could serve what was never published. Give the last URL alone."
        )
    protocol, separator, path = text.partition("://")
    if (separator and not protocol) or _ONE_SLASH.match(text):
        scheme = text.partition(":")[0]
        raise InvalidInputError(
            "url: expected protocol://…, or a path without a protocol, found one that "
            f"begins with {shown(scheme + ':')} and has not two slashes there"
        )
    if not separator:
        return "file", "file://" + _local_root(text, safe)
    protocol = protocol.lower()
    if protocol in _LOCAL:
        if not path.startswith("/"):
            raise InvalidInputError(
                f"url: expected an absolute path (file:///folder), found {safe}"
            )
        return "file", "file://" + _local_root(path, safe)
    if "?" in path or "#" in path:
        raise InvalidInputError(
            f"url: expected no query or fragment, found {safe}. "
            "Settings belong in storage_options."
        )
    parts = [part for part in path.split("/") if part]
    if protocol in _BUCKETS and (not parts or {"@", ":"} & set(parts[0])):
        raise InvalidInputError(
            f"url: expected a bucket ({protocol}://bucket/folder), found {safe}. "
            "Credentials belong in storage_options or the environment."
        )
    if parts and _has_password(parts):
        raise InvalidInputError(
            f"url: expected no password, found {safe}. Credentials belong in "
            "storage_options or the environment."
        )
    if {".", ".."} & set(parts):
        raise InvalidInputError(f"url: expected no '.' or '..' in {safe}")
    return protocol, f"{protocol}://" + "/".join(parts)


def _has_bytes(text: str) -> bool:
    """Whether a name can be made of it: JSON may hold halves of characters."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _has_password(parts: list[str]) -> bool:
    """Whether `user:password@` comes first. A password may itself hold slashes."""
    if re.search(":[^@]*@", parts[0]):
        return True
    return bool(re.search(r":(?!\d*$)", parts[0])) and any("@" in part for part in parts)


def _fspath(url: object) -> object:
    return url.__fspath__() if isinstance(url, os.PathLike) else url


def _local_root(path: str, safe: str) -> str:
    # POSIX lets two leading slashes mean something else; here they never do.
    try:
        whole = os.path.abspath(os.path.expanduser(path))
    except OSError as error:
        raise InvalidInputError(
            "url: expected a path below a current folder that is there, found "
            f"{safe}, and the current folder is gone ({error.strerror}). Give an "
            "absolute path, or change to another folder"
        ) from error
    root = "/" + whole.lstrip("/")
    if root == os.path.sep:
        raise InvalidInputError(f"url: expected a folder below /, found {safe}")
    return root
