"""Each row of the threat model in docs/security.md, shown; the rows of vLLM's side are in
`test_vllm_security.py`. Where kvstore cannot help, the test shows what happens."""

import ast
import contextlib
import functools
import io
import itertools
import json
import logging
import os
import pickle
import re
import stat
import subprocess
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import fsspec
import pytest
from hostile import Answer, Hostile, Request, hostile
from numcodecs import blosc, zstd
from work import until

from kvstore import (
    BlockStore,
    DamagedBlockError,
    FormatError,
    InvalidInputError,
    KVStoreError,
    LayoutMismatchError,
    StorageError,
    StorageTimeoutError,
    survey,
)
from kvstore.arrays import MAX_DOCUMENT_BYTES, group_document
from kvstore.collector import Collector, Limits, clock_skew
from kvstore.failures import MAX_CAUSE, storage_error
from kvstore.filesystem import Filesystem
from kvstore.paths import DOCUMENT
from kvstore.scratch import TEMPORARY
from kvstore.testing import Root, sample_block, sample_config, sample_layout
from kvstore.upkeep import Upkeep
from kvstore.urls import safe_url

LAYOUT = sample_layout()
BLOCK = sample_block(LAYOUT)
KEY = bytes(range(36))
OTHER = bytes(range(1, 37))
CHUNK = "c.0.0.0.0"
SECRET = "s3cr3t/of+somebody"
TOKEN = "bwoGZXIvYXdzEBYaDLong/Token+of=="
TOP = Path(__file__).parent.parent
PAGE = TOP / "docs" / "security.md"
EVICT_ALL = Limits(1, None, 1e9)

DOCUMENTS = {
    "oversized": b" " * MAX_DOCUMENT_BYTES + b"{}",
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep but read": b'{"zarr_format": 3, "a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a number without end": b'{"zarr_format": ' + b"3" * 500_000 + b"}",
    "no JSON": b"\0\xff\x1b[2J",
    "names twice": b'{"zarr_format": 2, "zarr_format": 3}',
    "many things": b'{"zarr_format": 3, "x": [' + b"{}," * 300_000 + b"{}]}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "kv"))


def upkeep(root: Root, timeout: float = 30.0) -> Upkeep:
    return Upkeep(root.url, root.storage_options, client=root.client, timeout=timeout)


def place(store: BlockStore, key: bytes = KEY) -> Path:
    """A block's folder, below a local root."""
    return Path(store.block_url(key).removeprefix("file://"))


def assert_damaged(store: BlockStore, key: bytes = KEY) -> str:
    """The block is a miss in every way. Returns what a load says."""
    buffer = bytearray(LAYOUT.nbytes)
    with pytest.raises(DamagedBlockError) as damaged:
        store.load(key, buffer)
    assert not store.contains(key)
    message = str(damaged.value)
    assert message.isprintable()
    assert len(message) < 2000
    return message


def assert_served(store: BlockStore, key: bytes = KEY) -> None:
    buffer = bytearray(LAYOUT.nbytes)
    assert store.load(key, buffer)
    assert buffer == BLOCK.tobytes()


# ---- W: who may write below the root


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_w1_a_document_of_any_bytes_is_damage(root: Root, document: bytes) -> None:
    store = root.open()
    store.store(KEY, BLOCK)
    root.write(f"{store.block_url(KEY)}/{DOCUMENT}", document)
    assert_damaged(store)
    assert store.store(KEY, BLOCK)
    assert_served(store)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_w1_a_groups_document_of_any_bytes_is_refused(root: Root, document: bytes) -> None:
    store = root.open()
    root.write(f"{store.url}/{DOCUMENT}", document)
    with pytest.raises(FormatError) as refused:
        root.open()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


def test_w1_no_more_is_read_than_a_document_may_have(folder: Root) -> None:
    store = folder.open()
    store.store(KEY, BLOCK)
    with (place(store) / DOCUMENT).open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        assert "bytes of metadata, found more" in assert_damaged(store)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_DOCUMENT_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [[1 << 62] * 4, [10**300] * 4, [1] * 20_000, [-1]])
