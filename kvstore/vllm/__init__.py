"""kvstore inside vLLM: a connector, and a bare tier for `secondary_tiers`."""

from kvstore.vllm.versions import require_supported

require_supported()

from kvstore.vllm.connector import KVStoreConnector  # noqa: E402  # version first
from kvstore.vllm.tier import KVStoreTier  # noqa: E402  # version first

__all__ = ["KVStoreConnector", "KVStoreTier"]
