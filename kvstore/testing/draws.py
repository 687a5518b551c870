"""What Hypothesis draws for the machine: keys, payloads, damage, and plans of faults."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.testing.damage import CHANGES
from kvstore.testing.plans import (
    CAUSES,
    KINDS,
    Fault,
    Operation,
    Plan,
    PlannedFaults,
    RandomFaults,
)
from kvstore.testing.roots import sample_block, sample_layout

KEYS = (b"k-1", b"k-2")
"""Few, so that what is done to one comes together; and in one folder."""

PAYLOADS = [sample_block(sample_layout(), seed, values=16).tobytes() for seed in range(3)]

keys = st.sampled_from(KEYS)
ends = st.sampled_from((0, 1))
finders = st.sampled_from((None, 0, 1))
payloads = st.sampled_from(range(len(PAYLOADS)))
damages = st.tuples(
    st.sampled_from(CHANGES),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
)
_calls: st.SearchStrategy[Operation] = st.sampled_from(
    ("read", "read_into", "publish", "create", "delete")
)
faults = _calls.flatmap(
    lambda operation: st.tuples(
        st.tuples(st.just(operation), st.integers(1, 3)),
        st.builds(
            Fault,
            kind=st.sampled_from(KINDS[operation]),
            error=st.sampled_from(list(CAUSES)),
            at=st.floats(0, 1),
        ),
    )
)
plans: st.SearchStrategy[Plan] = st.one_of(
    st.lists(faults, min_size=1, max_size=3).map(lambda drawn: PlannedFaults(dict(drawn))),
    st.builds(RandomFaults, st.integers(0, 1 << 16), st.sampled_from((0.05, 0.3))),
)
