# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum units with PyTorch: the reference, and the backend of last resort.

int64 arithmetic stands for uint64: products and sums wrap alike, and shifts are
made logical by masking.
"""

from collections.abc import Sequence

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import FOLD_FACTOR
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    PIECE_DTYPES,
    LayerView,
    SumRows,
    rows_of_states,
)

_MAX_GATHER_BYTES = 64 * 2**20
"""Bound on the transient memory of one chunk of rows, in bytes."""

_ARRAYS_PER_PIECE = 4
"""int64 arrays alive at once per gathered piece: the pieces, their weights, and two
more for shifted copies or, before them, the narrow or transposed copy that reading
pieces may take."""

_LOW31 = 2**31 - 1
_LOW32 = 2**32 - 1


def prepare(
    layers: Sequence[LayerView], max_gather_bytes: int | None = None
) -> SumRows:
    """Build the function that sums `layers`.

    Args:
        layers: the views to sum.
        max_gather_bytes: bound on the transient memory of one chunk of rows; None
            for `_MAX_GATHER_BYTES`. A chunk holds one row at least.

    """

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        limit = _MAX_GATHER_BYTES if max_gather_bytes is None else max_gather_bytes
        for layer in layers:
            _sum_layer(layer, rows, out, limit)

    return run


def _sum_layer(
    layer: LayerView, rows: torch.Tensor, out: torch.Tensor, max_gather_bytes: int
) -> None:
    per_row = layer.units[0, 0, 0].numel() * 8 * _ARRAYS_PER_PIECE
    step = max(1, max_gather_bytes // per_row)
    rows, out = rows_of_states(rows, out, layer.units_per_state)
    for at in range(0, rows.shape[1], step):
        chunk = slice(at, at + step)
        out[chunk] += _sum_chunk(layer, *rows[:, chunk])


def _sum_chunk(
    layer: LayerView, ids: torch.Tensor, first: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    first, valid = _states(layer, first, valid)
    x = _pieces(layer, ids)
    _, parts, _, tokens, pieces = x.shape
    token = torch.arange(parts * tokens, device=x.device).view(1, parts, 1, tokens, 1)
    piece = torch.arange(pieces, device=x.device) + layer.first_piece
    weights = (first.view(-1, 1, 1, 1, 1) + token) * layer.pieces + piece
    weights.mul_(2).add_(1)
    x ^= (x >> 33).bitwise_and_(_LOW31)
    x *= layer.factors.view(1, 1, -1, 1, 1)
    x *= weights
    folded = (x >> 32).bitwise_and_(_LOW32).mul_(FOLD_FACTOR)
    folded ^= folded >> 32
    x ^= folded.bitwise_and_(_LOW32)
    x.masked_fill_(token >= valid.view(-1, 1, 1, 1, 1), 0)
    return x.sum(dim=(1, 2, 3, 4))


def _states(
    layer: LayerView, first: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first state of rows and the number of their states that count."""
    tokens, states = layer.state_ratio
    begin = first * states // tokens
    return begin, (first + valid) * states // tokens - begin


def _pieces(layer: LayerView, ids: torch.Tensor) -> torch.Tensor:
    """Gather the pieces of units, int64 ``(n, parts, heads, tokens, pieces)``.

    The tensor is a fresh one, which the caller may change.
    """
    _, _, inner, *_ = layer.units.shape
    blocks, units = ids // layer.units_per_block, ids % layer.units_per_block
    raw = layer.units[blocks, units // inner, units % inner]
    if layer.elements_per_piece > 1:
        raw = raw.contiguous().view(PIECE_DTYPES[layer.piece_bytes])
    if raw.dtype == torch.int64:
        return raw
    return raw.to(torch.int64).bitwise_and_((1 << 8 * layer.piece_bytes) - 1)
