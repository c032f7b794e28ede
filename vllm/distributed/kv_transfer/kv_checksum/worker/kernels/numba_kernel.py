# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum units on the CPU: one pass over the cache, compiled by numba.

Bit-identical to `torch_reference`, which gathers whole arrays and is many times
slower. Weights are an arithmetic series along the tokens and pieces of a slice,
and along consecutive slices, so a head of a unit is a grid: rows of pieces, whose
weights grow by one step within a row and by another from row to row. `_grid_of`
writes its loop as SIMD itself, for LLVM vectorizes no loops as short as these.

Everything is in this module, as numba keeps compiled code by the file of the function
that calls it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    FOLD_FACTOR,
    GOLDEN_FACTOR,
    MASK64,
)
from vllm.distributed.kv_transfer.kv_checksum.jit import jit
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels.layer_table import (
    layer_tables,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SumRows

_ONE, _TWO = np.uint64(1), np.uint64(2)
_NEXT_FACTOR = np.uint64(2 * GOLDEN_FACTOR & MASK64)

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


class _Vectors:
    """Build instructions on vectors of 64-bit integers."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.type = ir.VectorType(_INT64, lanes)
        self.indices = ir.Constant(self.type, list(range(lanes)))

    def same(self, value: ir.Value | int) -> ir.Value:
        """Return a vector of one value in every lane."""
        if isinstance(value, int):
            return ir.Constant(self.type, [value] * self.lanes)
        undefined, first = ir.Constant(self.type, ir.Undefined), ir.Constant(_INT32, 0)
        one = self.builder.insert_element(undefined, value, first)
        lanes = ir.Constant(ir.VectorType(_INT32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, undefined, lanes)

    def terms(self, x: ir.Value, weights: ir.Value) -> ir.Value:
        """Return the terms of pieces; that of a piece that is 0 is 0."""
        b, n32 = self.builder, self.same(32)
        y = b.mul(b.xor(x, b.lshr(x, self.same(33))), weights)
        folded = b.mul(b.lshr(y, n32), self.same(FOLD_FACTOR))
        folded = b.xor(folded, b.lshr(folded, n32))
        return b.xor(y, b.and_(folded, self.same(2**32 - 1)))

    def sum(self, vector: ir.Value) -> ir.Value:
        name = f"llvm.vector.reduce.add.v{self.lanes}i64"
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(_INT64, [self.type]), name
        )
        return self.builder.call(function, [vector])

    def first_lanes(self, number: ir.Value) -> ir.Value:
        return self.builder.icmp_signed("<", self.indices, self.same(number))

    def load(self, place: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Load consecutive elements; 0 for lanes that are masked out.

        The address may be any: vectors of whole caches are not aligned.
        """
        element = place.type.pointee
        kind = ir.VectorType(element, self.lanes)
        place = self.builder.bitcast(place, kind.as_pointer())
        if mask is None:
            return self.builder.load(place, align=1)
        bits = ir.VectorType(ir.IntType(1), self.lanes)
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(kind, [place.type, _INT32, bits, kind]),
            f"llvm.masked.load.v{self.lanes}i{element.width}.p0",
        )
        zeros = ir.Constant(kind, [0] * self.lanes)
        return self.builder.call(function, [place, ir.Constant(_INT32, 1), mask, zeros])

    def pieces(self, elements: Sequence[ir.Value]) -> ir.Value:
        """Join vectors of a piece's first, second ... elements to one of pieces."""
        b = self.builder
        elements = list(elements)
        while len(elements) > 1:
            width = 2 * elements[0].type.element.width
            order = [n for k in range(self.lanes) for n in (k, self.lanes + k)]
            order = ir.Constant(ir.VectorType(_INT32, 2 * self.lanes), order)
            joined = ir.VectorType(ir.IntType(width), self.lanes)
            elements = [
                b.bitcast(b.shuffle_vector(low, high, order), joined)
                for low, high in zip(elements[::2], elements[1::2], strict=True)
            ]
        return (
            elements[0]
            if elements[0].type == self.type
            else b.zext(elements[0], self.type)
        )

    def prefetch(self, place: ir.Value) -> None:
        """Prefetch what is read soon; an address that is none does no harm."""
        address = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(ir.VoidType(), [address, _INT32, _INT32, _INT32]),
            "llvm.prefetch.p0i8",
        )
        # The arguments mean: for reading, keep in cache, data.
        how = [ir.Constant(_INT32, value) for value in (0, 3, 1)]
        self.builder.call(function, [self.builder.bitcast(place, address), *how])