def test_w2_a_declared_shape_is_compared_and_never_allocated(
    root: Root, shape: list[int]
) -> None:
    store = root.open()
    store.store(KEY, BLOCK)
    for url in (f"{store.block_url(KEY)}/{DOCUMENT}", f"{store.url}/{DOCUMENT}"):
        text = json.dumps(json.loads(root.read(url)))
        root.write(url, text.replace(json.dumps(list(LAYOUT.shape)), str(shape)).encode())
    tracemalloc.start()
    try:
        assert_damaged(store)
        with pytest.raises((LayoutMismatchError, FormatError)) as refused:
            root.open()
        assert len(str(refused.value)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_w3_a_bomb_is_damage_and_takes_no_memory(root: Root, codec: Any) -> None:
    store = root.open(codec=codec)
    smooth = bytes(LAYOUT.nbytes)
    store.store(KEY, smooth)
    zeros = bytes(8 << 20)
    bomb = bytes(
        zstd.compress(zeros, 1)
        if codec == "zstd"
        else blosc.compress(zeros, b"zstd", 9, 0, len(zeros))
    )
    assert len(bomb) < LAYOUT.nbytes  # its length may be a chunk's
    sealed = bomb + crc32c.crc32c(bomb).to_bytes(4, "little")
    root.write(f"{store.block_url(KEY)}/{CHUNK}", sealed)
    tracemalloc.start()
    try:
        assert "decoded bytes, found 8388608" in assert_damaged(store)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [DOCUMENT, CHUNK])
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_w4_what_is_no_file_is_neither_followed_nor_waited_for(
    folder: Root, tmp_path: Path, name: str, what: str
) -> None:
    store = folder.open()
    store.store(KEY, BLOCK)
    victim = tmp_path / "victim"
    victim.write_bytes((place(store) / name).read_bytes())  # even a healthy one
    before = victim.stat()
    file = place(store) / name
    file.unlink()
    if what == "link":
        file.symlink_to(victim)
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert_damaged(store)
    assert store.store(KEY, BLOCK)
    assert_served(store)
    assert victim.stat() == before


def test_w4_temporaries_behind_a_link_are_not_swept(folder: Root, tmp_path: Path) -> None:
    folder.open()
    victim = tmp_path / "victim" / f"{'0' * 16}-0"
    victim.mkdir(parents=True)
    os.utime(victim, (1, 1))  # old enough to count as left
    top = Path(folder.url) / TEMPORARY
    top.rename(tmp_path / "set aside")
    top.symlink_to(victim.parent)
    assert upkeep(folder).sweep() == 0
    assert victim.is_dir()


@pytest.mark.parametrize(
    "level", [1, 2, 3, 4], ids=["namespace", "rank", "group", "fan-out"]
)
def test_w5_nothing_is_removed_behind_a_link(
    folder: Root, tmp_path: Path, level: int
) -> None:
    """Somebody replaces a folder by a link to that of another root, after it was listed."""
    ours, theirs = folder.open(), Root(str(tmp_path / "theirs")).open()
    for store in (ours, theirs):
        store.store(KEY, BLOCK)
    collector = Collector(upkeep(folder), EVICT_ALL)
    collector._survey._known_groups()  # remembered for a minute
    swapped, target = place(ours), place(theirs)
    for _ in range(5 - level):
        swapped, target = swapped.parent, target.parent
    swapped.rename(tmp_path / "set aside")
    swapped.symlink_to(target)
    with pytest.raises(StorageError, match="Not a directory"):
        ours.delete(KEY)
    told = collector.collect()
    assert told.evicted == 0
    assert_served(theirs)


ODD = [
    pytest.param("../../../../../../victim", id="climbs"),
    pytest.param("./x", id="dot"),
    pytest.param("a//b", id="empty"),
    pytest.param("*", id="glob"),
    pytest.param("[a-z]?", id="glob-of-one"),
    pytest.param("new\nline\u202e", id="control"),
]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_w6_a_name_never_leads_out_of_its_block(
    server: Hostile, client: Any, name: str
) -> None:
    """A bucket may hold any names: who tidies up asks for none outside of the block."""
    block = f"kv/m_0/r0/g0/{KEY.hex()[:3]}/{KEY.hex()}"
    ours = (f"{block}/{CHUNK}", f"{block}/{DOCUMENT}")
    listed = sorted((f"{block}/{name}", *ours, "kv/victim"))
    server.answer = lambda request: listing(request, listed)
    root = Root("s3://bucket/kv", s3_options(server), client)
    collector = Collector(upkeep(root, 5.0), Limits(None, 1.0, 1.0))
    collector._clock_known = time.monotonic()
    # The server cannot go on behind a name.
    collector._survey.width, collector._survey._cursor = survey.FAN_OUTS, 0
    until(lambda: collector.collect().expired)
    removed = [request.path for request in server.seen if request.method == "DELETE"]
    removed += [request.body.decode() for request in server.seen if request.body]
    names = [file for text in removed for file in re.findall(r"kv/[^<? ]*", text)]
    assert set(ours) <= set(names)
    assert not [file for file in names if not file.startswith(f"{block}/")]
    assert not [file for file in names if "/" in file.removeprefix(f"{block}/")]


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_w6_a_folder_that_leads_elsewhere_is_none(server: Hostile, client: Any) -> None:
    names = ["kv/../r0/g0/zarr.json", "kv/./r0/g0/zarr.json", "kv//r0/g0/zarr.json"]
    server.answer = lambda request: listing(request, [*names, "kv/m_0/r0/g0/zarr.json"])
    assert upkeep(Root("s3://bucket/kv", s3_options(server), client), 5.0).folders("") == [
        "m_0"
    ]


