"""`abfs://container@account/…` in memory: one storage for each endpoint or profile."""

from collections import defaultdict
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from kvstore.testing import Root


class ContainersFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What stands before @ is a part of the path, as it is of Azure's."""

    protocol = "abfs"
    cachable = False
    storages: ClassVar[defaultdict[Any, dict[str, Any]]] = defaultdict(dict)

    def __init__(
        self,
        endpoint_url: str | None = None,
        profile: str | None = None,
        connection_string: str | None = None,
        account_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        account = (connection_string or "").partition(";AccountKey")[0]
        self.store = self.storages[endpoint_url, profile, account]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("abfs://").strip("/")


def container(name: str, **options: Any) -> Root:
    """A root in a container."""
    return Root(f"abfs://{name}@account/kv", options)


fsspec.register_implementation("abfs", ContainersFileSystem, clobber=True)
