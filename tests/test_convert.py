"""`kvstore convert`: every value lands where its name says, and nothing is lost."""

import json
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from children import Kvstore
from faulty import Faulty
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import assert_blocks_that_are_gone_are_missed
from stored import chunk_url, folder

from kvstore import BlockStore, FormatError, InvalidInputError, Layout, StorageError
from kvstore import testing as kit
from kvstore.conversion import Conversion
from kvstore.filesystem import Files
from kvstore.offline import Root, StoredGroup
from kvstore.offline.convert import Convert, Converted, claim, plan
from kvstore.offline.shares import run
from kvstore.offline.target import Wanted, target_of
from kvstore.packing import unpack
from kvstore.testing import sample_config
from kvstore.upkeep import Upkeep

LAYERS, HEADS, TOKENS, SIZE = 3, 4, 32, 16
NAMES = tuple(f"layers.{number}" for number in range(LAYERS))
LAYOUT = Layout(
    axes=("layer", "head", "token", "value"),
    shape=(LAYERS, HEADS, TOKENS, 2 * SIZE),
    dtype="float32",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=NAMES,
    tokens_per_block=TOKENS,
    page_bytes=HEADS * TOKENS * 2 * SIZE * 4,
)
ORDER = "head,layer,token,value"
V1 = replace(LAYOUT, runner="v1")
HEAD_FIRST = Wanted(axes=tuple(ORDER.split(",")), runner="v1")
KEYS = [bytes([16 * number]) * 36 for number in range(6)]


def tagged(number: int) -> np.ndarray[Any, Any]:
    """Each value says which it is, as (layer, head, token, value): K, then V."""
    count = LAYERS * HEADS * TOKENS * 2 * SIZE
    values = np.arange(count, dtype="float32") + number * count
    return values.reshape(LAYERS, HEADS, TOKENS, 2 * SIZE)


def named(layout: Layout, payload: bytes) -> np.ndarray[Any, Any]:
    """A block's values as `tagged` has them, each one looked up by its indices."""
    axes = [axis for axis in layout.axes if axis not in ("token", "value", "packed")]
    keys, content = unpack(layout, payload)
    per_worker = keys.shape[axes.index("head")]
    found = np.empty((LAYERS, HEADS, TOKENS, 2 * SIZE), "float32")
    for layer in range(LAYERS):
        for head in range(HEADS):
            at = {
                "worker": head // per_worker,
                "layer": layer,
                "head": head % per_worker,
            }
            index = tuple(at[axis] for axis in axes)
            found[layer, head] = np.concatenate((keys[index], content[index]), axis=-1)
    return found


def opened(root: kit.Root, *, read_only: bool = True) -> Root:
    return Root(root.url, root.storage_options, client=root.client, read_only=read_only)


def filled(root: kit.Root, keys: Sequence[bytes] = KEYS) -> StoredGroup:
    store = root.open(LAYOUT)
    for number, key in enumerate(keys):
        store.store(key, tagged(number))
    return opened(root).only_group()


def converted(
    source: StoredGroup,
    destination: kit.Root,
    wanted: Wanted | StoredGroup,
    kv_heads: int | None = None,
) -> tuple[StoredGroup, Converted]:
    target = plan(source, opened(destination, read_only=False), wanted, kv_heads=kv_heads)
    claim(target)
    with ThreadPoolExecutor(2) as pool:
        results = run(Convert(source, target), source.shares(), pool, ahead=4)
        return target, sum((result for _, result in results), Converted())


def payloads(group: StoredGroup) -> dict[bytes, bytes | None]:
    return {block.key: group.load(block.key) for block in group.blocks()}


def assert_all_named(group: StoredGroup, keys: Sequence[bytes] = KEYS) -> None:
    found = payloads(group)
    assert list(found) == list(keys)
    for number, payload in enumerate(found.values()):
        assert payload is not None
        assert np.array_equal(named(group.layout, payload), tagged(number))


# ---- where values land


