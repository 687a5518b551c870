import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import configs, json_values, keys, layouts, unhurried

from kvstore.arrays import (
    MAX_DOCUMENT_BYTES,
    ArrayFormat,
    group_attributes,
    group_document,
    parse_document,
    recorded_config,
    recorded_layout,
    split_proof,
    zarr_type,
)
from kvstore.codecs import checksum
from kvstore.config import Config, Group
from kvstore.errors import DamagedBlockError, FormatError, InvalidInputError
from kvstore.layout import ITEM_BYTES, Layout

LAYOUT = Layout(
    axes=("layer", "head", "token", "value"),
    shape=(2, 3, 16, 8),
    dtype="float16",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=("a", "b"),
    tokens_per_block=16,
    page_bytes=768,
)
CONFIG = Config(
    model_name="facebook/opt-125m",
    dtype="float16",
    tokens_per_hash=16,
    kv_cache_groups=(Group(tokens_per_block=16, layer_names=("a", "b")),),
)
KEY = bytes(range(32)) + (1).to_bytes(4)
CRC = 0x0BADCAFE
FORMAT = ArrayFormat.of(LAYOUT, 0)
PLACE = "memory://root/block/zarr.json"

GOLDEN = b"""\
{
  "zarr_format": 3,
  "node_type": "array",
  "shape": [
    2,
    3,
    16,
    8
  ],
  "data_type": "float16",
  "chunk_grid": {
    "name": "regular",
    "configuration": {
      "chunk_shape": [
        2,
        3,
        16,
        8
      ]
    }
  },
  "chunk_key_encoding": {
    "name": "default",
    "configuration": {
      "separator": "."
    }
  },
  "fill_value": "NaN",
  "codecs": [
    {
      "name": "bytes",
      "configuration": {
        "endian": "little"
      }
    },
    {
      "name": "crc32c"
    }
  ],
  "dimension_names": [
    "layer",
    "head",
    "token",
    "value"
  ],
  "attributes": {
    "kvstore": {
      "format": 1,
      "key": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000001",
      "group": 0,
      "dtype": "float16",
      "packing": "token-kv",
      "runner": "v2",
      "kv_cache_layout": "LBHNC",
      "layout": "9d6a8098cc223234816b2cf49f10a9f1",
      "crc32c": "0badcafe"
    }
  }
}"""


def parsed() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(GOLDEN)
    return document


def dumped(document: object) -> bytes:
    return json.dumps(document).encode()


def proved(document: bytes) -> int:
    crc, codec = split_proof(FORMAT.proved(document, KEY, place=PLACE))
    assert codec == "none"
    return crc


def with_attributes(**changes: Any) -> bytes:
    """The golden document with other kvstore attributes."""
    document = parsed()
    document["attributes"]["kvstore"] |= changes
    return dumped(document)


def without_attribute(name: str) -> bytes:
    document = parsed()
    del document["attributes"]["kvstore"][name]
    return dumped(document)


def with_fields(**changes: Any) -> bytes:
    """The golden document with other fields of its own."""
    return dumped(parsed() | changes)


# ---- what is written


def test_the_document_has_these_bytes() -> None:
    assert FORMAT.document(KEY, CRC) == GOLDEN


def test_the_only_chunk_is_named_by_zarrs_default_encoding() -> None:
    assert FORMAT.chunk_name == "c.0.0.0.0"
    opaque = Layout.of_bytes(7, dtype="uint8", reason="")
    assert ArrayFormat.of(opaque, 0).chunk_name == "c.0"


def test_the_checksum_is_crc32c() -> None:
    assert checksum(memoryview(b"123456789")) == 0xE3069283  # RFC 3720's check value
    assert checksum(memoryview(b"")) == 0


@pytest.mark.parametrize(
    ("dtype", "data_type", "fill_value"),
    [
        ("bfloat16", "bfloat16", "NaN"),
        ("float16", "float16", "NaN"),
        ("float32", "float32", "NaN"),
        ("float8_e4m3fn", "uint8", 255),
        ("float8_e4m3fnuz", "uint8", 128),
        ("float8_e5m2", "uint8", 255),
        ("int8", "uint8", 255),
        ("uint8", "uint8", 255),
    ],
)
def test_a_missing_chunk_never_reads_as_zeros(  # D5, D6
    dtype: str, data_type: str, fill_value: object
) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    document = json.loads(ArrayFormat.of(layout, 0).document(KEY, CRC))
    assert zarr_type(layout) == (data_type, fill_value)
    assert document["data_type"] == data_type
    assert document["fill_value"] == fill_value
    assert document["attributes"]["kvstore"]["dtype"] == dtype