def listing(request: Request, names: list[str]) -> Answer:
    """What S3 answers to a listing of these names, to deletions, and for documents."""
    if request.method != "GET":
        return Answer.of(b"<DeleteResult></DeleteResult>")
    if "list-type" not in request.path:
        return Answer.part([RECORDED], len(RECORDED))
    prefix = re.findall("prefix=([^&]*)", request.path)[0].replace("%2F", "/")
    found, folders = [], set()
    for name in names:
        inner = name.removeprefix(prefix)
        if "delimiter=%2F" in request.path and "/" in inner and inner != name:
            folders.add(prefix + inner.partition("/")[0] + "/")
        elif inner != name or "delimiter=%2F" not in request.path:
            found.append(name)  # also what was not asked for
    contents = "".join(
        f"<Contents><Key>{_xml(name)}</Key><LastModified>2020-01-01T00:00:00.000Z"
        "</LastModified><ETag>e</ETag><Size>1</Size></Contents>"
        for name in found
    )
    contents += "".join(
        f"<CommonPrefixes><Prefix>{_xml(name)}</Prefix></CommonPrefixes>"
        for name in sorted(folders)
    )
    return Answer.of(_LIST.format(contents=contents, more="false").encode())


_LIST = (
    "<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>"
    "<IsTruncated>{more}</IsTruncated>{contents}</ListBucketResult>"
)
RECORDED = group_document(config={})
"""What a folder has that is a namespace."""

_TOKEN = "<NextContinuationToken>t</NextContinuationToken>"


def _xml(name: str) -> str:
    return "".join(f"&#{ord(c)};" if not c.isalnum() and c not in "./" else c for c in name)


def test_w6_messages_show_odd_names_harmlessly(folder: Root) -> None:
    files = Filesystem(folder.url)
    files.probe()
    (Path(folder.url) / "a\x1b[2J\nb\u202e").mkdir()
    with pytest.raises(FormatError) as refused:
        files.read("a\x1b[2J\nb\u202e", 10)
    assert r"a\x1b[2J\nb\u202e: expected a file, found a folder" in str(refused.value)
    assert str(refused.value).isprintable()


def test_w7_a_block_under_another_name_is_damage(root: Root) -> None:
    """Another key, another group, another namespace: each names itself."""
    store = root.open()
    store.store(KEY, BLOCK)
    others = [
        (store, OTHER),
        (root.open(group=1), KEY),
        (root.open(sample_layout(runner="v1"), on_mismatch="isolate"), KEY),
    ]
    for other, key in others:
        other.store(key, sample_block(LAYOUT, seed=1))
        for name in (CHUNK, DOCUMENT):
            data = root.read(f"{store.block_url(KEY)}/{name}")
            root.write(f"{other.block_url(key)}/{name}", data)
        assert_damaged(other, key)


def test_w8_a_forged_block_is_served(root: Root) -> None:
    """A checksum is no signature: whoever may write can say anything."""
    store = root.open()
    store.store(KEY, BLOCK)
    forged = sample_block(LAYOUT, seed=1).tobytes()
    crc = crc32c.crc32c(forged)
    url = store.block_url(KEY)
    root.write(f"{url}/{CHUNK}", forged + crc.to_bytes(4, "little"))
    document = json.loads(root.read(f"{url}/{DOCUMENT}"))
    document["attributes"]["kvstore"]["crc32c"] = f"{crc:08x}"
    root.write(f"{url}/{DOCUMENT}", json.dumps(document).encode())
    buffer = bytearray(LAYOUT.nbytes)
    assert root.open().load(KEY, buffer)
    assert buffer == forged


def test_w9_folders_nested_too_deep_stop_nobody(folder: Root, tmp_path: Path) -> None:
    store = folder.open()
    store.store(KEY, BLOCK)
    store.store(OTHER, BLOCK)
    top = Path(folder.url) / TEMPORARY
    for name in (f"{'0' * 16}-0", f"{'f' * 16}-0"):
        (top / name).mkdir()
        os.utime(top / name, (1, 1))
    nest(top / f"{'0' * 16}-0")
    os.utime(top / f"{'0' * 16}-0", (1, 1))
    nest(place(store))
    try:
        upkeep(folder).sweep()
        assert not (top / f"{'f' * 16}-0").exists()
        store.delete(KEY)
        assert not store.contains(KEY)
        assert Collector(upkeep(folder), EVICT_ALL).collect().evicted == 1
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "kv"], check=True)  # Python cannot


