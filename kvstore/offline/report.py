"""`Report`: all that there is to tell of a root, in one value of bounded size.

What goes through all blocks is done elsewhere, in shares, and comes in as sums: `Count` for
sizes and ages, `Verify` for health. `sample` says which shares to verify where not all are.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import FormatError, StorageError
from kvstore.offline.census import Census
from kvstore.offline.contents import Part, parts_of
from kvstore.offline.faults import Findings
from kvstore.offline.group import StoredGroup
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.offline.verify import covering
from kvstore.offline.words import config_text, layout_text
from kvstore.paths import FAN_OUT, block_path
from kvstore.records import Record
from kvstore.survey import FAN_OUTS

SAMPLE = 256
"""Blocks of each group that a sample is after: a fault that one in a hundred has is then
missed in one of thirteen reports."""

PICTURED_BYTES = 1 << 30
"""Larger blocks are not pictured."""

TRIES = 8
"""Blocks that are tried for the picture, while they turn out damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport(Record):
    """One KV group.

    Attributes:
        path: its folder, relative to the root.
        model: the model's name; None where it cannot be read.
        text: config and layout in words, a sentence each.
        config, layout: as they are recorded.
        census: its blocks.
        problem: why its documents cannot be read.
        unread: whether that is since storage failed.
    """

    path: str
    census: Census
    model: str | None = None
    text: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    problem: str | None = None
    unread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture(Record):
    """What is in one block.

    Attributes:
        url: the block's.
        parts: K and V, or what there is.
    """

    url: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Record):
    """A root, or a part of one.

    Attributes:
        url: what was looked at, without credentials.
        made: when, in seconds since the epoch.
        groups: in the order of their paths.
        verified: `all`, `sample` or `none` of the blocks.
        findings: what the verification found.
        picture: None where no block could be pictured.
    """

    url: str
    made: float
    groups: tuple[GroupReport, ...]
    verified: str
    findings: Findings
    picture: Picture | None

    @property
    def census(self) -> Census:
        """Of all groups."""
        return sum((group.census for group in self.groups), Census())


def sample(root: Root, blocks: Mapping[str, int]) -> list[Share]:
    """Shares with about `SAMPLE` blocks of each group, drawn anew by each call.

    Keys are hashes, so the blocks of any fan-outs are a fair sample.

    Args:
        root: what is verified.
        blocks: how many each group has, by its path.

    Raises:
        StorageError: a group cannot be listed.
    """
    if root.within.key is not None:
        return covering(root)
    shares = []
    for path, count in blocks.items():
        names = filter(FAN_OUT.fullmatch, root.filesystem.folders(path))
        fan_outs = [int(name, 16) for name in names]
        if count <= SAMPLE:
            shares.append(Share(path, 0, FAN_OUTS))
            continue
        wanted = min(len(fan_outs), math.ceil(len(fan_outs) * SAMPLE / count))
        chosen = sorted(random.sample(fan_outs, wanted))
        shares += [Share(path, first, first + 1) for first in chosen]
    return shares


def group_reports(root: Root, sums: Mapping[str, Census]) -> tuple[GroupReport, ...]:
    """Every group, with what its documents record.

    Raises:
        StorageError: the groups cannot be listed.
    """
    found = []
    for place in root.places():
        census = sums.get(place.path, Census())
        try:
            group = root.read_group(place)
        except (FormatError, StorageError) as error:
            unread = isinstance(error, StorageError)
            found.append(
                GroupReport(
                    path=place.path, census=census, problem=str(error), unread=unread
                )
            )
            continue
        found.append(
            GroupReport(
                path=place.path,
                census=census,
                model=group.config.model_name,
                text=(config_text(group.config), layout_text(group.layout)),
                config=group.config.fields(),
                layout=group.layout.to_dict(),
            )
        )
    return tuple(found)


def picture(root: Root, sums: Mapping[str, Census]) -> Picture | None:
    """One proved block: of the group that takes most room, and can be pictured.

    What cannot be read is passed over: a page without a picture is one, too.

    Raises:
        StorageError: the groups cannot be listed.
    """
    places = {place.path: place for place in root.places()}
    for path in sorted(places, key=lambda path: -sums.get(path, Census()).nbytes):
        try:
            group = root.read_group(places[path])
            if group.layout.nbytes > PICTURED_BYTES:
                continue
            if (found := _first(group, root.within.key)) is not None:
                return found
        except (FormatError, StorageError):
            continue
    return None


def _first(group: StoredGroup, only: bytes | None) -> Picture | None:
    tried = (block.key for block in itertools.islice(group.blocks(), TRIES))
    for key in tried if only is None else (only,):
        try:
            payload = group.load(key)
            if payload is not None:
                url = group.filesystem.place(f"{group.path}/{block_path(key)}")
                return Picture(url=url, parts=parts_of(group.layout, payload))
        except StorageError:
            raise
        except Exception:  # damage, too little memory, or values that nobody foresaw
            continue
    return None
