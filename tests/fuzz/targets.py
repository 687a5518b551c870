"""The targets: each gives bytes to a parser, and checks what came of it.

A parser may refuse, with the error that it names and a message that is no longer than
people can read. What it accepts must be exactly that, and survive a round trip.
"""

import importlib.util
import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import crc32c

from kvstore.arrays import (
    ArrayFormat,
    group_attributes,
    group_document,
    recorded_config,
    recorded_layout,
    split_proof,
)
from kvstore.codecs import CODECS, Codec, decode_chunk, encode_chunk, zarr_codecs
from kvstore.config import Config
from kvstore.errors import DamagedBlockError, FormatError, InvalidInputError
from kvstore.layout import Layout
from kvstore.urls import parse_url, safe_url

Result = TypeVar("Result")
Target = Callable[[bytes], None]

DATA = Path(__file__).parent.parent / "data"
PLACE = "memory://fuzz/zarr.json"
MAX_MESSAGE = 2000
"""Characters of an error: what it repeats of its input is cut."""


def _options() -> type[Any]:
    """`TierOptions`, whose package refuses to be imported without vLLM."""
    source = Path(str(importlib.util.find_spec("kvstore").origin))  # type: ignore[union-attr] # it is there
    spec = importlib.util.spec_from_file_location(
        "options_of_vllm", source.parent / "vllm" / "options.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    options: type[Any] = module.TierOptions
    return options


TierOptions = _options()


def accepted(
    parse: Callable[[], Result], refusal: type[Exception], *, limit: int = MAX_MESSAGE
) -> Result | None:
    """What `parse` returns, or None if it refuses."""
    try:
        return parse()
    except refusal as error:
        message = str(error)
    assert len(message) <= limit, f"{len(message)} characters"
    return None


# ---- real documents, which the targets compare with and begin from


def _documents(folder: str, name: str) -> list[bytes]:
    found = sorted((DATA / folder).rglob(name))
    assert found
    return [path.read_bytes() for path in found]


_ARRAY = next((DATA / "v1" / "float16").rglob("a3f*/a3f*/zarr.json"))
_LAYOUT = recorded_layout(
    (_ARRAY.parent.parent.parent / "zarr.json").read_bytes(), place=PLACE
)
_FORMAT = ArrayFormat.of(_LAYOUT, 0)
_KEY = bytes.fromhex(_ARRAY.parent.name)
_GENUINE = json.loads(_ARRAY.read_bytes())
_PAYLOAD = bytes((7 * n) % 16 for n in range(1536))


# ---- documents of blocks


def array(data: bytes) -> None:
    """`ArrayFormat.proved`: a document is proved only if it is the block's own."""
    proof = accepted(lambda: _FORMAT.proved(data, _KEY, place=PLACE), DamagedBlockError)
    if proof is None:
        return
    crc, codec = split_proof(proof)
    found = json.loads(data, object_pairs_hook=_once)
    ours = found["attributes"]["kvstore"]
    assert ours.pop("crc32c") == f"{crc:08x}"
    genuine = json.loads(json.dumps(_GENUINE))
    del genuine["attributes"]["kvstore"]["crc32c"]
    assert _same(ours, genuine.pop("attributes")["kvstore"])
    first, *between, last = found.pop("codecs")
    assert _same([first, last], genuine.pop("codecs"))
    names = [{"name": each["name"]} for each in zarr_codecs(codec, 2)]
    assert [{"name": each["name"]} for each in between] == names
    for name in genuine:
        assert _same(found.pop(name), genuine[name]), name
    del found["attributes"]
    for name, value in found.items():
        meaningless = (name, value) in (
            ("storage_transformers", []),
            ("consolidated_metadata", None),
        )
        assert meaningless or value["must_understand"] is False, name
    again = _FORMAT.document(_KEY, crc, codec)
    assert _FORMAT.proved(again, _KEY, place=PLACE) == proof
    compact = json.dumps(json.loads(data)).encode()
    assert _FORMAT.proved(compact, _KEY, place=PLACE) == proof


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "the same name twice"
    return dict(pairs)


def _same(found: object, expected: object) -> bool:
    return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


# ---- documents of groups


def group(data: bytes) -> None:
    """`group_attributes`, `recorded_config` and `recorded_layout`."""
    attributes = accepted(lambda: group_attributes(data, place=PLACE), FormatError)
    config = accepted(lambda: recorded_config(data, place=PLACE), FormatError)
    layout = accepted(lambda: recorded_layout(data, place=PLACE), FormatError)
    if attributes is None:
        assert config is None
        assert layout is None
        return
    assert type(attributes["format"]) is int
    if config is not None:
        again = group_document(config=config.fields())
        assert recorded_config(again, place=PLACE) == config
        assert not config.differences(config)
    if layout is not None:
        again = group_document(layout=layout.to_dict())
        assert recorded_layout(again, place=PLACE) == layout
        assert not layout.differences(layout)


def layout_record(data: bytes) -> None:
    """`Layout.from_dict`, of any JSON."""
    value = _json(data)
    layout = accepted(lambda: Layout.from_dict(value, where="layout"), InvalidInputError)
    if layout is not None:
        again = json.loads(json.dumps(layout.to_dict()))
        assert Layout.from_dict(again, where="again") == layout
        assert re.fullmatch("[0-9a-f]{32}", layout.digest)
        assert layout.nbytes > 0
        assert set(value) <= set(layout.to_dict())


def config_record(data: bytes) -> None:
    """`Config.from_fields`, of any JSON."""
    value = _json(data)
    config = accepted(lambda: Config.from_fields(value, where="config"), InvalidInputError)
    if config is not None:
        again = json.loads(json.dumps(config.fields()))
        assert Config.from_fields(again, where="again") == config
        assert re.fullmatch("[0-9a-f]{12}", config.digest)


def options(data: bytes) -> None:
    """`TierOptions.parse`, of any JSON object."""
    value = _json(data)
    if not isinstance(value, dict):
        return
    found = accepted(
        lambda: TierOptions.parse(value, where="tier"),
        InvalidInputError,
        limit=MAX_MESSAGE + len(data),  # an engine's own config, told whole
    )
    if found is not None:
        assert TierOptions.parse(found.to_dict(), where="again") == found
        assert found.io_timeout > 0
        assert found.threads > 0


def _json(data: bytes) -> Any:
    """The value that is written there; None if it is not JSON as Python reads it."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# ---- URLs

_SECRET = "s3cr3t-of-somebody"
_PROTOCOL = re.compile("[a-z][a-z0-9+.-]*")


def url(data: bytes) -> None:
    """`parse_url` and `safe_url`: one spelling, and no credentials in what is shown."""
    text = data.decode(errors="surrogateescape")
    shown = safe_url(text)
    assert safe_url(shown) == shown
    parsed = accepted(lambda: parse_url(text), InvalidInputError)
    if parsed is not None:
        protocol, root = parsed
        assert parse_url(root) == parsed
        assert root.startswith(f"{protocol}://")
        assert safe_url(root) == safe_url(safe_url(root))
    protocol, _, rest = text.partition("://")
    user, _, path = rest.partition("@")
    if not _PROTOCOL.fullmatch(protocol) or protocol in ("file", "local"):
        return
    if re.search("[/?#]", user):
        return
    secret = f"{protocol}://{user}:{_SECRET}@{path}"
    assert _SECRET not in safe_url(secret)
    message = ""
    try:
        parse_url(secret)
    except InvalidInputError as error:
        message = str(error)
    assert _SECRET not in message


# ---- chunks


def chunk(data: bytes) -> None:
    """`decode_chunk`: the first byte chooses codec and size; the checksum is made right,
    since anybody can write one that is.
    """
    if not data:
        return
    choice, body = data[0], data[1:]
    codec: Codec = ("zstd", "blosc")[choice & 1]
    nbytes = (1536, 1, 96, 70_000)[choice >> 1 & 3]
    guard = b"\xa5" * 64
    buffer = bytearray(guard + bytes(nbytes) + guard)
    payload = memoryview(buffer)[64:-64]
    whole = body + crc32c.crc32c(body).to_bytes(4, "little")

    def decode() -> bytes:
        decode_chunk(whole, payload, codec, place=PLACE)
        return bytes(payload)

    decoded = accepted(decode, DamagedBlockError)
    assert buffer[:64] == buffer[-64:] == guard, "written outside of the payload"
    if decoded is not None:
        (encoded, trailer), used = encode_chunk(
            memoryview(decoded), crc32c.crc32c(decoded), codec, 2
        )
        again = bytearray(nbytes)
        if used != "none":
            joined = bytes(encoded) + trailer
            decode_chunk(joined, memoryview(again), used, place=PLACE)
            assert again == decoded


def _chunks() -> Iterator[bytes]:
    """Real ones, and headers that promise more than there is."""
    codecs: tuple[Codec, ...] = ("zstd", "blosc")
    for number, codec in enumerate(codecs):
        (encoded, _), _ = encode_chunk(memoryview(_PAYLOAD), 0, codec, 2)
        body = bytes(encoded)
        yield bytes([number]) + body
        for declared in (0, 1535, 1537, 1 << 20, (1 << 31) - 1, (1 << 32) - 1):
            if codec == "blosc":
                for place in (4, 8, 12):  # decoded, of a block, encoded
                    field = struct.pack("<I", declared)
                    yield bytes([number]) + body[:place] + field + body[place + 4 :]
            else:
                # One segment, and its length in 8 bytes.
                header = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", declared)
                yield bytes([number]) + header + body[7:]
                run = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1536)
                block = (declared & 0x1FFFFF) << 3 | 0b011  # last, one byte repeated
                yield bytes([number]) + run + block.to_bytes(3, "little") + b"\0"


# ---- all

_EXAMPLES = (
    {"url": "s3://bucket/kv", "storage_options": {"key": "k"}, "io_timeout": 30},
    {"url": "/mnt/kv", "threads": 8, "processes": 0, "codec": "zstd", "io_timeout": 1.5},
    {"url": "gs://b", "client": "fsspec", "on_mismatch": "isolate", "locality": "LOCAL"},
)
_URLS = (
    "s3://bucket/folder",
    "/mnt/kv store/[a]*",
    "file:///mnt/kv",
    "local:///mnt/../kv",
    "~/kv",
    "memory://x",
    "sftp://user:word@host:22/a/b?c#d",
    "s3://key:se/cr@et@bucket",
    "simplecache::s3://b",
    "http:/one/slash",
)


def _records(name: str) -> list[bytes]:
    documents = [json.loads(each) for each in _documents("v1", "zarr.json")]
    found = [each["attributes"].get("kvstore", {}).get(name) for each in documents]
    return [json.dumps(each).encode() for each in found if each]


def _arrays() -> list[bytes]:
    own = [_FORMAT.document(_KEY, 0xDEADBEEF, codec) for codec in CODECS]
    return own + [json.dumps(json.loads(each)).encode() for each in own]


TARGETS: dict[str, tuple[Target, list[bytes]]] = {
    "array": (array, [*_arrays(), *_documents("v1-codecs", "zarr.json")]),
    "group": (group, _documents("v1", "zarr.json")),
    "layout_record": (layout_record, _records("layout")),
    "config_record": (config_record, _records("config")),
    "options": (options, [json.dumps(each).encode() for each in _EXAMPLES]),
    "url": (url, [each.encode() for each in _URLS]),
    "chunk": (chunk, list(_chunks())),
}
"""By name: the target, and real inputs to begin from."""
