"""A root URL -> protocol and one spelling of the root. Pure strings, no I/O.

A URL may come from a file that anybody wrote, and an error may end in a log that anybody
reads: so what cannot be meant is refused here, and no message repeats a credential.
"""

from __future__ import annotations

import os
import re

from kvstore.errors import InvalidInputError

_LOCAL = ("file", "local")
_BUCKETS = ("s3", "s3a", "gs", "gcs")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ONE_SLASH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/(?!/)")


def safe_url(url: str) -> str:
    """`url` without user, password and query, for messages and logs.

    A secret may itself hold slashes and @. A local path is shown as it is: whatever looks
    like a user or a query there is a name.
    """
    protocol, separator, rest = url.partition("://")
    if not separator or (protocol.lower() in _LOCAL and rest.startswith("/")):
        return url
    host = re.split("[/?]", rest, maxsplit=1)[0]
    if "@" in rest and (":" in host or "@" in host):
        rest = "***@" + rest.rpartition("@")[2]
    return f"{protocol}://{rest.split('?', 1)[0]}"


def parse_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The protocol of a URL or bare path, and the root's URL in one spelling.

    Raises:
        InvalidInputError: not a URL whose folder can be a root.
    """
    text = os.fspath(url)
    if not text.strip():
        raise InvalidInputError(f"url: expected a URL or path, found {text!r}")
    shown = safe_url(text)
    if _CONTROL.search(text):
        raise InvalidInputError(f"url: control characters in {shown!r}")
    if "::" in text:
        raise InvalidInputError(
            f"url: chained URLs are not supported, found {shown!r}: a cache or archive "
            "in between could serve what was never published. Give the last URL alone."
        )
    protocol, separator, path = text.partition("://")
    if (separator and not protocol) or _ONE_SLASH.match(text):
        scheme = text.partition(":")[0]
        raise InvalidInputError(
            "url: expected protocol://…, or a path without a protocol, found one that "
            f"begins with {scheme + ':'!r} and has not two slashes there"
        )
    if not separator:
        return "file", "file://" + _local_root(text, shown)
    protocol = protocol.lower()
    if protocol in _LOCAL:
        if not path.startswith("/"):
            raise InvalidInputError(
                f"url: expected an absolute path (file:///folder), found {shown!r}"
            )
        return "file", "file://" + _local_root(path, shown)
    if "?" in path or "#" in path:
        raise InvalidInputError(
            f"url: expected no query or fragment, found {shown!r}. "
            "Settings belong in storage_options."
        )
    parts = [part for part in path.split("/") if part]
    if protocol in _BUCKETS and (not parts or {"@", ":"} & set(parts[0])):
        raise InvalidInputError(
            f"url: expected a bucket ({protocol}://bucket/folder), found {shown!r}. "
            "Credentials belong in storage_options or the environment."
        )
    if parts and re.search(":[^@]*@", parts[0]):
        raise InvalidInputError(
            f"url: expected no password, found {shown!r}. Credentials belong in "
            "storage_options or the environment."
        )
    if {".", ".."} & set(parts):
        raise InvalidInputError(f"url: expected no '.' or '..' in {shown!r}")
    return protocol, f"{protocol}://" + "/".join(parts)


def _local_root(path: str, shown: str) -> str:
    # POSIX lets two leading slashes mean something else; here they never do.
    root = "/" + os.path.abspath(os.path.expanduser(path)).lstrip("/")
    if root == os.path.sep:
        raise InvalidInputError(f"url: expected a folder below /, found {shown!r}")
    return root