def test_tp_1_to_2_to_4_to_1(root: kit.Root) -> None:
    source = filled(root.below("tp1"))
    group = source
    for tp in (2, 4, 1):
        heads = None if group is source else HEADS
        wanted = Wanted(tp=tp)
        group, done = converted(group, root.below(f"to{tp}"), wanted, heads)
        assert done == Converted(converted=len(KEYS), nbytes=len(KEYS) * LAYOUT.nbytes)
        assert group.config.tp_size == tp
        assert group.layout.page_bytes == LAYOUT.nbytes // LAYERS // tp
        assert_all_named(group)
    assert (group.config, group.layout, group.path) == (
        source.config,
        source.layout,
        source.path,
    )
    for key in KEYS:
        for name in ("zarr.json", "c.0.0.0.0"):
            ours, theirs = (
                root.read(f"{place.url}/{key.hex()[:3]}/{key.hex()}/{name}")
                for place in (source, group)
            )
            assert ours == theirs


_ORDERS = [
    ("layer", "head", "token", "value"),
    ("layer", "token", "head", "value"),
    ("head", "layer", "token", "value"),
    ("token", "head", "layer", "value"),
]


@st.composite
def wanted_steps(draw: st.DrawFn) -> list[Wanted]:
    """A way through layouts, each with its own order, packing, workers and claim."""
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        packing = draw(st.sampled_from(("token-kv", "cpu-vec", "cpu-amx")))
        axes: tuple[str, ...] = draw(st.sampled_from(_ORDERS))
        if packing != "token-kv":
            axes = (*(axis for axis in axes if axis in ("layer", "head")), "packed")
        agnostic = axes[0] == "head" and draw(st.booleans())
        tp = None if agnostic else draw(st.sampled_from((1, 2, 4)))
        steps.append(Wanted(axes=axes, packing=packing, tp=tp, parallel_agnostic=agnostic))
    return steps


@given(wanted_steps())
@settings(max_examples=20, deadline=None)
def test_every_way_leads_back(steps: list[Wanted]) -> None:
    root, keys = kit.Root(f"memory://{uuid.uuid4().hex}"), KEYS[:2]
    source = group = filled(root.below("source"), keys)
    home = Wanted(
        axes=LAYOUT.axes,
        packing="token-kv",
        kv_cache_layout="LBHNC",
        tp=1,
        parallel_agnostic=False,
    )
    for number, wanted in enumerate((*steps, home)):
        now = (group.config, group.layout)
        if target_of(*now, wanted) == now:
            continue
        group, done = converted(group, root.below(str(number)), wanted, HEADS)
        assert done.converted == len(keys)
        assert_all_named(group, keys)
    assert (group.config, group.layout) == (source.config, source.layout)
    assert payloads(group) == payloads(source)


def test_agnostic_and_not(root: kit.Root) -> None:
    source = filled(root)
    wanted = replace(HEAD_FIRST, parallel_agnostic=True)
    agnostic, _ = converted(source, root, wanted)
    assert agnostic.namespace != source.namespace
    assert agnostic.config == sample_config(parallel_agnostic=True)
    assert_all_named(agnostic)
    wanted = replace(HEAD_FIRST, parallel_agnostic=False, tp=2)
    sharded, _ = converted(agnostic, root, wanted)
    assert sharded.layout.axes == ("worker", "head", "layer", "token", "value")
    assert_all_named(sharded)
    assert len(list(opened(root).places())) == 3
    # An engine of that config and layout takes the blocks for its own.
    store = root.open(agnostic.layout, config=agnostic.config)
    assert store.load(KEYS[1], np.empty(store.layout.shape, "float32"))


def test_like_an_engine(root: kit.Root) -> None:
    source = filled(root.below("old"))
    layout = replace(
        LAYOUT,
        axes=("worker", "head", "layer", "packed"),
        shape=(2, 2, LAYERS, TOKENS * 2 * SIZE),
        packing="cpu-amx",
        backend="CPU_ATTN",
        runner="v1",
        kv_cache_layout=None,
        page_bytes=2 * TOKENS * 2 * SIZE * 4,
    )
    engine = root.below("new").open(layout, config=sample_config(tp_size=2))
    like = opened(root.below("new")).only_group()
    target, done = converted(source, root.below("new"), like)
    assert (target.url, target.layout) == (engine.url, layout)
    assert done.converted == len(KEYS)
    assert_all_named(target)
    assert engine.contains(KEYS[0])


