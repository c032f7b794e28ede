# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Add up the bytes of units where they lie: the least that any sum of units does.

The words of each unit are added, without weights, and written as one number per unit.
Runs of contiguous words are found from the addresses of a block's elements, once; what
remains is a loop over rows and runs of vector loads and additions, with prefetching.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_LANES = 8
_VECTOR = ir.VectorType(_I64, _LANES)
_UNROLLED = 4


@intrinsic
def _add_words(typing_context, address, number, later):
    """Return the sum of so many words at an address; prefetch as many at `later`."""

    def generate(context, builder, signature, arguments):
        address, number, later = arguments
        zeros = ir.Constant(_VECTOR, [0] * _LANES)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(_UNROLLED)]
        module = builder.module
        bits = ir.VectorType(ir.IntType(1), _LANES)
        place_type, byte_pointer = _VECTOR.as_pointer(), ir.IntType(8).as_pointer()
        masked = cgutils.get_or_insert_function(
            module,
            ir.FunctionType(_VECTOR, [place_type, _I32, bits, _VECTOR]),
            "llvm.masked.load.v8i64.p0",
        )
        prefetch = cgutils.get_or_insert_function(
            module,
            ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32]),
            "llvm.prefetch.p0i8",
        )
        reduce_add = cgutils.get_or_insert_function(
            module, ir.FunctionType(_I64, [_VECTOR]), "llvm.vector.reduce.add.v8i64"
        )
        how = [ir.Constant(_I32, value) for value in (0, 3, 1)]

        def constant(value: int) -> ir.Value:
            return ir.Constant(_I64, value)

        def add(total: ir.Value, index: ir.Value, mask: ir.Value | None = None) -> None:
            offset = builder.mul(index, constant(8))
            place = builder.inttoptr(builder.add(address, offset), place_type)
            if mask is None:
                words = builder.load(place, align=8)
            else:
                words = builder.call(masked, [place, ir.Constant(_I32, 8), mask, zeros])
            builder.store(builder.add(builder.load(total), words), total)
            soon = builder.inttoptr(builder.add(later, offset), byte_pointer)
            builder.call(prefetch, [soon, *how])

        step = _UNROLLED * _LANES
        many = builder.udiv(number, constant(step))
        with cgutils.for_range(builder, many) as loop:
            first = builder.mul(loop.index, constant(step))
            for i, total in enumerate(totals):
                add(total, builder.add(first, constant(i * _LANES)))
        done = builder.mul(many, constant(step))
        single = builder.udiv(builder.sub(number, done), constant(_LANES))
        with cgutils.for_range(builder, single) as loop:
            add(
                totals[0],
                builder.add(done, builder.mul(loop.index, constant(_LANES))),
            )
        done = builder.add(done, builder.mul(single, constant(_LANES)))
        rest = builder.sub(number, done)
        with builder.if_then(builder.icmp_signed(">", rest, constant(0))):
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            one = builder.insert_element(undefined, rest, ir.Constant(_I32, 0))
            same = builder.shuffle_vector(
                one, undefined, ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
            )
            indices = ir.Constant(_VECTOR, list(range(_LANES)))
            add(totals[1], done, builder.icmp_signed("<", indices, same))
        total = builder.load(totals[0])
        for other in totals[1:]:
            total = builder.add(total, builder.load(other))
        return builder.call(reduce_add, [total])

    return types.int64(types.int64, types.int64, types.int64), generate


@numba.njit(nogil=True)
def _sum_units(address, block_bytes, blocks, numbers, bounds, runs, look, out):
    """Write the sum of each unit: `numbers` of `blocks`, whose runs are in `bounds`."""
    last = len(blocks) - 1
    for row in range(len(blocks)):
        base = address + blocks[row] * block_bytes
        begin, end = bounds[numbers[row]], bounds[numbers[row] + 1]
        soon = min(row + look, last)
        later = address + blocks[soon] * block_bytes
        ahead = bounds[numbers[soon]] - begin
        total = np.int64(0)
        for run in range(begin, end):
            total += _add_words(
                base + runs[run, 0], runs[run, 1], later + runs[run + ahead, 0]
            )
        out[row] = total


def _unit_bytes(layers: Sequence[LayerView], unit: int) -> np.ndarray:
    """Return the sorted addresses of a unit's bytes, in the first block."""
    found = []
    for layer in layers:
        size = layer.units.element_size()
        _, outer, inner, *_ = layer.units.shape
        at = layer.units[0, unit // inner % outer, unit % inner]
        offsets = np.zeros(1, np.int64)
        for number, stride in zip(at.shape, at.stride(), strict=True):
            offsets = np.add.outer(offsets, np.arange(number) * stride).ravel()
        elements = at.data_ptr() + offsets * size
        found.append(np.add.outer(elements, np.arange(size)).ravel())
    return np.sort(np.concatenate(found))


def _runs(addresses: np.ndarray) -> np.ndarray:
    """Return address and words of each contiguous run of bytes."""
    ends = np.flatnonzero(np.diff(addresses) != 1) + 1
    ends = np.append(ends, len(addresses))
    begins = np.append(0, ends[:-1])
    sizes = ends - begins
    if (sizes % 8).any():
        raise ValueError("a run is no whole number of words")
    return np.stack([addresses[begins], sizes // 8], 1)


def prepare(
    layers: Sequence[LayerView], rows: torch.Tensor, look: int, whole_blocks: bool
) -> Callable[[], Any]:
    """Build the function that adds up the units of rows, all of them whole.

    Args:
        layers: the views of one layer, whose units have the same numbers.
        rows: see `SumRows`; all units of each block follow one another.
        look: units to look ahead.
        whole_blocks: whether a block is added up as if it were one unit.

    """
    first = layers[0]
    every, per_block = first.units_per_state, first.units_per_block
    units = rows[0].numpy()[every - 1 :: every]
    numbers = range(every - 1, per_block, every)
    parts = [_unit_bytes(layers, number) for number in numbers]
    if whole_blocks:
        units = units[:: len(numbers)]
        parts = [np.sort(np.concatenate(parts))]
    tables = [_runs(part) for part in parts]
    bounds = np.append(0, np.cumsum([len(table) for table in tables]))
    runs = np.concatenate(tables)
    address = min(layer.units.data_ptr() for layer in layers)
    runs[:, 0] -= address
    block_bytes = first.units.stride(0) * first.units.element_size()
    blocks = np.ascontiguousarray(units // per_block)
    which = np.ascontiguousarray(units % per_block // every)
    which = np.zeros_like(which) if whole_blocks else which
    out: np.ndarray = np.zeros(len(blocks), np.int64)

    def run() -> np.ndarray:
        _sum_units(address, block_bytes, blocks, which, bounds, runs, look, out)
        return out

    return run
