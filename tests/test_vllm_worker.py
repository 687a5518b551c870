"""What lies in a row: the host worker's copies, and the tiles of vLLM's CPU kernels."""

import itertools
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore import Layout, unpack
from kvstore.vllm.host_worker import HostWorker

PAGE, PAYLOAD, CACHE_BLOCKS, CHUNKS = 2048, 2000, 12, 6


class Engine:
    """Two groups of two layers, each in a tensor of its own."""

    def __init__(self, blocks: int) -> None:
        self.tensors = [
            torch.randint(-128, 128, (CACHE_BLOCKS, PAGE), dtype=torch.int8)
            for _ in range(4)
        ]
        refs = [
            [CanonicalKVCacheRef(i, PAYLOAD) for i in pair] for pair in ((0, 1), (2, 3))
        ]
        caches = [CanonicalKVCacheTensor(tensor, PAGE) for tensor in self.tensors]
        cell = 4 * PAGE * blocks
        row = -(-cell // 4096) * 4096
        self.region = SharedOffloadRegion(
            engine_id=uuid.uuid4().hex,
            num_chunks=CHUNKS,
            rank=0,
            kv_bytes_per_chunk=row,
            cpu_page_size=cell,
        )
        self.rows = self.region.create_kv_memoryview()
        self.worker = HostWorker(CanonicalKVCaches(caches, refs), self.region, blocks)

    def part(self, chunk: int, tensor: int, sub: int, blocks: int) -> bytes:
        """The bytes of one engine block of one layer in a row, by vLLM's own formula."""
        start = (tensor * blocks + sub) * PAGE
        return bytes(np.asarray(self.rows)[chunk][start : start + PAYLOAD].tobytes())


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    del engine.rows
    engine.worker.shutdown()


@pytest.mark.parametrize(
    ("engine", "index"),
    [
        pytest.param(b, i, id=f"{b} per row, from {i}")
        for b, i in ((1, 0), (2, 0), (2, 1), (3, 2), (3, 4))
    ],
    indirect=["engine"],
)
def test_blocks_land_where_vllms_own_worker_puts_them(engine: Engine, index: int) -> None:
    blocks = engine.worker._blocks
    # With one block per row there are only as many rows as there are blocks.
    ids = [[7, 3, 11], [2, 9]] if blocks == 1 else [[7, 3, 11, 0, 5], [2, 9]]
    indices = [index, 0]
    fresh = iter((4, 0, 5, 2, 1, 3))
    chunks = [
        list(itertools.islice(fresh, -(-(start % blocks + len(members)) // blocks)))
        for members, start in zip(ids, indices, strict=True)
    ]
    flat = list(itertools.chain(*ids))
    rows = list(itertools.chain(*chunks))
    spec = GPULoadStoreSpec(flat, [len(members) for members in ids], indices)
    assert engine.worker.submit_store(1, spec, CPULoadStoreSpec(rows))
    for group, (members, places) in enumerate(zip(ids, chunks, strict=True)):
        for n, block in enumerate(members):
            place, sub = divmod(indices[group] % blocks + n, blocks)
            for tensor in (2 * group, 2 * group + 1):
                expected = engine.tensors[tensor][block, :PAYLOAD].numpy().tobytes()
                assert engine.part(places[place], tensor, sub, blocks) == expected
    before = [kept.clone() for kept in engine.tensors]
    for emptied in engine.tensors:
        emptied.zero_()
    assert engine.worker.submit_load(2, CPULoadStoreSpec(rows), spec)
    for number, loaded in enumerate(engine.tensors):
        members = ids[number // 2]
        others = [b for b in range(CACHE_BLOCKS) if b not in members]
        assert (loaded[members, :PAYLOAD] == before[number][members, :PAYLOAD]).all()
        assert not loaded[others].any()
    results = engine.worker.get_finished()
    assert [r.job_id for r in results] == [1, 2]
    assert all(r.success for r in results)
    assert results[0].transfer_size == len(flat) * 2 * PAYLOAD
    assert engine.worker.get_finished() == []


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        *itertools.product(("vec", "vec16"), ("bfloat16", "float16", "float32")),
        ("amx", "bfloat16"),  # vLLM tiles nothing else, whatever its kernel would write
    ],
)
@pytest.mark.parametrize("tokens", [32, 64])
def test_unpacked_tiles_are_what_vllms_kernel_wrote(
    isa: str, dtype: str, tokens: int
) -> None:
    """K and V go through vLLM's own writing kernel, and come back by `unpack`."""
    import vllm._custom_ops as ops

    current_platform.import_kernels()
    heads, size = 3, 64
    kind = getattr(torch, dtype)
    keys = torch.randn(tokens, heads, size).to(kind)
    values = torch.randn(tokens, heads, size).to(kind)
    cache = torch.zeros(2, heads, tokens, 2 * size, dtype=kind)
    tiles = cache.view(2, heads, 2 * tokens, size)
    slots = torch.arange(tokens, 2 * tokens)
    try:
        ops.cpu_attn_reshape_and_cache(keys, values, *tiles.chunk(2, dim=2), slots, isa)
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"this processor has no {isa} kernel for {dtype}")
    layout = Layout(
        axes=("head", "packed"),
        shape=(heads, tokens * 2 * size),
        dtype=dtype,
        packing=f"cpu-{isa}",
        tokens_per_block=tokens,
    )
    found = unpack(layout, cache[1].contiguous().view(torch.uint8).numpy())
    for ours, theirs in zip(found, (keys, values), strict=True):
        expected = theirs.transpose(0, 1).float().numpy()
        assert (ours.astype(np.float32) == expected).all()