def nest(folder: Path, depth: int = 1100) -> None:
    """Folders in folders, deeper than any path can name."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


def test_w10_a_listing_without_end_is_an_error(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    store.store(KEY, BLOCK)
    monkeypatch.setattr(survey, "MAX_FILES", 1)
    with pytest.raises(StorageError, match="expected at most 1 files"):
        Collector(upkeep(folder), EVICT_ALL).collect()
    assert_served(store)  # nothing goes on half a listing


# ---- S: who answers as storage


@pytest.fixture
def server() -> Iterator[Hostile]:
    for package in ("s3fs", "gcsfs", "obstore"):
        pytest.importorskip(package, reason="the extras s3 and gcs are not installed")
    with hostile() as server:
        yield server


def s3_options(server: Hostile) -> dict[str, Any]:
    return {"endpoint_url": server.endpoint, "key": "AKIA-of-me", "secret": SECRET}


@pytest.fixture(params=["s3-obstore", "s3-fsspec", "gs-obstore", "gs-fsspec"])
def victim(server: Hostile, request: pytest.FixtureRequest) -> Upkeep:
    """A client of each kind, of the hostile server."""
    protocol, client = request.param.split("-")
    options = s3_options(server)
    if protocol == "gs":
        options = {"endpoint_url": server.endpoint, "token": "anon"}
    return Upkeep(f"{protocol}://bucket/kv", options, client=client, timeout=1.5)


def by_obstore(victim: Upkeep) -> bool:
    return "obstore" in type(victim._client._client).__module__


def test_s1_more_than_was_announced_is_not_collected(
    server: Hostile, victim: Upkeep
) -> None:
    """A part of 100 bytes, it says, and then sends for ever."""
    if not by_obstore(victim):
        pytest.skip("s3fs and gcsfs collect an answer before anybody can look at it")
    part = {"Content-Range": "bytes 0-99/100"}
    server.answer = lambda request: Answer(
        206, itertools.repeat(bytes(1 << 20)), part, 1 << 40
    )
    buffer = bytearray(100)
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="more bytes came"):
            victim.read("block", 100)
        with pytest.raises(StorageError, match="more bytes came"):
            victim.read_into("block", [memoryview(buffer)])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_s2_an_answer_that_never_ends_is_a_timeout(server: Hostile, victim: Upkeep) -> None:
    def drops() -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(0.1)
            yield b"x"

    server.answer = lambda request: Answer.part(drops(), 100)
    started = time.monotonic()
    with pytest.raises(StorageTimeoutError):
        victim.read("block", 100)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer.of(b"x" * 5000), id="the-whole"),
        pytest.param(Answer.part([b"x" * 100], 100), id="other-bytes"),
        pytest.param(
            Answer(206, [b"x" * 100], {"Content-Range": "bytes 50-149/5000"}, 100),
            id="another-range",
        ),
        pytest.param(Answer.of(b""), id="nothing"),
        pytest.param(Answer.of(b"", 302, Location="/elsewhere"), id="a-circle"),
    ],
)
def test_s3_what_a_server_invents_is_never_served(
    server: Hostile, victim: Upkeep, answer: Answer
) -> None:
    server.answer = lambda request: answer
    with pytest.raises(KVStoreError):
        BlockStore.open(
            f"{victim.url}",
            sample_config(),
            LAYOUT,
            storage_options=victim._made_of.args[1],
            client=victim._made_of.keywords["client"],
            timeout=1.5,
            read_only=True,
        )


def test_s4_a_redirect_leads_no_block_elsewhere(server: Hostile, victim: Upkeep) -> None:
    """Reads follow one, and what comes from there has to prove itself as ever. obstore
    sends no body on, as s3fs and gcsfs do.
    """
    if not by_obstore(victim):
        pytest.skip("s3fs and gcsfs send on what they write")
    with hostile() as elsewhere:
        away = {"Location": f"{elsewhere.endpoint}/x"}
        for status in (301, 302, 303, 307, 308):
            server.answer = functools.partial(redirect, status, away)
            with contextlib.suppress(StorageError):
                victim.publish("b", [(DOCUMENT, [BLOCK.tobytes()])], replace=False)
        assert not any(request.body for request in elsewhere.seen)
        elsewhere.answer = lambda request: Answer.part([b"{}"], 2)
        assert victim.read(DOCUMENT, 100) == b"{}"
        asked = [name.lower() for name in elsewhere.seen[-1].headers]
        assert "authorization" not in asked


def redirect(status: int, away: dict[str, str], request: Request) -> Answer:
    return Answer(status, [], away, 0)


def test_s5_a_servers_words_are_one_line_without_secrets(
    server: Hostile, victim: Upkeep, caplog: pytest.LogCaptureFixture
) -> None:
    def echo(request: Request) -> Answer:
        known = SECRET if victim.url.startswith("s3") else ""
        told = f"\x1b[2J\r\nkvstore: all is well \u202e {known} {request.headers}"
        text = told.replace("<", "") + "x" * 100_000
        return Answer.of(f"<Error><Message>{text}</Message></Error>".encode(), 400)

    server.answer = echo
    with pytest.raises(StorageError) as failed:
        victim.read("block", 100)
    message = str(failed.value)
    assert message.isprintable()
    assert len(message) < MAX_CAUSE + 200
    assert_hidden("".join(traceback.format_exception(failed.value)))
    assert_hidden(repr(failed.value) + pickled(failed.value).decode("latin-1"))
    ours = [record for record in caplog.records if record.name.startswith("kvstore")]
    assert_hidden("".join(record.getMessage() for record in ours))


def pickled(error: StorageError) -> bytes:
    """As Python pickles it: distributed, once imported, adds what caused an error."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {}
    pickler.dump(error)
    return buffer.getvalue()


