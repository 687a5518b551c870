"""The rows of docs/security.md that need vLLM's side of the package."""

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from specs import Rows, make_tier, offloading_config

from kvstore import InvalidInputError
from kvstore.vllm.options import TierOptions
from kvstore.vllm.weights import weights_digest

SECRET = "s3cr3t-of-somebody"


def test_c6_weights_of_any_bytes_have_a_fingerprint_or_none(tmp_path: Path) -> None:
    def digest(header: bytes) -> str | None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
        return weights_digest(tmp_path)

    sound = digest(b'{"a": {"data_offsets": [0, 1000]}}')
    assert sound is not None
    for offsets in (
        "[-5000, 10]",
        "[0, 99999999999999999999999999]",
        "[0, 1e9]",
        "[true, 5]",
        '["a", "b"]',
        "[5, 1]",
        "[1]",
        "7",
    ):
        assert digest(b'{"a": {"data_offsets": %s}}' % offsets.encode()) is not None
    for header in (b"[" * 100_000, b"{}", b"[]", b"\xff", b'{"a": 1}', b"null"):
        assert digest(header) is not None
    assert weights_digest(Path("org/model")) is None
    assert weights_digest(Path("a\0b")) is None


def test_c3_options_that_are_no_object_are_not_repeated() -> None:
    text = json.dumps({"secret": SECRET})
    with pytest.raises(InvalidInputError) as refused:
        TierOptions.parse({"url": "s3://b/kv", "storage_options": text}, where="kvstore")
    assert str(refused.value) == "kvstore.storage_options: expected an object, found str"


def test_l1_options_are_shown_without_credentials() -> None:
    url = f"s3://me:{SECRET}@b/kv"  # refused, but not before it is parsed
    options = TierOptions(url=url, storage_options={"secret": SECRET})
    assert SECRET not in f"{options!r} {options}"
    assert pickle.loads(pickle.dumps(options)) == options


def test_l4_a_movers_task_is_no_argument_and_nobodys_to_read(
    tmp_path: Path, tiers: list[Any]
) -> None:
    """A process is told its options, credentials too, in a file without a name."""
    options = {"storage_options": {"secret": SECRET, "auto_mkdir": True}, "processes": 2}
    rows = Rows(offloading_config(), shared=True)
    tiers.append(make_tier(rows, {"url": str(tmp_path / "kv"), **options}))
    children = [
        folder
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and f"PPid:\t{os.getpid()}\n" in status(folder)
    ]
    assert len(children) >= 2
    for folder in (*children, Path("/proc/self")):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in (folder / name).read_bytes()
    tasks = [
        Path(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if "kvstore-task" in os.path.realpath(f"/proc/self/fd/{number}")
    ]
    assert len(tasks) == 2
    for task in tasks:
        assert stat.S_IMODE(task.stat().st_mode) == 0o400
        assert SECRET.encode() in task.read_bytes()  # or this would show nothing
    files = [file for file in (tmp_path / "kv").rglob("*") if file.is_file()]
    assert files
    assert not any(SECRET.encode() in file.read_bytes() for file in files)


def status(folder: Path) -> str:
    """What the kernel says of a process; nothing if it is gone."""
    try:
        return (folder / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
