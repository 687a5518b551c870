"""`Refusing`: keeps vLLM from storing to a tier that is only read.

vLLM asks a tier's back-pressure detector before each store. So no job is made, no row is
held, and nothing counts as failed: vLLM counts the stores as dropped.
"""

from __future__ import annotations

from vllm.v1.kv_offload.tiering.backpressure import (
    BackpressureDetector,
    DropStorePolicy,
)


class Refusing(BackpressureDetector):
    """Under pressure for ever."""

    def __init__(self) -> None:
        """Drops every store."""
        super().__init__(DropStorePolicy())

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """None ever is."""

    def is_under_pressure(self) -> bool:
        """Always."""
        return True

    def reset(self) -> None:
        """Nothing changes."""
