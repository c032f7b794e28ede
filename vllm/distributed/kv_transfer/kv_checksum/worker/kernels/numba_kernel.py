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
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    SumRows,
    rows_of_states,
)

_ONE, _TWO, _32, _33 = (np.uint64(n) for n in (1, 2, 32, 33))
_NEXT_FACTOR = np.uint64(2 * GOLDEN_FACTOR & MASK64)
_FOLD, _LOW32 = np.uint64(FOLD_FACTOR), np.uint64(2**32 - 1)

_CHUNK = 128
"""Pieces of a run between two looks ahead."""

_AHEAD, _CACHE_LINE = 1024, 8
"""Pieces of 8 bytes: how far a run looks ahead, and how many come at once."""

_ROWS_AHEAD, _NEAR = 2, 16
"""How many rows ahead a unit is prefetched, and how many cache lines of it at most.

Processors do not guess where the next unit is if blocks are in random order.
"""

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


@intrinsic
def _element(typing_context, array, index):
    """Read an element, as ``array[index]`` does for an index that is not negative.

    Runs are short, and a slice of an array would count its users twice per run.
    """

    def generate(context, builder, signature, arguments):
        array_type = signature.args[0]
        held = context.make_array(array_type)(context, builder, arguments[0])
        element = cgutils.get_item_pointer(
            context, builder, array_type, held, [arguments[1]]
        )
        return builder.load(element)

    return array.dtype(array, index), generate


@jit
def _run(flat, at, number, weight, step):
    """Sum `number` pieces from index `at` under ``weight + step * i``.

    Prefetch if the run is long. The arithmetic leaves the processor no room to look as
    far ahead as memory is slow: it reaches 85% of the speed of a plain read without
    prefetching, and 95% with it.
    """
    total = np.uint64(0)
    while number >= _CHUNK:
        for i in range(0, _CHUNK, _CACHE_LINE):
            _prefetch(flat, at + i + _AHEAD)
        # A slice is worth its cost here: its loop is compiled better.
        chunk = flat[at : at + _CHUNK]
        for i in range(_CHUNK):
            total += _term(np.uint64(chunk[i]), weight + step * np.uint64(i))
        number -= _CHUNK
        at += _CHUNK
        weight += step * np.uint64(_CHUNK)
    for i in range(number):
        x = np.uint64(_element(flat, at + i))
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _run_apart(flat, at, stride, number, weight, step):
    """Sum as `_run` does; pieces lie `stride` apart."""
    total = np.uint64(0)
    for i in range(number):
        x = np.uint64(_element(flat, at + i * stride))
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _run_of_2(flat, at, stride, number, bits, weight, step):
    """Sum as `_run` does; element `k` of piece `i` is ``flat[at + k*stride + i]``."""
    total = np.uint64(0)
    for i in range(number):
        x = np.uint64(_element(flat, at + i))
        x |= np.uint64(_element(flat, at + stride + i)) << bits
        total += _term(x, weight + step * np.uint64(i))
    return total


@jit
def _run_of_4(flat, at, stride, number, bits, weight, step):
    total = np.uint64(0)
    for i in range(number):
        low = np.uint64(_element(flat, at + i))
        low |= np.uint64(_element(flat, at + stride + i)) << bits
        high = np.uint64(_element(flat, at + 2 * stride + i))
        high |= np.uint64(_element(flat, at + 3 * stride + i)) << bits
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
                total += _run(flat, begin, heads, factors[0] * odd, _NEXT_FACTOR * odd)
        return total
    # Tokens whose pieces follow one another are summed as one run.
    dense = token_stride == width * piece_stride and width == per_token
    runs, length = (1, number * width) if dense else (number, width)
    # Heads and tokens are visited in the order of memory.
    by_token = head_stride < token_stride
    outer, inner = (runs, heads) if by_token else (heads, runs)
    for i in range(outer):
        for k in range(inner):
            token, head = (i, k) if by_token else (k, i)
            begin = at + head * head_stride + token * token_stride
            j = first + np.uint64(token * per_token)
            step = _TWO * factors[head]
            weight = factors[head] * (_TWO * j + _ONE)
            if piece_stride == 1:
                total += _run(flat, begin, length, weight, step)
            else:
                total += _run_apart(flat, begin, piece_stride, length, weight, step)
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
            elif parts == 2:
                total += _run_of_2(flat, begin, stride, number, bits, weight, step)
            else:
                total += _run_of_4(flat, begin, stride, number, bits, weight, step)
    return total


