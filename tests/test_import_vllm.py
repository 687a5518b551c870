"""`kvstore import-vllm`: rows become blocks, and nothing else does."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_cache
from cache import LAYERS, LAYOUT, config_of
from children import Kvstore
from journals import assert_blocks_that_are_gone_are_missed
from stored import chunk_url

from kvstore import BlockStore, Config, Group, Layout
from kvstore import testing as kit
from kvstore.offline import Root
from kvstore.offline.convert import claim
from kvstore.offline.import_vllm import Import, Imported, plan, vouched
from kvstore.offline.landing import Landing
from kvstore.offline.vllm_fs import VllmCache
from kvstore.offline.vllm_rows import PAGES

ODD = replace(LAYOUT, axes=("layer", "head", "token", "value"), shape=(4, 2, 9, 16))
"""Of 2,304 bytes: its rows are padded."""
CONFIG = config_of(vllm_cache.MODEL)
KNOWN = replace(CONFIG, weights_digest="0123456789ab", prefix_hash="sha256")
KEYS = [bytes([16 * number]) * 32 + bytes(4) for number in range(1, 7)]


def block(number: int) -> bytes:
    return np.full(ODD.nbytes // 2, number + 1, "<u2").tobytes()


def rows(folder: Path, config: Config = CONFIG, keys: list[bytes] = KEYS) -> Path:
    """A folder as vLLM's tier writes it; returns that of `config.json`."""
    base = Path(str(vllm_cache.fill(folder, config, count=0))[: -len("_r0")])
    base.with_name(f"{base.name}_r0").mkdir()
    for number, key in enumerate(keys):
        write(base, key, vllm_cache.padded(block(number)))
    return base


