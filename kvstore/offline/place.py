"""A URL -> the root that it lies in, and which part of the root is meant.

People name what they see: a root, one namespace in it, a group, or one block, each by the
URL that Zarr tools open too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.arrays import MAX_DOCUMENT_BYTES, recorded_config
from kvstore.errors import FormatError, InvalidInputError, StorageError, shown
from kvstore.filesystem import ClientName
from kvstore.paths import DOCUMENT, block_key, block_path, group_path
from kvstore.survey import BELOW_NAMESPACE
from kvstore.upkeep import Upkeep
from kvstore.urls import parse_url, safe_url

_RANK, _GROUP = BELOW_NAMESPACE
_BELOW_NAMESPACE = re.compile(
    r"(?P<root>.+[^/])/(?P<namespace>[^/]+)/r(?P<rank>0|[1-9]\d{0,8})"
    r"(/g(?P<group>0|[1-9]\d{0,8})(/(?P<block>[0-9a-f]{3}(/[0-9a-f]+)?))?)?"
)


@dataclass(frozen=True, slots=True)
class Within:
    """A part of a root. What is None is not narrowed down, and what lies below it is None.

    Attributes:
        namespace: the namespace's folder.
        rank, group: numbers.
        key: one block's.
    """

    namespace: str | None = None
    rank: int | None = None
    group: int | None = None
    key: bytes | None = None

    @property
    def path(self) -> str:
        """The folder of this part, relative to the root; empty for all of it."""
        if self.namespace is None:
            return ""
        if self.rank is None:
            return self.namespace
        if self.group is None:
            return f"{self.namespace}/r{self.rank}"
        folder = group_path(self.namespace, self.rank, self.group)
        return folder if self.key is None else f"{folder}/{block_path(self.key)}"


def locate(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    client: ClientName = "obstore",
    timeout: float = 30.0,
    read_only: bool = True,
) -> tuple[Upkeep, Within]:
    """Find the root that `url` lies in.

    Only the last name of a URL may leave open what it is. It is a namespace's if its
    document records a config or there are ranks in it, and a rank's if there are KV groups
    in it; otherwise it is the root's.

    Args:
        url: of a root, namespace, rank, group or block.
        storage_options: what the URL's fsspec filesystem takes.
        client: what talks to S3 and Google Cloud Storage.
        timeout: seconds that one request may take.
        read_only: whether everything that would write is refused.

    Raises:
        InvalidInputError: the URL cannot be used.
        StorageError: it cannot be read.
    """
    _, whole = parse_url(url)

    def at(root: str) -> Upkeep:
        return Upkeep(
            root, storage_options, client=client, timeout=timeout, read_only=read_only
        )

    match = _BELOW_NAMESPACE.fullmatch(whole)
    if match and match["group"]:
        return at(match["root"]), _within(match)
    upkeep = at(whole)
    if match and _holds(upkeep, _GROUP):
        return at(match["root"]), _within(match)
    if not _is_namespace(upkeep):
        return upkeep, Within()
    parent, _, name = whole.rpartition("/")
    if parent.endswith("/"):  # of `protocol://`
        raise InvalidInputError(
            f"url: expected a root, found a namespace at {shown(safe_url(whole))}, which "
            "has no folder above it"
        )
    return at(parent), Within(name)


def _is_namespace(folder: Upkeep) -> bool:
    try:
        document = folder.read(DOCUMENT, MAX_DOCUMENT_BYTES + 1)
        if document is not None:
            recorded_config(document, place=folder.place(DOCUMENT))
            return True
    except FormatError:
        pass  # a node of somebody else's, or a damaged document: what is below it tells
    return _holds(folder, _RANK)


def _holds(folder: Upkeep, pattern: re.Pattern[str]) -> bool:
    try:
        return any(map(pattern.fullmatch, folder.folders("")))
    except StorageError:
        return False  # who lists the root next is told


def _within(match: re.Match[str]) -> Within:
    rank, group, block = int(match["rank"]), match["group"], match["block"]
    return Within(
        match["namespace"],
        rank,
        None if group is None else int(group),
        None if block is None else block_key(block),
    )
