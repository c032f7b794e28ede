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
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    SumRows,
    rows_of_states,
)
from vllm.triton_utils import tl, triton

_TILE = 256
"""Most pieces that a program reads at once: 8 per lane of its one warp."""

_TILES_PER_PROGRAM = 16
"""Tiles that a program sums: 4K pieces, or 32 KiB where they are 8 bytes wide."""

_SMALL_SHARE = 1024
"""Pieces of a unit below which a program takes several units: with 32 per lane of its
one warp, its beginning and its end are a small part of it."""

_BYTES_PER_LOAD = 512
"""Bytes that a warp reads with one instruction: 16 per lane."""

_MAX_UNITS = 16
"""Most units that a program takes, unless as many fill less than a tile: a load then
reads 32 bytes of each in a row, which is the least that memory delivers."""

_AT_RUN_TIME = [
    "addresses",
    "rows",
    "rows_stride",
    "row_stride",
    "num_rows",
    "factors",
    "out",
    "out_stride",
]
"""Arguments for whose values no variant is compiled."""

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


@triton.jit
def _states(
    first, valid, TOKENS_PER_STATE: tl.constexpr, STATES_PER_TOKEN: tl.constexpr
):
    """Return the first state of rows and the number of their states that count."""
    if TOKENS_PER_STATE != 1 or STATES_PER_TOKEN != 1:
        end = (first + valid) * STATES_PER_TOKEN // TOKENS_PER_STATE
        first = first * STATES_PER_TOKEN // TOKENS_PER_STATE
        valid = (end - first).to(tl.int32)
    return first, valid


