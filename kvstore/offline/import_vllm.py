"""`Import`: rows that vLLM's `fs` tier wrote -> blocks.

    vouched  what its user says that the rows are
    plan     where they go, or why they do not
    claim    the documents there are written, or compared
    Import   the task, share by share

The bytes of a block are those of a row, without the padding. What they are is the user's
word, as far as vLLM's `config.json` does not tell; that they are whole is believed of every
row of the right length, since vLLM writes no checksum. The folder is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvstore.blocks import Stored
from kvstore.codecs import Codec
from kvstore.config import Config, prove_parallel_agnostic
from kvstore.errors import DamagedBlockError, FormatError, InvalidInputError, shown
from kvstore.offline.diff import Side
from kvstore.offline.faults import LISTED
from kvstore.offline.group import StoredGroup
from kvstore.offline.landing import Landing
from kvstore.offline.place import Within
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.offline.vllm_fs import TOLD, VllmCache
from kvstore.offline.vllm_rows import Other, Row, entries, padded_lengths, read_row
from kvstore.paths import namespace_path
from kvstore.records import Record

_SIZES = ("tp_size", "pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported(Record):
    """What became of some rows.

    Attributes:
        rows: of the groups that are imported.
        imported: stored and read back; `repaired` of them in the place of damaged blocks.
        kept: blocks that were there already, and hold.
        refused: rows that cannot be whole ones of the layout.
        unfinished: rows that are being written, or were when their writer ended.
        elsewhere: rows of KV groups that are not imported.
        strays: names that vLLM does not give.
        nbytes: of the blocks that were stored; without storing, of the rows to be stored.
        left_out: what is wrong with the first that are refused, and strays.
    """

    rows: int = 0
    imported: int = 0
    repaired: int = 0
    kept: int = 0
    refused: int = 0
    unfinished: int = 0
    elsewhere: int = 0
    strays: int = 0
    nbytes: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """All that were worked on."""
        return self.rows

    @property
    def there(self) -> int:
        """Those that are at the target."""
        return self.imported + self.kept

    def __add__(self, other: Imported) -> Imported:
        """Of both."""
        return Imported(
            rows=self.rows + other.rows,
            imported=self.imported + other.imported,
            repaired=self.repaired + other.repaired,
            kept=self.kept + other.kept,
            refused=self.refused + other.refused,
            unfinished=self.unfinished + other.unfinished,
            elsewhere=self.elsewhere + other.elsewhere,
            strays=self.strays + other.strays,
            nbytes=self.nbytes + other.nbytes,
            left_out=(self.left_out + other.left_out)[:LISTED],
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where.

    Attributes:
        source: vLLM's folder.
        targets: one for each KV group that is imported; of one namespace.
        word: fields of the config that only the user's word is known for.
    """

    source: VllmCache
    targets: tuple[StoredGroup, ...]
    word: tuple[str, ...]


def vouched(like: Root | Path, destination: Root) -> list[StoredGroup]:
    """The groups that the rows are said to be of, below another root.

    Args:
        like: a namespace or group that an engine has recorded; or a JSON file with what
            `kvstore info --json` prints of one, of an engine with one KV group.
        destination: the root that the blocks go to.

    Raises:
        InvalidInputError: it tells no config and layout of one engine.
        FormatError, StorageError: as `Root.groups`.
    """
    if destination.within != Within():
        raise InvalidInputError(
            f"destination: expected a root, found {destination.within.path} below "
            f"{destination.filesystem.url}"
        )
    filesystem = destination.filesystem
    if isinstance(like, Path):
        side = Side.of_file(like)
        if side.config is None or side.layout is None:
            raise InvalidInputError(f"{like}: expected both config and layout, found one")
        if len(side.config.kv_cache_groups) > 1:
            raise InvalidInputError(
                f"{like}: expected the config of an engine with one KV group, found "
                f"{len(side.config.kv_cache_groups)}. Name what it has recorded instead"
            )
        path = namespace_path(side.config)
        return [StoredGroup(filesystem, path, 0, 0, side.config, side.layout)]
    groups = [replace(group, filesystem=filesystem) for group in like.groups()]
    if len({group.namespace for group in groups}) != 1 or any(g.rank for g in groups):
        found = ", ".join(group.path for group in groups[:3]) or "none"
        raise InvalidInputError(
            "like: expected the groups of rank 0 of one namespace at "
            f"{like.filesystem.place(like.within.path)}, found {found}"
        )
    return groups


