# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum units on the CPU: one pass over the cache, compiled by numba.

Bit-identical to `torch_reference`, which gathers whole arrays and is many times
slower. Weights are an arithmetic series along the tokens and pieces of a slice,
and along consecutive slices, so every loop here is a run of pieces under
``weight + step * i``: nothing is carried from piece to piece, and the compiler
makes SIMD of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    FOLD_FACTOR,
    GOLDEN_FACTOR,
    MASK64,
)
from vllm.distributed.kv_transfer.kv_checksum.jit import jit
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SumRows

_ONE, _TWO, _32, _33 = (np.uint64(n) for n in (1, 2, 32, 33))
_NEXT_FACTOR = np.uint64(2 * GOLDEN_FACTOR & MASK64)
_FOLD, _LOW32 = np.uint64(FOLD_FACTOR), np.uint64(2**32 - 1)

_CHUNK = 128
"""Pieces of a run between two looks ahead."""

_AHEAD, _CACHE_LINE = 1024, 8
"""Pieces of 8 bytes: how far a run looks ahead, and how many come at once."""

_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


@jit
def _term(x, weight):
    y = (x ^ (x >> _33)) * weight
    folded = (y >> _32) * _FOLD
    return y ^ ((folded ^ (folded >> _32)) & _LOW32)


