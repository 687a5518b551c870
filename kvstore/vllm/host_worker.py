"""Offloading for engines that run on the CPU: rows are copied from host memory to host.

vLLM's own worker refuses the CPU platform. The matching of engine blocks to parts of a
row follows `transfer_async` in `vllm/v1/kv_offload/cpu/gpu_worker.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import InvalidInputError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec


class KVStoreOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering, with a worker for the CPU platform too."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's own worker on an accelerator, `HostWorker` on a CPU."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise InvalidInputError(
                "canonical_layout: not supported on the CPU platform, whose attention "
                "writes tiles of its own inside each head. Remove canonical_layout."
            )
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return HostWorker(kv_caches, region, self.blocks_per_chunk)
        except BaseException:
            region.cleanup()
            raise


class HostWorker(OffloadingWorker):
    """Copies between the engine's tensors and the rows of the primary tier.

    A copy is done when `submit_*` returns: it costs what the memory bandwidth allows, and
    the engine's own threads would use the same cores meanwhile.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks: int
    ) -> None:
        """Take this worker's part of `region`, one view for each of the tensors.

        Args:
            kv_caches: the engine's tensors, each of shape (blocks, page bytes), int8.
            region: the primary tier's memory, which the worker now owns.
            blocks: engine blocks in one row.
        """
        self._region = region
        self._blocks = blocks
        self._refs = kv_caches.group_data_refs
        self._engine: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            view = region.create_next_worker_view(page * blocks)
            self._engine.append(cache.tensor.view(torch.int8).view(-1, page))
            self._rows.append(view.unflatten(1, (blocks, page)))
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Engine blocks to rows."""
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Rows to engine blocks. Every copy is expedited: it is done on return."""
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def _copy(
        self, job_id: int, engine: GPULoadStoreSpec, rows: Any, *, to_rows: bool
    ) -> bool:
        started = time.monotonic()
        copied = 0
        block_ids = torch.as_tensor(engine.block_ids).long()
        chunk_ids = torch.as_tensor(rows.block_ids).long()
        first_block = first_chunk = 0
        for refs, count, index in zip(
            self._refs, engine.group_sizes, engine.block_indices, strict=True
        ):
            if count == 0:
                continue
            skipped = index % self._blocks
            position = torch.arange(skipped, skipped + count)
            chunks = chunk_ids[first_chunk + position // self._blocks]
            blocks = block_ids[first_block : first_block + count]
            part = position % self._blocks
            for ref in refs:
                size = ref.page_size_bytes
                page = self._engine[ref.tensor_idx]
                row = self._rows[ref.tensor_idx]
                if to_rows:
                    row[chunks, part, :size] = page[blocks, :size]
                else:
                    page[blocks, :size] = row[chunks, part, :size]
                copied += count * size
            first_block += count
            first_chunk += -(-(skipped + count) // self._blocks)
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied,
                transfer_time=time.monotonic() - started,
            )
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Every copy since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Give the primary tier's memory back."""
        self._rows.clear()
        self._region.cleanup()