def test_every_dtype_with_named_values_has_its_row_in_the_table_above() -> None:
    [mark] = [
        mark
        for mark in getattr(test_a_missing_chunk_never_reads_as_zeros, "pytestmark", [])
        if mark.name == "parametrize"
    ]
    assert {row[0] for row in mark.args[1]} == ITEM_BYTES.keys()


def test_opaque_blocks_are_bytes_whatever_the_engine_takes_them_for() -> None:
    opaque = Layout.of_bytes(6051, dtype="bfloat16", reason="mamba")
    document = json.loads(ArrayFormat.of(opaque, 3).document(KEY, CRC))
    assert (document["data_type"], document["fill_value"]) == ("uint8", 255)
    assert document["shape"] == [6051]
    assert document["codecs"] == [{"name": "bytes"}, {"name": "crc32c"}]
    assert document["attributes"]["kvstore"]["dtype"] == "bfloat16"
    assert document["attributes"]["kvstore"]["group"] == 3


@unhurried
@given(layouts(), st.integers(0, 99), keys, st.integers(0, 2**32 - 1))
def test_what_is_written_proves_itself_and_nothing_else(
    layout: Layout, group: int, key: bytes, crc: int
) -> None:
    array = ArrayFormat.of(layout, group)
    document = array.document(key, crc)
    assert array.proved(document, key, place=PLACE) == crc
    assert array.proved(dumped(json.loads(document)), key, place=PLACE) == crc
    for other in (key + b"\0", bytes(len(key)) if any(key) else b"\1" * len(key)):
        with pytest.raises(DamagedBlockError):
            array.proved(document, other, place=PLACE)


@pytest.mark.parametrize("text", ["@key@", "@crc32c@"])
def test_any_text_can_stand_in_a_layout(text: str) -> None:
    array = ArrayFormat.of(replace(LAYOUT, packing=text), 0)
    assert array.proved(array.document(KEY, CRC), KEY, place=PLACE) == CRC


# ---- what is accepted


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(GOLDEN, id="as-written"),
        pytest.param(json.dumps(parsed()).encode(), id="one-line"),
        pytest.param(json.dumps(parsed(), separators=(",", ":")).encode(), id="compact"),
        pytest.param(json.dumps(parsed(), indent="\t").encode(), id="tabs"),
        pytest.param(json.dumps(parsed(), sort_keys=True).encode(), id="sorted"),
        pytest.param(json.dumps(reordered(parsed())).encode(), id="reversed"),
        pytest.param(b"\r\n " + GOLDEN + b"\n", id="space-around"),
        pytest.param(GOLDEN.replace(b'"layer"', b'"\\u006cayer"'), id="escapes"),
        pytest.param(
            with_fields(ours={"must_understand": False, "name": "x"}),
            id="extension-that-may-be-ignored",
        ),
        pytest.param(
            dumped(parsed() | {"attributes": parsed()["attributes"] | {"note": 1}}),
            id="somebody-elses-attribute",
        ),
    ],
)
def test_the_same_document_written_otherwise_is_accepted(document: bytes) -> None:
    assert proved(document) == CRC


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "uint8"])
def test_tensorstores_document_of_the_same_array_is_accepted(  # D12
    tmp_path: Path, dtype: str
) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    array = ArrayFormat.of(replace(LAYOUT, dtype=dtype), 0)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
        "metadata": json.loads(array.document(KEY, CRC)),
    }
    tensorstore.open(spec, create=True).result()
    document = (tmp_path / "zarr.json").read_bytes()
    assert array.proved(document, KEY, place=PLACE) == CRC


