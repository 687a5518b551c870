"""For whoever has a new backend: does it keep what kvstore relies on?

`BlockStoreTests` is a conformance suite for any fsspec URL. Beside it, and only where they
are asked for, `kvstore.testing.faults` has filesystems that fail, are slow, or count; and
`kvstore.testing.stateful`, which needs hypothesis, a model that a store is compared with.
"""

from kvstore.testing.conformance import BlockStoreTests
from kvstore.testing.roots import (
    LAYERS,
    Root,
    open_on,
    sample_block,
    sample_config,
    sample_layout,
)

__all__ = [
    "LAYERS",
    "BlockStoreTests",
    "Root",
    "open_on",
    "sample_block",
    "sample_config",
    "sample_layout",
]