@jit
def _exponent(number):
    """Return the exponent of a power of two; -1 for other numbers."""
    exponent = 0
    while 1 << exponent < number:
        exponent += 1
    return exponent if 1 << exponent == number else -1


@jit
def _divided(number, by, exponent):
    """Return quotient and remainder of numbers that are not negative, `by` not 0.

    Units are so short that a division shows, and Python's looks at signs and at 0, too.
    `exponent` is that of `by`, which is mostly a power of two.
    """
    if exponent >= 0:
        return number >> exponent, number & (by - 1)
    quotient = np.uint64(number) // np.uint64(by)
    return np.int64(quotient), number - np.int64(quotient) * by


@jit
def _place(unit, shape, strides, of_block, of_inner):
    """Return where a unit begins, in elements from where the layer's units begin."""
    _, outer, inner, _, _, _, _ = shape
    block, unit = _divided(unit, outer * inner, of_block)
    kernel_block, unit = _divided(unit, inner, of_inner)
    return block * strides[0] + kernel_block * strides[1] + unit * strides[2]


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
    _, outer, inner, parts_of_unit, heads, tokens, width = shape
    per_state, states = state_ratio
    of_state = _exponent(per_state)
    of_inner, of_block = _exponent(inner), _exponent(outer * inner)
    one_run = parts == 1 and heads == 1 and strides[6] == 1
    one_run = one_run and strides[5] == width and width == per_token
    line = 512 // np.int64(bits)
    lines = min(tokens * width // line + 1, _NEAR)
    for row in range(rows.shape[1]):
        # States stand for tokens from here on. Positions are not negative.
        first_token, _ = _divided(rows[1, row] * states, per_state, of_state)
        tokens_end = rows[1, row] + rows[2, row]
        end, _ = _divided(tokens_end * states, per_state, of_state)
        valid = end - first_token
        if valid <= 0:
            continue
        if row + _ROWS_AHEAD < rows.shape[1]:
            ahead = _place(
                rows[0, row + _ROWS_AHEAD], shape, strides, of_block, of_inner
            )
            for i in range(lines):
                _prefetch(flat, offset + ahead + i * line)
        begin = offset + _place(rows[0, row], shape, strides, of_block, of_inner)
        for part in range(parts_of_unit):
            number = min(tokens, valid - part * tokens)
            if number <= 0:
                break
            at = begin + part * strides[3]
            first = np.uint64((first_token + part * tokens) * per_token + skip)
            if one_run:
                weight = factors[0] * (_TWO * first + _ONE)
                out[row] += _run(flat, at, number * width, weight, _TWO * factors[0])
            elif parts == 1:
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
    by_states: dict[int, list[tuple[Any, ...]]] = {}
    for layer in layers:
        by_states.setdefault(layer.units_per_state, []).append(_arguments(layer))

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        for every, arguments in by_states.items():
            ends, sums = rows_of_states(rows, out, every)
            # Arrays that are not contiguous would be a type of their own to numba, and
            # the first of them would compile everything again, in an engine step.
            own_rows, own_sums = ends.contiguous(), sums.contiguous()
            values = own_sums.numpy().view(np.uint64)
            for layer in arguments:
                _sum_rows(*layer, own_rows.numpy(), values)
            if not sums.is_contiguous():
                sums.copy_(own_sums)

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