def test_the_task_pickles(root: kit.Root) -> None:
    if root.url.startswith("memory"):
        pytest.skip("no other process sees it")
    source = filled(root.below("old"))
    target = plan(source, opened(root.below("new"), read_only=False), HEAD_FIRST)
    claim(target)
    task = pickle.loads(pickle.dumps(Convert(source, target)))
    done = sum(map(task, source.shares()), Converted())
    assert pickle.loads(pickle.dumps(done)) == done
    assert done.converted == len(KEYS)
    assert_all_named(target)


# ---- what is refused


@pytest.mark.parametrize(
    ("wanted", "heads", "reason"),
    [
        (Wanted(), None, "wanted: expected a change, found none"),
        (
            Wanted(packing="cpu-other"),
            None,
            "expected one of token-kv, .*'cpu-other'",
        ),
        (Wanted(tp=2), 2, "kv_heads: expected 4, the 4 of each of 1 workers, found 2"),
    ],
)
def test_a_plan_that_is_refused(
    tmp_path: Path, wanted: Wanted, heads: int | None, reason: str
) -> None:
    root = kit.Root(str(tmp_path))
    with pytest.raises(InvalidInputError, match=reason):
        converted(filled(root), root.below("other"), wanted, heads)
    assert not (tmp_path / "other").exists()


def test_copies_of_heads_are_not_taken_for_heads(tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path))
    sharded, _ = converted(filled(root), root, Wanted(tp=4))
    with pytest.raises(InvalidInputError, match="kv_heads: expected the number"):
        converted(sharded, root.below("other"), Wanted(tp=1))
    with pytest.raises(InvalidInputError, match="copies of heads"):
        converted(sharded, root.below("other"), Wanted(tp=1), kv_heads=2)


@pytest.mark.parametrize(
    ("layout", "config", "reason"),
    [
        (replace(LAYOUT, packing=None), {}, "packing: unknown"),
        (Layout.of_bytes(64, dtype="float32", reason="mamba"), {}, "mamba"),
        (LAYOUT, {"pp_size": 2}, "pp_size"),
        (LAYOUT, {"replicated_layout": True}, "replicated_layout"),
        (replace(LAYOUT, packing="other"), {}, "packing: expected one of"),
    ],
)
def test_a_source_that_is_refused(
    tmp_path: Path, layout: Layout, config: dict[str, Any], reason: str
) -> None:
    root = kit.Root(str(tmp_path))
    root.open(layout, config=sample_config(**config))
    wanted = Wanted(packing="cpu-vec") if layout.packing == "other" else HEAD_FIRST
    with pytest.raises(InvalidInputError, match=reason):
        converted(opened(root).only_group(), root.below("other"), wanted)


def test_one_ranks_blocks_are_refused(tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path))
    root.open(LAYOUT, rank=1)
    with pytest.raises(InvalidInputError, match="rank, group: expected r0/g0, found r1/g0"):
        converted(opened(root).only_group(), root, HEAD_FIRST)


def test_a_destination_is_a_root(tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path))
    source = filled(root)
    with pytest.raises(InvalidInputError, match="destination: expected a root, found org_"):
        converted(source, kit.Root(source.url), HEAD_FIRST)


# ---- what goes wrong


def damage(root: kit.Root, group: StoredGroup, key: bytes) -> None:
    store = root.open(group.layout, config=group.config)
    chunk = bytearray(root.read(chunk_url(store, key)))
    chunk[100] ^= 1
    root.write(chunk_url(store, key), bytes(chunk))


def test_damage_is_left_out_or_repaired_and_what_holds_is_kept(root: kit.Root) -> None:
    old, new = root.below("old"), root.below("new")
    source = filled(old)
    target, _ = converted(source, new, HEAD_FIRST)
    damage(new, target, KEYS[2])
    damage(old, source, KEYS[3])
    new.open(target.layout).delete(KEYS[3])
    new.open(target.layout).delete(KEYS[4])
    _, done = converted(source, new, HEAD_FIRST)
    assert (done.converted, done.repaired, done.kept, done.damaged) == (2, 1, 3, 1)
    [problem] = done.left_out
    assert KEYS[3].hex() in problem
    assert target.load(KEYS[3]) is None
    assert all(target.load(key) is not None for key in KEYS if key != KEYS[3])


