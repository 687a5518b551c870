"""`faulty://name`: an fsspec filesystem in memory whose requests a test can see, hold and
let fail."""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from kvstore.testing import Root


@dataclass
class Faulty:
    """One root, and what happens to the requests below it.

    Attributes:
        before: called with each request (`get`, `put`, `delete` or `list`) and its path, in
            the thread that makes it. It may raise or wait.
        answer: what a `get` gives of an object's path and bytes.
        seen: the requests so far, in the order in which they came.
    """

    before: Callable[[str, str], None] = lambda request, path: None
    answer: Callable[[str, bytes], bytes] = lambda path, data: data
    seen: list[tuple[str, str]] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        """From now on its URL knows it."""
        FaultyFileSystem.roots[self.name] = self

    @property
    def root(self) -> Root:
        """Where a test opens its stores."""
        return Root(f"faulty://{self.name}")

    def count(self, request: str, ending: str = "") -> int:
        """How many such requests there were for paths of this ending."""
        return sum(kind == request and path.endswith(ending) for kind, path in self.seen)

    def request(self, request: str, path: str) -> None:
        """Note a request, then let it happen."""
        self.seen.append((request, path))
        self.before(request, path)


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Knows its roots by the first part of a path."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    roots: ClassVar[dict[str, Faulty]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("faulty://").strip("/")

    def _request(self, request: str, path: str) -> Faulty:
        root = self.roots[self._strip_protocol(path).split("/")[1]]
        root.request(request, path)
        return root

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        root = self._request("get", path)
        return root.answer(path, super().cat_file(path, *arguments, **options))

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._request("put", path)
        return super().pipe_file(path, *arguments, **options)

    def rm_file(self, path: str) -> None:
        self._request("delete", path)
        super().rm_file(path)

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._request("list", path)
        return super().ls(path, *arguments, **options)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@dataclass
class Gate:
    """Holds some requests until it is opened.

    Attributes:
        holds: whether a request, by its kind and path, is held.
        opened: set, it lets all of them through.
        waiting: released once for each request that it holds.
    """

    holds: Callable[[str, str], bool]
    opened: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, request: str, path: str) -> None:
        if self.holds(request, path):
            self.waiting.release()
            assert self.opened.wait(60)