@triton.jit
def _pieces_at(address, PIECE_BITS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return a pointer to signed pieces."""
    if PIECE_BITS == 64:
        pieces = address.to(tl.pointer_type(tl.int64))
    elif PIECE_BITS == 32:
        pieces = address.to(tl.pointer_type(tl.int32))
    else:
        pieces = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(pieces, ALIGNMENT)


@triton.jit(do_not_specialize=_AT_RUN_TIME)
def _layer_checksum_kernel(
    addresses,  # int64 (layers,): where each layer's block 0 begins
    rows,  # int64 (3, num_rows): unit, first token, valid tokens
    rows_stride,
    row_stride,
    num_rows,
    factors,  # int64 (layers, HEADS): factors of consecutive slices
    out,  # int64 (num_rows,): sums, added to
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

    rows += row * row_stride
    unit = tl.load(rows)
    block, unit = unit // UNITS, unit % UNITS
    first = tl.load(rows + rows_stride)
    valid = tl.load(rows + 2 * rows_stride).to(tl.int32)
    first, valid = _states(first, valid, TOKENS_PER_STATE, STATES_PER_TOKEN)
    if (TOKENS_PER_STATE != 1 or STATES_PER_TOKEN != 1) and valid <= 0:
        return
    first += part * TOKENS
    valid -= part * TOKENS
    factor = tl.load(factors + layer * HEADS + first_head).to(tl.uint64, bitcast=True)
    blocks = _pieces_at(tl.load(addresses + layer), PIECE_BITS, ALIGNMENT)
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
        # Several loads are on their way at once, where no tiles are left over.
        WHOLE: tl.constexpr = SPANS % SPANS_PER_PROGRAM == 0
        UNROLLED: tl.constexpr = 4 if WHOLE and SPANS_PER_PROGRAM % 4 == 0 else 1
        for _ in tl.range(first_span, last_span, loop_unroll_factor=UNROLLED):
            raw = tl.load(pointers, mask=piece < num_kept, other=0)
            total += _terms(raw, weights, PIECE_BITS)
            weights += step
            pointers += SPAN * STRIDE_P
            num_kept -= SPAN
    sums = tl.sum(total, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(out + row * out_stride, sums, sem="relaxed")


@triton.jit(do_not_specialize=_AT_RUN_TIME)
def _small_units_kernel(
    addresses,
    rows,
    rows_stride,
    row_stride,
    num_rows,
    factors,
    out,
    out_stride,
    # The layer's shape as above.
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
    STRIDE_B: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_U: tl.constexpr,
    STRIDE_R: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_P: tl.constexpr,
    PIECE_BITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RUN_TOKENS: tl.constexpr,  # tokens whose pieces follow one another
    STEP: tl.constexpr,  # what the number of a piece grows by in them
    LOADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add one slice's sums of ROWS rows, in one part of their units, to `out`.

    A tile is LOADS spans of every row, so that each lane works for one row: what is
    computed once per row then costs the warp as much as for one row alone.
    """
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) % HEADS
    part = tl.program_id(1) // HEADS
    layer = tl.program_id(2)
    listed = number < num_rows
    row = rows + number * row_stride
    unit = tl.load(row, mask=listed, other=0)
    first = tl.load(row + rows_stride, mask=listed, other=0)
    valid = tl.load(row + 2 * rows_stride, mask=listed, other=0).to(tl.int32)
    first, valid = _states(first, valid, TOKENS_PER_STATE, STATES_PER_TOKEN)
    first += part * TOKENS
    valid -= part * TOKENS
    factor = tl.load(factors + layer * HEADS + head).to(tl.uint64, bitcast=True)
    blocks = _pieces_at(tl.load(addresses + layer), PIECE_BITS, ALIGNMENT)
    blocks += part.to(tl.int64) * STRIDE_R + head.to(tl.int64) * STRIDE_H
    block, unit = unit // UNITS, unit % UNITS
    base = blocks + block * STRIDE_B
    base += (unit // INNER) * STRIDE_K + (unit % INNER) * STRIDE_U

    load = tl.arange(0, LOADS)[:, None, None]
    lane = tl.arange(0, SPAN)[None, None, :]
    piece = load * SPAN + lane
    STEPS: tl.constexpr = (RUN_TOKENS * PIECES + LOADS * SPAN - 1) // (LOADS * SPAN)
    total = tl.zeros((LOADS, ROWS, SPAN), tl.uint64)
    # Several loads are on their way at once.
    UNROLLED_RUNS: tl.constexpr = 4 if STEPS == 1 else 1
    UNROLLED_STEPS: tl.constexpr = STEPS if STEPS < 16 else 16
    for token in tl.range(0, TOKENS, RUN_TOKENS, loop_unroll_factor=UNROLLED_RUNS):
        num_kept = tl.minimum(valid - token, RUN_TOKENS) * PIECES
        num_kept = num_kept[None, :, None]
        j = (first + token).to(tl.uint64) * ALL_PIECES + FIRST_PIECE
        weights = (factor * (2 * j + 1))[None, :, None]
        weights = weights + 2 * STEP * factor * piece.to(tl.uint64)
        pointers = (base + token * STRIDE_T)[None, :, None] + piece
        for _ in tl.range(STEPS, loop_unroll_factor=UNROLLED_STEPS):
            raw = tl.load(pointers, mask=piece < num_kept, other=0)
            total += _terms(raw, weights, PIECE_BITS)
            weights += factor * (2 * STEP * LOADS * SPAN)
            pointers += LOADS * SPAN
            num_kept -= LOADS * SPAN
    sums = tl.sum(tl.sum(total, axis=2), axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(out + number * out_stride, sums, mask=listed, sem="relaxed")


def _span(pieces: int) -> int:
    """Return the largest span of which at most an eighth is wasted, or a small one."""
    span = min(_TILE, triton.next_power_of_2(pieces))
    while span > 64 and (-pieces % span) * 8 > pieces + -pieces % span:
        span //= 2
    return span


def kernel_and_constants(layer: LayerView) -> tuple[Any, dict[str, Any]]:
    """Choose the kernel for `layer`; return it and its compile-time arguments."""
    _, _, inner, parts, heads, tokens, pieces = layer.units.shape
    block, kernel_block, unit, part, head, token, piece = layer.units.stride()
    # An axis of one place has no stride of its own.
    if pieces == 1:
        piece = token if tokens > 1 else 1
    if tokens == 1:
        token = pieces * piece
    common = {
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
    }
    dense = token == pieces * piece
    # The numbers of pieces follow one another evenly if tokens are read whole.
    of_a_unit, share = _tiles_of_a_unit(layer, dense and pieces == layer.pieces)
    fits = tokens * pieces <= _TILE * _TILES_PER_PROGRAM
    if share < _SMALL_SHARE and fits and piece == 1:
        one_run = dense and pieces in (1, layer.pieces)
        return _small_units_kernel, common | _tiles_of_units(layer, one_run)
    return _layer_checksum_kernel, common | of_a_unit


def _tiles_of_a_unit(layer: LayerView, even: bool) -> tuple[dict[str, int], int]:
    """Return how `_layer_checksum_kernel` tiles a unit, and a program's pieces."""
    heads, tokens, pieces = layer.units.shape[4:]
    span = _span(tokens * pieces)
    spans = triton.cdiv(tokens * pieces, span)
    tile_heads = min(_TILE // span, triton.next_power_of_2(heads))
    # A program walks along the heads, or along the slice if that has more tiles:
    # weights and pointers step evenly there.
    heads_per = min(heads, tile_heads * _TILES_PER_PROGRAM)
    spans_per = 1
    if even and spans > triton.cdiv(heads, tile_heads):
        heads_per, spans_per = tile_heads, min(spans, _TILES_PER_PROGRAM)
    share = min(heads_per, heads) * min(spans_per * span, tokens * pieces)
    tiles = {
        "NEXT_FACTOR": 2 * GOLDEN_FACTOR & MASK64,
        "SPAN": span,
        "TILE_HEADS": tile_heads,
        "SPANS_PER_PROGRAM": spans_per,
        "HEADS_PER_PROGRAM": heads_per,
    }
    return tiles, share


def _tiles_of_units(layer: LayerView, one_run: bool) -> dict[str, int]:
    """Return how `_small_units_kernel` tiles units, whose tokens may be `one_run`.

    It takes more of them than it must if less of a tile lies past a run's end then: at
    most a sixteenth, if a run is not shorter than a load.
    """
    tokens, pieces = layer.units.shape[5:]
    run_tokens = tokens if one_run else 1
    run = run_tokens * pieces
    load = _BYTES_PER_LOAD // layer.piece_bytes
    most = max(_MAX_UNITS, _TILE // triton.next_power_of_2(tokens * pieces))
    rows = triton.next_power_of_2(triton.cdiv(_SMALL_SHARE, tokens * pieces))
    rows = min(rows, most)
    while rows < _MAX_UNITS and -run % (load // rows) > run // 16:
        rows *= 2
    span = min(load // min(rows, _MAX_UNITS), triton.next_power_of_2(run))
    rows = max(rows, 32 // span)
    loads = max(1, _TILE // (rows * span))
    while loads > 1 and -run % (loads * span) > run // 16:
        loads //= 2
    return {
        "RUN_TOKENS": run_tokens,
        "STEP": layer.pieces if pieces == 1 else 1,
        "LOADS": loads,
        "ROWS": rows,
        "SPAN": span,
    }


@dataclass
class _Launch:
    """Layers of one shape, which one launch sums.

    `addresses` and `factors` are on the device, `shares` is the number of programs
    per layer and `rows_per_program`; a state spans `units_per_state`.
    """

    kernel: Any
    constants: dict[str, Any]
    rows_per_program: int
    shares: int
    units_per_state: int
    addresses: torch.Tensor
    factors: torch.Tensor

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        rows, out = rows_of_states(rows, out, self.units_per_state)
        number = rows.shape[1]
        programs = triton.cdiv(number, self.rows_per_program)
        self.kernel[(programs, self.shares, len(self.addresses))](
            self.addresses,
            rows,
            *rows.stride(),
            number,
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
        _, constants = kernel_and_constants(layer)
        key = tuple(constants.items())
        shapes.setdefault(key, []).append(layer)
    launches = [_launch(alike) for alike in shapes.values()]

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        for launch in launches:
            launch(rows, out)

    return run


def _launch(layers: list[LayerView]) -> _Launch:
    kernel, c = kernel_and_constants(layers[0])
    shares = c["PARTS"] * c["HEADS"]
    if kernel is _layer_checksum_kernel:
        spans = triton.cdiv(c["TOKENS"] * c["PIECES"], c["SPAN"])
        shares = c["PARTS"] * triton.cdiv(spans, c["SPANS_PER_PROGRAM"])
        shares *= triton.cdiv(c["HEADS"], c["HEADS_PER_PROGRAM"])
    addresses = [layer.units.data_ptr() for layer in layers]
    device = layers[0].units.device
    return _Launch(
        kernel,
        c,
        c.get("ROWS", 1),
        shares,
        layers[0].units_per_state,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.stack([layer.factors for layer in layers]),
    )
