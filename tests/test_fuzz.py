"""The fuzzer's targets, by a few thousand changes that are the same in each run."""

from itertools import islice

import pytest
from fuzz.mutate import mutations
from fuzz.targets import TARGETS

RUNS = 3000


@pytest.mark.parametrize("name", TARGETS)
def test_what_strangers_write_is_refused_or_understood(name: str) -> None:
    target, seeds = TARGETS[name]
    for number, data in enumerate(islice(mutations(seeds, 1), RUNS)):
        try:
            target(data)
        except BaseException as error:
            error.add_note(f"run {number}: {data[:2000]!r}")
            raise