def test_zarr_pythons_document_of_the_same_array_is_accepted(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    (tmp_path / "zarr.json").write_bytes(GOLDEN)
    zarr.open_array(tmp_path, mode="r+").update_attributes({"note": "looked at"})
    document = (tmp_path / "zarr.json").read_bytes()
    assert document != GOLDEN
    assert proved(document) == CRC


# ---- what is refused


@pytest.mark.parametrize(
    ("document", "field"),
    [
        pytest.param(FORMAT.document(KEY[:-1] + b"\2", CRC), "key", id="other-key"),
        pytest.param(FORMAT.document(KEY[:-1], CRC), "key", id="shorter-key"),
        pytest.param(with_attributes(key=KEY.hex().upper()), "key", id="upper-case-key"),
        pytest.param(without_attribute("key"), "key", id="no-key"),
        pytest.param(with_attributes(layout="0" * 32), "layout", id="A1-other-layout"),
        pytest.param(without_attribute("layout"), "layout", id="no-layout"),
        pytest.param(with_attributes(runner="v1"), "runner", id="A1-other-runner"),
        pytest.param(with_attributes(packing="cpu-vec"), "packing", id="other-packing"),
        pytest.param(with_attributes(dtype="int8"), "dtype", id="other-dtype"),
        pytest.param(
            with_attributes(kv_cache_layout="HND"), "kv_cache_layout", id="other-name"
        ),
        pytest.param(with_attributes(group=1), "group", id="other-group"),
        pytest.param(with_attributes(group=False), "group", id="False-is-not-0"),
        pytest.param(with_attributes(group=0.0), "group", id="a-float-is-not-0"),
        pytest.param(with_attributes(format=2), "format", id="later-format"),
        pytest.param(with_attributes(format=True), "format", id="True-is-not-1"),
        pytest.param(without_attribute("format"), "format", id="no-format"),
        pytest.param(with_attributes(extra=1), "extra", id="unknown-attribute"),
        pytest.param(without_attribute("crc32c"), "crc32c", id="no-checksum"),
        pytest.param(with_attributes(crc32c=CRC), "crc32c", id="checksum-as-a-number"),
        pytest.param(with_attributes(crc32c="badcafe"), "crc32c", id="7-digits"),
        pytest.param(with_attributes(crc32c="0badcafe0"), "crc32c", id="9-digits"),
        pytest.param(with_attributes(crc32c="badcaf"), "crc32c", id="6-digits"),
        pytest.param(with_attributes(crc32c="000badcafe"), "crc32c", id="10-digits"),
        pytest.param(with_attributes(crc32c="0badcafg"), "crc32c", id="not-hex"),
        pytest.param(with_attributes(crc32c="-badcafe"), "crc32c", id="negative"),
        pytest.param(with_attributes(crc32c="0xbadcaf"), "crc32c", id="prefixed"),
        pytest.param(with_fields(shape=[2, 3, 8, 16]), "shape", id="other-shape"),
        pytest.param(with_fields(shape=768), "shape", id="shape-not-a-list"),
        pytest.param(
            with_fields(dimension_names=["head", "layer", "token", "value"]),
            "dimension_names",
            id="other-axes",
        ),
        pytest.param(
            with_fields(dimension_names=None), "dimension_names", id="no-axis-names"
        ),
        pytest.param(
            with_fields(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}]),
            "codecs",
            id="D11-no-crc32c",
        ),
        pytest.param(
            with_fields(
                codecs=[
                    {"name": "bytes", "configuration": {"endian": "big"}},
                    {"name": "crc32c"},
                ]
            ),
            "codecs",
            id="big-endian",
        ),
        pytest.param(
            with_fields(codecs=[*parsed()["codecs"], {"name": "gzip"}]),
            "codecs",
            id="one-codec-more",
        ),
        pytest.param(with_fields(codecs=[{"name": "nope"}]), "codecs", id="D15-codec"),
        pytest.param(with_fields(codecs=None), "codecs", id="no-codecs"),
        pytest.param(with_fields(data_type="bfloat16"), "data_type", id="other-type"),
        pytest.param(with_fields(data_type="int1024"), "data_type", id="D15-data-type"),
        pytest.param(with_fields(fill_value=0), "fill_value", id="D5-zeros"),
        pytest.param(
            with_fields(
                chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1] * 4}}
            ),
            "chunk_grid",
            id="many-chunks",
        ),
        pytest.param(
            with_fields(
                chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}}
            ),
            "chunk_key_encoding",
            id="chunks-elsewhere",
        ),
        pytest.param(with_fields(node_type="group"), "node_type", id="a-group"),
        pytest.param(with_fields(zarr_format=2), "Zarr v3", id="D15-zarr-2"),
        pytest.param(with_fields(zarr_format=4), "Zarr v3", id="D15-zarr-4"),
        pytest.param(with_fields(zarr_format="3"), "Zarr v3", id="zarr-format-as-text"),
        pytest.param(
            with_fields(ours={"must_understand": True}), "ours", id="D15-must-understand"
        ),
        pytest.param(with_fields(ours={"name": "x"}), "ours", id="says-nothing-of-itself"),
        pytest.param(with_fields(ours={"must_understand": 0}), "ours", id="0-is-not-false"),
        pytest.param(with_fields(ours=[]), "ours", id="unknown-list"),
        pytest.param(with_fields(attributes={}), "crc32c", id="no-attributes"),
        pytest.param(with_fields(attributes=[1]), "crc32c", id="attributes-a-list"),
        pytest.param(with_fields(attributes={"kvstore": 1}), "crc32c", id="ours-a-number"),
    ],
)
def test_another_document_is_refused_by_the_field_that_differs(
    document: bytes, field: str
) -> None:
    with pytest.raises(DamagedBlockError, match=field) as refused:
        proved(document)
    assert refused.value.place == PLACE