def _grid_of(parts: int) -> Callable[..., Any]:
    """Make the function that sums a grid of pieces of `parts` elements each."""

    @intrinsic
    def grid(
        typing_context,
        like,
        address,
        at,
        ahead,
        rows,
        row_stride,
        row_step,
        columns,
        apart,
        weight,
        step,
    ):
        """Sum `rows` rows of `columns` pieces, in elements of the type of `like`.

        Element `k` of piece `(i, j)` is at ``at + i*row_stride + j + k*apart`` behind
        `address`, its weight is ``weight + i*row_step + j*step``. What lies `ahead`
        elements behind each piece is prefetched.
        """
        size = like.dtype.bitwidth

        def generate(context, builder, signature, arguments):
            if not 16 <= parts * size <= 64:  # There are no such pieces.
                return ir.Constant(_INT64, 0)
            (_, address, at, ahead, rows, row_stride, row_step, columns, apart) = (
                arguments[:9]
            )
            weight, step = arguments[9:]
            # Elements that lie apart are of tokens, of which a unit has mostly 16.
            vectors = _Vectors(builder, 8 if parts == 1 else 16)
            memory = builder.inttoptr(address, ir.IntType(size).as_pointer())
            many = ir.Constant(_INT64, vectors.lanes)
            total = cgutils.alloca_once_value(builder, vectors.same(0))
            weights = cgutils.alloca_once(builder, vectors.type)
            ramp = builder.mul(vectors.indices, vectors.same(step))
            whole = builder.sdiv(columns, many)
            rest = builder.sub(columns, builder.mul(whole, many))
            in_rest = vectors.first_lanes(rest)
            is_rest = builder.icmp_signed(">", rest, ir.Constant(_INT64, 0))

            def after(first: ir.Value, number: ir.Value, step: ir.Value) -> ir.Value:
                return builder.add(first, builder.mul(number, step))

            def begin(first: ir.Value) -> None:
                builder.store(builder.add(vectors.same(first), ramp), weights)

            def add(place: ir.Value, mask: ir.Value | None, then: ir.Value) -> None:
                """Add the terms at a place; `then` is the step to the next weights."""
                elements = []
                for _ in range(parts):
                    elements.append(vectors.load(builder.gep(memory, [place]), mask))
                    vectors.prefetch(builder.gep(memory, [builder.add(place, ahead)]))
                    place = builder.add(place, apart)
                held = builder.load(weights)
                terms = vectors.terms(vectors.pieces(elements), held)
                builder.store(builder.add(builder.load(total), terms), total)
                builder.store(builder.add(held, then), weights)

            def by_rows() -> None:
                then = vectors.same(builder.mul(step, many))
                with cgutils.for_range(builder, rows) as row:
                    begin(after(weight, row.index, row_step))
                    place = after(at, row.index, row_stride)
                    with cgutils.for_range(builder, whole) as column:
                        add(after(place, column.index, many), None, then)
                    with builder.if_then(is_rest):
                        add(after(place, whole, many), in_rest, then)

            def by_columns() -> None:
                then = vectors.same(row_step)

                def add_rows(column: ir.Value, mask: ir.Value | None) -> None:
                    begin(after(weight, builder.mul(column, many), step))
                    place = after(at, column, many)
                    with cgutils.for_range(builder, rows) as row:
                        add(after(place, row.index, row_stride), mask, then)

                with cgutils.for_range(builder, whole) as column:
                    add_rows(column.index, None)
                with builder.if_then(is_rest):
                    add_rows(whole, in_rest)

            # The inner loop is the one of more vectors.
            by_rows() if parts == 1 else by_columns()
            return vectors.sum(builder.load(total))

        number = types.int64
        signature = types.uint64(
            like,
            *[number] * 5,
            types.uint64,
            number,
            number,
            types.uint64,
            types.uint64,
        )
        return signature, generate

    return grid


_grid_of_1, _grid_of_2, _grid_of_4, _grid_of_8 = map(_grid_of, (1, 2, 4, 8))


