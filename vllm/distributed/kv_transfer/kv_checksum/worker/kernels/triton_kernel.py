# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum units with Triton: one pass over the cache, no host sync, any layout.

For every row (one unit of a request) and every slice (layer and KV head) of it,
the kernel sums mod 2**64, over the pieces ``x`` with number ``j`` in the request::

    y = (x ^ (x >> 33)) * m * (2 * j + 1)
    t = (y >> 32) * C
    term = y ^ low32(t ^ (t >> 32))

(`checksum` gives the reasons). A masked piece reads as 0, whose term is 0, so
token slots past the valid ones need no other care. Additions are exact mod
2**64, so their order does not matter and the sums are bit-identical to
`torch_reference`'s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    FOLD_FACTOR,
    GOLDEN_FACTOR,
    MASK64,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SumRows
from vllm.triton_utils import tl, triton

_TILE = 256
"""Most pieces that a program reads at once: 8 per lane of its one warp."""

_TILES_PER_PROGRAM = 16
"""Tiles that a program sums: 4K pieces, or 32 KiB where they are 8 bytes wide."""

_NUM_WARPS = 1
_NUM_STAGES = 1
_FOLD: tl.constexpr = tl.constexpr(FOLD_FACTOR)


@triton.jit
def _terms(raw, weights, PIECE_BITS: tl.constexpr):
    """Compute the terms of signed pieces of PIECE_BITS; zero-extend narrow ones."""
    if PIECE_BITS == 64:
        x = raw.to(tl.uint64, bitcast=True)
        x ^= x >> 33
    elif PIECE_BITS == 32:
        x = raw.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        x = raw.to(tl.uint16, bitcast=True).to(tl.uint64)
    y = x * weights
    folded = (y >> 32) * _FOLD
    # Both are narrowed before the XOR, which then is no 64-bit operation.
    low = folded.to(tl.uint32) ^ (folded >> 32).to(tl.uint32)
    return y ^ low.to(tl.uint64)