@pytest.mark.parametrize("name", [name for name in parsed() if name != "attributes"])
def test_every_field_must_be_there(name: str) -> None:
    document = parsed()
    del document[name]
    with pytest.raises(DamagedBlockError):
        proved(dumped(document))


@pytest.mark.parametrize("name", parsed()["attributes"]["kvstore"])
def test_every_attribute_must_be_there(name: str) -> None:
    with pytest.raises(DamagedBlockError, match=name):
        proved(without_attribute(name))


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(
            with_attributes(crc32c="12 34 56"),
            id="spaces-in-the-checksum",
        ),
        pytest.param(
            GOLDEN.replace(b"0badcafe", b"12 34 56"),
            id="spaces-in-the-checksum-as-written",
        ),
        pytest.param(
            with_fields(shape=[2.0, 3, 16, 8]),
            id="a-float-in-the-shape",
        ),
        pytest.param(
            FORMAT.document(KEY, CRC).replace(b'"shape": [\n    2', b'"shape": [\n    2e0'),
            id="an-exponent-in-the-shape",
        ),
    ],
)
def test_a_document_that_is_nearly_right_is_refused(document: bytes) -> None:
    with pytest.raises(DamagedBlockError):
        proved(document)


# ---- hostile bytes

HOSTILE = [
    pytest.param(b"", id="B13-empty"),
    pytest.param(b" ", id="blank"),
    pytest.param(b"\0" * 100, id="zeros"),
    pytest.param(b"null", id="null"),
    pytest.param(b"true", id="true"),
    pytest.param(b"3", id="number"),
    pytest.param(b'"zarr_format"', id="string"),
    pytest.param(b"[]", id="list"),
    pytest.param(b'[{"zarr_format": 3}]', id="list-of-the-right-thing"),
    pytest.param(b"{}", id="object"),
    pytest.param(b"{" * 100, id="open-braces"),
    pytest.param(GOLDEN[:-1], id="D8-half-written"),
    pytest.param(GOLDEN + b"{}", id="something-behind"),
    pytest.param(b"[" * 100_000, id="deep"),
    pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep-and-closed"),
    pytest.param(b'{"zarr_format":' * 50_000 + b"3" + b"}" * 50_000, id="deep-objects"),
    pytest.param(b" " * MAX_DOCUMENT_BYTES + GOLDEN, id="huge"),
    pytest.param(b"1" * 10_000, id="huge-number"),
    pytest.param(b'{"zarr_format": ' + b"3" * 10_000 + b"}", id="huge-number-inside"),
    pytest.param(b'{"zarr_format": 3e999}', id="infinite"),
    pytest.param(b'{"zarr_format": NaN}', id="not-a-number"),
    pytest.param(GOLDEN.replace(b"layer", b"lay\xffr"), id="not-UTF-8"),
    pytest.param(b"\x80\x81\x82\x83", id="not-UTF-8-at-all"),
    pytest.param(GOLDEN.replace(b"layer", b"\\ud800"), id="lone-surrogate"),
    pytest.param(GOLDEN.replace(b"layer", b"\xed\xa0\x80"), id="lone-surrogate-in-UTF-8"),
]

