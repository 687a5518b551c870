import copy
import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from kvstore import errors
from kvstore.errors import (
    DamagedBlockError,
    Difference,
    FormatError,
    InvalidInputError,
    KVStoreError,
    LayoutMismatchError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
    UnsupportedVersionError,
)

DIFFERENCES = (
    Difference("axes", ("layer", "head"), ("head", "layer")),
    Difference("runner", "v2", "v1"),
    Difference("packing", None, "cpu-amx"),
)
# One of each error, with every field that it has.
EXAMPLES: list[tuple[KVStoreError, dict[str, Any]]] = [
    (KVStoreError("anything"), {}),
    (InvalidInputError("url: expected a URL or path, found ''"), {}),
    (
        LayoutMismatchError("s3://b/ns/r0/g0/zarr.json", DIFFERENCES),
        {"place": "s3://b/ns/r0/g0/zarr.json", "differences": DIFFERENCES},
    ),
    (
        FormatError("s3://b/ns/zarr.json", "expected JSON, found {"),
        {"place": "s3://b/ns/zarr.json", "problem": "expected JSON, found {"},
    ),
    (
        DamagedBlockError("s3://b/ns/c.0", "expected 8 bytes, found 4", "wrong-length"),
        {
            "place": "s3://b/ns/c.0",
            "problem": "expected 8 bytes, found 4",
            "damage": "wrong-length",
        },
    ),
    (UnsupportedVersionError("found vllm 0.1"), {}),
    *(
        (
            kind("s3://b/ns", "read", "503 slow down"),
            {"place": "s3://b/ns", "action": "read", "cause": "503 slow down"},
        )
        for kind in (StorageError, StorageAccessError, StorageTimeoutError)
    ),
]
IDS = [type(error).__name__ for error, _ in EXAMPLES]


def subclasses(cls: type[KVStoreError]) -> set[type[KVStoreError]]:
    """Every error of the module below `cls`, and `cls`."""
    found = {cls}
    for child in cls.__subclasses__():
        found |= subclasses(child)
    return {kind for kind in found if kind.__module__ == errors.__name__}


# ---- the tree


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (KVStoreError, (Exception,)),
        (InvalidInputError, (KVStoreError, ValueError)),
        (LayoutMismatchError, (KVStoreError, ValueError)),
        (FormatError, (KVStoreError, ValueError)),
        (DamagedBlockError, (FormatError,)),
        (UnsupportedVersionError, (KVStoreError, ImportError)),
        (StorageError, (KVStoreError, OSError)),
        (StorageAccessError, (StorageError, PermissionError)),
        (StorageTimeoutError, (StorageError, TimeoutError)),
    ],
)
def test_each_error_is_also_the_builtin_that_users_expect(
    kind: type[KVStoreError], parents: tuple[type[Exception], ...]
) -> None:
    assert kind.__bases__ == parents


def test_the_docstring_draws_the_whole_tree() -> None:
    drawn = re.findall(r"^[ │├└─]*(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(kind.__name__ for kind in subclasses(KVStoreError))


def test_there_is_an_example_of_every_error() -> None:
    assert {type(error) for error, _ in EXAMPLES} == subclasses(KVStoreError)


@pytest.mark.parametrize("kind", [StorageError, InvalidInputError, LayoutMismatchError])
def test_what_a_handler_treats_alike_has_one_parent(kind: type[KVStoreError]) -> None:
    others = {StorageError, InvalidInputError, LayoutMismatchError, FormatError} - {kind}
    assert not issubclass(kind, tuple(others))


# ---- across process borders


@pytest.mark.parametrize(("error", "fields"), EXAMPLES, ids=IDS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_pickle_with_their_fields(
    error: KVStoreError, fields: dict[str, Any], protocol: int
) -> None:
    found = pickle.loads(pickle.dumps(error, protocol))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert {name: getattr(found, name) for name in fields} == fields
    assert found.args == error.args


@pytest.mark.parametrize(("error", "fields"), EXAMPLES, ids=IDS)
def test_errors_copy_with_their_fields(error: KVStoreError, fields: dict[str, Any]) -> None:
    for found in (copy.copy(error), copy.deepcopy(error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize("kind", [StorageError, StorageAccessError, StorageTimeoutError])
def test_a_storage_error_does_not_pretend_to_be_an_errno(kind: type[StorageError]) -> None:
    error = kind("s3://b/ns", "read", "503 slow down")
    assert error.errno is None
    assert error.filename is None


# ---- messages


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            FormatError("s3://b/ns/zarr.json", "expected JSON, found {"),
            "s3://b/ns/zarr.json: expected JSON, found {",
        ),
        (
            DamagedBlockError("s3://b/ns/c.0", "expected 8 bytes, found 4"),
            "s3://b/ns/c.0: expected 8 bytes, found 4",
        ),
        (
            StorageError("s3://b/ns", "read", "503 slow down"),
            "cannot read s3://b/ns: 503 slow down",
        ),
        (
            StorageAccessError("s3://b/ns", "write", "403"),
            "cannot write s3://b/ns: 403",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_message_is_one_line_with_the_place_and_the_problem(
    error: KVStoreError, message: str
) -> None:
    assert str(error) == message


def test_a_mismatch_names_the_place_every_difference_and_what_to_do() -> None:
    place, *lines, remedy = str(
        LayoutMismatchError("s3://b/ns/r0/g0", DIFFERENCES)
    ).splitlines()
    assert place == "s3://b/ns/r0/g0 was written with another layout or config:"
    assert lines == [
        "  axes: expected ('layer', 'head'), found ('head', 'layer')",
        "  runner: expected 'v2', found 'v1'",
        "  packing: expected None, found 'cpu-amx'",
    ]
    assert "another URL" in remedy
    assert '"on_mismatch": "isolate"' in remedy


def test_a_difference_is_a_value() -> None:
    difference = Difference("runner", "v2", "v1")
    assert difference == Difference("runner", "v2", "v1")
    assert difference != Difference("runner", "v1", "v2")
    assert str(difference) == "runner: expected 'v2', found 'v1'"
    with pytest.raises(FrozenInstanceError):
        difference.field = "axes"  # type: ignore[misc]  # what the test is about
