"""`bare://name`: an asynchronous fsspec filesystem that can do what kvstore asks of one,
and nothing else. Its requests run on fsspec's own loop, as those of s3fs and gcsfs do."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem

from kvstore.testing import Root

REFUSED = """
cat _cat cat_ranges _cat_ranges cp_file _cp_file created du _du exists _exists
expand_path _expand_path find _find get _get get_file _get_file glob _glob head info
_info invalidate_cache isdir _isdir isfile _isfile ls _ls makedirs _makedirs mkdir
_mkdir modified mv open open_async _open pipe _pipe put _put put_file _put_file
read_block rm _rm size _size tail touch transaction ukey walk _walk
"""


@dataclass
class Bare:
    """One root, and what lies in it.

    Attributes:
        objects: the bytes of each object, by its path.
        on_request: called on the loop's thread while a request is under way.
        at_once: the most requests that were under way together.
        made: how many filesystems there are.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    on_request: Callable[[], object] = lambda: None
    at_once: int = 0
    made: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _now: int = 0

    def __post_init__(self) -> None:
        """From now on its URL knows it."""
        BareFileSystem.roots[self.name] = self

    @property
    def root(self) -> Root:
        """Where a test opens its stores."""
        return Root(f"bare://{self.name}", {"name": self.name})

    async def request(self) -> None:
        """What every request does before its answer."""
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        self.on_request()
        await asyncio.sleep(0.001)  # the others have their turn
        self._now -= 1


class BareFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Whole objects by their exact names; ranges from a start to an end."""

    protocol = "bare"
    roots: ClassVar[dict[str, Bare]] = {}

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self.bare = self.roots[name]
        self.bare.made += 1

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None
    ) -> bytes:
        await self.bare.request()
        if start is None or end is None or not 0 <= start < end:
            raise NotImplementedError(f"the range {start} to {end}")
        if path not in self.bare.objects:
            raise FileNotFoundError(path)
        return self.bare.objects[path][start:end]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        await self.bare.request()
        if mode == "create" and path in self.bare.objects:
            raise FileExistsError(path)
        self.bare.objects[path] = bytes(value)

    async def _rm_file(self, path: str) -> None:
        await self.bare.request()
        if self.bare.objects.pop(path, None) is None:
            raise FileNotFoundError(path)


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("kvstore promises not to ask for that")


for _method in REFUSED.split():
    setattr(BareFileSystem, _method, _refuse)
fsspec.register_implementation("bare", BareFileSystem, clobber=True)
