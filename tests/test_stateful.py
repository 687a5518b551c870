"""Two stores under one root, compared with a model: `kvstore.testing.stateful`."""

import logging
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.testing import Root
from kvstore.testing.stateful import BlockStoreMachine
from kvstore.urls import parse_url

SHARE = {"file": 3, "memory": 3, "s3": 33, "gs": 33}
"""By which the profile's number of examples is divided: each has up to 50 steps, and where
a server answers, each step is several requests."""


@pytest.mark.timeout(3600)
def test_a_store_does_as_the_model(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    class Machine(BlockStoreMachine):
        def __init__(self) -> None:
            super().__init__(root.below(uuid4().hex))

    caplog.set_level(logging.CRITICAL, "kvstore")  # damage is what it is about
    protocol, _ = parse_url(root.url)
    examples = settings().max_examples // SHARE[protocol]
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=examples, deadline=None, report_multiple_bugs=False),
    )
