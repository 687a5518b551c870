import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import unhurried

from kvstore.errors import InvalidInputError
from kvstore.urls import parse_url, safe_url

SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    ("url", "protocol", "root"),
    [
        ("/data/kv", "file", "file:///data/kv"),
        ("/data//kv/", "file", "file:///data/kv"),
        ("/data/./kv", "file", "file:///data/kv"),
        ("/data/a/../kv", "file", "file:///data/kv"),
        ("file:///data/kv", "file", "file:///data/kv"),
        ("file:///data/kv/", "file", "file:///data/kv"),
        ("local:///data/kv", "file", "file:///data/kv"),
        ("FILE:///data/kv", "file", "file:///data/kv"),
        ("/data/kv[1]*", "file", "file:///data/kv[1]*"),
        ("/data/a?b#c%20d", "file", "file:///data/a?b#c%20d"),
        ("/data/Größe 模型", "file", "file:///data/Größe 模型"),
        ("/data/user@host", "file", "file:///data/user@host"),
        ("/data/a:b", "file", "file:///data/a:b"),
        ("memory://", "memory", "memory://"),
        ("memory://kv", "memory", "memory://kv"),
        ("memory:///kv", "memory", "memory://kv"),
        ("s3://bucket/kv", "s3", "s3://bucket/kv"),
        ("S3://Bucket/kv", "s3", "s3://Bucket/kv"),
        ("s3a://bucket/kv", "s3a", "s3a://bucket/kv"),
        ("gs://bucket/kv", "gs", "gs://bucket/kv"),
        ("gcs://bucket/kv", "gcs", "gcs://bucket/kv"),
        ("s3://bucket/kv[1]*", "s3", "s3://bucket/kv[1]*"),
        ("s3://bucket/a@b", "s3", "s3://bucket/a@b"),
        ("s3://bucket/a%20b c", "s3", "s3://bucket/a%20b c"),
        ("abfs://box@host/kv", "abfs", "abfs://box@host/kv"),
    ],
)
def test_accepted(url: str, protocol: str, root: str) -> None:
    assert parse_url(url) == (protocol, root)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("s3://b", id="C22-bucket"),
        pytest.param("s3://b/", id="C22-bucket-and-slash"),
        pytest.param("s3://b//", id="C22-bucket-and-slashes"),
        pytest.param("s3:///b", id="C22-three-slashes"),
    ],
)
def test_a_bucket_has_one_spelling(url: str) -> None:
    assert parse_url(url) == ("s3", "s3://b")


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("s3://b/p", id="C22-plain"),
        pytest.param("s3://b/p/", id="C22-trailing-slash"),
        pytest.param("s3://b//p/", id="C22-double-slash"),
        pytest.param("s3://b///p//", id="C22-many-slashes"),
    ],
)
def test_a_prefix_has_one_spelling(url: str) -> None:
    assert parse_url(url) == ("s3", "s3://b/p")


def test_a_relative_path_is_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("kv") == ("file", f"file://{tmp_path}/kv")
    assert parse_url(Path("kv")) == ("file", f"file://{tmp_path}/kv")


def test_a_relative_path_needs_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        InvalidInputError, match="found 'kv', and the current folder is gone"
    ):
        parse_url("kv")
    assert parse_url("/data/kv") == ("file", "file:///data/kv")
    monkeypatch.chdir(tmp_path)


def test_a_bare_path_may_begin_at_home() -> None:
    assert parse_url("~/kv") == ("file", f"file://{os.path.expanduser('~')}/kv")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        pytest.param("", "expected a URL or path, found ''", id="A45-empty"),
        pytest.param("  ", "expected a URL or path, found '  '", id="A45-blank"),
        pytest.param("/data\0/kv", "control characters in '/data", id="A45-NUL"),
        pytest.param("s3://b/a\nb", "control characters in 's3://b", id="newline"),
        pytest.param("memory://a\x1b[2J", "control characters in", id="escape"),
        pytest.param("/", "expected a folder below /, found '/'", id="root"),
        pytest.param("file:///", "expected a folder below /", id="root-url"),
        pytest.param("/data/..", "expected a folder below /", id="A45-up-to-the-root"),
        pytest.param("file://host/x", "expected an absolute path", id="file-on-a-host"),
        pytest.param("file://localhost/x", "expected an absolute path", id="localhost"),
        pytest.param("file://", "expected an absolute path", id="no-path"),
        pytest.param("file://kv", "expected an absolute path", id="relative-url"),
        pytest.param("file://~/kv", "expected an absolute path", id="home-url"),
        pytest.param("local://kv", "expected an absolute path", id="relative-local"),
        pytest.param("s3://", "expected a bucket", id="no-bucket"),
        pytest.param("s3:///", "expected a bucket", id="no-bucket-but-slashes"),
        pytest.param("gs://", "expected a bucket", id="no-gs-bucket"),
        pytest.param("gcs://", "expected a bucket", id="no-gcs-bucket"),
        pytest.param("s3a://", "expected a bucket", id="no-s3a-bucket"),
        pytest.param("s3://k:s@b/x", "Credentials belong in storage_options", id="key"),
        pytest.param("gs://user@b/x", "Credentials belong in storage_options", id="user"),
        pytest.param("s3://b/x?a=1", "expected no query or fragment", id="query"),
        pytest.param("s3://b/x#a", "expected no query or fragment", id="fragment"),
        pytest.param("memory://x?", "expected no query or fragment", id="bare-query"),
        pytest.param("s3://b/../x", r"expected no '\.' or '\.\.'", id="A45-parent"),
        pytest.param("s3://b/./x", r"expected no '\.' or '\.\.'", id="A45-here"),
        pytest.param("memory://..", r"expected no '\.' or '\.\.'", id="A45-parent-alone"),
        pytest.param("s3://../b", r"expected no '\.' or '\.\.'", id="A45-parent-bucket"),
        pytest.param(
            "simplecache::s3://b/x", "chained URLs are not supported", id="C15-cache"
        ),
        pytest.param(
            "zip://x::file:///a.zip", "chained URLs are not supported", id="C15-archive"
        ),
        pytest.param("/data/a::b", "chained URLs are not supported", id="C15-path"),
    ],
)
def test_refused_with_its_reason(url: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^url: .*{problem}"):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(
            "file:/data/kv",
            id="one-slash",
        ),
        pytest.param(
            "s3:/bucket/kv",
            id="bucket-and-one-slash",
        ),
        pytest.param(
            "://bucket/kv",
            id="no-protocol",
        ),
        pytest.param(
            "file:////",
            id="root-of-four-slashes",
        ),
        pytest.param(
            "//",
            id="root-of-two-slashes",
        ),
        pytest.param(
            "/data/a\x7fb",
            id="DEL",
        ),
    ],
)
def test_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_url(url)


