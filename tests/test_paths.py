import posixpath
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import configs, keys, layouts, names, unhurried

from kvstore.config import Config
from kvstore.errors import InvalidInputError
from kvstore.layout import Layout
from kvstore.paths import (
    DOCUMENT,
    MAX_KEY_BYTES,
    block_key,
    block_path,
    group_path,
    isolated_path,
    namespace_path,
)

OPT = Config(model_name="facebook/opt-125m", dtype="float16", tokens_per_hash=16)
KEY = bytes(range(32)) + (1).to_bytes(4)
DIGEST = "0123456789abcdef0123456789abcdef"
SAFE = re.compile(r"[A-Za-z0-9._-]+")

HOSTILE_NAMES = [
    pytest.param("..", id="A45-parent"),
    pytest.param(".", id="A45-here"),
    pytest.param("/abs", id="A45-absolute"),
    pytest.param("a/../b", id="A45-parent-inside"),
    pytest.param("../../etc/passwd", id="A45-up-and-away"),
    pytest.param("a/", id="A45-trailing-slash"),
    pytest.param("/", id="A45-slash-alone"),
    pytest.param("//", id="slashes"),
    pytest.param("a@b", id="B23-at"),
    pytest.param("a%2e%2e%2fb", id="B23-percent"),
    pytest.param("a#b", id="B23-hash"),
    pytest.param("a?b", id="B23-question-mark"),
    pytest.param("a&b", id="B23-ampersand"),
    pytest.param("a+b", id="B23-plus"),
    pytest.param("a b", id="B23-space"),
    pytest.param(" ", id="B23-space-alone"),
    pytest.param("Größe/模型🦙", id="B23-unicode"),
    pytest.param("\ud800", id="lone-surrogate"),
    pytest.param("*", id="star"),
    pytest.param("a[b]?", id="C13-brackets"),
    pytest.param("s3://bucket/x", id="url"),
    pytest.param("a::b", id="chain"),
    pytest.param("a\nb\r\t\x7f", id="control-characters"),
    pytest.param("a\\..\\b", id="backslashes"),
    pytest.param("~root", id="tilde"),
    pytest.param("-rf", id="option"),
    pytest.param(".kvstore-tmp", id="our-own-scratch"),
    pytest.param("zarr.json", id="our-own-document"),
    pytest.param("x" * 300, id="300-letters"),
    pytest.param("ß" * 300, id="300-times-two-bytes"),
    pytest.param("/" * 300, id="300-slashes"),
]


def paths_of(config: Config) -> tuple[str, ...]:
    """Every kind of path that has the config's name in it, and a block's below it."""
    return tuple(
        f"{group_path(folder, 63, 15)}/{block_path(b'k' * MAX_KEY_BYTES)}/{DOCUMENT}"
        for folder in (namespace_path(config), isolated_path(config, DIGEST))
    )


def assert_safe(path: str) -> None:
    """Below the root, short enough for any file system and bucket, nothing special."""
    assert not posixpath.isabs(path)
    assert posixpath.normpath(path) == path
    assert len(path.encode()) <= 1024 - 64  # room for the root's own path
    for component in path.split("/"):
        assert SAFE.fullmatch(component)
        assert component not in (".", "..")
        assert len(component.encode()) <= 255


# ---- namespaces


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("facebook/opt-125m", "facebook_opt-125m"),
        ("meta-llama/Llama-3.1_8B", "meta-llama_Llama-3.1_8B"),
        ("/models/a b", "_models_a_b"),
        ("..", ".."),
        ("é", "_"),
        ("x" * 300, "x" * 200),
    ],
)
def test_a_namespace_is_a_readable_label_and_the_digest(name: str, label: str) -> None:
    config = replace(OPT, model_name=name)
    assert namespace_path(config) == f"{label}_{config.digest}"


def test_paths_never_move() -> None:
    assert namespace_path(OPT) == "facebook_opt-125m_3c412b280dad"
    assert isolated_path(OPT, DIGEST) == "facebook_opt-125m_3c412b280dad_0123456789ab"
    assert group_path("folder", 0, 1) == "folder/r0/g1"
    assert block_path(KEY) == (
        "000/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000001"
    )


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_no_name_leads_out_of_the_root(name: str) -> None:
    for path in paths_of(replace(OPT, model_name=name)):
        assert_safe(path)


@unhurried
@given(configs)
def test_every_path_is_safe(config: Config) -> None:
    for path in paths_of(config):
        assert_safe(path)


def test_hostile_names_have_paths_of_their_own() -> None:
    tried = [str(parameter.values[0]) for parameter in HOSTILE_NAMES]
    folders = {namespace_path(replace(OPT, model_name=name)) for name in tried}
    assert len(folders) == len(tried)


@unhurried
@given(names, names)
def test_two_names_share_a_path_only_if_they_are_one(a: str, b: str) -> None:
    one, other = (namespace_path(replace(OPT, model_name=name)) for name in (a, b))
    assert (one == other) == (a == b)