def write(base: Path, key: bytes, row: bytes) -> Path:
    file = vllm_cache.row_file(base, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(row)
    return file


def recorded(root: kit.Root, config: Config = KNOWN, **options: Any) -> BlockStore:
    """What an engine on kvstore records when it starts."""
    return root.open(ODD, config=config, **options)


def options(root: kit.Root) -> list[str]:
    """How the command reaches a root."""
    given = json.dumps(dict(root.storage_options))
    return ["--dst-storage-options", given, "--client", root.client]


def holds(store: BlockStore, keys: list[bytes] = KEYS) -> None:
    for number, key in enumerate(keys):
        found = bytearray(ODD.nbytes)
        assert store.load(key, found)
        assert found == block(number)


def counted(out: str) -> dict[str, Any]:
    """What of the rows is not nought."""
    told = json.loads(out)["rows"]
    return {name: count for name, count in told.items() if count}


# ---- what is adopted


def test_rows_become_blocks(seen: kit.Root, tmp_path: Path, kvstore: Kvstore) -> None:
    base = rows(tmp_path / "vllm")
    store = recorded(seen)
    call = ["import-vllm", base, seen.url, "--like", seen.url, *options(seen)]
    code, out, err = kvstore(*call, "--dry-run", "--json")
    assert (code, err) == (0, "")
    assert counted(out) == {"rows": 6, "nbytes": 6 * ODD.nbytes}
    assert not any(store.contains(key) for key in KEYS)
    code, out, err = kvstore(*call)
    assert (code, err) == (0, "")
    assert "imported    6" in out
    assert "taken on trust: vLLM has written no checksum" in out
    holds(recorded(seen))
    code, out, _ = kvstore(*call, "--json")
    assert counted(out) == {"rows": 6, "kept": 6}
    assert json.loads(out)["config_on_your_word"] == ["weights_digest", "prefix_hash"]
    memory = f"memory://{tmp_path.name}"
    code, _, err = kvstore("import-vllm", base, memory, "--like", seen.url)
    assert (code, "DST: expected storage that other" in err) == (2, True)


def test_a_layout_in_a_file(tmp_path: Path, kvstore: Kvstore) -> None:
    rows(tmp_path / "vllm")
    recorded(kit.Root(str(tmp_path / "old")))
    code, out, _ = kvstore("info", tmp_path / "old", "--json")
    (tmp_path / "layout.json").write_text(out)
    new = tmp_path / "new"
    call = ["import-vllm", tmp_path / "vllm", new, "--layout", tmp_path / "layout.json"]
    code, out, err = kvstore(*call, "--codec", "zstd")
    assert (code, err) == (0, "")
    holds(recorded(kit.Root(str(new))))
    assert Root(new).only_group().facts(KEYS[0]).codec == "zstd"


def test_every_group_that_is_recorded(tmp_path: Path, kvstore: Kvstore) -> None:
    group = Group(tokens_per_block=16, layer_names=LAYERS[:2])
    config = replace(CONFIG, kv_cache_groups=(group, group, group))
    keys = [key[:-4] + number.to_bytes(4, "big") for number in (0, 2, 5) for key in KEYS]
    rows(tmp_path / "vllm", config, keys)
    root = kit.Root(str(tmp_path / "kv"))
    stores = [recorded(root, config, group=number) for number in (0, 2)]
    call = ["import-vllm", tmp_path / "vllm", root.url, "--like", root.url, "--json"]
    _, out, _ = kvstore(*call)
    assert counted(out) == {
        "rows": 12,
        "imported": 12,
        "elsewhere": 6,
        "nbytes": 12 * ODD.nbytes,
    }
    assert [len(list(g.blocks())) for g in Root(root.url).groups()] == [6, 6]
    assert stores[1].contains(keys[6])
    assert not stores[1].contains(keys[0])


def test_a_model_in_the_hubs_cache(tmp_path: Path, kvstore: Kvstore) -> None:
    commit = "0123456789" * 4
    place = f"/home/me/hub/models--org--small/snapshots/{commit}"
    rows(tmp_path / "vllm", replace(CONFIG, model_name=place))
    root = kit.Root(str(tmp_path / "kv"))
    call = ["import-vllm", tmp_path / "vllm", root.url, "--like", root.url]
    store = recorded(root, replace(CONFIG, revision=commit))
    assert kvstore(*call)[0] == 0
    holds(store)
    other = kit.Root(str(tmp_path / "other"))
    recorded(other, replace(CONFIG, revision=commit[::-1]))
    code, _, err = kvstore(*call[:-1], other.url)
    assert code == 4
    assert "revision: expected '9876543210" in err


def test_a_size_that_vllm_has_folded_is_on_your_word(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    rows(tmp_path / "vllm", replace(CONFIG, parallel_agnostic=True))
    root = kit.Root(str(tmp_path / "kv"))
    recorded(root, replace(CONFIG, tp_size=2))
    code, out, _ = kvstore("import-vllm", tmp_path / "vllm", root.url, "--like", root.url)
    assert code == 0
    assert "tp_size            2" in out


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_any_machine(page: int, tmp_path: Path) -> None:
    base = rows(tmp_path / "vllm", keys=[])
    write(base, KEYS[0], block(0).ljust(page, b"\0"))
    assert imported(base, kit.Root(str(tmp_path / "kv"))).imported == 1


def imported(base: Path, root: kit.Root, *, dry: bool = False) -> Imported:
    """By the library, in this thread."""
    recorded(root)
    destination = Root(root.url, read_only=False)
    planned = plan(VllmCache.find(base), vouched(Root(root.url), destination))
    claim(planned.targets[0])
    task = pickle.loads(pickle.dumps(Import(planned.source, planned.targets, dry=dry)))
    shares, _ = planned.source.shares("r0")
    return sum(map(task, shares), Imported())


# ---- what is left out


def test_what_is_no_whole_row_is_left_out(tmp_path: Path) -> None:
    base = rows(tmp_path / "vllm")
    folder = base.with_name(f"{base.name}_r0")
    row = vllm_cache.padded(block(0))
    bad = [bytes([number]) * 32 + bytes(4) for number in range(1, 9)]
    write(base, bad[0], row[:-1])
    write(base, bad[1], row[: ODD.nbytes])
    write(base, bad[2], row + bytes(4096))
    write(base, bad[3], bytes(len(row)))
    write(base, bad[4], row[:-1] + b"\1")
    write(base, bad[5], b"")
    write(base, bad[6], row).rename(tmp_path / "elsewhere")
    vllm_cache.row_file(base, bad[6]).symlink_to(tmp_path / "elsewhere")
    write(base, bad[7], row).unlink()
    os.mkfifo(vllm_cache.row_file(base, bad[7]))
    done = imported(base, kit.Root(str(tmp_path / "kv")))
    assert (done.rows, done.imported, done.refused, done.strays) == (14, 6, 8, 0)
    told = "\n".join(done.left_out)
    for key in bad:
        assert key[:-4].hex() in told
    for reason in ("found 4,095", "found zeros only", "zeros behind", "expected a file"):
        assert reason in told
    dry = imported(base, kit.Root(str(tmp_path / "kv")), dry=True)
    assert (dry.rows, dry.imported, dry.nbytes) == (14, 0, 8 * ODD.nbytes)
    assert len(list(Root(tmp_path / "kv").only_group().blocks())) == 6
    assert folder.is_dir()


STRAYS = [
    "101/10_g0/{hash}.bin",  # of another folder
    "202/02_g00/{other}.bin",
    "202/02_g0/{other}.BIN",
    "202/02_g0/{other}.bin.bak",
    "202/02_g0/{other}0.bin",
    "202/02_g4294967296/{other}.bin",
    "202/02_g\u0660/{other}.bin",
    "202/02_g0/{long}.bin",
    "202/\n\x1b[31m/x",
    "2O2/02_g0/{other}.bin",
    "2020/02_g0/{other}.bin",
]


def test_names_that_vllm_does_not_give_are_told(tmp_path: Path, kvstore: Kvstore) -> None:
    base = rows(tmp_path / "vllm")
    folder = base.with_name(f"{base.name}_r0")
    row = vllm_cache.padded(block(0))
    for name in STRAYS:
        names = {"hash": "10" * 32, "other": "20" * 32, "long": "20" * 120}
        file = folder / name.format(**names)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row)
    (folder / "808").symlink_to(folder / "404")
    (folder / "101" / "02_g0").symlink_to(folder / "404" / "04_g0")
    (folder / "909").write_bytes(row)
    os.close(os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT))
    unfinished = folder / "101" / "01_g0" / f"{'10' * 32}.bin_123456789.tmp"
    unfinished.write_bytes(row)
    root = kit.Root(str(tmp_path / "kv"))
    recorded(root)
    call = ["import-vllm", base, root.url, "--like", root.url]
    code, out, _ = kvstore(*call, "--json")
    done = counted(out)
    problems = done.pop("left_out")
    assert code == 1
    assert done == {
        "rows": 6,
        "imported": 6,
        "nbytes": 6 * ODD.nbytes,
        "strays": len(problems),
        "unfinished": 1,
    }
    assert all(problem.isprintable() for problem in problems)
    assert "\x1b" not in kvstore(*call)[1]
    assert len(list(Root(root.url).only_group().blocks())) == 6