@intrinsic
def _pointer(typing_context, address):
    """Return an address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@jit
def _grid(parts, like, address, at, ahead, rows, stride, row_step, n, apart, w, step):
    """Sum a grid of pieces of `parts` elements; the others are as of `_grid_of`."""
    if parts == 1:
        return _grid_of_1(
            like, address, at, ahead, rows, stride, row_step, n, apart, w, step
        )
    if parts == 2:
        return _grid_of_2(
            like, address, at, ahead, rows, stride, row_step, n, apart, w, step
        )
    if parts == 4:
        return _grid_of_4(
            like, address, at, ahead, rows, stride, row_step, n, apart, w, step
        )
    return _grid_of_8(
        like, address, at, ahead, rows, stride, row_step, n, apart, w, step
    )


@jit
def _tokens(like, layer, at, ahead, number, factors, first):
    """Sum the first `number` tokens of a unit, or of a part of it, at index `at`.

    Args:
        like: see `_sum_layers`.
        layer: an element of its `layers`.
        at: where the tokens begin, in elements from where the layer's units begin.
        ahead: how many elements behind the unit that lies is prefetched meanwhile.
        number: of tokens.
        factors: see `_sum_layers`.
        first: number of the first piece of the first token in its slice, uint64.

    """
    address, width, parts = layer.address, layer.width, layer.elements_per_piece
    total = np.uint64(0)
    if layer.head_stride == 1 and layer.piece_stride != 1:
        for token in range(number):
            for piece in range(width):
                begin = at + token * layer.token_stride + piece * layer.piece_stride
                odd = _TWO * (first + np.uint64(token * layer.pieces + piece)) + _ONE
                weight, step = factors[layer.first_factor] * odd, _NEXT_FACTOR * odd
                total += _grid_of_1(
                    like,
                    address,
                    begin,
                    ahead,
                    1,
                    0,
                    step,
                    layer.heads,
                    0,
                    weight,
                    step,
                )
        return total
    # A row of a grid is what is contiguous: a token's pieces, those of all tokens, one
    # piece of every token, or a single piece.
    grids, rows, per_row, row_stride = 1, width // parts, 1, parts * layer.piece_stride
    if parts == 1 and layer.piece_stride == 1 and width > 1:
        columns, per_column = width, 1
        rows, per_row, row_stride = number, layer.pieces, layer.token_stride
        if row_stride == width and width == layer.pieces:
            columns, rows = number * width, 1
    elif layer.token_stride == 1:
        columns, per_column = number, layer.pieces
    else:
        grids, columns, per_column = number, 1, 1
    for head in range(layer.heads):
        factor = factors[layer.first_factor + head]
        to_prefetch = layer.elements_ahead
        if to_prefetch == 0:
            to_prefetch = layer.heads_ahead * layer.head_stride
            if head + layer.heads_ahead >= layer.heads:
                to_prefetch += ahead - layer.heads * layer.head_stride
        for grid in range(grids):
            total += _grid(
                parts,
                like,
                address,
                at + head * layer.head_stride + grid * layer.token_stride,
                to_prefetch,
                rows,
                row_stride,
                _TWO * factor * np.uint64(per_row),
                columns,
                layer.piece_stride,
                factor * (_TWO * (first + np.uint64(grid * layer.pieces)) + _ONE),
                _TWO * factor * np.uint64(per_column),
            )
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
def _place(unit, layer, of_block, of_inner):
    """Return where a unit begins, in elements from where the layer's units begin."""
    block, unit = _divided(unit, layer.outer * layer.inner, of_block)
    kernel_block, unit = _divided(unit, layer.inner, of_inner)
    at = block * layer.block_stride + kernel_block * layer.outer_stride
    return at + unit * layer.inner_stride


@jit
def _sum_layers(
    like,
    layers,
    factors,
    number,
    rows_at,
    row_stride,
    number_stride,
    out_at,
    out_stride,
):
    """Add the sums of all layers to `out`.

    Rows and sums are given by their addresses and strides, so that there is one
    variant whatever they are slices of, and a call costs little.

    Args:
        like: an empty array of the unsigned type of the layers' elements.
        layers: see `LayerTable`.
        factors: uint64, those of all layers.
        number: of rows.
        rows_at: address of the rows, int64 ``(3, number)``, see `SumRows`.
        row_stride: their first stride.
        number_stride: their second stride.
        out_at: address of the sums, int64 ``(number,)``.
        out_stride: their stride.

    """
    rows = carray(_pointer(rows_at), 2 * row_stride + number * number_stride, np.int64)
    out = carray(_pointer(out_at), number * out_stride, np.uint64)
    for index in range(len(layers)):
        layer = layers[index]
        per_state, every = layer.tokens_per_states, layer.units_per_state
        of_state = _exponent(per_state)
        of_inner = _exponent(layer.inner)
        of_block = _exponent(layer.outer * layer.inner)
        look = layer.units_ahead * every
        # A state that spans several units ends in the last of them.
        for row in range(every - 1, number, every):
            unit = rows[row * number_stride]
            token = rows[row * number_stride + row_stride]
            tokens = rows[row * number_stride + 2 * row_stride]
            # States stand for tokens from here on. Positions are not negative.
            first, _ = _divided(token * layer.states, per_state, of_state)
            end, _ = _divided((token + tokens) * layer.states, per_state, of_state)
            valid = end - first
            if valid <= 0:
                continue
            begin = _place(unit, layer, of_block, of_inner)
            later = rows[min(row + look, number - 1) * number_stride]
            ahead = _place(later, layer, of_block, of_inner) - begin
            total = np.uint64(0)
            for part in range(layer.parts):
                held = min(layer.tokens, valid - part * layer.tokens)
                if held <= 0:
                    break
                state = first + part * layer.tokens
                piece = np.uint64(state * layer.pieces + layer.first_piece)
                at = begin + part * layer.part_stride
                total += _tokens(like, layer, at, ahead, held, factors, piece)
            out[row * out_stride] += total


def prepare(layers: Sequence[LayerView]) -> SumRows:
    """Build the function that sums `layers`; the caches must stay where they are."""
    tables = layer_tables(layers)

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        number = rows.shape[1]
        at, sums = (rows.data_ptr(), *rows.stride()), (out.data_ptr(), *out.stride())
        for table in tables:
            _sum_layers(table.like, table.layers, table.factors, number, *at, *sums)

    return run
