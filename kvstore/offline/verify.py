"""Prove every block below a root, and find what is damaged, half, or belongs to nothing.

`Upper` checks what lies above the blocks; `Verify` is a task for `run` with the shares that
`covering` gives. Nothing is written unless it is asked for. What could not be read is never
removed: nothing is known of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import FormatError, InvalidInputError, StorageError
from kvstore.listing import Found
from kvstore.offline.faults import (
    HALF,
    LISTED,
    REMOVABLE,
    REMOVED,
    Fault,
    Findings,
    Problem,
)
from kvstore.offline.group import read_layout, shares_of
from kvstore.offline.proof import BlockProof, Faulty
from kvstore.offline.root import Root
from kvstore.offline.shares import Share
from kvstore.offline.upper import check_plain
from kvstore.paths import CHUNK, DOCUMENT, FAN_OUT, FAN_OUT_DIGITS, block_key, block_path
from kvstore.survey import FAN_OUTS, require_ascending
from kvstore.upkeep import Upkeep

MAX_UNREAD = 8
"""Blocks of a share that may fail to be read: where more do, storage itself fails."""

PATIENCE = 3600.0
"""Seconds after which nobody is still writing the other file of a block."""

KEPT = dict.fromkeys(
    (Fault.OTHER_FORMAT, Fault.UNKNOWN_CODEC), "kept: another version may read it"
) | {
    Fault.OTHER_LAYOUT: "kept: if the group's document is the wrong one, remove that: an "
    "engine writes it anew"
}
"""Why a block is not removed, of which it is not clear that nobody can use it."""

LEFT = "kept: its files are gone, the folder is not: a link or folder is in it"
"""Of a folder in which something lies that no listing shows, and that is not ours."""


def covering(root: Root) -> list[Share]:
    """Shares of all groups that are meant. They leave nothing out: what belongs to nothing
    may lie between fan-outs.
    """
    shares = []
    for place in root.places():
        if (key := root.within.key) is not None:
            first = int(key.hex()[:FAN_OUT_DIGITS], 16)
            shares.append(Share(place.path, first, first + 1))
            continue
        starts = [share.first for share in shares_of(root.filesystem, place.path)]
        bounds = [0, *starts[1:], FAN_OUTS]
        shares += [
            Share(place.path, first, stop) for first, stop in itertools.pairwise(bounds)
        ]
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Prove the blocks of a share. A task for `run`.

    Attributes:
        filesystem: the root's.
        key: the only block that is meant; None for all.
        delete: whether to remove what is damaged or half, after another look at it.
        repair: whether to write documents of fan-outs that are missing, where their group's
            document can be read.
        now: seconds since the epoch when the work began, by the storage's clock, as
            `Root.now` tells it. What is newer than an hour may be a write under way and is
            not removed; without it that is everything that is written file by file.
    """

    filesystem: Upkeep
    key: bytes | None = None
    delete: bool = False
    repair: bool = False
    now: float = 0.0

    def __call__(self, share: Share) -> Findings:
        """Look at all that lies in the share.

        Raises:
            StorageError: the share could not be listed, or much of it not be read.
        """
        return _Check(self, share).findings()


class _Entry(NamedTuple):
    """What lies directly in a group (`name` is None) or in a fan-out, and its files."""

    fan_out: str
    name: str | None
    files: list[Found]


