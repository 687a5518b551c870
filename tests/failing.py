"""A task that fails, in a module that other processes find."""

from kvstore.offline.shares import Share
from kvstore.offline.sizes import Sizes


class Fault(Exception):
    """Not one of kvstore's."""


def fails(share: Share) -> Sizes:
    raise Fault(share.group)
