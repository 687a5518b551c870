"""`Events`: which blocks this engine vouches for, told to vLLM's event stream.

Consumers, routers mostly, keep an index of what each engine can load. What they know of
this tier is what `take` has told: a block is stored once, then removed once, then maybe
stored again. See docs/decisions/0024.

Locking: none, since vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvstore.blocks import Stored
from kvstore.job import Outcome
from kvstore.transfer import ABSENT, DAMAGED
from kvstore.vllm.options import TierOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)

OWNERSHIP = "kvstore"
"""Whose blocks they are: vLLM's CPU tier names nobody, and other tiers themselves."""

_THERE = frozenset(Stored)
_GONE = frozenset((ABSENT, DAMAGED))


class _News(Enum):
    """What consumers are to be told of a block."""

    STORED = "stored"
    AGAIN = "stored again"  # they may know it, so that its removal must be told as well
    REMOVED = "removed"


class Events:
    """What consumers were told, and what they are to be told next.

    Both are bounded: at most `ANNOUNCED` blocks are vouched for, and no more than as many
    again wait to be taken back.
    """

    ANNOUNCED = 262_144
    """Blocks that are vouched for; the oldest are taken back first."""

    def __init__(self, locality: Locality | None) -> None:
        """Nothing is announced."""
        self._locality = locality
        self._clearings = 0
        # The clearings before it was told. A plain dict would find its oldest slowly.
        self._announced: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[bytes, _News] = {}

    @classmethod
    def wanted(
        cls, options: TierOptions, spec: OffloadingSpec, tier_type: str
    ) -> Events | None:
        """Events if the tier is to tell any; else None, with a warning where the tier's
        option asks for them and vLLM's own does not.
        """
        if not options.enable_kv_events:
            return None
        if not spec.config.enable_kv_cache_events:
            logger.warning(
                "%s: enable_kv_events is set, but vLLM's own events are off, so this tier "
                "tells none. Set enable_kv_cache_events in --kv-events-config.",
                tier_type,
            )
            return None
        return cls(None if options.locality is None else Locality(options.locality))

    def job_ended(self, outcome: Outcome) -> None:
        """Tell what a job has shown: a store, that its blocks are there; any job, that a
        block is absent or damaged. A failure shows nothing.
        """
        ended = zip(outcome.job.keys, outcome.words, strict=True)
        if outcome.job.operation == "store":
            self.stored(key for key, word in ended if word in _THERE)
        elif not _GONE.isdisjoint(outcome.words):
            self.removed(key for key, word in ended if word in _GONE)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These can be loaded. What consumers know already is not told again."""
        for key in keys:
            known = self._announced.get(key)
            if known == self._clearings:
                continue
            self._announced[key] = self._clearings
            news = self._pending.get(key)
            if news is not _News.STORED:
                never = known is None and news is None
                self._pending[key] = _News.STORED if never else _News.AGAIN
        while len(self._announced) > self.ANNOUNCED:
            self.removed((next(iter(self._announced)),))

    def removed(self, keys: Iterable[bytes]) -> None:
        """These cannot be loaded any more. Only what was announced is taken back."""
        for key in keys:
            if self._announced.pop(key, None) is None:
                continue
            if self._pending.get(key) is _News.STORED:
                del self._pending[key]
            else:
                self._pending[key] = _News.REMOVED

    def cleared(self) -> None:
        """Consumers may have been told to forget this engine's blocks: announce them anew
        when they are stored again.
        """
        self._clearings += 1

    def take(self) -> list[OffloadingEvent]:
        """What happened since the last call: removals and stores, of different blocks."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, {}
        told: dict[bool, list[OffloadKey]] = {True: [], False: []}
        for key, news in pending.items():
            told[news is _News.REMOVED].append(OffloadKey(key))
        return [self._event(keys, removed=gone) for gone, keys in told.items() if keys]

    def _event(self, keys: list[OffloadKey], *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=keys,
            medium=Medium.STORAGE,
            removed=removed,
            locality=self._locality,
            ownership=OWNERSHIP,
            # vLLM then keeps what the removal must repeat: the hashes in a block.
            removal_expected=not removed,
        )