def assert_hidden(text: str) -> None:
    assert SECRET not in text
    assert "AKIA-of-me" not in text
    assert not re.search("Signature=[0-9a-f]", text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("GET https://me:hush@host/x", "GET https://***@host/x"),
        ("http://u:p@h:1/a and http://u:p@h/b", "http://***@h:1/a and http://***@h/b"),
        ("https://host/x?sv=1&sig=hu%2Fsh&se=2", "https://host/x?sv=1&sig=***&se=2"),
        ("x?access_token=hush", "x?access_token=***"),
        (f"Signature={'ab' * 32}, x", "Signature=***, x"),
        ("Authorization: Bearer ya29.a0AbCdEf-Gh_IjKl==", "Authorization: Bearer ***"),
        ("key1 key1key2", "*** ***"),
    ],
)
def test_s5_credentials_of_anybody_are_masked(words: str, told: str) -> None:
    error = storage_error(OSError(words), "read", "x", ("key1", "key1key2"))
    assert error.cause == told
    assert error.__cause__ is None


@pytest.mark.parametrize(
    "words",
    [
        "x-amz-security-token:{}",
        "X-Amz-Security-Token: {}",
        "http://host/x?X-Amz-Security-Token={}&X-Amz-Date=1",
        "to=http%3A%2F%2Fhost%3Fx-amz-security-token%3D{}",
        "[('X-Amz-Security-Token', '{}')]",
        "headers: b'X-Amz-Security-Token': b'{}'",
        r"\"x-amz-security-token\": \"{}\", \"x\": 1",
        "&quot;X-Amz-Security-Token&quot;: &quot;{}&quot;",
        "<Token-0>{}</Token-0>",
        "x-amz-s3session-token: {}",
        "x-goog-iam-authorization-token: {}",
        '"SecretAccessKey": "{}", "Token": "{}", "AccessKeyId": "mine"',
        "client_secret={}&refresh_token={}&assertion={}",
        "AWS_SECRET_ACCESS_KEY={}",
        "AccountName=mine;AccountKey={};EndpointSuffix=x",
        "x-amz-server-side-encryption-customer-key: {}",
        "x-amz-copy-source-server-side-encryption-customer-key:{}",
        "X-Goog-Encryption-Key: {}",
        "x?X-Amz-Signature={}&X-Goog-Signature={}&Signature={}&sig={}",
        "<SignatureProvided>{}</SignatureProvided>",
        "Authorization: AWS4-HMAC-SHA256 {}, SignedHeaders=host, Signature={}",
        "authorization:AWS {}",
        "{'Authorization': 'Basic {}'}",
        "proxy-authorization: GOOG1 {}",
        "the bearer {} is old",
    ],
)
def test_s5_credentials_are_masked_wherever_they_stand(words: str) -> None:
    error = storage_error(OSError(words.replace("{}", TOKEN)), "read", "x", ())
    assert error.cause == words.replace("{}", "***")
    assert error.__cause__ is None