def test_a_row_that_changes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rows(tmp_path / "vllm", keys=KEYS[:2])
    whole = os.preadv
    files = [vllm_cache.row_file(base, key) for key in KEYS[:2]]

    def meanwhile(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target == str(files[0]):
            files[0].write_bytes(bytes(100))
        if target == str(files[1]):
            os.utime(files[1], (1, 1))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", meanwhile)
    done = imported(base, kit.Root(str(tmp_path / "kv")))
    assert (done.imported, done.refused) == (0, 2)
    assert "truncated while it was read" in done.left_out[0]
    assert "written while it was read" in done.left_out[1]


def test_a_row_that_is_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rows(tmp_path / "vllm", keys=KEYS[:1])
    land = Landing.land

    def removed(self: Landing, key: bytes, made: Callable[[], Any]) -> Any:
        vllm_cache.row_file(base, key).unlink()
        return land(self, key, made)

    monkeypatch.setattr(Landing, "land", removed)
    assert imported(base, kit.Root(str(tmp_path / "kv"))) == Imported()


def test_damage_at_the_target_is_repaired(tmp_path: Path) -> None:
    root = kit.Root(str(tmp_path / "kv"))
    base = rows(tmp_path / "vllm")
    imported(base, root)
    store = recorded(root)
    chunk = bytearray(root.read(chunk_url(store, KEYS[2])))
    chunk[100] ^= 1
    root.write(chunk_url(store, KEYS[2]), bytes(chunk))
    done = imported(base, root)
    assert (done.imported, done.repaired, done.kept) == (1, 1, 5)
    holds(recorded(root))


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (replace(KNOWN, dtype="bfloat16", tokens_per_hash=32), ["dtype", "tokens_per_ha"]),
        (replace(KNOWN, tp_size=2), ["tp_size: expected 2, found 1"]),
        (replace(KNOWN, blocks_per_file=4), ["blocks_per_file: expected 4, found 1"]),
        (replace(KNOWN, replicated_layout=True), ["replicated_layout"]),
        (replace(KNOWN, canonical_format="v1-hnd"), ["canonical_format"]),
        (replace(KNOWN, kv_cache_groups=()), ["kv_cache_groups"]),
    ],
)
def test_rows_of_another_engine(
    config: Config, fields: list[str], tmp_path: Path, kvstore: Kvstore
) -> None:
    rows(tmp_path / "vllm")
    root = kit.Root(str(tmp_path / "kv"))
    recorded(root, config)
    new = tmp_path / "new"
    code, _, err = kvstore("import-vllm", tmp_path / "vllm", new, "--like", root.url)
    assert (code, new.exists()) == (4, False)
    assert all(f"\n  {field}" in err for field in fields)