def plan(source: VllmCache, targets: Sequence[StoredGroup]) -> Plan:
    """Compare what vLLM recorded with what the user says. Touches no storage.

    Args:
        source: vLLM's folder.
        targets: as `vouched` has them.

    Raises:
        FormatError: with every field that differs.
    """
    for target in targets:
        if differences := _differences(source.config, target):
            raise FormatError(
                shown(source.rows),
                "the rows are of another engine than was said:\n  "
                + "\n  ".join(differences)
                + "\nServing them would give wrong answers, so they are refused",
            )
    told = {name for name in TOLD if name not in _untold(source.config, targets[0].config)}
    if source.config.revision is not None:
        told.add("revision")
    word = tuple(name for name in targets[0].config.fields() if name not in told)
    return Plan(source, tuple(targets), word)


def _untold(told: Config, ours: Config) -> tuple[str, ...]:
    """Fields that vLLM folded. It claims that rows are the same under every parallel size
    where they are not, so that the size is the user's to say.
    """
    folded = told.parallel_agnostic and not ours.parallel_agnostic
    return ("parallel_agnostic", *_SIZES) if folded else ()


def _differences(told: Config, target: StoredGroup) -> list[str]:
    ours = target.config
    ignored = _untold(told, ours)
    names = [name for name in TOLD if name not in ignored]
    if told.revision is not None:
        names.append("revision")
    found = [str(d) for d in ours.differences(told) if d.field in names]
    proved = prove_parallel_agnostic(
        target.layout,
        claimed=told.parallel_agnostic,
        replicated_layout=told.replicated_layout,
        canonical_format=told.canonical_format,
    )
    if told.parallel_agnostic and proved != ours.parallel_agnostic:
        found.append(
            f"parallel_agnostic: expected {proved} by what the layout proves, found "
            f"{ours.parallel_agnostic}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Import:
    """The import of one share. A task for `run`.

    Attributes:
        source, targets: as `plan` has them; the targets are claimed.
        codec: how the blocks are written.
        dry: whether rows are only looked at, and nothing is read or stored.
    """

    source: VllmCache
    targets: tuple[StoredGroup, ...]
    codec: Codec = "none"
    dry: bool = False

    def __call__(self, share: Share) -> Imported:
        """Import the share's rows.

        Raises:
            StorageError: storage failed, on either side; what is imported by then stays.
        """
        works = {target.group: _Work(self, target) for target in self.targets}
        done = Imported()
        for entry in entries(self.source.rows, share.first, share.stop):
            if isinstance(entry, Other):
                done += _of_other(entry)
            elif entry.group in works:
                done += works[entry.group].move(entry)
            else:
                done += Imported(elsewhere=1)
        return done


def strays(names: Sequence[str]) -> Imported:
    """What comes of names that vLLM did not give."""
    return sum((_of_other(Other(name)) for name in names), Imported())


def _of_other(other: Other) -> Imported:
    if other.unfinished:
        return Imported(unfinished=1)
    told = f"{shown(other.name)}: expected a name that vLLM gives, found another"
    return Imported(strays=1, left_out=(told,))


class _Work:
    """One row after the other, in the same memory."""

    def __init__(self, task: Import, target: StoredGroup) -> None:
        self._nbytes = target.layout.nbytes
        self._landing = None if task.dry else Landing(target, task.codec)
        longest = 0 if task.dry else max(padded_lengths(self._nbytes))
        self._buffer = memoryview(np.empty(longest, np.uint8))

    def move(self, row: Row) -> Imported:
        try:
            stored = self._moved(row)
        except FileNotFoundError:
            return Imported()  # removed since it was listed
        except DamagedBlockError as error:
            return Imported(rows=1, refused=1, left_out=(str(error),))
        if stored is Stored.KEPT:
            return Imported(rows=1, kept=1)
        return Imported(
            rows=1,
            imported=int(stored is not None),
            repaired=int(stored is Stored.REPAIRED),
            nbytes=self._nbytes,
        )

    def _moved(self, row: Row) -> Stored | None:
        if self._landing is None:
            read_row(row, self._nbytes, None)
            return None
        return self._landing.land(row.key, lambda: self._read(row))

    def _read(self, row: Row) -> memoryview:
        read_row(row, self._nbytes, self._buffer)
        return self._buffer[: self._nbytes]
