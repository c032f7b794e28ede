"""Let vLLM's host-memory offload run on a machine without an accelerator.

Its scheduling, hashing and caching stay as they are. Its copy engine is not there: where it would queue
copies between device and host memory, blocks are copied at once, because both are host memory here.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kv_checksum_rig.on_import import on_import

if TYPE_CHECKING:
    from kv_checksum_rig.damage import Page


def apply() -> None:
    """Register the adjustments. Safe to call more than once."""
    on_import("vllm.v1.simple_kv_offload.cuda_mem_ops", copy_at_once)
    on_import("vllm.v1.worker.cpu.shm", placeholders_answer)


def copy_at_once(module: ModuleType) -> None:
    """Copy blocks in host memory instead of through the driver's batched copy.

    Loads can be damaged (``kv_checksum_rig.damage``). Which prefix a block belongs to, or which group, is not known here:
    its position is that within the copy.
    """
    from kv_checksum_rig.damage import Tampering

    module._resolve_batch_memcpy = lambda: (None, 0)  # type: ignore[attr-defined]
    loads = module.CU_MEMCPY_SRC_ACCESS_ORDER_ANY  # type: ignore[attr-defined]
    tampering = Tampering()

    def copy_blocks(sources: list[int], targets: list[int], params: Any) -> None:
        if not sources:
            return
        from_blocks = _pages(sources, params.src_bases, params.bpb)
        to_blocks = _pages(targets, params.dst_bases, params.bpb)
        if params.attrs.srcAccessOrder == loads:
            restore = tampering.before_load(from_blocks)
        for source, target in zip(from_blocks, to_blocks, strict=True):
            target.fill(source.layers)
        if params.attrs.srcAccessOrder == loads:
            restore()
        else:
            tampering.stored(to_blocks)

    module.copy_blocks = copy_blocks  # type: ignore[attr-defined]


def _pages(blocks: list[int], bases: Any, sizes: Any) -> list[Page]:
    """View blocks of memory, region by region."""
    import torch

    from kv_checksum_rig.damage import Page

    regions = [(int(base), int(n)) for base, n in zip(bases, sizes, strict=True)]
    return [
        Page(
            0,
            position,
            position,
            tuple(
                torch.frombuffer(
                    (ctypes.c_uint8 * size).from_address(base + block * size),
                    dtype=torch.uint8,
                )
                for base, size in regions
            ),
        )
        for position, block in enumerate(blocks)
    ]


def placeholders_answer(module: ModuleType) -> None:
    """Let the CPU runner's stand-ins for streams and events answer what offloading asks of them.

    Copies are done when they return, so every event has passed.
    """
    stream: Any = module._StreamPlaceholder  # type: ignore[attr-defined]
    stream.priority_range = staticmethod(lambda: (0, 0))
    stream.cuda_stream = 0
    event: Any = module._EventPlaceholder  # type: ignore[attr-defined]
    event.query = lambda self: True
