# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the CPU path on caches as vLLM lays them out, beside two plain sums.

Blocks are in random order, as a cache's are after a while. The plain sum in place
(`plain_sum.py`) adds up the same blocks in the same order, each from its first byte to
its last, without weights; it looks 0, 1 and 4 blocks ahead, of which the fastest
counts. The plain read adds up as many bytes of one array in order, so it also has none
of what random blocks cost. All are the best of many passes, taken in turns. Sums are
compared with the PyTorch path's first, those of the plain sum with the array's.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import plain_sum
import torch
from benchmark_kv_checksum import SHAPES, Shape, layer_of, machine

from vllm.distributed.kv_transfer.kv_checksum.worker import attention
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    numba_kernel,
    torch_reference,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    integer_view,
)

Cache = tuple[torch.Tensor, list[LayerView]]
"""All of a cache's words, and the views that sum its blocks."""

PASSES = {2**20: 160, 2**24: 40, 2**26: 14}
"""Passes by bytes; in four turns each."""

HEADS, HEAD_SIZE = 8, 128


def _words(*dims: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random words, and a cache of these dims over them."""
    number = torch.Size(dims).numel() * dtype.itemsize // 8
    words = torch.randint(-(2**62), 2**62, (number,))
    return words, words.view(dtype).view(dims)


def _view(view: Any, pieces: int, heads: int, first: int, per_state: Any) -> LayerView:
    factors = layer_of(Shape("", heads, 1, 1), 1, "cpu").factors
    return LayerView("", view, 8, pieces, factors, (1, 0), first, per_state)


def dense(shape: Shape, size: int) -> Cache:
    """Return a cache whose tokens lie one after the other."""
    layer = layer_of(shape, size // shape.block_bytes, "cpu")
    return layer.blocks.view(-1), [layer]


def segments(states: int, sizes: Sequence[int], per_state: int, size: int) -> Cache:
    """Return a cache of blocks that hold all states' values, then all their scales."""
    number = size // (states * sum(sizes))
    words, cache = _words(number, 1, states, sum(sizes), dtype=torch.uint8)
    _, pieces, parts = attention._segments(cache, 1, sizes, None)
    return words, [_view(v, pieces, 1, first, per_state) for v, first in parts]


def cpu_attention(tokens: int, dtype: torch.dtype, size: int) -> Cache:
    """Return a cache of vLLM's CPU attention, whose keys are transposed."""
    width = 2 * HEAD_SIZE * dtype.itemsize
    number = size // (HEADS * tokens * width)
    words, cache = _words(number, HEADS, tokens, 2 * HEAD_SIZE, dtype=dtype)
    parts = attention._cpu_vectors(cache, number, integer_view(cache, number, 8))
    return words, [_view(v, width // 8, HEADS, first, 1) for v, first in parts]


def cpu_tiles(tokens: int, size: int) -> Cache:
    """Return a cache of the same for `amx`, in tiles, bf16."""
    width = 4 * HEAD_SIZE
    number = size // (HEADS * tokens * width)
    words, cache = _words(number, HEADS, tokens, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    parts = attention._cpu_tiles(cache, 1, 8)
    return words, [_view(v, width // 8, HEADS, first, 1) for v, first in parts]


def caches() -> dict[str, Callable[[int], Cache]]:
    """Return what makes each cache of about so many bytes, by name."""
    found: dict[str, Callable[[int], Cache]] = {
        shape.name: lambda size, s=shape: dense(s, size)  # type: ignore[misc]
        for shape in SHAPES
        if "state rows" not in shape.name and "DeepSeek-V4:" not in shape.name
    }
    latent = (576, 8)
    for tokens, states, what in (
        (4, 64, "64 latents, of 4 tokens each"),
        (128, 2, "2 latents, of 128 tokens each"),
        (1, 64, "a window of 64 tokens"),
    ):
        found[f"DeepSeek-V4, values then scales: {what}"] = (
            lambda size, t=tokens, n=states: segments(n, latent, t, size)  # type: ignore[misc]
        )
    for tokens, dtype in (
        (128, torch.bfloat16),
        (32, torch.bfloat16),
        (32, torch.float32),
        (32, torch.uint8),
    ):
        kind = "fp8" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")
        found[f"CPU attention, {kind}, {tokens} tokens"] = (
            lambda size, t=tokens, d=dtype: cpu_attention(t, d, size)  # type: ignore[misc]
        )
    found["CPU attention for amx, bf16, 32 tokens"] = lambda size: cpu_tiles(32, size)
    return found


def rows_of(layer: LayerView) -> torch.Tensor:
    """Return rows of all whole units, blocks in random order."""
    per_block = layer.units_per_block
    ids = torch.randperm(layer.blocks.shape[0])
    units = (ids[:, None] * per_block + torch.arange(per_block)).flatten()
    states = layer.blocks.shape[1] * layer.blocks.shape[3]
    tokens = int(states * layer.tokens_per_state) // per_block
    first = torch.arange(len(units)) * tokens
    return torch.stack([units, first, torch.full_like(first, tokens)])


def best(run: Callable[[], Any], passes: int) -> float:
    """Return the seconds of the fastest pass."""
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(name: str, make: Callable[[int], Cache], size: int) -> dict[str, Any]:
    """Return the rates of one cache.

    Raises:
        SystemExit: the sums are not the PyTorch path's.

    """
    words, layers = make(size)
    rows = rows_of(layers[0])
    out, right = (torch.zeros(rows.shape[1], dtype=torch.int64) for _ in range(2))
    sum_rows = numba_kernel.prepare(layers)
    sum_rows(rows, out)
    torch_reference.prepare(layers)(rows, right)
    if not torch.equal(out, right):
        raise SystemExit(f"the sums of {name} are wrong")
    plain = [plain_sum.prepare(layers, rows, look, True) for look in (0, 1, 4)]
    for add_up in plain:
        if add_up().sum() != words.sum().item():
            raise SystemExit(f"the plain sum of {name} misses bytes")
    runs = [words.sum, lambda: sum_rows(rows, out), *plain]
    turns = [[best(run, PASSES[size] // 4) for run in runs] for _ in range(4)]
    read, summed, *sums = (min(times) for times in zip(*turns, strict=True))
    in_place = min(sums)
    total = 8 * words.numel()
    return {
        "cache": name,
        "bytes": total,
        "GB/s": {
            "numba": total / summed / 1e9,
            "plain sum in place": total / in_place / 1e9,
            "read": total / read / 1e9,
        },
        "of plain sum in place": in_place / summed,
        "of read": read / summed,
        "ns per unit": 1e9 * summed / rows.shape[1],
        "ns per unit, plain sum in place": 1e9 * in_place / rows.shape[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="caches whose name has it"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there, too"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"{machine('cpu')}; share of a plain sum in place (its GB/s), "
        "of a plain read (its GB/s), ns per unit"
    )
    results = []
    for name, make in caches().items():
        if args.only not in name:
            continue
        cells = []
        for size in PASSES:
            found = measure(name, make, size)
            results.append(found)
            cells.append(
                f"{found['of plain sum in place']:.0%} "
                f"({found['GB/s']['plain sum in place']:.0f}), "
                f"{found['of read']:.0%} ({found['GB/s']['read']:.0f}), "
                f"{found['ns per unit']:,.0f} ns"
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if args.json:
        content = {"machine": machine("cpu"), "results": results}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
