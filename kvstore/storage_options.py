"""`storage_options`: what a filesystem takes, and which of it is secret. No I/O."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from kvstore.errors import InvalidInputError, shown
from kvstore.records import refuse_unknown

logger = logging.getLogger(__name__)

Kind: TypeAlias = type[Any] | UnionType | tuple[str, ...] | Mapping[str, Any]
"""What an option must be: of a type, one of some words, or an object of such options."""

S3_KINDS: Mapping[str, Kind] = {
    "anon": bool,
    "client_kwargs": {"endpoint_url": str, "region_name": str, "verify": bool | str},
    "config_kwargs": {
        "s3": {
            "addressing_style": ("auto", "path", "virtual"),
            "payload_signing_enabled": bool,
            "use_dualstack_endpoint": bool,
        }
    },
    "endpoint_url": str,
    "key": str,
    "profile": str,
    "requester_pays": bool,
    "s3_additional_kwargs": {
        "BucketKeyEnabled": bool,
        "SSEKMSKeyId": str,
        "ServerSideEncryption": ("AES256", "aws:kms", "aws:kms:dsse"),
    },
    "secret": str,
    "token": str,
}
"""The options of s3fs that are translated for obstore."""

GCS_KINDS: Mapping[str, Kind] = {
    "endpoint_url": str,
    "project": str,
    "token": object,
}
"""Those of gcsfs. `project` names who lists and makes buckets, which kvstore never does."""

_KINDS = {"s3": S3_KINDS, "s3a": S3_KINDS, "gs": GCS_KINDS, "gcs": GCS_KINDS}
_ANY_KINDS: Mapping[str, Kind] = {"anon": bool, "endpoint_url": str}

_SECRET_NAMES = (
    "key",
    "secret",
    "token",
    "pass",
    "credential",
    "sas",
    "auth",
    "connection",
)

_ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.IGNORECASE)
"""Without a user or password: clients repeat an endpoint in their errors."""

_BASE_OPTIONS = frozenset(
    ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths")
)
"""What every fsspec filesystem takes without naming it in its own signature."""


_HOW = _BASE_OPTIONS | {
    "anon",
    "config_kwargs",
    "requester_pays",
    "s3_additional_kwargs",
    "timeout",
}
"""Options that say how storage is asked, and not which."""

_OF_S3 = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_OF_AZURE = ("AZURE_STORAGE_ACCOUNT_NAME",)
_AROUND = {
    **dict.fromkeys(("s3", "s3a"), _OF_S3),
    **dict.fromkeys(("gs", "gcs"), ("STORAGE_EMULATOR_HOST",)),
    **dict.fromkeys(("abfs", "abfss", "az"), _OF_AZURE),
}
"""Variables that say which storage it is, by protocol."""

_OF_CONNECTION = ("AccountName=", "BlobEndpoint=", "EndpointSuffix=")
"""What of a connection string of Azure's is no secret."""


