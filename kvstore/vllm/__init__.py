"""kvstore inside vLLM: a connector, and a bare tier for `secondary_tiers`."""

import logging

from kvstore.releases import require_supported

require_supported()

# Told where and how vLLM tells its own, unless the user has set it up otherwise.
if not logging.getLogger("kvstore").handlers:
    logging.getLogger("kvstore").handlers = logging.getLogger("vllm").handlers
    logging.getLogger("kvstore").setLevel(logging.getLogger("vllm").level)

from kvstore.vllm.connector import KVStoreConnector  # noqa: E402  # version first
from kvstore.vllm.tier import KVStoreTier  # noqa: E402  # version first

__all__ = ["KVStoreConnector", "KVStoreTier"]