def test_a_local_root_has_one_spelling() -> None:
    assert parse_url("file:////data/kv") == parse_url("file:///data/kv")


# ---- no message repeats a credential


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(f"s3://AKIA:{SECRET}@bucket/kv", id="bucket"),
        pytest.param(f"gs://{SECRET}@bucket/kv", id="user-alone"),
        pytest.param(f"s3://bucket/kv?secret={SECRET}", id="query"),
        pytest.param(f"simplecache::s3://AKIA:{SECRET}@bucket", id="chained"),
        pytest.param(f"s3://AKIA:{SECRET}@bucket/a\nb", id="control-character"),
        pytest.param(f"file://user:{SECRET}@host/x", id="file"),
        pytest.param(f"http://user:{SECRET}@host/../x", id="http"),
        pytest.param(
            f"s3://AKIA:slash/{SECRET}@bucket/kv",
            id="secret-with-a-slash",
        ),
        pytest.param(
            f"s3://AKIA:at@{SECRET}@bucket/kv",
            id="secret-with-an-at",
        ),
    ],
)
def test_a_refusal_does_not_repeat_a_credential(url: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse_url(url)
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/kv", "s3://bucket/kv"),
        ("s3://key:secret@bucket/kv", "s3://***@bucket/kv"),
        ("s3://key@bucket", "s3://***@bucket"),
        ("http://host/kv?token=secret", "http://host/kv"),
        ("file:///data/user@host", "file:///data/user@host"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("abfs://box@account.dfs.core.windows.net/kv",) * 2,
        ("sftp://user@host:22/kv",) * 2,
        ("SFTP://user@host/a@b",) * 2,
        ("sftp://user@host/kv?token=secret", "sftp://user@host/kv"),
        ("sftp://user:secret@host/kv", "sftp://***@host/kv"),
        ("sftp://user:sec/ret@host/kv", "sftp://***@host/kv"),
        ("sftp://user:sec@ret@host/kv", "sftp://***@host/kv"),
        ("sftp://user@sec@host/kv", "sftp://***@host/kv"),
        ("sftp://user@sec:r/et@host/kv", "sftp://***@host/kv"),
        ("abfs://sv=1&sig=secret@account/kv", "abfs://***@account/kv"),
        (f"abfs://{'k' * 64}@account/kv", "abfs://***@account/kv"),
        ("http://token@host/kv", "http://***@host/kv"),
        ("webdav://token@host/kv", "webdav://***@host/kv"),
        pytest.param(
            "s3://key:sec/ret@bucket/kv",
            "s3://***@bucket/kv",
        ),
        pytest.param(
            "s3://key:sec@ret@bucket/kv",
            "s3://***@bucket/kv",
        ),
        pytest.param(
            "file:///data/a?b",
            "file:///data/a?b",
        ),
        pytest.param(
            "file:///kv@home",
            "file:///kv@home",
        ),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert safe_url(url) == shown


# ---- every other string


@unhurried
@given(
    st.text(max_size=30)
    | st.builds(
        "{}://{}".format,
        st.sampled_from(["file", "local", "memory", "s3", "gs", "x"]),
        st.text(alphabet="/.@:?#[]*%~ab é", max_size=20),
    )
)
def test_a_url_is_refused_or_has_one_spelling(url: str) -> None:
    try:
        protocol, root = parse_url(url)
    except InvalidInputError:
        return
    assert root.startswith(f"{protocol}://")
    assert parse_url(root) == (protocol, root)


@pytest.mark.parametrize("url", ["s3://{}?", "{}:/x", "file://{}", "s3://b/../{}", "a\0{}"])
def test_a_refusal_is_not_as_long_as_a_url(url: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse_url(url.format("x" * 100_000))
    assert len(str(refused.value)) < 2000