@pytest.mark.parametrize(
    "name", [pytest.param("", id="A45-empty"), pytest.param("a\0", id="A45-NUL")]
)
def test_names_that_no_path_can_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="model_name"):
        namespace_path(replace(OPT, model_name=name))


@unhurried
@given(configs, layouts(), layouts())
def test_an_isolated_namespace_is_one_layouts_own(
    config: Config, a: Layout, b: Layout
) -> None:
    folders = {isolated_path(config, layout.digest) for layout in (a, b)}
    assert len(folders) == len({a.digest, b.digest})
    assert namespace_path(config) not in folders
    assert all("/" not in folder for folder in folders)


# ---- ranks and groups


@pytest.mark.parametrize(
    ("rank", "group"),
    [
        pytest.param(1, 0, id="B9-rank"),
        pytest.param(0, 1, id="A22-group"),
        pytest.param(1, 1, id="both"),
        pytest.param(11, 1, id="two-digits"),
        pytest.param(1, 11, id="two-digits-behind"),
    ],
)
def test_ranks_and_groups_do_not_meet(rank: int, group: int) -> None:
    others = [(r, g) for r in range(12) for g in range(12) if (r, g) != (rank, group)]
    assert group_path("n", rank, group) not in {group_path("n", r, g) for r, g in others}


@pytest.mark.parametrize(("rank", "group", "name"), [(-1, 0, "rank"), (0, -1, "group")])
def test_negative_ranks_and_groups_are_refused(rank: int, group: int, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: expected 0 or more, found -1"):
        group_path("namespace", rank, group)


# ---- keys


@unhurried
@given(keys)
@example(bytes(range(MAX_KEY_BYTES)))
def test_a_key_comes_back_from_its_path(key: bytes) -> None:
    assert block_key(block_path(key)) == key


@unhurried
@given(keys, keys)
def test_two_keys_share_a_path_only_if_they_are_one(a: bytes, b: bytes) -> None:
    assert (block_path(a) == block_path(b)) == (a == b)


@unhurried
@given(keys)
def test_keys_that_differ_in_their_case_alone_do_not_exist(key: bytes) -> None:
    assert block_path(key) == block_path(key).lower()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(b"\xff" + KEY[1:], id="A42-first-byte"),
        pytest.param(KEY[:-1] + b"\xff", id="A42-last-byte"),
        pytest.param(bytes(28) + KEY[28:], id="A42-equal-low-64-bits"),
        pytest.param(KEY[:8] + bytes(28), id="A42-equal-high-64-bits"),
        pytest.param(KEY[:-4] + (2).to_bytes(4), id="A22-other-group"),
        pytest.param(KEY[:-1], id="shorter"),
        pytest.param(KEY + b"\0", id="longer"),
        pytest.param(b"\0" + KEY, id="leading-zero"),
    ],
)
def test_keys_that_nearly_agree_have_other_paths(other: bytes) -> None:
    ours, theirs = block_path(KEY), block_path(other)
    assert ours != theirs
    assert not theirs.startswith(f"{ours}/")
    assert not ours.startswith(f"{theirs}/")


@pytest.mark.parametrize("length", [2, 3, 36, 96])
def test_keys_of_any_usable_length_fit_into_a_file_name(length: int) -> None:
    assert_safe(block_path(b"\xff" * length))


@pytest.mark.parametrize("length", [0, 1, 97, 4096])
def test_keys_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(InvalidInputError, match=f"key: .*96 bytes, found {length}"):
        block_path(bytes(length))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("", id="empty"),
        pytest.param("000", id="fan-out-alone"),
        pytest.param("0001", id="no-fan-out"),
        pytest.param("001/0001", id="other-fan-out"),
        pytest.param("00/0001", id="short-fan-out"),
        pytest.param("0001/0001", id="long-fan-out"),
        pytest.param("000/000", id="half-a-byte"),
        pytest.param("000/00", id="too-short"),
        pytest.param("00a/00A0", id="upper-case"),
        pytest.param("ABC/ABCD", id="all-upper-case"),
        pytest.param("000/0001\n", id="newline"),
        pytest.param("/000/0001", id="absolute"),
        pytest.param("000/0001/zarr.json", id="a-file-of-it"),
        pytest.param("../0001", id="parent"),
        pytest.param("٠٠٠/٠٠٠١", id="digits-of-another-script"),
        pytest.param("000/" + "00" * 97, id="too-long"),
    ],
)
def test_what_no_key_has_as_its_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError):
        block_key(path)


@unhurried
@given(st.text(alphabet="0123456789abcdefABCDEF/. ", max_size=20))
def test_a_path_has_a_key_or_is_refused(path: str) -> None:
    try:
        key = block_key(path)
    except InvalidInputError:
        return
    assert block_path(key) == path