@triton.jit(
    do_not_specialize=[
        "addresses",
        "rows",
        "num_rows",
        "factors",
        "out",
        "out_stride",
    ],
)
def _layer_checksum_kernel(
    addresses,  # int64 (layers,): where each layer's block 0 begins
    rows,  # int64 (3, num_rows): unit, first token, valid tokens
    num_rows,
    factors,  # int64 (layers, HEADS): factors of consecutive slices
    out,  # int64: sums, added to
    out_stride,
    # The layer's shape: units per block and per kernel block, parts of a unit, heads,
    # tokens per part, pieces per token here and in the whole layer, number of the
    # first one here; numerator and denominator of the tokens per state.
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECES: tl.constexpr,
    ALL_PIECES: tl.constexpr,
    FIRST_PIECE: tl.constexpr,
    TOKENS_PER_STATE: tl.constexpr,
    STATES_PER_TOKEN: tl.constexpr,
    # Strides in pieces.
    STRIDE_B: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_U: tl.constexpr,
    STRIDE_R: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_P: tl.constexpr,
    PIECE_BITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of the addresses, in bytes
    NEXT_FACTOR: tl.constexpr,  # what the next slice's factor adds, mod 2**64
    SPAN: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    SPANS_PER_PROGRAM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    """Add a share of one layer's sum of one row to ``out[row * out_stride]``.

    A slice's pieces in one part of a unit are cut into spans; a tile is one span
    of TILE_HEADS slices. A program walks over SPANS_PER_PROGRAM spans and
    HEADS_PER_PROGRAM slices, one of which is a single tile. From tile to tile the
    weights follow by one addition.
    """
    SPANS: tl.constexpr = (TOKENS * PIECES + SPAN - 1) // SPAN
    SPAN_SHARES: tl.constexpr = (SPANS + SPANS_PER_PROGRAM - 1) // SPANS_PER_PROGRAM
    HEAD_SHARES: tl.constexpr = (HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    DENSE: tl.constexpr = STRIDE_T == PIECES * STRIDE_P
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    layer = tl.program_id(2)
    first_head = (share % HEAD_SHARES) * HEADS_PER_PROGRAM
    last_head = tl.minimum(first_head + HEADS_PER_PROGRAM, HEADS)
    share = share // HEAD_SHARES
    part = share // SPAN_SHARES
    first_span = (share % SPAN_SHARES) * SPANS_PER_PROGRAM
    last_span = tl.minimum(first_span + SPANS_PER_PROGRAM, SPANS)

    unit = tl.load(rows + row)
    block, unit = unit // UNITS, unit % UNITS
    first = tl.load(rows + num_rows + row)
    valid = tl.load(rows + 2 * num_rows + row).to(tl.int32)
    if TOKENS_PER_STATE != 1 or STATES_PER_TOKEN != 1:
        # States stand for tokens from here on.
        end = (first + valid) * STATES_PER_TOKEN // TOKENS_PER_STATE
        first = first * STATES_PER_TOKEN // TOKENS_PER_STATE
        valid = (end - first).to(tl.int32)
        if valid <= 0:
            return
    first += part * TOKENS
    valid -= part * TOKENS
    factor = tl.load(factors + layer * HEADS + first_head).to(tl.uint64, bitcast=True)
    address = tl.load(addresses + layer)
    if PIECE_BITS == 64:
        blocks = address.to(tl.pointer_type(tl.int64))
    elif PIECE_BITS == 32:
        blocks = address.to(tl.pointer_type(tl.int32))
    else:
        blocks = address.to(tl.pointer_type(tl.int16))
    blocks = tl.multiple_of(blocks, ALIGNMENT)
    base = blocks + block * STRIDE_B
    base += (unit // INNER) * STRIDE_K + (unit % INNER) * STRIDE_U
    base += part.to(tl.int64) * STRIDE_R
    base += first_head.to(tl.int64) * STRIDE_H

    lane = tl.arange(0, SPAN * TILE_HEADS)
    if TILE_HEADS == 1:
        piece = lane
    else:
        # Neighbouring lanes read neighbouring memory.
        if STRIDE_H == 1:
            head = lane % TILE_HEADS
            piece = lane // TILE_HEADS
        else:
            head = lane // SPAN
            piece = lane % SPAN
        factor += head.to(tl.uint64) * NEXT_FACTOR
        base += head.to(tl.int64) * STRIDE_H
    piece += first_span * SPAN
    num_kept = tl.minimum(valid, TOKENS) * PIECES
    if PIECES == ALL_PIECES:
        j = first.to(tl.uint64) * ALL_PIECES + piece.to(tl.uint64)
    else:
        j = (first + piece // PIECES).to(tl.uint64) * ALL_PIECES
        j += (piece % PIECES + FIRST_PIECE).to(tl.uint64)
    odd = 2 * j + 1
    weights = factor * odd
    if DENSE:
        pointers = base + piece * STRIDE_P
    else:
        pointers = base + (piece // PIECES) * STRIDE_T + (piece % PIECES) * STRIDE_P
    total = tl.zeros((SPAN * TILE_HEADS,), tl.uint64)
    if HEADS_PER_PROGRAM > TILE_HEADS:
        step = odd * NEXT_FACTOR * TILE_HEADS
        kept = piece < num_kept
        for at_head in range(first_head, last_head, TILE_HEADS):
            mask = kept
            if HEADS_PER_PROGRAM % TILE_HEADS != 0 or HEADS % TILE_HEADS != 0:
                mask = kept & (at_head + head < last_head)
            raw = tl.load(pointers, mask=mask, other=0)
            total += _terms(raw, weights, PIECE_BITS)
            weights += step
            pointers += TILE_HEADS * STRIDE_H
    else:
        if HEADS % TILE_HEADS != 0:
            num_kept = tl.where(first_head + head < last_head, num_kept, 0)
        step = factor * (2 * SPAN)
        for _ in range(first_span, last_span):
            raw = tl.load(pointers, mask=piece < num_kept, other=0)
            total += _terms(raw, weights, PIECE_BITS)
            weights += step
            pointers += SPAN * STRIDE_P
            num_kept -= SPAN
    sums = tl.sum(total, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(out + row * out_stride, sums, sem="relaxed")


def _span(pieces: int) -> int:
    """Return the largest span of which at most an eighth is wasted, or a small one."""
    span = min(_TILE, triton.next_power_of_2(pieces))
    while span > 64 and (-pieces % span) * 8 > pieces + -pieces % span:
        span //= 2
    return span


def kernel_constants(layer: LayerView) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel for `layer`."""
    _, _, inner, parts, heads, tokens, pieces = layer.units.shape
    block, kernel_block, unit, part, head, token, piece = layer.units.stride()
    if tokens == 1:
        token = pieces * piece
    span = _span(tokens * pieces)
    spans = triton.cdiv(tokens * pieces, span)
    tile_heads = min(_TILE // span, triton.next_power_of_2(heads))
    # A program walks along the heads, or along the slice if that has more tiles:
    # weights and pointers step evenly there if it is dense and read whole.
    heads_per = min(heads, tile_heads * _TILES_PER_PROGRAM)
    spans_per = 1
    even = pieces == layer.pieces and token == pieces * piece
    if even and spans > triton.cdiv(heads, tile_heads):
        heads_per, spans_per = tile_heads, min(spans, _TILES_PER_PROGRAM)
    return {
        "UNITS": layer.units_per_block,
        "INNER": inner,
        "PARTS": parts,
        "HEADS": heads,
        "TOKENS": tokens,
        "PIECES": pieces,
        "ALL_PIECES": layer.pieces,
        "FIRST_PIECE": layer.first_piece,
        "TOKENS_PER_STATE": layer.state_ratio[0],
        "STATES_PER_TOKEN": layer.state_ratio[1],
        "STRIDE_B": block,
        "STRIDE_K": kernel_block,
        "STRIDE_U": unit,
        "STRIDE_R": part,
        "STRIDE_H": head,
        "STRIDE_T": token,
        "STRIDE_P": piece,
        "PIECE_BITS": 8 * layer.piece_bytes,
        "ALIGNMENT": math.gcd(layer.units.data_ptr(), 16),
        "NEXT_FACTOR": 2 * GOLDEN_FACTOR & MASK64,
        "SPAN": span,
        "TILE_HEADS": tile_heads,
        "SPANS_PER_PROGRAM": spans_per,
        "HEADS_PER_PROGRAM": heads_per,
    }


@dataclass
class _Launch:
    """Layers of one shape, which one launch sums.

    `addresses` and `factors` are on the device, `shares` is the number of programs
    per row and layer.
    """

    constants: dict[str, Any]
    shares: int
    addresses: torch.Tensor
    factors: torch.Tensor

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _layer_checksum_kernel[(rows.shape[1], self.shares, len(self.addresses))](
            self.addresses,
            rows,
            rows.stride(0),
            self.factors,
            out,
            out.stride(0),
            **self.constants,
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
        )


def prepare(layers: Sequence[LayerView]) -> SumRows:
    """Build the function that sums `layers`; the caches must stay where they are.

    Layers of one shape share a launch, so that a step's cost on the host does not
    grow with the number of layers.
    """
    shapes: dict[tuple[Any, ...], list[LayerView]] = {}
    for layer in layers:
        key = tuple(kernel_constants(layer).values())
        shapes.setdefault(key, []).append(layer)
    launches = [_launch(alike) for alike in shapes.values()]

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        for launch in launches:
            launch(rows, out)

    return run


def _launch(layers: list[LayerView]) -> _Launch:
    c = kernel_constants(layers[0])
    spans = triton.cdiv(c["TOKENS"] * c["PIECES"], c["SPAN"])
    shares = c["PARTS"] * triton.cdiv(spans, c["SPANS_PER_PROGRAM"])
    shares *= triton.cdiv(c["HEADS"], c["HEADS_PER_PROGRAM"])
    addresses = [layer.units.data_ptr() for layer in layers]
    device = layers[0].units.device
    return _Launch(
        c,
        shares,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.stack([layer.factors for layer in layers]),
    )
