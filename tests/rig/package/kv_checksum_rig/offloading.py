"""Run OffloadingConnector where blocks are copied without a GPU's streams: another copy engine, and nothing else.

Two out-of-tree specs, for ``kv_connector_extra_config``::

    {
        "spec_name": "HostOffloading",
        "spec_module_path": "kv_checksum_rig.offloading",
        "cpu_bytes_to_use": 33554432,
    }

``HostOffloading`` has a CPU tier, ``HostTiering`` a CPU tier before others (``secondary_tiers``). vLLM's scheduler side,
its managers, its chunks and their keys, its secondary tiers and its connector are the real ones. ``load_steps`` says over
how many steps an asynchronous load lasts: its blocks arrive in as many parts. ``blocks_per_chunk`` and
``sync_load_budget_bytes`` are vLLM's own. Loads can be damaged (``kv_checksum_rig.damage``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kv_checksum_rig.damage import Page, Tampering
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pair = tuple[tuple[torch.Tensor, ...], Page]
"""The bytes of a block in the KV cache, layer by layer, and its page."""


@dataclass
class _Job:
    """One transfer; a load that lasts has blocks left to copy."""

    size: int
    steps: int = 0
    left: list[Pair] = field(default_factory=list)
    at_end: Callable[[], None] = lambda: None

    def step(self) -> bool:
        """Copy the next part of a load, and tell whether the transfer is over."""
        if self.steps <= 0:
            self.finish()
            return True
        part = -(-len(self.left) // (self.steps + 1))
        _copy_to_cache(self.left[:part])
        self.left = self.left[part:]
        self.steps -= 1
        return False

    def finish(self) -> None:
        """Copy what is left."""
        _copy_to_cache(self.left)
        self.at_end()
        self.steps, self.left, self.at_end = 0, [], lambda: None


class HostCopies(OffloadingWorker):
    """Copies blocks between the KV cache and rows of host memory.

    Args:
        kv_caches: the KV cache's tensors, and each group's part of them.
        per_chunk: blocks per chunk.
        rows: for each tensor, a row of host memory per chunk.
        steps: how many steps an asynchronous load lasts.
        on_shutdown: called when the copies have ended for good.

    """

    def __init__(
        self,
        kv_caches: Any,
        per_chunk: int,
        rows: Sequence[torch.Tensor],
        steps: int,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._caches = [entry.tensor.view(torch.uint8) for entry in kv_caches.tensors]
        self._rows = [row.view(torch.uint8) for row in rows]
        self._refs = kv_caches.group_data_refs
        self._per_chunk, self._steps = per_chunk, steps
        self._on_shutdown = on_shutdown
        self._jobs: dict[int, _Job] = {}
        self._tampering = Tampering()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to host memory."""
        pairs = list(self._pairs(src_spec, dst_spec))
        for cache, page in pairs:
            page.fill(cache)
        self._tampering.stored(page for _, page in pairs)
        self._jobs[job_id] = _Job(_size(pairs))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy blocks back, in this step or over the next ones."""
        pairs = list(self._pairs(dst_spec, src_spec))
        restore = self._tampering.before_load([page for _, page in pairs])
        steps = 0 if expedited else self._steps
        self._jobs[job_id] = job = _Job(_size(pairs), steps, pairs, restore)
        if not steps:
            job.finish()
        return True

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[Pair]:
        block_ids, chunk_ids = iter(blocks.block_ids), iter(chunks.block_ids)
        sizes = zip(blocks.group_sizes, blocks.block_indices, strict=True)
        for group, (number, first) in enumerate(sizes):
            chunk = 0
            for n in range(number):
                at = (first + n) % self._per_chunk
                if n == 0 or at == 0:
                    chunk = int(next(chunk_ids))
                block = int(next(block_ids))
                cache, page = [], []
                for ref in self._refs[group]:
                    whole = self._caches[ref.tensor_idx][block]
                    begin, size = at * len(whole), ref.page_size_bytes
                    cache.append(whole[:size])
                    row = self._rows[ref.tensor_idx][chunk]
                    page.append(row[begin : begin + size])
                yield tuple(cache), Page(group, first + n, chunk, tuple(page))

    def get_finished(self) -> list[TransferResult]:
        """Let a step pass, and return the jobs that are over."""
        done = [job_id for job_id, job in self._jobs.items() if job.step()]
        return [
            TransferResult(job_id, True, self._jobs.pop(job_id).size, 1e-3)
            for job_id in done
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Finish jobs at once; they are told as finished next time."""
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].finish()

    def shutdown(self) -> None:
        """Forget all jobs and give the host memory back."""
        self._jobs.clear()
        self._rows.clear()
        self._tampering = Tampering()
        self._on_shutdown()


def _size(pairs: Sequence[Pair]) -> int:
    return sum(layer.numel() for _, page in pairs for layer in page.layers)


def _copy_to_cache(pairs: Sequence[Pair]) -> None:
    for cache, page in pairs:
        for layer, kept in zip(cache, page.layers, strict=True):
            layer.copy_(kept)


class _HostWorker:
    """Comes before a spec; gives its worker the copies above."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return this process's worker."""
        this: Any = self
        if getattr(this, "_copies", None) is None:
            this._copies = this.create_worker(kv_caches)
        copies: OffloadingWorker = this._copies
        return copies


class HostOffloading(_HostWorker, CPUOffloadingSpec):
    """vLLM's CPU spec with the copies above."""

    def create_worker(self, kv_caches: Any) -> Any:
        """Keep chunks in memory of this process."""
        rows = [
            torch.zeros(
                self.num_chunks,
                self.blocks_per_chunk * entry.tensor.shape[1],
                dtype=torch.int8,
            )
            for entry in kv_caches.tensors
        ]
        steps = int(self.extra_config.get("load_steps", 2))
        return HostCopies(kv_caches, self.blocks_per_chunk, rows, steps)


class HostTiering(_HostWorker, TieringOffloadingSpec):
    """vLLM's spec of several tiers with the copies above."""

    def create_worker(self, kv_caches: Any) -> Any:
        """Keep chunks in the memory that vLLM's secondary tiers read and write."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        rows = [
            region.create_next_worker_view(
                self.blocks_per_chunk * entry.tensor.shape[1]
            )
            for entry in kv_caches.tensors
        ]
        steps = int(self.extra_config.get("load_steps", 2))
        return HostCopies(kv_caches, self.blocks_per_chunk, rows, steps, region.cleanup)
