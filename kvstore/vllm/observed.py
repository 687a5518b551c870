"""`ObservedTier`: the part of a tier that tells vLLM what happens in it.

Metrics, events, and what 0.33 shows of the configuration; `KVStoreTier` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore.collector import Collected
from kvstore.job import Job, Outcome
from kvstore.urls import safe_url
from kvstore.vllm.events import Events
from kvstore.vllm.hits import Hits
from kvstore.vllm.metrics import DEFINITIONS, TierMetrics
from kvstore.vllm.options import TierOptions

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingEvent, OffloadingMetricMetadata

_SHOWN = tuple(
    field.name
    for field in fields(TierOptions)
    if field.name not in ("storage_options", "kv_heads", "head_size")
)
"""Options without secrets in them."""


class ObservedTier(SecondaryTierManager):
    """A tier with metrics and maybe events, once `observe` was called.

    Attributes:
        options: set by the tier, before it calls `observe`.
        metrics: what is counted.
        events: what is announced, or None if nobody wants to know.
        hits: whether any block was found.
    """

    options: TierOptions
    metrics: TierMetrics
    events: Events | None
    hits: Hits

    def observe(self, block_bytes: int) -> None:
        """Begin, with nothing counted and nothing announced."""
        self.metrics = TierMetrics(block_bytes)
        self.events = Events.wanted(self.options, self._offloading_spec, self.tier_type)
        self.hits = Hits(safe_url(self.options.url))

    def note_submitted(self, job: Job) -> None:
        """A job begins."""
        self.metrics.job_submitted(job)

    def note_ended(self, outcome: Outcome) -> None:
        """That job has ended."""
        self.metrics.job_ended(outcome)
        self.hits.job_ended(outcome)
        if self.events is not None:
            self.events.job_ended(outcome)

    def note_recalled(self, found: bool) -> None:
        """A lookup was answered from memory."""
        self.metrics.recalled(found)
        self.hits.recalled(found)

    def note_collected(self, collected: Collected) -> None:
        """Blocks were removed, and the root's usage is known."""
        self.metrics.evicted("no_room", collected.evicted)
        self.metrics.evicted("expired", collected.expired)
        self.metrics.evicted("orphan", collected.orphans)
        self.metrics.set_usage(collected.used, self.options.max_bytes)
        if self.events is not None:
            self.events.removed(collected.keys)

    # ---- vLLM's calls

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """What vLLM's front end registers. It asks the class, and never has a tier."""
        return dict(DEFINITIONS)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        return self.metrics.take_stats()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was announced since the last call."""
        return () if self.events is None else self.events.take()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """The labels of `config_info`. Asked by 0.33 only."""
        return tuple(f"kvstore_{name}" for name in _SHOWN)

    def config_info(self) -> Mapping[str, str]:
        """The options, as labels of vLLM's `vllm:kv_offload_config_info`."""
        shown = {name: str(getattr(self.options, name)) for name in _SHOWN}
        shown["url"] = safe_url(self.options.url)
        return {f"kvstore_{name}": value for name, value in shown.items()}
