"""What differs between two records of config and layout, and what would bridge it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.arrays import MAX_DOCUMENT_BYTES
from kvstore.config import Config, require_proof
from kvstore.conversion import Conversion, only_reordered
from kvstore.errors import Difference, InvalidInputError
from kvstore.layout import Layout
from kvstore.offline.group import StoredGroup, too_large
from kvstore.offline.target import require_described, require_like
from kvstore.records import refuse_unknown

_MEMBERS = ("config", "layout", "url", "block", "sizes")
"""Of what `kvstore info --json` prints of a group."""

MAX_CELL = 80
"""Characters of a value, beyond which only the part that differs is told."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: an engine's, or a group's.

    Attributes:
        name: a URL or file.
        config, layout: None where it is not told.
    """

    name: str
    config: Config | None
    layout: Layout | None

    @classmethod
    def of_group(cls, group: StoredGroup) -> Side:
        """What a group's documents record."""
        return cls(group.url, group.config, group.layout)

    @classmethod
    def of_file(cls, path: Path) -> Side:
        """Records in a JSON file: what `kvstore info --json` prints of one group.

        Raises:
            InvalidInputError: they are not in it, or cannot be read.
        """
        found = _parsed(path)
        if isinstance(found, list):
            if len(found) != 1:
                raise InvalidInputError(
                    f"{path}: expected one group's records, found {len(found)}"
                )
            [found] = found
        if not isinstance(found, dict) or not found.keys() & {"config", "layout"}:
            raise InvalidInputError(
                f"{path}: expected an object with config, layout or both, found none"
            )
        refuse_unknown(found, _MEMBERS, where=str(path))
        config = layout = None
        if (told := found.get("config")) is not None:
            config = Config.from_fields(told, where=f"{path}: config")
        if (told := found.get("layout")) is not None:
            layout = Layout.from_dict(told, where=f"{path}: layout")
            if problem := too_large(layout):
                raise InvalidInputError(f"{path}: {problem}")
        return cls(str(path), config, layout)


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(
            f"{path}: expected a JSON file, found {type(error).__name__}"
        ) from error
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidInputError(f"{path}: expected {MAX_DOCUMENT_BYTES} bytes, found more")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path}: expected JSON, found other text") from error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two sides.

    Attributes:
        config, layout: every field that differs; `expected` is A's value, `found` B's. None
            where one side does not tell.
        reordered: whether only the order of axes differs, which `on_mismatch: "convert"`
            bridges.
        convertible: whether `kvstore convert` bridges it.
        obstacles: why it does not.
    """

    config: tuple[Difference, ...] | None
    layout: tuple[Difference, ...] | None
    reordered: bool
    convertible: bool
    obstacles: str | None

    @property
    def same(self) -> bool:
        """Whether nothing that both sides tell differs."""
        return not self.config and not self.layout


def compare(a: Side, b: Side) -> Comparison:
    """What differs, field by field. What one side does not tell is not compared.

    Raises:
        InvalidInputError: they have nothing to compare.
    """
    config = layout = None
    if a.config is not None and b.config is not None:
        config = a.config.differences(b.config)
    if a.layout is not None and b.layout is not None:
        layout = a.layout.differences(b.layout)
    if config is None and layout is None:
        raise InvalidInputError(
            f"expected two sides that both tell config or layout, found {a.name} with one "
            f"and {b.name} with the other"
        )
    obstacles = None if not config and not layout else _obstacles(a, b)
    return Comparison(
        config,
        layout,
        reordered=bool(layout) and _reordered(a, b),
        convertible=bool(config or layout) and obstacles is None,
        obstacles=obstacles,
    )


def _reordered(a: Side, b: Side) -> bool:
    """Whether an engine of either side takes the other's blocks by `on_mismatch`."""
    if a.config is None or b.config is None or a.layout is None or b.layout is None:
        return False
    if a.config.differences(b.config) or not only_reordered(a.layout, b.layout):
        return False
    try:
        require_proof(a.config, a.layout)
        require_proof(b.config, b.layout)
    except InvalidInputError:
        return False
    return True


def _obstacles(a: Side, b: Side) -> str | None:
    if a.config is None or b.config is None or a.layout is None or b.layout is None:
        return "config and layout of both sides are needed to tell"
    try:
        require_described(a.config, a.layout)
        require_like(a.config, a.layout, b.config, b.layout)
        Conversion(a.layout, b.layout)
    except InvalidInputError as error:
        return str(error)
    return None


def narrowed(difference: Difference) -> Difference:
    """A difference of long values by the first part of them that differs."""
    name, ours, theirs = difference.field, difference.expected, difference.found
    while len(repr(ours)) > MAX_CELL or len(repr(theirs)) > MAX_CELL:
        if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
            if len(ours) != len(theirs):
                return Difference(f"number of {name}", len(ours), len(theirs))
            pairs = [
                (f"[{i}]", *pair) for i, pair in enumerate(zip(ours, theirs, strict=True))
            ]
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            members = sorted(ours.keys() | theirs.keys())
            pairs = [(f".{key}", ours.get(key), theirs.get(key)) for key in members]
        else:
            break
        part, ours, theirs = next(pair for pair in pairs if pair[1] != pair[2])
        name += part
    return Difference(name, ours, theirs)
