# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make random KV cells, the layouts a cache may keep them in, and their defined sums.

Needs numpy and torch alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import slice_factor
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    integer_view,
)

from . import reference


def factors_of(layer, heads, first_head=0):
    values = [slice_factor(layer, first_head + h) for h in range(heads)]
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


def view(cells, cache, layer=3, first_head=0):
    """Return a view of `cache`, a uint8 ``[B, H, N, C]`` cache that holds `cells`."""
    content = cells.shape[-1]
    width = next(w for w in (8, 4, 2) if content % w == 0)
    blocks = integer_view(cache, len(cells), width)
    factors = factors_of(layer, cells.shape[1], first_head).to(cache.device)
    return LayerView("", blocks, width, content // width, factors, (1, 0))


def random_cells(*shape, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).randint(0, 256, shape, "u1"))


def head_major(cells):
    return cells


def token_major(cells):
    return cells.transpose(1, 2).contiguous().transpose(1, 2)


def kernel_split(cells, number=2):
    blocks, heads, tokens, content = cells.shape
    size = tokens // number
    parts = cells.view(blocks, heads, number, size, content).transpose(1, 2)
    return parts.reshape(blocks * number, heads, size, content)


def kernel_blocks_of_2(cells):
    """Return kernel blocks of 2 tokens: several to a unit, several units to a block."""
    return kernel_split(cells, cells.shape[2] // 2)


def kernel_split_token_major(cells):
    return token_major(kernel_split(cells))


def interleaved(cells):
    """Put another layer's page of the same size before each block."""
    wide = torch.zeros(len(cells), 2, *cells.shape[1:], dtype=torch.uint8)
    wide[:, 1] = cells
    return wide[:, 1]


LAYOUTS = [
    head_major,
    token_major,
    kernel_split,
    kernel_split_token_major,
    kernel_blocks_of_2,
    interleaved,
]

SHAPES = {
    "GQA": (4, 3, 16, 64),
    "one head, several tiles": (4, 1, 16, 1152),
    "units of several kernel blocks": (4, 3, 64, 32),
    "units of 1,280 pieces": (4, 2, 64, 8 * 80),
    "chunks beyond 16K pieces": (4, 2, 120, 8 * 160),
    "many heads": (4, 40, 4, 16),
    "4-byte pieces": (4, 5, 6, 132),
    "2-byte pieces": (4, 3, 10, 22),
    "one piece": (4, 1, 2, 8),
}


def rows_for(tokens, device="cpu"):
    """Return whole, partial and empty units of blocks of `tokens`, last ones first."""
    rows, size = ROWS.clone(), reference.unit_size(tokens)
    per_block = tokens // size
    rows[0] = (rows[0] + 1) * per_block - 1 - torch.arange(4) % per_block
    rows[2] = torch.tensor([size, size - 1, 0, size // 2 + 1])
    return rows.to(device)


ROWS = torch.tensor([[2, 0, 3, 1], [4096, 0, 12, 500_000], [0, 0, 0, 0]])


def expected(cells, rows, layer=3, first_head=0):
    data = cells.numpy()
    size = reference.unit_size(data.shape[2])
    per_block, sums = data.shape[2] // size, []
    for unit, first, valid in rows.T.tolist():
        at = unit % per_block * size
        part = data[unit // per_block][:, at : at + size]
        sums.append(
            reference.block_sum({layer: part}, first, first + valid, first_head)
        )
    return sums


@dataclass(frozen=True)
class Backend:
    """A backend on its device: called as it is, with memory of the CPU."""

    prepare: Callable[..., Any]
    device: str = "cpu"

    def __call__(self, layers: Sequence[LayerView]) -> Callable[..., None]:
        there = [
            replace(
                layer,
                blocks=moved(layer.blocks, self.device),
                factors=layer.factors.to(self.device),
            )
            for layer in layers
        ]
        sum_rows = self.prepare(there)

        def run(rows: torch.Tensor, out: torch.Tensor) -> None:
            sums = moved(out, self.device)
            sum_rows(moved(rows, self.device), sums)
            out.copy_(sums)

        return run


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor that lies in memory of the device as it does in its own."""
    if device == "cpu":
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return storage.to(device).as_strided(shape, strides, offset)


def run(prepare, layers, rows):
    """Return the sums of `layers` together, by what `prepare` makes."""
    out = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
    prepare(layers)(rows, out)
    return [int(v) for v in out.cpu().numpy().view(np.uint64)]