@pytest.mark.parametrize(
    "words",
    [
        "no://secret here@home",
        "The security token included in the request is invalid: expired",
        "(InvalidToken) when calling the GetObject operation: malformed",
        "Check your key and signing method. Use AWS4-HMAC-SHA256 for authorization.",
        "<Key>n/r0/g0/a3f/zarr.json</Key>",
        "x-amz-server-side-encryption-customer-key-MD5: of a key",
    ],
)
def test_s5_other_words_stay(words: str) -> None:
    error = storage_error(OSError(words), "read", "x", ("key1",))
    assert error.cause == words
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("unit", ["x", "://", ":", "token", "token ", "authorization: a"])
@pytest.mark.parametrize("start", ["", "://", "token=", "authorization:"])
def test_s5_words_of_any_length_are_soon_told(start: str, unit: str) -> None:
    started = time.monotonic()
    storage_error(OSError(start + unit * 1_000_000), "read", "x", (SECRET,))
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_s5_a_session_token_of_the_environment_is_masked(
    server: Hostile, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option holds it. S3 repeats one that has expired, and what a wrong signature was
    made of.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "of a role"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
    ):
        monkeypatch.setenv(name, value)

    def echo(request: Request) -> Answer:
        sent = "".join(f"{n.lower()}:{value}\n" for n, value in request.headers.items())
        assert f"x-amz-security-token:{TOKEN}" in sent
        told = (
            f"<Message>{sent if in_message else 'no'}</Message><Token-0>{TOKEN}</Token-0>"
        )
        body = f"<Error>{told}<CanonicalRequest>{sent}</CanonicalRequest></Error>"
        return Answer.of(body.encode(), 403)

    server.answer = echo
    options = {"endpoint_url": server.endpoint}
    victim = Upkeep("s3://bucket/kv", options, client=client, timeout=5.0)
    for in_message in (True, False):  # noqa: B007  # `echo` does
        with pytest.raises(StorageError) as failed:
            victim.read("block", 100)
        assert TOKEN not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_s5_what_fsspecs_own_configuration_holds_is_masked(
    server: Hostile, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"key": "AKIA-of-me", "secret": SECRET}
    monkeypatch.setitem(fsspec.config.conf, "s3", found)
    text = f"<Error><Message>you are {found}</Message></Error>"
    server.answer = lambda request: Answer.of(text.encode(), 400)
    options = {"endpoint_url": server.endpoint}
    victim = Upkeep("s3://bucket/kv", options, client=client, timeout=5.0)
    with pytest.raises(StorageError, match="you are") as failed:
        victim.read("block", 100)
    assert_hidden(str(failed.value))