@intrinsic
def _prefetch(typing_context, array, index):
    """Prefetch an element that is read soon; an index past the end does no harm."""

    def generate(context, builder, signature, arguments):
        array_type = signature.args[0]
        held = context.make_array(array_type)(context, builder, arguments[0])
        element = cgutils.get_item_pointer(
            context, builder, array_type, held, [arguments[1]]
        )
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [address, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        # The arguments mean: for reading, keep in cache, data.
        how = [ir.Constant(number, value) for value in (0, 3, 1)]
        builder.call(function, [builder.bitcast(element, address), *how])
        return context.get_dummy_value()

    return types.void(array, index), generate


@jit
def _run(pieces, weight, step):
    """Sum a run of pieces under ``weight + step * i``; prefetch if the run is long.

    The arithmetic leaves the processor no room to look as far ahead as memory is slow:
    it reaches 85% of the speed of a plain read without prefetching, and 95% with it.
    """
    total = np.uint64(0)
    done = 0
    while pieces.size - done >= _CHUNK:
        for i in range(0, _CHUNK, _CACHE_LINE):
            _prefetch(pieces, done + i + _AHEAD)
        at = weight + step * np.uint64(done)
        chunk = pieces[done : done + _CHUNK]
        for i in range(_CHUNK):
            total += _term(np.uint64(chunk[i]), at + step * np.uint64(i))
        done += _CHUNK
    for i in range(done, pieces.size):
        total += _term(np.uint64(pieces[i]), weight + step * np.uint64(i))
    return total


@jit
def _run_of_2(a, b, bits, weight, step):
    """Sum as `_run` does; piece `i` is made of element `i` of `a` and of `b`."""
    total = np.uint64(0)
    for i in range(a.size):
        x = np.uint64(a[i]) | np.uint64(b[i]) << bits
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _run_of_4(a, b, c, d, bits, weight, step):
    total = np.uint64(0)
    for i in range(a.size):
        low = np.uint64(a[i]) | np.uint64(b[i]) << bits
        high = np.uint64(c[i]) | np.uint64(d[i]) << bits
        x = low | high << (_TWO * bits)
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _short_run(flat, at, stride, number, parts, bits, weight, step):
    """Sum as `_run_of_4` does; element `k` of piece `i` is ``flat[at + k*stride + i]``.

    This serves any number of parts, and tiles of two tokens, which no SIMD fits.
    """
    total = np.uint64(0)
    for i in range(number):
        x, shift, element = np.uint64(0), np.uint64(0), at + i
        for _ in range(parts):
            x |= np.uint64(flat[element]) << shift
            shift += bits
            element += stride
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _tokens(flat, at, number, shape, strides, factors, first, per_token):
    """Sum the first `number` tokens of a unit, or of a part of it, at index `at`."""
    _, _, _, _, heads, _, width = shape
    _, _, _, _, head_stride, token_stride, piece_stride = strides
    total = np.uint64(0)
    if head_stride == 1 and piece_stride != 1:
        for token in range(number):
            for piece in range(width):
                begin = at + token * token_stride + piece * piece_stride
                odd = _TWO * (first + np.uint64(token * per_token + piece)) + _ONE
                run = flat[begin : begin + heads]
                total += _run(run, factors[0] * odd, _NEXT_FACTOR * odd)
        return total
    # Tokens whose pieces follow one another are summed as one run.
    dense = token_stride == width * piece_stride and width == per_token
    runs, length = (1, number * width) if dense else (number, width)
    by_token = head_stride < token_stride
    for i in range(runs * heads):
        # Heads and tokens are visited in the order of memory.
        if by_token:
            token, head = i // heads, i % heads
        else:
            head, token = i // runs, i % runs
        begin = at + head * head_stride + token * token_stride
        j = first + np.uint64(token * per_token)
        step = _TWO * factors[head]
        weight = factors[head] * (_TWO * j + _ONE)
        if piece_stride == 1:
            total += _run(flat[begin : begin + length], weight, step)
        else:
            end = begin + length * piece_stride
            total += _run(flat[begin:end:piece_stride], weight, step)
    return total


@jit
def _tokens_of_elements(
    flat, at, number, shape, strides, factors, first, per_token, parts, bits
):
    """Sum as `_tokens` does, for pieces of 2, 4 or 8 elements, tokens side by side."""
    _, _, _, _, heads, _, width = shape
    _, _, _, _, head_stride, _, stride = strides
    total = np.uint64(0)
    for head in range(heads):
        step = factors[head] * np.uint64(2 * per_token)
        for piece in range(width // parts):
            weight = factors[head] * (_TWO * (first + np.uint64(piece)) + _ONE)
            begin = at + head * head_stride + piece * parts * stride
            if parts == 8 or number <= 2:
                total += _short_run(
                    flat, begin, stride, number, parts, bits, weight, step
                )
                continue
            a = flat[begin : begin + number]
            b = flat[begin + stride : begin + stride + number]
            if parts == 2:
                total += _run_of_2(a, b, bits, weight, step)
            else:
                begin += 2 * stride
                c = flat[begin : begin + number]
                d = flat[begin + stride : begin + stride + number]
                total += _run_of_4(a, b, c, d, bits, weight, step)
    return total


@jit
def _sum_rows(
    flat,
    offset,
    shape,
    strides,
    factors,
    per_token,
    skip,
    parts,
    bits,
    state_ratio,
    rows,
    out,
):
    """Add each row's sum to `out` (uint64).

    Args:
        flat: the storage, as unsigned pieces or elements.
        offset: where the layer's `units` begin in it.
        shape: the shape of `units`.
        strides: the strides of `units`.
        factors: uint64 ``(heads,)``.
        per_token: the layer's `pieces`.
        skip: the layer's `first_piece`.
        parts: the layer's `elements_per_piece`.
        bits: width of an element, uint64.
        state_ratio: numerator and denominator of the tokens per state.
        rows: int64 ``(3, n)``, see `SumRows`.
        out: uint64 ``(n,)``.

    """
    _, outer, inner, parts_of_unit, _, tokens, _ = shape
    per_state, states = state_ratio
    for row in range(rows.shape[1]):
        # States stand for tokens from here on. Positions are not negative.
        first_token = rows[1, row] * states // per_state
        valid = (rows[1, row] + rows[2, row]) * states // per_state - first_token
        if valid <= 0:
            continue
        block, unit = divmod(rows[0, row], outer * inner)
        begin = offset + block * strides[0]
        begin += (unit // inner) * strides[1] + (unit % inner) * strides[2]
        for part in range(parts_of_unit):
            number = min(tokens, valid - part * tokens)
            if number <= 0:
                break
            at = begin + part * strides[3]
            first = np.uint64((first_token + part * tokens) * per_token + skip)
            if parts == 1:
                out[row] += _tokens(
                    flat, at, number, shape, strides, factors, first, per_token
                )
            else:
                out[row] += _tokens_of_elements(
                    flat,
                    at,
                    number,
                    shape,
                    strides,
                    factors,
                    first,
                    per_token,
                    parts,
                    bits,
                )


def prepare(layers: Sequence[LayerView]) -> SumRows:
    """Build the function that sums `layers`; the caches must stay where they are."""
    arguments = [_arguments(layer) for layer in layers]

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        for layer in arguments:
            _sum_rows(*layer, rows.numpy(), out.numpy().view(np.uint64))

    return run


def _arguments(layer: LayerView) -> tuple[Any, ...]:
    """Return the arguments of `_sum_rows` that depend on the layer alone."""
    units = layer.units
    size = units.element_size()
    flat = torch.empty(0, dtype=units.dtype)
    flat.set_(units.untyped_storage())
    return (
        flat.numpy().view(_UNSIGNED[size]),
        units.storage_offset(),
        tuple(units.shape),
        units.stride(),
        layer.factors.numpy().view(np.uint64),
        layer.pieces,
        layer.first_piece,
        layer.elements_per_piece,
        np.uint64(8 * size),
        layer.state_ratio,
    )
