"""`on_mismatch="convert"`: an engine whose axes are in another order shares the blocks."""

import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest
from stored import chunk_url, folder

from kvstore import DamagedBlockError, InvalidInputError, Layout, LayoutMismatchError
from kvstore.testing import Root, sample_config

KEY, OTHER = bytes(range(36)), bytes(range(1, 37))
LAYER_MAJOR = Layout(
    axes=("layer", "head", "token", "value"),
    shape=(3, 2, 16, 8),
    dtype="float16",
    packing="token-kv",
    backend="FLASH_ATTN",
    runner="v2",
    kv_cache_layout="LBHNC",
    layer_names=("layers.0", "layers.1", "layers.2"),
    tokens_per_block=16,
    page_bytes=512,
)
HEAD_MAJOR = replace(
    LAYER_MAJOR,
    axes=("head", "layer", "token", "value"),
    shape=(2, 3, 16, 8),
    runner="v1",
    kv_cache_layout="BHLNC",
)


def block(seed: int) -> np.ndarray:
    """Values as (layer, head, token, value)."""
    numbers = np.random.default_rng(seed).random(LAYER_MAJOR.shape)
    return numbers.astype("float16")


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
def test_both_orders_read_what_either_stored(root: Root, codec: str) -> None:
    ours = root.open(LAYER_MAJOR)
    theirs = root.open(HEAD_MAJOR, on_mismatch="convert", codec=codec)
    assert theirs.url == ours.url
    assert theirs.layout == HEAD_MAJOR
    first, second = block(1), block(2)
    assert ours.store(KEY, first)
    assert theirs.store(OTHER, np.ascontiguousarray(second.swapaxes(0, 1)))
    assert not theirs.store(KEY, first)  # it is there
    found = np.empty(HEAD_MAJOR.shape, "float16")
    assert theirs.load(KEY, found)
    assert np.array_equal(found.swapaxes(0, 1), first)
    assert theirs.load(OTHER, found)
    assert np.array_equal(found.swapaxes(0, 1), second)
    found = np.empty(LAYER_MAJOR.shape, "float16")
    assert ours.load(OTHER, found)
    assert np.array_equal(found, second)


def test_the_log_says_both_orders(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    root.open(LAYER_MAJOR)
    with caplog.at_level(logging.WARNING, "kvstore.store"):
        root.open(HEAD_MAJOR, on_mismatch="convert")
    [line] = [record.getMessage() for record in caplog.records]
    assert "('layer', 'head', 'token', 'value')" in line
    assert "converted to ('head', 'layer', 'token', 'value')" in line


def test_where_nothing_differs_nothing_is_converted(root: Root) -> None:
    store = root.open(HEAD_MAJOR, on_mismatch="convert")
    values = np.ascontiguousarray(block(1).swapaxes(0, 1))
    store.store(KEY, values)
    assert root.read(chunk_url(store, KEY))[:-4] == values.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"backend": "OTHER"},
        {"backend": None},
        {"runner": None},
        {"layer_names": ("layers.2", "layers.1", "layers.0")},
        {"packing": "cpu-other"},
        {"page_bytes": None},
        {"tokens_per_block": None},
    ],
)
def test_whatever_else_differs_is_refused(root: Root, change: dict[str, object]) -> None:
    root.open(LAYER_MAJOR)
    other = replace(HEAD_MAJOR, **change)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatchError, match=next(iter(change))):
        root.open(other, on_mismatch="convert")


def test_blocks_of_an_unknown_packing_are_refused(root: Root) -> None:
    root.open(replace(LAYER_MAJOR, packing=None))
    with pytest.raises(LayoutMismatchError, match="axes"):
        root.open(replace(HEAD_MAJOR, packing=None), on_mismatch="convert")


def test_another_config_is_refused(root: Root) -> None:
    store = root.open(LAYER_MAJOR)
    document = f"{store.url.removesuffix('/r0/g0')}/zarr.json"
    root.write(document, root.read(document).replace(b"org/model", b"org/other"))
    with pytest.raises(LayoutMismatchError, match="model_name"):
        root.open(HEAD_MAJOR, on_mismatch="convert")


def test_a_claim_that_the_stored_order_cannot_hold_is_refused(root: Root) -> None:
    config = sample_config(parallel_agnostic=True)
    store = root.open(HEAD_MAJOR, config=config)
    document = f"{store.url}/zarr.json"
    lie = root.read(document)
    for ours, theirs in (
        (b'"head",\n          "layer"', b'"layer",\n          "head"'),
        (b"2,\n          3", b"3,\n          2"),
    ):
        assert ours in lie
        lie = lie.replace(ours, theirs)
    root.write(document, lie)
    with pytest.raises(InvalidInputError, match="parallel_agnostic"):
        root.open(HEAD_MAJOR, config=config, on_mismatch="convert")


def test_damage_is_found_before_anything_is_converted(root: Root) -> None:
    ours = root.open(LAYER_MAJOR)
    theirs = root.open(HEAD_MAJOR, on_mismatch="convert")
    ours.store(KEY, block(1))
    chunk = bytearray(root.read(chunk_url(ours, KEY)))
    chunk[100] ^= 1
    root.write(chunk_url(ours, KEY), bytes(chunk))
    found = np.zeros(HEAD_MAJOR.shape, "float16")
    with pytest.raises(DamagedBlockError):
        theirs.load(KEY, found)
    assert not found.any()
    assert theirs.store(KEY, np.ascontiguousarray(block(1).swapaxes(0, 1)))
    assert theirs.load(KEY, found)
    assert root.read(chunk_url(ours, KEY))[:-4] == block(1).tobytes()


def test_the_steps_pickle(root: Root) -> None:
    root.open(LAYER_MAJOR).store(KEY, block(1))
    theirs = root.open(HEAD_MAJOR, on_mismatch="convert")
    if not theirs.shared:
        pytest.skip("no other process sees it")
    blocks = pickle.loads(pickle.dumps(theirs.blocks))
    payload = bytearray(blocks.nbytes)
    assert blocks.load(KEY, memoryview(payload), None) is not None
    assert payload == block(1).swapaxes(0, 1).tobytes()


def test_documents_stay_as_they_are(root: Root) -> None:
    ours = root.open(LAYER_MAJOR)
    if not ours.local:
        pytest.skip("folders tell")
    before = folder(f"{ours.url}/zarr.json").read_bytes()
    root.open(HEAD_MAJOR, on_mismatch="convert")
    assert folder(f"{ours.url}/zarr.json").read_bytes() == before
