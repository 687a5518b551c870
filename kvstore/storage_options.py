"""`storage_options`: what a filesystem takes, and which of it is secret. No I/O."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from kvstore.errors import InvalidInputError
from kvstore.records import refuse_unknown

logger = logging.getLogger(__name__)

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

_BASE_OPTIONS = frozenset(
    ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths")
)
"""What every fsspec filesystem takes without naming it in its own signature."""


def checked(cls: type[Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options`, unless one looks like a misspelling of what `cls` takes.

    fsspec classes swallow what they do not know, so that a misspelt endpoint would send
    the blocks elsewhere. Some also take options that their signatures do not name, so
    what resembles nothing is passed on, and said in the log.
    """
    if options is None:
        return {}
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
    for name in options.keys() - known:
        if close := difflib.get_close_matches(str(name), known, n=1, cutoff=0.8):
            raise InvalidInputError(
                f"storage_options: unknown option {name!r}. Did you mean {close[0]!r}?"
            )
        logger.warning("storage_options: %s does not name %r", cls.__name__, name)
    return dict(options)


def refuse_for_obstore(
    options: Mapping[str, Any], known: Iterable[str], where: str
) -> None:
    """Refuse an option that is not translated for obstore: none is ignored."""
    if not isinstance(options, Mapping):
        raise InvalidInputError(
            f"{where}: expected an object, found {type(options).__name__}"
        )
    advice = 'Or let the URL\'s fsspec filesystem take it, with "client": "fsspec".'
    refuse_unknown(options, known, where=where, advice=advice)


def secret_strings(options: object, *, named: bool = False) -> Iterator[str]:
    """The strings in nested `storage_options` that stand under a secret's name."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            told = any(word in str(name).lower() for word in _SECRET_NAMES)
            yield from secret_strings(value, named=named or told)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from secret_strings(value, named=named)
    elif named and isinstance(options, str) and len(options) > 3:
        yield options
        yield quote(options, safe="")  # as a client may put it into a URL
