"""`Convert`: a group's blocks -> another layout or config; every value keeps its name.

    plan     source and target, or why there is none
    claim    the target's documents are written, or compared
    Convert  the task, share by share

A block is proved, converted, converted back and compared before anything is written; then
stored, read back, and compared again. Nothing is ever removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvstore.__about__ import __version__
from kvstore.blocks import Stored
from kvstore.codecs import Codec
from kvstore.conversion import Conversion
from kvstore.errors import DamagedBlockError, FormatError, InvalidInputError
from kvstore.namespace import Namespace
from kvstore.offline.faults import LISTED
from kvstore.offline.group import StoredGroup
from kvstore.offline.landing import Landing
from kvstore.offline.place import Within
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.offline.target import (
    Wanted,
    require_heads,
    require_like,
    target_of,
)
from kvstore.paths import namespace_path
from kvstore.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted(Record):
    """What became of some blocks.

    Attributes:
        converted: written at the target, and read back; `repaired` of them in the place of
            damaged ones.
        kept: were there already, and hold.
        damaged: do not hold their proof at the source, so that they are left out.
        nbytes: of the payloads that were written.
        left_out: what is wrong with the first that are damaged.
    """

    converted: int = 0
    repaired: int = 0
    kept: int = 0
    damaged: int = 0
    nbytes: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.converted + self.kept + self.damaged

    @property
    def there(self) -> int:
        """Those that are at the target."""
        return self.converted + self.kept

    def __add__(self, other: Converted) -> Converted:
        """Of both."""
        return Converted(
            converted=self.converted + other.converted,
            repaired=self.repaired + other.repaired,
            kept=self.kept + other.kept,
            damaged=self.damaged + other.damaged,
            nbytes=self.nbytes + other.nbytes,
            left_out=(self.left_out + other.left_out)[:LISTED],
        )


def plan(
    source: StoredGroup,
    destination: Root,
    wanted: Wanted | StoredGroup,
    *,
    kv_heads: int | None = None,
) -> StoredGroup:
    """The group that the source's blocks are converted to. Touches no storage.

    Args:
        source: what is there.
        destination: the root that the target lies in.
        wanted: what is to be otherwise, or a group that an engine has recorded: then
            the target has its config, layout and path below the root.
        kv_heads: KV heads of the model; needed where the blocks have a `worker` axis.

    Raises:
        InvalidInputError: the conversion is refused, and why.
    """
    if destination.within != Within():
        raise InvalidInputError(
            f"destination: expected a root, found {destination.within.path} below "
            f"{destination.filesystem.url}. The names below a root follow from config "
            "and layout"
        )
    if isinstance(wanted, StoredGroup):
        target = replace(wanted, filesystem=destination.filesystem)
        _require_numbers(wanted, source.group)
        require_like(source.config, source.layout, wanted.config, wanted.layout)
    else:
        config, layout = target_of(source.config, source.layout, wanted)
        path = namespace_path(config)
        target = StoredGroup(destination.filesystem, path, 0, source.group, config, layout)
    _require_numbers(source, source.group)
    require_heads(source.layout, kv_heads)
    Conversion(source.layout, target.layout)
    if (target.config, target.layout) == (source.config, source.layout):
        raise InvalidInputError(
            "wanted: expected a change, found none: the group is so already. To copy it, "
            "use `kvstore cp`"
        )
    return target


def _require_numbers(group: StoredGroup, number: int) -> None:
    if (group.rank, group.group) != (0, number):
        raise InvalidInputError(
            f"rank, group: expected r0/g{number}, found r{group.rank}/g{group.group} at "
            f"{group.url}: rank 0 is where a block holds all workers, and keys are of one "
            "KV group"
        )


def claim(target: StoredGroup) -> None:
    """Record the target's config and layout, unless they are recorded there already.

    Below a root that is only read, what is recorded is compared.

    Raises:
        LayoutMismatchError: the documents there are of another config or layout.
        FormatError: they cannot be read.
        StorageError: storage failed.
    """
    target.filesystem.probe()
    Namespace(
        target.filesystem,
        target.namespace,
        target.config,
        target.layout,
        rank=target.rank,
        group=target.group,
        provenance={"kvstore": __version__},
    ).claim()


@dataclass(frozen=True, slots=True)
class Convert:
    """The conversion of one share. A task for `run`.

    Attributes:
        source, target: as `plan` has them; the target is claimed.
        codec: how the blocks are written.
    """

    source: StoredGroup
    target: StoredGroup
    codec: Codec = "none"

    def __call__(self, share: Share) -> Converted:
        """Convert the share's blocks.

        Raises:
            StorageError: storage failed; what is converted by then stays.
            FormatError: values did not survive the conversion; nothing of that block was
                written.
        """
        work, done = _Work(self), Converted()
        for block in self.source.blocks(share.first, share.stop):
            done += work.move(block.key)
        return done


class _Work:
    """One block after the other, in the same memory."""

    def __init__(self, task: Convert) -> None:
        source, target = task.source, task.target
        self._source, self._landing = source.steps(), Landing(target, task.codec)
        self._forth = Conversion(source.layout, target.layout)
        self._back = Conversion(target.layout, source.layout)
        self._payload = np.empty(source.layout.nbytes, np.uint8)

    def move(self, key: bytes) -> Converted:
        try:
            stored = self._landing.land(key, lambda: self._read(key))
        except DamagedBlockError as error:
            return Converted(damaged=1, left_out=(str(error),))
        if stored is None:
            return Converted()  # half a block, or removed since it was listed
        if stored is Stored.KEPT:
            return Converted(kept=1)
        return Converted(
            converted=1,
            repaired=int(stored is Stored.REPAIRED),
            nbytes=self._landing.nbytes,
        )

    def _read(self, key: bytes) -> memoryview | None:
        if self._source.load(key, memoryview(self._payload), None) is None:
            return None
        return self._converted(key)

    def _converted(self, key: bytes) -> memoryview:
        block = self._forth.convert_bytes(self._payload)
        if self._back.convert_bytes(block) != memoryview(self._payload):
            raise FormatError(
                self._source.url(key),
                "expected the same bytes after conversion and back, found others. Please "
                f"report it with both layouts: {self._forth.source}, {self._forth.target}",
            )
        return block