class _Check:
    """Of one share."""

    def __init__(self, task: Verify, share: Share) -> None:
        self._task = task
        self._filesystem = task.filesystem
        self._share = share
        self._group = share.group
        self._blocks = self._nbytes = self._unproved = 0
        self._found: Counter[str] = Counter()
        self._mended: Counter[str] = Counter()
        self._problems: list[Problem] = []
        self._listed = ""
        self._proof = self._opened()

    def _opened(self) -> BlockProof | None:
        """None if the group's layout cannot be read, which `Upper` tells."""
        try:
            layout = read_layout(self._filesystem, self._group)
        except FormatError:
            return None
        except StorageError as error:
            self._unread(f"{self._group}/{DOCUMENT}", error)
            return None
        if layout is None:
            return None
        number = int(self._group.rpartition("/g")[2])
        return BlockProof(self._filesystem, self._group, number, layout)

    def findings(self) -> Findings:
        """Look at everything, once."""
        for fan_out, entries in itertools.groupby(self._entries(), lambda e: e.fan_out):
            if FAN_OUT.fullmatch(fan_out):
                self._fan_out(fan_out, entries)
            elif next(entries).name is not None or fan_out != DOCUMENT:
                self._stranger(f"{self._group}/{fan_out}")
        return Findings(
            blocks=self._blocks,
            nbytes=self._nbytes,
            unproved=self._unproved,
            found=dict(self._found),
            mended=dict(+self._mended),
            problems=tuple(self._problems),
        )

    def _entries(self) -> Iterator[_Entry]:
        first, stop, skip = self._share.first, self._share.stop, len(self._group) + 1
        # Behind all of the fan-out before: as `stored_blocks`.
        after = f"{self._group}/{first - 1:03x}g" if first else ""
        begin = f"{first:03x}" if first else ""  # what lies between is the share before's
        end = f"{stop:03x}" if stop < FAN_OUTS else None
        only = None if self._task.key is None else block_path(self._task.key)

        def place(file: Found) -> tuple[str, str | None]:
            fan_out, slash, rest = file.path[skip:].partition("/")
            return fan_out, rest.partition("/")[0] if slash else None

        files = self._filesystem.files(self._group, after=after)
        for (fan_out, name), inside in itertools.groupby(files, place):
            if end is not None and fan_out >= end:
                return
            if fan_out >= begin and only in (None, f"{fan_out}/{name}"):
                yield _Entry(fan_out, name, list(inside))

    def _fan_out(self, fan_out: str, entries: Iterable[_Entry]) -> None:
        folder, used = f"{self._group}/{fan_out}", False
        for _, name, files in entries:
            path = folder if name is None else f"{folder}/{name}"
            is_file = files[0].path == path
            key = None if name is None or is_file else _key(name)
            if is_file and name == DOCUMENT:
                used = True
            elif key is None:
                self._stranger(path)
            else:
                used = True
                require_ascending(self._filesystem, self._listed, path)
                self._listed = path
                self._block(path, key, files, misplaced=not key.hex().startswith(fan_out))
        if used:
            self._document(folder)

    def _document(self, folder: str) -> None:
        missing, unreadable = Fault.FAN_OUT_MISSING, Fault.FAN_OUT_UNREADABLE
        try:
            repair = self._task.repair and self._proof is not None
            problem = check_plain(
                self._filesystem, folder, missing, unreadable, repair=repair
            )
        except StorageError as error:
            self._unread(f"{folder}/{DOCUMENT}", error)
        else:
            if problem is not None:
                self._note(problem)

    def _block(self, path: str, key: bytes, files: list[Found], *, misplaced: bool) -> None:
        names = [file.path[len(path) + 1 :] for file in files]
        known = [name for name in names if name == DOCUMENT or self._is_chunk(name)]
        self._nbytes += sum(file.nbytes for file in files)
        self._blocks += bool(known)
        for name in names:
            if name not in known:
                self._stranger(f"{path}/{name}", Fault.UNKNOWN_FILE)

        def look() -> Faulty | None:
            if misplaced:
                expected = block_path(key).partition("/")[0]
                return Faulty(Fault.MISPLACED, f"expected in the fan-out {expected}")
            if self._proof is not None:
                return self._proof.look(key)
            return self._half(path)

        if self._proof is None and not misplaced:
            self._unproved += bool(known)
        try:
            faulty = look() if known or not misplaced else None
        except StorageError as error:
            self._unread(path, error)
            return
        if faulty is not None:
            newest = max(file.modified for file in files)
            done = self._removed(path, names, faulty.fault, newest, look)
            self._note(
                Problem(path=path, fault=faulty.fault, detail=faulty.detail, done=done)
            )

    def _is_chunk(self, name: str) -> bool:
        if self._proof is not None:
            return name == self._proof.chunk_name
        return CHUNK.fullmatch(name) is not None

    def _half(self, path: str) -> Faulty | None:
        """What the names of a block's files tell, where its layout is not known."""
        names = [file.path[len(path) + 1 :] for file in self._filesystem.files(path)]
        chunk = any(map(CHUNK.fullmatch, names))
        if chunk and DOCUMENT not in names:
            return Faulty(Fault.DOCUMENT_MISSING, "the document is missing")
        if DOCUMENT in names and not chunk:
            return Faulty(Fault.CHUNK_MISSING, "the chunk is missing")
        return None

    def _removed(
        self,
        path: str,
        names: list[str],
        fault: Fault,
        newest: float,
        look: Callable[[], Faulty | None],
    ) -> str:
        """Remove a block, if that is asked for and right. Returns what was done."""
        if not self._task.delete:
            return ""
        if self._proof is None:
            return "kept: its group's document tells no layout"
        if fault not in REMOVABLE:
            return KEPT[fault]
        if not all(name == DOCUMENT or self._is_chunk(name) for name in names):
            return "kept: files that are not kvstore's lie beside it"
        # In an object store a repair writes one file after the other, too.
        slow = fault in HALF or not self._filesystem.local
        if slow and self._task.now - newest < PATIENCE:
            return "kept: it is new, so somebody may be writing it"
        try:
            again = look()
        except StorageError as error:
            return f"kept: it could not be read again: {error}"
        if again is None:
            return "kept: it is whole by now"
        if again.fault not in REMOVABLE:
            return KEPT[again.fault]
        # Also what no listing shows, such as a link. The commit mark goes first.
        ours = (self._proof.chunk_name, DOCUMENT)
        _, problem = self._filesystem.delete_many([(path, ours)])
        if problem is not None:
            return f"kept: {problem}"
        anew = self._filesystem.local and self._filesystem.exists(f"{path}/{DOCUMENT}")
        return LEFT if not anew and self._filesystem.occupied(path) else REMOVED

    def _stranger(self, path: str, fault: Fault = Fault.UNKNOWN_NAME) -> None:
        detail = "belongs to nothing that kvstore knows"
        done = "kept: it is not kvstore's" if self._task.delete else ""
        self._note(Problem(path=path, fault=fault, detail=detail, done=done))

    def _unread(self, path: str, error: StorageError) -> None:
        if self._found[Fault.UNREAD] >= MAX_UNREAD:
            raise error
        self._note(Problem(path=path, fault=Fault.UNREAD, detail=str(error)))

    def _note(self, problem: Problem) -> None:
        self._found[problem.fault] += 1
        self._mended[problem.fault] += problem.mended
        if len(self._problems) < LISTED:
            self._problems.append(problem)


def _key(name: str) -> bytes | None:
    """The key whose block's folder has this name; None if there is none."""
    try:
        return block_key(f"{name[:FAN_OUT_DIGITS]}/{name}")
    except InvalidInputError:
        return None