# What Python's parser takes for JSON and other parsers need not.
ALMOST_JSON = [
    pytest.param(
        GOLDEN.decode().encode("utf-16"),
        id="UTF-16",
    ),
    pytest.param(
        GOLDEN.decode().encode("utf-32-be"),
        id="UTF-32",
    ),
    pytest.param(
        b'{"zarr_format": 2, ' + GOLDEN[1:],
        id="duplicate-names",
    ),
    pytest.param(
        GOLDEN.replace(b'"format": 1,', b'"format": 1, "layout": "other",'),
        id="duplicate-attributes",
    ),
    pytest.param(
        GOLDEN[:-1] + b', "x": {"must_understand": false, "y": -Infinity}}',
        id="infinity-in-an-extension",
    ),
]


@pytest.mark.parametrize("document", HOSTILE + ALMOST_JSON)
def test_hostile_bytes_are_a_damaged_block(document: bytes) -> None:
    with pytest.raises(DamagedBlockError):
        proved(document)


@pytest.mark.parametrize("document", HOSTILE)
@pytest.mark.parametrize("read", [group_attributes, recorded_config, recorded_layout])
def test_hostile_bytes_are_a_format_error_of_a_group(
    document: bytes, read: Callable[..., object]
) -> None:
    with pytest.raises(FormatError) as refused:
        read(document, place=PLACE)
    assert type(refused.value) is FormatError
    assert refused.value.place == PLACE