def test_s5_a_traceback_has_no_secret_at_any_depth() -> None:
    below = ValueError("of key1")
    error = OSError("harmless")
    error.__cause__ = RuntimeError("harmless too")
    error.__cause__.__context__ = below
    assert storage_error(error, "read", "x", ("key1",)).__cause__ is None
    assert storage_error(error, "read", "x", ("key2",)).__cause__ is error
    below.args = ("a server's words,\nin lines",)
    assert storage_error(error, "read", "x", ("key2",)).__cause__ is None


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_s6_a_servers_listing_without_end_is_an_error(
    server: Hostile, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()

    def more(request: Request) -> Answer:
        if "list-type" not in request.path:
            return Answer.part([RECORDED], len(RECORDED))
        if "delimiter=%2F" in request.path:
            folders = {"kv/": "kv/m/", "kv/m/": "kv/m/r0/", "kv/m/r0/": "kv/m/r0/g0/"}
            asked = re.findall("prefix=([^&]*)", request.path)[0].replace("%2F", "/")
            if folder := folders.get(asked):
                told = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
                return Answer.of(_LIST.format(contents=told, more="false").encode())
        told = "".join(
            f"<Contents><Key>kv/m/r0/g0/{KEY.hex()[:3]}/{next(numbers):09}</Key>"
            "<LastModified>2020-01-01T00:00:00.000Z</LastModified><Size>1</Size>"
            "<ETag>e</ETag></Contents>"
            for _ in range(1000)
        )
        return Answer.of(_LIST.format(contents=told + _TOKEN, more="true").encode())

    server.answer = more
    monkeypatch.setattr(survey, "MAX_FILES", 20_000)
    collector = Collector(
        upkeep(Root("s3://bucket/kv", s3_options(server), client), 2.0), EVICT_ALL
    )
    collector._clock_known = time.monotonic()
    started = time.monotonic()
    with pytest.raises(
        StorageError, match=r"at most 20000 files|no answer in time|same next token"
    ):
        collector.collect()
    assert time.monotonic() - started < 20
    assert not [request for request in server.seen if request.method != "GET"]


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
@pytest.mark.parametrize("what", ["folders", "temporaries"])
def test_s6_no_listing_of_a_servers_goes_on_for_ever(
    server: Hostile, client: Any, what: str
) -> None:
    """Of folders below the root, and of what killed starts may have left."""
    numbers = itertools.count()

    def more(request: Request) -> Answer:
        if request.method != "GET" or "list-type" not in request.path:
            return Answer.of(b"")
        page = next(numbers)
        if what == "folders":
            form = "<CommonPrefixes><Prefix>kv/{}/</Prefix></CommonPrefixes>"
        else:
            form = (
                "<Contents><Key>kv/.kvstore-tmp/{}</Key><LastModified>"
                "2020-01-01T00:00:00.000Z</LastModified><Size>1</Size><ETag>e</ETag>"
                "</Contents>"
            )
        told = "".join(form.format(f"{page:09}{i:03}") for i in range(1000))
        token = _TOKEN.replace(">t<", f">t{page}<")
        return Answer.of(_LIST.format(contents=told + token, more="true").encode())

    server.answer = more
    files = upkeep(Root("s3://bucket/kv", s3_options(server), client), 1.0)
    started = time.monotonic()
    if what == "temporaries" and client == "obstore":
        clock_skew(files)  # a part of the listing is enough
    else:
        with pytest.raises(StorageError, match="no answer in time"):
            clock_skew(files) if what == "temporaries" else files.folders("")
    assert time.monotonic() - started < 10
    seen = len(server.seen)
    time.sleep(0.5)
    assert len(server.seen) <= seen + 1  # nobody is still at it


def test_w10_folders_without_number_are_an_error(
    folder: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.open()
    monkeypatch.setattr(survey, "MAX_FOLDERS", 2)
    for name in ("a", "b"):
        (Path(folder.url) / name).mkdir()
    with pytest.raises(StorageError, match="expected at most 2 folders"):
        Collector(upkeep(folder), EVICT_ALL).collect()


def test_s7_entities_of_xml_do_not_grow(server: Hostile, victim: Upkeep) -> None:
    names = "abcdefghijk"
    entities = '<!ENTITY a "0123456789">' + "".join(
        f'<!ENTITY {name} "{f"&{before};" * 10}">'
        for before, name in itertools.pairwise(names)
    )
    text = f"<!DOCTYPE x [{entities}]><Error><Message>&k;</Message></Error>"
    server.answer = lambda request: Answer.of(text.encode(), 400)
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(StorageError) as failed:
            victim.read("block", 100)
        assert len(str(failed.value)) < MAX_CAUSE + 200
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5


# ---- C: who writes the configuration


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA-of-me:{SECRET}@bucket/kv",
        f"ftp://me:{SECRET}@host/kv",
        f"webhdfs://me:{SECRET}@host/kv",
        f"http://me:{SECRET}@host:80/kv",
        f"https://host/kv?sig={SECRET}",
        f"s3://bucket/kv#{SECRET}",
        f"simplecache::s3://AKIA-of-me:{SECRET}@bucket",
    ],
)
def test_c1_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Filesystem(url)
    assert "s3cr3t" not in "".join(traceback.format_exception(refused.value))
    assert "s3cr3t" not in safe_url(url.partition("#")[0])


def test_c1_a_port_and_a_user_in_a_path_are_no_password() -> None:
    assert Filesystem("memory://host:8020/user/me@home").url


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("simplecache::memory://kv", {}),
        *(
            (f"{protocol}://kv", {"target_protocol": "memory"})
            for protocol in ("simplecache", "filecache", "blockcache", "dir", "reference")
        ),
        ("zip://kv", {"fo": "memory://kv.zip"}),
    ],
)
def test_c2_nothing_may_stand_before_storage(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="what was never published"):
        Filesystem(url, options)


@pytest.mark.parametrize(
    "options",
    [
        f"secret={SECRET}",
        [SECRET],
        {"secret": [SECRET]},
        {"key": "AKIA-of-me", "secret": SECRET, "endpoint_url": f"http://x:{SECRET}@h"},
        {"key": "AKIA-of-me", "secret": SECRET, "endpoint_url": f"{SECRET}@h"},
        {"key": "AKIA-of-me", "secret": SECRET, "region": "x"},
        {"key": "AKIA-of-me", "secret": SECRET, "profile": SECRET},
        {"key": "AKIA-of-me", "secret": SECRET, "client_kwargs": SECRET},
    ],
)
def test_c3_options_that_are_refused_are_not_repeated(options: Any) -> None:
    pytest.importorskip("botocore", reason="the extra s3 is not installed")
    with pytest.raises(InvalidInputError) as refused:
        Filesystem("s3://bucket/kv", options)
    assert_hidden("".join(traceback.format_exception(refused.value)))