def test_values_that_a_conversion_changes_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = kit.Root(str(tmp_path))
    source = filled(root)
    right = Conversion.convert_bytes

    def wrong(self: Conversion, payload: Any) -> memoryview:
        block = bytearray(right(self, payload))
        block[7] ^= self.target.runner == "v1"
        return memoryview(block)

    monkeypatch.setattr(Conversion, "convert_bytes", wrong)
    with pytest.raises(FormatError, match="expected the same bytes after conversion and b"):
        converted(source, root.below("other"), Wanted(runner="v1"))
    assert not list(Path(tmp_path, "other").rglob("c.*"))


class Raced(Upkeep):
    """Another writer publishes first, once: the same key, and other values."""

    values: ClassVar[list[Any]] = []

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """See above."""
        if self.values:
            values = self.values.pop()
            BlockStore.open(self.url, sample_config(), V1).store(KEYS[0], values)
        return super().publish(path, files, replace=replace)


class Spoiling(Upkeep):
    """One byte of what is written becomes another one."""

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """See above."""
        ours = super().publish(path, files, replace=replace)
        [chunk] = folder(self.place(path)).glob("c.*")
        content = bytearray(chunk.read_bytes())
        content[9] ^= 1
        chunk.write_bytes(content)
        return ours


class Failing(Upkeep):
    """Fails at the fourth block and each one behind it."""

    published: ClassVar[list[str]] = []

    def publish(self, path: str, files: Files, *, replace: bool) -> bool:
        """See above."""
        if len(self.published) == 3:
            raise StorageError(self.place(path), "write", "it is unplugged")
        self.published.append(path)
        return super().publish(path, files, replace=replace)


def test_a_block_that_another_writer_was_first_with_is_kept(tmp_path: Path) -> None:
    source = filled(kit.Root(str(tmp_path / "old")), KEYS[:1])
    target = plan(source, Root(tmp_path / "new", read_only=False), Wanted(runner="v1"))
    target = replace(target, filesystem=Raced(tmp_path / "new"))
    claim(target)
    Raced.values = [tagged(99)]
    assert Convert(source, target)(source.shares()[0]) == Converted(kept=1)
    found = target.load(KEYS[0])
    assert found is not None
    assert np.array_equal(named(target.layout, found), tagged(99))


def test_what_cannot_be_read_back_is_an_error_of_storage(tmp_path: Path) -> None:
    source = filled(kit.Root(str(tmp_path / "old")))
    target = plan(source, Root(tmp_path / "new", read_only=False), HEAD_FIRST)
    target = replace(target, filesystem=Spoiling(tmp_path / "new"))
    claim(target)
    with pytest.raises(StorageError, match=r"cannot read back .*crc32c"):
        Convert(source, target)(source.shares()[0])


def test_an_interrupted_conversion_goes_on(root: kit.Root) -> None:
    old, new = root.below("old"), root.below("new")
    source = filled(old)
    target = plan(source, opened(new, read_only=False), HEAD_FIRST)
    failing = Failing(new.url, new.storage_options, client=new.client)
    Failing.published = []
    task = Convert(source, replace(target, filesystem=failing))
    claim(target)
    with ThreadPoolExecutor(1) as pool, pytest.raises(StorageError, match="unplugged"):
        list(run(task, source.shares(), pool, ahead=2))
    assert len(payloads(target)) == 3
    _, done = converted(source, new, HEAD_FIRST)
    assert (done.converted, done.kept) == (3, 3)
    assert_all_named(target)


# ---- the command


def options(root: kit.Root) -> list[str]:
    """How the command reaches a root."""
    told = json.dumps(root.storage_options)
    given = ["--storage-options", told, "--dst-storage-options", told]
    return [*given, "--client", root.client]


