"""`Record`: frozen values that go to JSON and come back, parsed strictly.

Stored JSON is untrusted. A record is built from it only if every field is there, none is
unknown, and each has exactly its declared type (`True` is not an integer).
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Self, Union, cast, get_args, get_origin, get_type_hints

from kvstore.errors import InvalidInputError, shown

MAX_NUMBER = 86_400
"""More seconds, threads, heads or values than anything here has a use for. Some waits of
Python's overflow beyond any sensible time."""


class Record:
    """Base of the frozen dataclasses that are written to, and read from, JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary with every field; tuples become lists."""
        return {f.name: _to_json(getattr(self, f.name)) for f in _fields(type(self))}

    @classmethod
    def from_dict(cls, data: object, *, where: str) -> Self:
        """The inverse of `to_dict`. A field that has a default may be absent.

        Args:
            data: parsed JSON.
            where: what `data` is, for error messages.

        Raises:
            InvalidInputError: a field is missing, unknown, or of another type.
        """
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"{where}: expected an object, found {shown(data)}")
        known = {f.name: f for f in _fields(cls)}
        refuse_unknown(data, known, where=where)
        values = {}
        for name, kind in _kinds(cast(Hashable, cls)).items():
            if name in data:
                values[name] = parse(data[name], kind, f"{where}.{name}")
            elif known[name].default is MISSING:
                raise InvalidInputError(f"{where}.{name}: expected a value, found none")
        return cls(**values)

    def _parse_fields(self, where: str) -> None:
        """Refuse what `from_dict` would refuse; a list becomes a tuple.

        For records in documents that engines share: what one writes, all must read.
        """
        for name, kind in _kinds(cast(Hashable, type(self))).items():
            value = parse(getattr(self, name), kind, f"{where}.{name}")
            object.__setattr__(self, name, value)


def refuse_unknown(
    data: Iterable[object], known: Iterable[str], *, where: str, advice: str = ""
) -> None:
    """Raise `InvalidInputError` for the first name in `data` that is not in `known`.

    `advice` is said after the known names.
    """
    names = sorted(known)
    for name in data:
        if name in names:
            continue
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidInputError(
            f"{where}: unknown option {shown(name)}.{hint} Known: {', '.join(names)}."
            f"{advice and ' ' + advice}"
        )


def _fields(cls: type) -> tuple[Any, ...]:
    assert is_dataclass(cls)
    return fields(cls)


@cache
def _kinds(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _to_json(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return value


def parse(value: Any, kind: Any, where: str) -> Any:
    """`value`, if it is exactly of this type: one that a field of a record may have.

    Raises:
        InvalidInputError: it is not.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (arg for arg in get_args(kind) if arg is not type(None))
        return parse(value, kind, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidInputError(f"{where}: expected a list, found {shown(value)}")
        item = get_args(kind)[0]
        return tuple(parse(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, Record):
        return value if type(value) is kind else kind.from_dict(value, where=where)
    if origin is dict:
        if not isinstance(value, dict):
            # Not what: it may be options, credentials and all, in a string.
            raise InvalidInputError(
                f"{where}: expected an object, found {type(value).__name__}"
            )
        return value
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise InvalidInputError(
                f"{where}: expected a float, found {shown(value)}"
            ) from None
    if type(value) is not kind:
        raise InvalidInputError(f"{where}: expected {kind.__name__}, found {shown(value)}")
    return value
