# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make variants of the Triton kernel, and kernels that read or copy the same bytes.

A variant is the kernel's own source with some lines changed, so it measures what these
lines cost. Each changed text must stand exactly once.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from without_vllm import stand_in_for_vllm

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel  # noqa: E402
from vllm.triton_utils import tl, triton  # noqa: E402

Changes = tuple[tuple[str, str], ...]

_FOLDED = """    folded = (y >> 32) * _FOLD
    # Both are narrowed before the XOR, which then is no 64-bit operation.
    low = folded.to(tl.uint32) ^ (folded >> 32).to(tl.uint32)
    return y ^ low.to(tl.uint64)
"""
_TERM = "    y = x * weights\n" + _FOLDED

TODAY = (256, 16, 1)
"""Pieces of a tile, tiles of a program, and warps, as the kernel has them."""

TILINGS = [
    TODAY,
    (128, 32, 1),
    (512, 8, 1),
    (512, 8, 2),
    (512, 32, 2),
    (1024, 4, 4),
    (1024, 16, 4),
    (256, 64, 1),
]
"""What is tried in their place; (1024, 16, 4) are the sizes of the request."""


def tiling(tile: int, tiles: int, warps: int) -> Changes:
    """Return the changes that set the sizes of tiles and programs."""
    return (
        ("_TILE = 256\n", f"_TILE = {tile}\n"),
        ("_TILES_PER_PROGRAM = 16\n", f"_TILES_PER_PROGRAM = {tiles}\n"),
        ("_NUM_WARPS = 1\n", f"_NUM_WARPS = {warps}\n"),
    )


DEFINITION_1: Changes = ((_FOLDED, "    return y ^ (y >> 32)\n"),)

PROBES: dict[str, Changes] = {
    "instructions": ((_TERM, "    return x\n"),),
    "atomics": (
        (
            'tl.atomic_add(out + row * out_stride, sums, sem="relaxed")',
            "tl.store(out + row * out_stride, sums)",
        ),
        (
            'tl.atomic_add(out + number * out_stride, sums, mask=listed, sem="relaxed")',
            "tl.store(out + number * out_stride, sums, mask=listed)",
        ),
    ),
    "bytes in flight": tiling(512, 8, 1),
}
"""By what might bound the kernel: changes that take it away, or take less of it. The
sums of the first two are wrong."""


def variant(changes: Changes) -> ModuleType:
    """Return the kernel's module with these changes.

    Raises:
        ValueError: a text does not stand exactly once.

    """
    source = Path(triton_kernel.__file__).read_text()
    for before, after in changes:
        if source.count(before) != 1:
            raise ValueError(f"the kernel has changed: {before!r}")
        source = source.replace(before, after)
    # Triton reads the source of its functions from their file.
    with tempfile.NamedTemporaryFile(
        "w", suffix=".py", prefix="kernel_variant_", delete=False
    ) as file:
        file.write(source)
    name = Path(file.name).stem
    spec = importlib.util.spec_from_file_location(name, file.name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@triton.jit
def _read_kernel(source, out, number, TILE: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE * TILES + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for _ in range(TILES):
        total += tl.load(source + at, mask=at < number, other=0)
        at += TILE
    tl.atomic_add(out, tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def _copy_kernel(source, target, number, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    kept = at < number
    tl.store(target + at, tl.load(source + at, mask=kept), mask=kept)


def reader(words: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what reads int64 `words` once and adds them up."""
    out = torch.zeros(1, dtype=torch.int64, device=words.device)
    programs = triton.cdiv(len(words), 1024 * 16)

    def read() -> torch.Tensor:
        out.zero_()
        _read_kernel[(programs,)](words, out, len(words), TILE=1024, TILES=16)
        return out

    return read


def copier(words: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Return what copies int64 `words` to `target`."""
    programs = triton.cdiv(len(words), 1024)

    def copy() -> None:
        _copy_kernel[(programs,)](words, target, len(words), TILE=1024)

    return copy
