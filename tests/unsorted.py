"""Storage that lists in no order of paths."""

from collections.abc import Generator

from kvstore.listing import Found
from kvstore.upkeep import Upkeep


class Unsorted(Upkeep):
    """A folder whose files come by their own names, and so a block's files apart."""

    def files(self, path: str, *, after: str = "") -> Generator[Found, None, None]:
        found = list(super().files(path, after=after))
        found.sort(key=lambda file: (file.path.rpartition("/")[2], file.path))
        yield from found
