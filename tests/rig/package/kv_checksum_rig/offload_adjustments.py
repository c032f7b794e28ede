"""Let vLLM's host-memory offload run on a machine without an accelerator.

Its scheduling, hashing and caching stay as they are. Its copy engine is not there: where it would queue
copies between device and host memory, blocks are copied by ``memmove``, because both are host memory here.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from kv_checksum_rig.on_import import on_import


def apply() -> None:
    """Register the adjustments. Safe to call more than once."""
    on_import("vllm.v1.simple_kv_offload.cuda_mem_ops", copy_by_memmove)
    on_import("vllm.v1.worker.cpu.shm", placeholders_answer)


def copy_by_memmove(module: ModuleType) -> None:
    """Copy blocks in host memory instead of through the driver's batched copy."""
    module._resolve_batch_memcpy = lambda: (None, 0)  # type: ignore[attr-defined]

    def copy_blocks(sources: list[int], targets: list[int], params: Any) -> None:
        regions = zip(params.src_bases, params.dst_bases, params.bpb, strict=True)
        for source_base, target_base, size in regions:
            for source, target in zip(sources, targets, strict=True):
                to = int(target_base) + target * int(size)
                ctypes.memmove(to, int(source_base) + source * int(size), int(size))

    module.copy_blocks = copy_blocks  # type: ignore[attr-defined]


def placeholders_answer(module: ModuleType) -> None:
    """Let the CPU runner's stand-ins for streams and events answer what offloading asks of them.

    Copies are done when they return, so every event has passed.
    """
    stream: Any = module._StreamPlaceholder  # type: ignore[attr-defined]
    stream.priority_range = staticmethod(lambda: (0, 0))
    stream.cuda_stream = 0
    event: Any = module._EventPlaceholder  # type: ignore[attr-defined]
    event.query = lambda self: True