def test_c3_an_endpoint_of_the_environment_has_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("botocore", reason="the extra s3 is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:s3cr3t@127.0.0.1:1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://me:s3cr3t@127.0.0.1:1")
    for url, options in (
        ("s3://bucket/kv", {"key": "AKIA-of-me", "secret": SECRET}),
        ("gs://bucket/kv", {"token": "anon"}),
    ):
        with pytest.raises(InvalidInputError, match="found a user or password") as refused:
            Filesystem(url, options)
        assert "s3cr3t" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "character", ["\0", "\n", "\x1b", "\x9b", "\u2028", "\u202e", "\ud800"]
)
@pytest.mark.parametrize("url", ["/tmp/kv{}", "s3://bucket/kv{}", "memory://kv{}"])
def test_c4_a_url_that_no_terminal_should_see_is_refused(url: str, character: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Filesystem(url.format(character))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "/models/llama",
        "../../../etc",
        "..",
        "/",
        "~root",
        "a/../../b",
        "a\\..\\b",
        "*?[a-z]{x,y}",
        "%2e%2e%2f",
        "a\nb\x1b[2J\u202e",
        "\ud800",
        "s3://bucket/../x?y#z",
        "é" * 1000,
        "$(touch x)`touch y`;|&",
    ],
)
def test_c5_no_model_name_leads_out_of_the_root(root: Root, name: str) -> None:
    inner = root.below("inner")
    store = inner.open(config=sample_config(model_name=name))
    store.store(KEY, BLOCK)
    assert_served(inner.open(config=sample_config(model_name=name)))
    files = root.files()
    assert files
    assert all("/inner/" in file for file in files)
    below = [file.partition("/inner/")[2] for file in files]
    assert all(re.fullmatch(r"[A-Za-z0-9._/-]+", file) for file in below)
    assert not any({"", ".", ".."} & set(file.split("/")) for file in below)
    store.delete(KEY)
    assert not any(KEY.hex() in file for file in root.files())


# ---- L: who reads what is told and left


def test_l1_no_error_or_log_has_a_credential(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("botocore", reason="the extra s3 is not installed")
    caplog.set_level(logging.DEBUG)
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "AKIA-of-me", "secret": SECRET}
    files = Filesystem("s3://bucket/kv", options, timeout=0.5)
    told = [repr(files), str(vars(files)["url"]), files.place("x")]
    calls: list[Callable[[], object]] = [
        files.probe,
        lambda: files.read("x", 1),
        lambda: files.create("x", b""),
        lambda: files.delete("x", ("y",)),
    ]
    for call in calls:
        with pytest.raises(StorageError) as failed:
            call()
        told += traceback.format_exception(failed.value)
        told.append(repr(failed.value))
    ours = (r for r in caplog.records if r.name.startswith("kvstore"))
    assert_hidden("".join([*told, *(record.getMessage() for record in ours)]))


def test_l2_documents_have_no_credential(root: Root) -> None:
    if not root.storage_options:
        root = replace(root, storage_options={"auto_mkdir": True})
    store = root.open(provenance={"engine": "x"})
    store.store(KEY, BLOCK)
    texts = [root.read(file) for file in map(full(root), root.files())]
    secrets = [
        value
        for name, value in root.storage_options.items()
        if name in ("key", "secret", "endpoint_url")
    ]
    documents = [text for text in texts if text.startswith(b"{")]
    assert len(documents) == 5
    assert not any(str(secret).encode() in text for text in documents for secret in secrets)


def full(root: Root) -> Any:
    protocol = root.url.partition("://")[0] if "://" in root.url else "file"
    return lambda file: f"{protocol}://{file}"


@pytest.mark.parametrize("mask", [0o077, 0o027])
def test_l3_files_and_folders_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        root = Root(str(tmp_path / "deep" / "kv"))
        store = root.open(fsync=True)
        store.store(KEY, BLOCK)
        (place(store) / CHUNK).write_bytes(b"damaged")
        with pytest.raises(DamagedBlockError):
            store.load(KEY, bytearray(LAYOUT.nbytes))
        store.store(KEY, BLOCK)
    finally:
        os.umask(before)
    made = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(made) > 10
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path


# ---- the page


def names(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name


def test_the_page_names_every_test_in_its_row() -> None:
    rows = dict(re.findall(r"^\| ([WSCL]\d+) \|(.*)\|$", PAGE.read_text(), re.MULTILINE))
    assert list(rows) == sorted(rows, key=lambda row: ("WSCL".index(row[0]), int(row[1:])))
    everywhere = set(
        itertools.chain.from_iterable(map(names, (TOP / "tests").rglob("*.py")))
    )
    for row, cells in rows.items():
        attack, _, shown = (cell.strip() for cell in cells.split(" | "))
        assert len(attack) > 5
        named = re.findall(r"`(test_\w+)`", shown)
        assert named, row
        assert set(named) <= everywhere, row
        assert any(name.startswith(f"test_{row.lower()}_") for name in named), row
    for module in ("test_security.py", "test_vllm_security.py"):
        for name in names(TOP / "tests" / module):
            row = name.split("_")[1].upper()
            assert row == "THE" or f"`{name}`" in rows[row], name
