"""Run OffloadingConnector's CPU tier where blocks are copied without a GPU's streams.

An out-of-tree spec, for ``kv_connector_extra_config``::

    {
        "spec_name": "HostOffloading",
        "spec_module_path": "kv_checksum_rig.offloading",
        "cpu_bytes_to_use": 33554432,
    }

vLLM's scheduler side, its manager, its chunks and its connector are the real ones. ``load_steps`` says over how many
steps an asynchronous load lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopies(OffloadingWorker):
    """Copies blocks between the KV cache and rows of host memory, at once."""

    def __init__(self, kv_caches: Any, per_chunk: int, chunks: int, steps: int) -> None:
        self._caches = [entry.tensor for entry in kv_caches.tensors]
        self._rows = [
            torch.zeros(per_chunk * chunks, cache.shape[1], dtype=torch.int8)
            for cache in self._caches
        ]
        self._refs = kv_caches.group_data_refs
        self._per_chunk, self._steps = per_chunk, steps
        # By job: steps until it is told as finished, and bytes.
        self._jobs: dict[int, tuple[int, int]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to host memory."""
        moved = 0
        for cache, row, size in self._pairs(src_spec, dst_spec):
            row[:size].copy_(cache[:size])
            moved += size
        self._jobs[job_id] = (0, moved)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy blocks back."""
        moved = 0
        for cache, row, size in self._pairs(dst_spec, src_spec):
            cache[:size].copy_(row[:size])
            moved += size
        self._jobs[job_id] = (0 if expedited else self._steps, moved)
        return True

    def _pairs(
        self, blocks: Any, chunks: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield each block in the cache, its place in host memory, and its bytes."""
        block_ids, chunk_ids = iter(blocks.block_ids), iter(chunks.block_ids)
        sizes = zip(blocks.group_sizes, blocks.block_indices, strict=True)
        for group, (number, first) in enumerate(sizes):
            chunk = 0
            for n in range(number):
                at = (first + n) % self._per_chunk
                if n == 0 or at == 0:
                    chunk = int(next(chunk_ids))
                block = int(next(block_ids))
                for ref in self._refs[group]:
                    cache, rows = (
                        self._caches[ref.tensor_idx],
                        self._rows[ref.tensor_idx],
                    )
                    row = rows[chunk * self._per_chunk + at]
                    yield cache[block], row, ref.page_size_bytes

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs whose steps are over."""
        done = {job: size for job, (left, size) in self._jobs.items() if left <= 0}
        self._jobs = {
            job: (left - 1, size)
            for job, (left, size) in self._jobs.items()
            if left > 0
        }
        return [TransferResult(job, True, size, 1e-3) for job, size in done.items()]

    def wait(self, job_ids: set[int]) -> None:
        """Let jobs be told as finished next time; their copies are done."""
        for job in job_ids & self._jobs.keys():
            self._jobs[job] = (0, self._jobs[job][1])


class HostOffloading(CPUOffloadingSpec):
    """vLLM's CPU spec with the copies above."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return this process's worker."""
        worker: OffloadingWorker | None = getattr(self, "_copies", None)
        if worker is None:
            steps = int(self.extra_config.get("load_steps", 2))
            worker = self._copies = HostCopies(
                kv_caches, self.blocks_per_chunk, self.num_chunks, steps
            )
        return worker