def test_the_command_on_every_backend(seen: kit.Root, kvstore: Kvstore) -> None:
    old, new = seen.below("old"), seen.below("new")
    source = filled(old)
    call = ["convert", source.url, new.url, *options(seen), "--axes", ORDER, "--json"]
    code, out, _ = kvstore(*call, "--dry-run")
    told = json.loads(out)
    assert (code, told["done"]) == (0, None)
    assert {change["field"] for change in told["differences"]} == {
        "axes",
        "shape",
        "kv_cache_layout",
    }
    assert not [path for path in new.files() if "new" in path]
    code, out, _ = kvstore(*call)
    assert (code, json.loads(out)["done"]["converted"]) == (0, len(KEYS))
    assert_all_named(opened(new).only_group())
    damage(old, source, KEYS[0])
    new.open(opened(new).only_group().layout).delete(KEYS[0])
    code, out, _ = kvstore(*call[:-1])
    assert code == 1
    assert "damaged    1" in out
    assert f"left out: {source.url}" in out


def test_another_layout_at_the_destination_is_left_alone(
    seen: kit.Root, kvstore: Kvstore
) -> None:
    source = filled(seen)
    before = sorted(seen.files())
    for more in ([], ["--dry-run"]):
        code, _, err = kvstore(
            "convert", source.url, seen.url, *options(seen), "--axes", ORDER, *more
        )
        assert code == 4
        assert "axes: expected ('head', 'layer'" in err
    assert sorted(seen.files()) == before
    assert_all_named(source)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tp", "3"], "divisor"),
        (["--runner", "v3"], "v3"),
        (["--tp", "0"], "tp"),
        (["--codec", "gzip", "--tp", "2"], "codec"),
        (["--like", "kv", "--tp", "2"], "--like"),
        ([], "wanted: expected a change"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvstore: Kvstore,
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(kit.Root("kv"))
    code, _, err = kvstore("convert", "kv", "new", *arguments)
    assert (code, Path("new").exists()) == (2, False)
    assert reason in err


def test_codec_and_other_storage_options(tmp_path: Path, kvstore: Kvstore) -> None:
    source = filled(kit.Root(str(tmp_path / "old")))
    memory, new = f"memory://{uuid.uuid4().hex}", Faulty().root.url
    code, _, err = kvstore(
        *("convert", source.url, memory, "--tp", 2),
        *("--storage-options", '{"auto_mkdir": true}'),
    )
    assert (code, "DST: expected storage that other" in err) == (2, True)
    code, _, err = kvstore(
        *("convert", source.url, new, "--tp", 2, "--codec", "zstd"),
        *("--storage-options", '{"auto_mkdir": true}', "--dst-storage-options", "{}"),
    )
    assert (code, err) == (0, "")
    target = Root(new).only_group()
    assert {target.facts(key).codec for key in KEYS} == {"zstd"}
    assert_all_named(target)


def test_a_journal_does_not_stand_for_blocks_that_are_gone(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    old, new, journal = (tmp_path / name for name in ("old", "new", "journal"))
    filled(kit.Root(str(old)))
    call: list[object] = ["convert", old, new, "--axes", ORDER]
    assert_blocks_that_are_gone_are_missed(kvstore, call, new, journal)


def test_a_killed_conversion_goes_on_with_its_journal(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    keys = [(8 * number).to_bytes(2, "big") * 18 for number in range(256)]  # 8 shares
    old, new, journal = (tmp_path / name for name in ("old", "new", "journal"))
    source = filled(kit.Root(str(old)), keys)
    call = ["convert", old, new, "--axes", ORDER, "--jobs", "1", "--journal", journal]
    script = "from kvstore.cli.app import main; main()"
    command = [sys.executable, "-c", script, *map(str, call)]

    def written() -> int:
        return len(list(new.glob("org_*/r0/g0/*/*/zarr.json")))

    with subprocess.Popen(command) as child:
        while written() < 40:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    before = written()
    assert before < len(keys)
    noted = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    done = sum(entry["result"]["converted"] for entry in noted)
    assert done >= 32
    code, out, _ = kvstore(*call, "--json")
    blocks = json.loads(out)["done"]
    assert (code, blocks["converted"]) == (0, done + len(keys) - before)
    assert blocks["kept"] == before - done
    assert json.loads(out)["journal"]["recalled"] == len(noted)
    assert kvstore(*call)[0] == 2  # it is finished
    target = Root(new).only_group()
    for number, key in enumerate(keys):
        payload = target.load(key)
        assert payload is not None
        assert np.array_equal(named(target.layout, payload), tagged(number))
    assert payloads(source).keys() == set(keys)