@pytest.mark.parametrize("depth", range(900, 1000))
def test_json_as_deep_as_the_interpreter_goes_is_a_format_error(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    group = json.loads(group_document(layout={}, config={}))
    group["attributes"]["kvstore"] |= {"layout": "deep", "config": "deep"}
    document = json.dumps(group).replace('"deep"', deep).encode()
    for read in (recorded_config, recorded_layout):
        with pytest.raises(FormatError) as refused:
            read(document, place=PLACE)
        assert str(refused.value)
    with pytest.raises(DamagedBlockError):
        proved(GOLDEN.replace(b'"token-kv"', deep.encode()))


@unhurried
@given(st.binary(max_size=200))
def test_any_bytes_are_a_format_error(document: bytes) -> None:
    for read in (parse_document, group_attributes, recorded_config, recorded_layout):
        with pytest.raises(FormatError):
            read(document, place=PLACE)
    with pytest.raises(DamagedBlockError):
        proved(document)


@st.composite
def mutated(draw: st.DrawFn, document: bytes) -> bytes:
    """A real document, cut, patched or with bytes put in at one to three places."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(document)))
        end = draw(st.integers(start, min(len(document), start + 8)))
        patch = draw(st.binary(max_size=4) | st.sampled_from([b"0", b" ", b"null", b"-"]))
        document = document[:start] + patch + document[end:]
    return document


@unhurried
@given(mutated(GOLDEN))
def test_a_changed_document_is_refused_or_says_the_same(document: bytes) -> None:
    try:
        crc = proved(document)
    except DamagedBlockError:
        return
    assert 0 <= crc < 2**32
    found = json.loads(document)
    expected = parsed()
    expected["attributes"]["kvstore"]["crc32c"] = found["attributes"]["kvstore"]["crc32c"]
    known = {name: found[name] for name in expected}
    assert known["attributes"]["kvstore"] == expected["attributes"]["kvstore"]
    assert known | {"attributes": expected["attributes"]} == expected


@unhurried
@given(st.sampled_from(sorted(parsed())), json_values)
def test_any_json_in_a_field_is_refused_or_the_same(name: str, value: object) -> None:
    document = parsed() | {name: value}
    if dumped(document) == dumped(parsed()):
        assert proved(dumped(document)) == CRC
    else:
        with pytest.raises(DamagedBlockError):
            proved(dumped(document))


@unhurried
@given(st.sampled_from(sorted(parsed()["attributes"]["kvstore"])), json_values)
def test_any_json_in_an_attribute_is_refused_or_the_same(name: str, value: object) -> None:
    found = with_attributes(**{name: value})
    try:
        proved(found)
    except DamagedBlockError:
        return
    assert name == "crc32c" or found == dumped(parsed())


# ---- groups

GROUP_GOLDEN = b"""\
{
  "zarr_format": 3,
  "node_type": "group",
  "attributes": {
    "kvstore": {
      "format": 1,
      "config": {
        "model_name": "facebook/opt-125m"
      }
    }
  }
}"""


def test_a_group_has_these_bytes() -> None:
    assert group_document(config={"model_name": "facebook/opt-125m"}) == GROUP_GOLDEN


@unhurried
@given(configs)
def test_a_config_is_recorded_and_read(config: Config) -> None:
    document = group_document(config=config.fields(), provenance={"kvstore": "0.1.0"})
    assert recorded_config(document, place=PLACE) == config


@unhurried
@given(layouts())
def test_a_layout_is_recorded_and_read(layout: Layout) -> None:
    document = group_document(layout=layout.to_dict())
    assert recorded_layout(document, place=PLACE) == layout


def test_a_layout_of_as_many_layers_as_models_have_fits() -> None:
    names = tuple(f"model.layers.{i}.self_attn.indexer.attn" for i in range(2000))
    layout = replace(LAYOUT, shape=(2000, 3, 16, 8), layer_names=names)
    document = group_document(layout=layout.to_dict())
    assert len(document) < MAX_DOCUMENT_BYTES
    assert recorded_layout(document, place=PLACE) == layout


def test_no_document_is_made_that_is_too_long_to_be_read() -> None:
    longest = "a" * (MAX_DOCUMENT_BYTES - len(group_document(reason="")))
    document = group_document(reason=longest)
    assert group_attributes(document, place=PLACE)["reason"] == longest
    with pytest.raises(InvalidInputError, match="reason: expected a document of at most"):
        group_document(reason=f"{longest}a")


def group_changed(**changes: Any) -> bytes:
    recorded = {"config": CONFIG.fields(), "layout": LAYOUT.to_dict()}
    return dumped(json.loads(group_document(**recorded)) | changes)


def recorded_changed(**changes: Any) -> bytes:
    return group_document(
        **{"config": CONFIG.fields(), "layout": LAYOUT.to_dict()} | changes
    )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        pytest.param(group_changed(node_type="array"), "node_type", id="an-array"),
        pytest.param(group_changed(node_type=None), "node_type", id="no-node-type"),
        pytest.param(group_changed(zarr_format=2), "Zarr v3", id="D15-zarr-2"),
        pytest.param(group_changed(attributes={}), "format", id="somebody-elses-group"),
        pytest.param(group_changed(attributes=None), "format", id="no-attributes"),
        pytest.param(recorded_changed(format=2), "expected 1, found 2", id="later-format"),
        pytest.param(recorded_changed(format=True), "found True", id="True-is-not-1"),
        pytest.param(recorded_changed(format=None), "found None", id="no-format"),
    ],
)
@pytest.mark.parametrize("read", [group_attributes, recorded_config, recorded_layout])
def test_another_groups_document_is_refused(
    document: bytes, problem: str, read: Callable[..., object]
) -> None:
    with pytest.raises(FormatError, match=problem):
        read(document, place=PLACE)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        pytest.param(recorded_changed(config=None), "config: expected an", id="none"),
        pytest.param(recorded_changed(config=[]), "config: expected an", id="list"),
        pytest.param(recorded_changed(config={}), "model_name", id="empty"),
        pytest.param(
            recorded_changed(config=CONFIG.fields() | {"dtype": "auto"}), "dtype", id="auto"
        ),
        pytest.param(
            recorded_changed(config=CONFIG.fields() | {"zz": 1}), "zz", id="unknown"
        ),
    ],
)
def test_a_malformed_config_is_a_format_error(document: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as refused:
        recorded_config(document, place=PLACE)
    assert refused.value.place == PLACE
    assert "remove this one document" in refused.value.problem


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        pytest.param(recorded_changed(layout=None), "layout: expected an", id="none"),
        pytest.param(recorded_changed(layout={}), "axes", id="empty"),
        pytest.param(
            recorded_changed(layout=LAYOUT.to_dict() | {"axes": ["\ud800"] * 4}),
            "axes",
            id="lone-surrogates",
        ),
        pytest.param(
            recorded_changed(layout=LAYOUT.to_dict() | {"shape": [2, 3, 16, True]}),
            r"shape\[3\]",
            id="True-is-not-1",
        ),
        pytest.param(
            recorded_changed(layout=LAYOUT.to_dict() | {"zz": 1}), "zz", id="unknown"
        ),
    ],
)
def test_a_malformed_layout_is_a_format_error(document: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as refused:
        recorded_layout(document, place=PLACE)
    assert refused.value.place == PLACE
    assert "remove this one document" in refused.value.problem


@unhurried
@given(mutated(recorded_changed()))
def test_a_changed_group_is_refused_or_read(document: bytes) -> None:
    for read in (recorded_config, recorded_layout):
        try:
            found = read(document, place=PLACE)
        except FormatError:
            continue
        assert isinstance(found, Config | Layout)


@unhurried
@given(st.sampled_from(sorted(LAYOUT.to_dict())), json_values)
def test_any_json_in_a_layout_is_refused_or_read(name: str, value: object) -> None:
    document = recorded_changed(layout=LAYOUT.to_dict() | {name: value})
    try:
        found = recorded_layout(document, place=PLACE)
    except FormatError:
        return
    assert found.to_dict() == LAYOUT.to_dict() | {name: value}


@pytest.mark.parametrize(
    "extension",
    [
        pytest.param({"must_understand": False, "kind": "inline"}, id="D19-stale-index"),
        pytest.param(
            {"must_understand": True},
            id="D15-must-understand",
        ),
        pytest.param(
            {"name": "other"},
            id="says-nothing-of-itself",
        ),
    ],
)
def test_an_extension_of_a_group_counts_as_zarr_has_it(extension: dict[str, Any]) -> None:
    document = group_changed(extension=extension)
    if extension.get("must_understand") is False:
        assert recorded_layout(document, place=PLACE) == LAYOUT
    else:
        with pytest.raises(FormatError, match="extension"):
            recorded_layout(document, place=PLACE)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(
            lambda: recorded_layout(recorded_changed(format="x" * 500_000), place=PLACE),
            id="group",
        ),
        pytest.param(lambda: proved(with_attributes(dtype="x" * 500_000)), id="block"),
        pytest.param(
            lambda: recorded_layout(
                recorded_changed(layout=LAYOUT.to_dict() | {"dtype": ["x"] * 20_000}),
                place=PLACE,
            ),
            id="layout",
        ),
        pytest.param(
            lambda: proved(with_attributes(**{"x\n" * 250_000: 1})), id="attribute's name"
        ),
        pytest.param(
            lambda: proved(json.dumps(json.loads(GOLDEN) | {"x\n" * 250_000: 1}).encode()),
            id="block's field's name",
        ),
        pytest.param(
            lambda: group_attributes(
                json.dumps(json.loads(group_document()) | {"x\n" * 250_000: 1}).encode(),
                place=PLACE,
            ),
            id="group's field's name",
        ),
    ],
)
def test_a_log_line_is_not_as_long_as_a_hostile_document(
    read: Callable[[], object],
) -> None:
    with pytest.raises(FormatError) as refused:
        read()
    assert len(str(refused.value)) < 2000
    assert "\n" not in str(refused.value)


def chunks(payload: bytes) -> Iterator[bytes]:
    for start in range(0, len(payload), 7):
        yield payload[start : start + 7]


@unhurried
@given(st.binary(max_size=100))
def test_the_checksum_is_the_crc32c_packages_own_over_any_pieces(payload: bytes) -> None:
    crc = 0
    for chunk in chunks(payload):
        crc = crc32c.crc32c(chunk, crc)
    assert checksum(memoryview(payload)) == crc
