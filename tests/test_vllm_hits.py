"""An engine that stores in vain says so, once."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from test_capacity import Clock

from kvstore.job import Job, Outcome
from kvstore.parts import Operation
from kvstore.vllm.hits import LOOKUPS, PATIENCE, Hits

NAME = "kvstore.vllm.hits"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hits(clock: Clock) -> Hits:
    return Hits("s3://bucket/kv", clock=clock)


def end(hits: Hits, operation: Operation, word: str, count: int) -> None:
    job = Job(1, operation, [bytes(36)] * count, range(count))
    hits.job_ended(Outcome(job, [word] * count, [None] * count, {}, 0.1))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == NAME]


def test_it_is_said_once(
    hits: Hits, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    end(hits, "store", "stored", 7)
    clock.now += PATIENCE  # nobody has asked yet
    end(hits, "lookup", "absent", LOOKUPS)
    clock.now += PATIENCE - 1
    end(hits, "lookup", "absent", 1)
    assert lines(caplog) == []
    clock.now += 1
    for _ in range(3):
        end(hits, "lookup", "damaged", 1)
    assert lines(caplog) == [
        f"no hit among {LOOKUPS + 2} lookups in {PATIENCE:.0f} s, while 7 blocks were "
        'stored in s3://bucket/kv: see "Is it working?" in docs/operations.md'
    ]


@pytest.mark.parametrize("recalled", [False, True])
def test_one_hit_is_enough(
    hits: Hits, clock: Clock, caplog: pytest.LogCaptureFixture, recalled: bool
) -> None:
    end(hits, "store", "stored", 1)
    end(hits, "lookup", "absent", 1)
    if recalled:
        hits.recalled(True)
    else:
        end(hits, "lookup", "found", 1)
    clock.now += PATIENCE
    end(hits, "lookup", "absent", LOOKUPS)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("stored", "answered", "word"),
    [(0, LOOKUPS, "absent"), (1, LOOKUPS - 2, "absent"), (1, LOOKUPS, "failed")],
    ids=["nothing is stored", "few ask", "storage fails"],
)
def test_what_tells_nothing(
    hits: Hits,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    stored: int,
    answered: int,
    word: str,
) -> None:
    end(hits, "store", "stored", stored)
    end(hits, "store", "failed", 5)
    end(hits, "lookup", "absent", 1)
    clock.now += PATIENCE
    end(hits, "lookup", word, answered)
    assert lines(caplog) == []
    end(hits, "store", "kept", 1)
    end(hits, "lookup", "absent", LOOKUPS)
    assert len(lines(caplog)) == 1
