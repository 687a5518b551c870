"""What lies above the blocks: documents of namespaces, ranks and KV groups, names that
belong to nothing, and what dead writers left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.arrays import group_attributes, group_document, recorded_config
from kvstore.config import Config
from kvstore.errors import FormatError, StorageError, shown
from kvstore.filesystem import Filesystem
from kvstore.offline.faults import REMOVED, WRITTEN, Fault, Problem
from kvstore.offline.group import read_document, read_layout
from kvstore.offline.root import Root
from kvstore.paths import DOCUMENT, isolated_path, namespace_path
from kvstore.survey import BELOW_NAMESPACE
from kvstore.upkeep import Upkeep

_RANK, _GROUP = BELOW_NAMESPACE

_ASK_ENGINE = "An engine with this config writes it anew when it opens the namespace"


def check_plain(
    filesystem: Filesystem, folder: str, missing: Fault, unreadable: Fault, *, repair: bool
) -> Problem | None:
    """Check the document of a rank or fan-out, which says nothing but that it is one.

    Args:
        filesystem: the root.
        folder: the rank's or fan-out's.
        missing: what it is if there is no document.
        unreadable: what it is if there is another one.
        repair: whether to write one that is missing. Only below a document of kvstore's:
            a folder may be called `r5` and be somebody's.
    """
    path = f"{folder}/{DOCUMENT}"
    try:
        document = read_document(filesystem, folder)
        if document is not None:
            group_attributes(document, place=filesystem.place(path))
            return None
    except FormatError as error:
        return Problem(path=path, fault=unreadable, detail=error.problem)
    if repair:
        filesystem.create(path, group_document())
    detail = "expected a document, found none"
    return Problem(path=path, fault=missing, detail=detail, done=WRITTEN if repair else "")


@dataclass(frozen=True, slots=True)
class Upper:
    """The check of a root, or of the part that is meant, down to the KV groups.

    Attributes:
        root: where.
        repair: whether documents of ranks that are missing are written, where their
            namespace's document can be read.
        delete: whether what dead writers left is removed.
    """

    root: Root
    repair: bool = False
    delete: bool = False

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong. Raises `StorageError` where nothing can be listed."""
        within = self.root.within
        if within.namespace is None:
            yield from self._leftovers()
            yield from self._strangers("", self._is_namespace)
        for namespace in self.root.namespaces():
            if self._is_namespace(namespace):
                yield from self._namespace(namespace)

    def _namespace(self, namespace: str) -> Iterator[Problem]:
        within = self.root.within
        path, ours = f"{namespace}/{DOCUMENT}", True
        for problem in _read(path, self._config(namespace, path)):
            ours = ours and problem.fault == Fault.NAMESPACE_MISNAMED
            yield problem
        if within.rank is None:
            yield from self._strangers(namespace, _is(_RANK))
        for rank in self._meant(namespace, _RANK, within.rank):
            folder = f"{namespace}/{rank}"
            repair = self.repair and ours
            yield from _read(f"{folder}/{DOCUMENT}", self._rank(folder, repair=repair))
            if within.group is None:
                yield from self._strangers(folder, _is(_GROUP))
            for group in self._meant(folder, _GROUP, within.group):
                path = f"{folder}/{group}/{DOCUMENT}"
                yield from _read(path, self._group(f"{folder}/{group}", path))

    def _rank(self, folder: str, *, repair: bool) -> Iterator[Problem]:
        missing, unreadable = Fault.RANK_MISSING, Fault.RANK_UNREADABLE
        problem = check_plain(
            self.root.filesystem, folder, missing, unreadable, repair=repair
        )
        if problem is not None:
            yield problem

    def _meant(
        self, folder: str, pattern: re.Pattern[str], only: int | None
    ) -> Iterator[str]:
        """The ranks or groups in a folder that are meant, and that are there."""
        for name in self.root.filesystem.folders(folder):
            if pattern.fullmatch(name) and only in (None, int(name[1:])):
                yield name

    def _config(self, namespace: str, path: str) -> Iterator[Problem]:
        try:
            document = read_document(self.root.filesystem, namespace)
            if document is None:
                detail = f"expected a document, found none. {_ASK_ENGINE}"
                yield Problem(path=path, fault=Fault.NAMESPACE_MISSING, detail=detail)
                return
            config = recorded_config(document, place=self.root.filesystem.place(path))
        except FormatError as error:
            yield Problem(path=path, fault=Fault.NAMESPACE_UNREADABLE, detail=error.problem)
            return
        expected = namespace_path(config)
        if namespace != expected and not self._is_isolated(namespace, config):
            detail = f"expected {expected}, by its config, found {shown(namespace)}"
            yield Problem(path=namespace, fault=Fault.NAMESPACE_MISNAMED, detail=detail)

    def _is_isolated(self, namespace: str, config: Config) -> bool:
        """Whether a folder is named after its config and its layout.

        A layout that cannot be read contradicts nothing.
        """
        plain = re.escape(namespace_path(config))
        if re.fullmatch(f"{plain}_[0-9a-f]{{12}}", namespace) is None:
            return False
        for rank in self._meant(namespace, _RANK, None):
            for group in self._meant(f"{namespace}/{rank}", _GROUP, None):
                folder = f"{namespace}/{rank}/{group}"
                try:
                    layout = read_layout(self.root.filesystem, folder)
                except FormatError:
                    continue
                if layout and isolated_path(config, layout.digest) != namespace:
                    return False
        return True

    def _group(self, folder: str, path: str) -> Iterator[Problem]:
        try:
            layout = read_layout(self.root.filesystem, folder)
        except FormatError as error:
            yield Problem(path=path, fault=Fault.GROUP_UNREADABLE, detail=error.problem)
            return
        if layout is None:
            detail = (
                "expected a document, found none, and nothing else tells the layout. "
                f"{_ASK_ENGINE}"
            )
            yield Problem(path=path, fault=Fault.GROUP_MISSING, detail=detail)

    def _strangers(self, folder: str, known: Callable[[str], bool]) -> Iterator[Problem]:
        """Files and folders directly below a folder that belong to nothing."""
        filesystem = self.root.filesystem
        start = f"{folder}/" if folder else ""
        detail = "belongs to nothing that kvstore knows"
        for name in filesystem.folders(folder):
            if not known(name):
                path = f"{start}{name}"
                yield Problem(path=path, fault=Fault.UNKNOWN_NAME, detail=detail)
        for name in file_names(filesystem, folder):
            if not (folder and name == DOCUMENT):
                path = f"{start}{name}"
                yield Problem(path=path, fault=Fault.UNKNOWN_NAME, detail=detail)

    def _is_namespace(self, name: str) -> bool:
        """Whether a folder below the root is one, maybe without its document."""
        if any(map(_RANK.fullmatch, self.root.filesystem.folders(name))):
            return True
        try:
            return read_document(self.root.filesystem, name) is not None
        except (FormatError, StorageError):  # there is one, or that is for `_config` to say
            return True

    def _leftovers(self) -> Iterator[Problem]:
        left = self.root.filesystem.leftovers()
        if left and self.delete:
            self.root.filesystem.sweep()
        stay = set(self.root.filesystem.leftovers()) if self.delete else set()
        for path in left:
            done = ("kept" if path in stay else REMOVED) if self.delete else ""
            detail = "its writer is dead"
            yield Problem(path=path, fault=Fault.LEFTOVER, detail=detail, done=done)


def file_names(filesystem: Upkeep, folder: str) -> Iterator[str]:
    """The names of the files directly in a folder. Those below it are passed over."""
    start = f"{folder}/" if folder else ""
    passed: set[str] = set()
    after, more = "", True
    while more:
        more = False
        for file in filesystem.files(folder, after=after):
            name, slash, _ = file.path[len(start) :].partition("/")
            if not slash:
                yield name
            elif name not in passed:
                passed.add(name)
                after, more = f"{start}{name}/\U0010ffff", True
                break


def _read(path: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """What is wrong with a document; that it could not be read hides no other one."""
    try:
        yield from problems
    except StorageError as error:
        yield Problem(path=path, fault=Fault.UNREAD, detail=str(error))


def _is(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda name: pattern.fullmatch(name) is not None