def checked(cls: type[Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options`, unless one looks like a misspelling of what `cls` takes.

    fsspec classes swallow what they do not know, so that a misspelt endpoint would send
    the blocks elsewhere. Some also take options that their signatures do not name, so
    what resembles nothing is passed on, and said in the log.
    """
    if options is None:
        return {}
    protocols = (cls.protocol,) if isinstance(cls.protocol, str) else cls.protocol
    kinds = next((_KINDS[p] for p in protocols if p in _KINDS), _ANY_KINDS)
    _require_kinds(options, kinds, "storage_options", words=False)
    known = set(_BASE_OPTIONS)
    for base in cls.__mro__[:-1]:
        for parameter in inspect.signature(
            vars(base).get("__init__", object.__init__)
        ).parameters.values():
            if parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                known.add(parameter.name)
    if "target_protocol" in known:
        raise InvalidInputError(
            f"url: {protocols[0]}:// stands before another filesystem, and could serve "
            "what was never published. Give the URL of that one alone."
        )
    for name in options.keys() - known:
        if close := difflib.get_close_matches(str(name), known, n=1, cutoff=0.8):
            raise InvalidInputError(
                f"storage_options: unknown option {name!r}. Did you mean {close[0]!r}?"
            )
        logger.warning("storage_options: %s does not name %r", cls.__name__, name)
    return dict(options)


def refuse_for_obstore(
    options: Mapping[str, Any], known: Mapping[str, Kind], where: str
) -> None:
    """Refuse an option that is not translated for obstore, or is not of its kind: none is
    ignored, and none is guessed at.
    """
    advice = 'Or let the URL\'s fsspec filesystem take it, with "client": "fsspec".'
    refuse_unknown(options, known, where=where, advice=advice)
    _require_kinds(options, known, where, words=True)
    for name, kind in known.items():
        if isinstance(kind, Mapping) and options.get(name) is not None:
            refuse_for_obstore(options[name], kind, f"{where}.{name}")


def require_http(endpoint: str, where: str) -> str:
    """An endpoint without the slashes at its end.

    Raises:
        InvalidInputError: it is no URL of HTTP. Clients add no protocol of their own, and
            some panic.
    """
    try:
        ports = _ENDPOINT.fullmatch(endpoint) and (urlsplit(endpoint).port or True)
    except ValueError:
        ports = False  # not a number, or the brackets of an address are not closed
    if not ports:
        found = shown(endpoint.rpartition("@")[2])
        if "@" in endpoint:
            found = f"a user or password before {found}"
        raise InvalidInputError(
            f"{where}: expected http://host or https://host, maybe with a port, found "
            f"{found}"
        )
    return endpoint.rstrip("/")


def _require_kinds(
    options: Mapping[str, Any], kinds: Mapping[str, Kind], where: str, *, words: bool
) -> None:
    """Each option that has a kind must be of it; `words` are looked at only if told."""
    for name, kind in kinds.items():
        value, place = options.get(name), f"{where}.{name}"
        if value is None:
            continue
        expected: type[Any] | UnionType = (
            Mapping
            if isinstance(kind, Mapping)
            else str
            if isinstance(kind, tuple)
            else kind
        )
        if not isinstance(value, expected):
            # In place of an object stands maybe its text, credentials and all.
            whole = expected is Mapping
            found = type(value).__name__ if whole else _found(name, value)
            raise InvalidInputError(f"{place}: expected {_named(expected)}, found {found}")
        if isinstance(kind, Mapping):
            _require_kinds(value, kind, place, words=words)
        elif words and isinstance(kind, tuple) and value not in kind:
            raise InvalidInputError(
                f"{place}: expected one of {kind}, found {_found(name, value)}"
            )
        if name == "endpoint_url" and value:
            require_http(value, place)


def _named(kind: type[Any] | UnionType) -> str:
    if kind is Mapping:
        return "an object"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace(" |", " or")


def _found(name: str, value: object) -> str:
    """What was found, without a secret."""
    plain = isinstance(value, str | bool | int | float) and not _is_secret(name)
    return shown(value) if plain else type(value).__name__


def _is_secret(name: object) -> bool:
    return any(word in str(name).lower() for word in _SECRET_NAMES)


def without_secrets(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Nested `storage_options` without what stands under a secret's name; and the names."""
    told: dict[str, Any] = {}
    left_out = []
    for name, value in options.items():
        if _is_secret(name):
            left_out.append(str(name))
        else:
            told[name], more = _harmless(value)
            left_out += more
    return told, left_out


def _harmless(value: Any) -> tuple[Any, list[str]]:
    """As `without_secrets`, of objects in lists too."""
    if isinstance(value, Mapping):
        return without_secrets(value)
    if not isinstance(value, list | tuple):
        return value, []
    parts = [_harmless(part) for part in value]
    return [part for part, _ in parts], [name for _, names in parts for name in names]


def storage_digest(protocol: str, options: Mapping[str, Any]) -> str:
    """What tells one storage of a protocol from another where the URL is the same: options
    and variables of the environment, without credentials and what says how to ask.

    Credentials may be other ones, and given elsewhere, without it being another storage.
    """
    told, _ = without_secrets(options)
    for name in _HOW:
        told.pop(name, None)
    for name, value in options.items():
        if "connection" in str(name) and isinstance(value, str):
            parts = (part.strip() for part in value.split(";"))
            told[name] = sorted(p for p in parts if p.startswith(_OF_CONNECTION))
    given = {name: value for name, value in told.items() if value not in (None, {}, [])}
    around = {n: os.environ[n] for n in _AROUND.get(protocol, ()) if os.environ.get(n)}
    text = json.dumps([given, around], sort_keys=True, default=lambda v: type(v).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hold_credentials(options: Mapping[str, Any]) -> bool:
    """Whether `options` say themselves what credentials there are, or that there are none,
    so that others cannot be found.

    A `token` of one string is a name or a path, or goes with a `key`.
    """
    if options.get("token") == "anon" or options.get("anon"):
        return True
    return any(
        _is_secret(name) and value and not (name == "token" and isinstance(value, str))
        for name, value in options.items()
    )


def secret_strings(options: object, *, named: bool = False) -> Iterator[str]:
    """The strings in nested `storage_options` that stand under a secret's name."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            yield from secret_strings(value, named=named or _is_secret(name))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from secret_strings(value, named=named)
    elif named and isinstance(options, str) and len(options) > 3:
        yield options
        yield quote(options, safe="")  # as a client may put it into a URL