def test_a_layout_that_proves_what_was_not_recorded(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    rows(tmp_path / "vllm", replace(CONFIG, parallel_agnostic=True))
    root = kit.Root(str(tmp_path / "kv"))
    axes = ("head", "layer", "token", "value")
    root.open(
        replace(ODD, axes=axes, shape=(2, 4, 9, 16), kv_cache_layout=None), config=KNOWN
    )
    call = ["import-vllm", tmp_path / "vllm", root.url, "--like", root.url]
    code, _, err = kvstore(*call)
    assert code == 4
    assert "parallel_agnostic: expected True by what the layout proves, found False" in err


def _no_config(base: Path) -> None:
    (base / "config.json").unlink()


def _other_rank(base: Path) -> None:
    base.with_name(f"{base.name}_r1").mkdir()


def _no_rows(base: Path) -> None:
    base.with_name(f"{base.name}_r0").rename(base.with_name("away"))


def _linked_rows(base: Path) -> None:
    folder = base.with_name(f"{base.name}_r0")
    folder.rename(base.with_name("away"))
    folder.symlink_to(base.with_name("away"))


def _two(base: Path) -> None:
    rows(base.parent, replace(CONFIG, tokens_per_hash=32), keys=[])


def _renamed(base: Path) -> None:
    base.rename(base.with_name("model"))


def _linked_config(base: Path) -> None:
    (base / "config.json").rename(base / "real.json")
    (base / "config.json").symlink_to("real.json")


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(base: Path) -> None:
        file = base / "config.json"
        found = json.loads(file.read_text()) | changes
        kept = {name: value for name, value in found.items() if value is not None}
        file.write_text(json.dumps(kept))

    return edit


def _torn(base: Path) -> None:
    file = base / "config.json"
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (_no_config, 2, "dir: expected the root_dir of vLLM's fs tier"),
        (_other_rank, 2, "found _r0, _r1"),
        (_no_rows, 2, "found none"),
        (_linked_rows, 2, "found a symbolic link"),
        (_two, 2, "found 'org_small_0f64575539d1', 'org_small_"),
        (_renamed, 4, "expected to be in a folder called 'org_small_0f64575539d1'"),
        (_linked_config, 3, "cannot read"),
        (_torn, 4, "not as vLLM writes it"),
        (_edit(tp_size=2), 4, "or was changed"),
        (_edit(tp_size="1"), 4, "tp_size: expected int, found '1'"),
        (_edit(tp_size=None), 4, "expected every field that vLLM writes"),
        (_edit(revision="x"), 4, "unknown option 'revision'"),
        (_edit(model_name="../../etc"), 4, "or was changed"),
        (lambda base: (base / "config.json").write_text("[" * 100_000), 4, "not as vLLM"),
    ],
)
def test_folders_that_cannot_be_used(
    change: Callable[[Path], None], code: int, reason: str, tmp_path: Path, kvstore: Kvstore
) -> None:
    change(rows(tmp_path / "vllm"))
    root = kit.Root(str(tmp_path / "kv"))
    recorded(root)
    new = tmp_path / "new"
    call = ["import-vllm", tmp_path / "vllm", new, "--like", root.url]
    found, _, err = kvstore(*call)
    assert (found, new.exists()) == (code, False)
    assert reason in err
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ([], 2, "like, layout: expected one of them"),
        (["--like", "kv", "--layout", "layout.json"], 2, "expected one of them"),
        (["--like", "nowhere"], 2, "found none"),
        (["--layout", "layout.json"], 2, "expected both config and layout"),
        (["--layout", "large.json"], 2, "expected blocks of at most 17179869184 bytes"),
        (["--layout", "groups.json"], 2, "expected the config of an engine with one KV"),
        (["--like", "kv", "--codec", "gzip"], 2, "codec"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    code: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvstore: Kvstore,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(Path("vllm"))
    recorded(kit.Root("kv"))
    groups = KNOWN.fields() | {"kv_cache_groups": KNOWN.fields()["kv_cache_groups"] * 2}
    layout = {"layout": ODD.to_dict()}
    Path("layout.json").write_text(json.dumps(layout))
    large = replace(ODD, shape=(4, 2, 9, 16 * 10**9)).to_dict()
    Path("large.json").write_text(json.dumps({"layout": large, "config": KNOWN.fields()}))
    Path("groups.json").write_text(json.dumps(layout | {"config": groups}))
    found, _, err = kvstore("import-vllm", "vllm", "new", *arguments)
    assert (found, Path("new").exists()) == (code, False)
    assert reason in err
    assert kvstore("import-vllm", "nothing", "new", "--like", "kv")[0] == 2


def test_another_layout_at_the_destination_is_left_alone(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    rows(tmp_path / "vllm")
    root, other = (kit.Root(str(tmp_path / name)) for name in ("kv", "other"))
    recorded(root)
    opaque = Layout.of_bytes(ODD.nbytes, dtype="float16", reason="unknown")
    other.open(opaque, config=KNOWN)
    before = sorted(other.files())
    call = ["import-vllm", tmp_path / "vllm", other.url, "--like", root.url]
    for more in ([], ["--dry-run"]):
        code, _, err = kvstore(*call, *more)
        assert code == 4
        assert "axes: expected ('layer', 'head'" in err
    assert sorted(other.files()) == before


@pytest.mark.parametrize(
    "dst",
    [
        "vllm/{rows}",
        "vllm/{base}",
        "vllm/{rows}/kv",
        "vllm/{rows}/101",
        "vllm",
        "elsewhere/../vllm",
        "vllm/kv",
        "link/{rows}",
        "linked",
    ],
)
@pytest.mark.parametrize("source", ["vllm", "vllm/{base}"])
def test_vllms_folders_are_only_read(
    source: str,
    dst: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kvstore: Kvstore,
) -> None:
    monkeypatch.chdir(tmp_path)
    base = rows(Path("vllm")).name
    Path("link").symlink_to("vllm")
    Path("elsewhere").mkdir()
    store = recorded(kit.Root("old"))
    Path("linked").mkdir()
    Path("linked", store.path.partition("/")[0]).symlink_to(tmp_path / "vllm" / base)
    dst = dst.format(base=base, rows=f"{base}_r0")
    before = sorted(Path().rglob("*"))
    source = source.format(base=base)
    code, _, err = kvstore("import-vllm", source, dst, "--like", "old")
    if (source, dst) == (f"vllm/{base}", "vllm/kv"):
        assert code == 0  # beside all that DIR names
        return
    assert code == 2
    assert "DST: expected a root apart from vLLM's folders" in err
    assert sorted(Path().rglob("*")) == before


def test_a_folder_that_cannot_be_read_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvstore: Kvstore
) -> None:
    base = rows(tmp_path / "vllm")
    root = kit.Root(str(tmp_path / "kv"))
    recorded(root)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    call = ["import-vllm", base, root.url, "--like", root.url, "--jobs", "1"]
    code, _, err = kvstore(*call)
    assert code == 3
    assert "cannot read" in err
    assert "Input/output error" in err


# ---- interrupted


def test_a_journal_does_not_stand_for_blocks_that_are_gone(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    base = rows(tmp_path / "vllm")
    old, new, journal = (tmp_path / name for name in ("old", "new", "journal"))
    recorded(kit.Root(str(old)))
    call: list[object] = ["import-vllm", base, new, "--like", old]
    assert_blocks_that_are_gone_are_missed(kvstore, call, new, journal)


def test_a_killed_import_goes_on_with_its_journal(tmp_path: Path, kvstore: Kvstore) -> None:
    keys = [(8 * n).to_bytes(2, "big") * 16 + bytes(4) for n in range(256)]  # 8 shares
    base = rows(tmp_path / "vllm", keys=keys)
    new, journal = tmp_path / "kv", tmp_path / "journal"
    root = kit.Root(str(new))
    store = recorded(root)
    call = ["import-vllm", base, new, "--like", new, "--jobs", "1", "--journal", journal]
    script = "from kvstore.cli.app import main; main()"

    def written() -> int:
        return len(list(new.glob("org_*/r0/g0/*/*/zarr.json")))

    with subprocess.Popen([sys.executable, "-c", script, *map(str, call)]) as child:
        while written() < 40:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    before = written()
    assert before < len(keys)
    lines = journal.read_text().splitlines()[1:]
    done = sum(json.loads(line)["result"]["imported"] for line in lines)
    assert done >= 32
    code, out, _ = kvstore(*call, "--json")
    told = counted(out)
    assert (code, told["imported"]) == (0, done + len(keys) - before)
    assert told.get("kept", 0) == before - done
    assert json.loads(out)["journal"]["recalled"] == len(lines)
    assert kvstore(*call)[0] == 2  # it is finished
    holds(store, keys)
