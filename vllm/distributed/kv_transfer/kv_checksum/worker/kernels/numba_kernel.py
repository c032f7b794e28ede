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

_AT_ONCE, _MOST_AHEAD = 64, 16
"""Units whose places are computed at once, and those beyond them to look ahead to."""

_MOST_TOGETHER = 8
"""Units of one kernel block that are summed together, if their tokens lie apart."""

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
            whole = builder.udiv(columns, many)
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


@intrinsic
def _one(typing_context, like, address, at, ahead, weight):
    """Return the term of one element that is a piece; the others are as of `_grid`."""
    size = like.dtype.bitwidth

    def generate(context, builder, signature, arguments):
        _, address, at, ahead, weight = arguments
        vectors = _Vectors(builder, 1)
        memory = builder.inttoptr(address, ir.IntType(size).as_pointer())
        place = builder.gep(memory, [at])
        vectors.prefetch(builder.gep(place, [ahead]))
        piece = vectors.pieces([vectors.load(place, None)])
        return vectors.sum(vectors.terms(piece, vectors.same(weight)))

    number = types.int64
    return types.uint64(like, number, number, number, types.uint64), generate


@intrinsic
def _pairs(typing_context, like, address, at, ahead, number, token_step, weight, step):
    """Sum `number` vectors of pairs: one element of two tokens, the next of both.

    A line of 16 elements of two tokens is followed by that of the next two. `number` is
    of vectors of 64 bytes, `token_step` what weights grow by from token to token; the
    others are as of `_grid`.
    """
    size = like.dtype.bitwidth

    def generate(context, builder, signature, arguments):
        if size > 16:  # There are no such elements.
            return ir.Constant(_INT64, 0)
        _, address, at, ahead, number, token_step, weight, step = arguments
        vectors = _Vectors(builder, 8)
        # A line fills a vector, or half of it.
        lanes = range(8)
        per_line = size // 2
        tokens = [lane // per_line * 2 + lane % 2 for lane in lanes]
        pieces = [lane % per_line // 2 for lane in lanes]
        ramp = builder.add(
            builder.mul(ir.Constant(vectors.type, tokens), vectors.same(token_step)),
            builder.mul(ir.Constant(vectors.type, pieces), vectors.same(step)),
        )
        weights = cgutils.alloca_once_value(
            builder, builder.add(vectors.same(weight), ramp)
        )
        then = vectors.same(
            builder.mul(token_step, ir.Constant(_INT64, 16 // per_line))
        )
        # Lanes of 16 bytes hold a piece of either token.
        half = 64 // size
        order = [2 * k + token for token in (0, 1) for k in range(half)]
        order = [16 * 8 // size * lane + k for lane in range(4) for k in order]
        elements = ir.VectorType(ir.IntType(size), 512 // size)
        order = ir.Constant(ir.VectorType(_INT32, 512 // size), order)
        total = cgutils.alloca_once_value(builder, vectors.same(0))
        memory = builder.inttoptr(address, ir.IntType(size).as_pointer())
        with cgutils.for_range(builder, number) as loop:
            index = builder.mul(loop.index, ir.Constant(_INT64, 512 // size))
            place = builder.gep(memory, [builder.add(at, index)])
            vectors.prefetch(builder.gep(place, [ahead]))
            place = builder.bitcast(place, elements.as_pointer())
            read = builder.load(place, align=1)
            sorted_ = builder.shuffle_vector(read, read, order)
            held = builder.load(weights)
            terms = vectors.terms(builder.bitcast(sorted_, vectors.type), held)
            builder.store(builder.add(builder.load(total), terms), total)
            builder.store(builder.add(held, then), weights)
        return vectors.sum(builder.load(total))

    number_type, word = types.int64, types.uint64
    return word(like, *[number_type] * 4, word, word, word), generate


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
def _side_by_side(like, layer, at, ahead, number, factor, first):
    """Sum tokens of all heads, where pieces of one number are neighbours.

    The arguments are as of `_tokens`, `factor` that of the first head.
    """
    total = np.uint64(0)
    for token in range(number):
        for piece in range(layer.width):
            begin = at + token * layer.token_stride + piece * layer.piece_stride
            odd = _TWO * (first + np.uint64(token * layer.pieces + piece)) + _ONE
            weight, step = factor * odd, _NEXT_FACTOR * odd
            total += _grid_of_1(
                like,
                layer.address,
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


@jit
def _tokens(like, layer, at, ahead, number, factor, first):
    """Sum the first `number` tokens of a unit and head, or of a part, at index `at`.

    Args:
        like: see `_sum_layers`.
        layer: an element of its `layers`.
        at: where the tokens begin, in elements from where the layer's units begin.
        ahead: how many elements behind them those lie that are prefetched meanwhile.
        number: of tokens.
        factor: of the head.
        first: number of the first piece of the first token in its slice, uint64.

    """
    width, parts = layer.width, layer.elements_per_piece
    # A row of a grid is one piece of every token, or a single piece.
    grids, columns, per_column = 1, number, layer.pieces
    if layer.token_stride != 1:
        grids, columns, per_column = number, 1, 1
    total = np.uint64(0)
    for grid in range(grids):
        total += _grid(
            parts,
            like,
            layer.address,
            at + grid * layer.token_stride,
            ahead,
            width // parts,
            parts * layer.piece_stride,
            _TWO * factor,
            columns,
            layer.piece_stride,
            factor * (_TWO * (first + np.uint64(grid * layer.pieces)) + _ONE),
            _TWO * factor * np.uint64(per_column),
        )
    return total


@jit
def _tiles(like, layer, at, ahead, number, factor, first):
    """Sum the first `number` tokens of a unit and head, which lie in tiles.

    The arguments are as of `_tokens`.
    """
    total = np.uint64(0)
    for tile in range(layer.tiles):
        begin = at + tile * layer.tile_stride
        if layer.pairs > 0 and number == layer.parts * layer.tokens:
            total += _pairs(
                like,
                layer.address,
                begin,
                ahead,
                layer.pairs,
                _TWO * factor * np.uint64(layer.pieces),
                factor * (_TWO * first + _ONE),
                _TWO * factor,
            )
        else:
            for part in range(layer.parts):
                held = min(layer.tokens, number - part * layer.tokens)
                if held <= 0:
                    break
                place = begin + part * layer.part_stride
                piece = first + np.uint64(part * layer.tokens * layer.pieces)
                if layer.is_side_by_side:
                    total += _side_by_side(
                        like, layer, place, ahead, held, factor, piece
                    )
                else:
                    total += _tokens(like, layer, place, ahead, held, factor, piece)
        first += np.uint64(layer.tile_pieces)
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
def _states(rows, row, layer, of_states):
    """Return the first state of a row, and the number of those that count.

    States stand for tokens from here on. Positions are not negative.
    """
    token, tokens = rows[1][row], rows[2][row]
    per_state = layer.tokens_per_states
    first, _ = _divided(token * layer.states, per_state, of_states)
    end, _ = _divided((token + tokens) * layer.states, per_state, of_states)
    return first, end - first


@jit
def _place(unit, layer, of_block, of_inner):
    """Return a unit's block, the kernel block in it, and the unit's number in this."""
    block, unit = _divided(unit, layer.outer * layer.inner, of_block)
    kernel_block, unit = _divided(unit, layer.inner, of_inner)
    return block, kernel_block, unit


@jit
def _begin(layer, place):
    """Return where a unit begins, in elements from where the layer's units begin."""
    block, kernel_block, unit = place
    at = block * layer.block_stride + kernel_block * layer.outer_stride
    return at + unit * layer.inner_stride


@jit
def _sum_single(like, layer, factor, firsts, valid, at, every, out):
    """Sum some units of a view that has one head, and units of one part.

    These are short, so all that they share is computed before.

    Args:
        like: see `_sum_layers`.
        layer: an element of its `layers`.
        factor: of the head.
        firsts: number of each unit's first state, int64 ``(number,)``.
        valid: how many of its states count.
        at: where each unit begins, and those that are prefetched last.
        every: how far the sums of units lie apart in `out`.
        out: the sums.

    """
    address, width, pieces = layer.address, layer.width, layer.pieces
    one_run, row_stride, look = layer.is_one_run, layer.token_stride, layer.units_ahead
    elements_ahead, last = layer.elements_ahead, len(at) - 1
    double = _TWO * factor
    row_step, step = double * np.uint64(pieces), double * np.uint64(layer.per_column)
    base = double * np.uint64(layer.first_piece) + factor
    for k in range(len(firsts)):
        held = valid[k]
        if held <= 0:
            continue
        lines, columns = held, width
        if one_run:
            lines, columns = 1, held * width
        ahead = elements_ahead
        if ahead == 0:
            ahead = at[min(k + look, last)] - at[k]
        weight = base + row_step * np.uint64(firsts[k])
        if lines * columns == 1:
            total = _one(like, address, at[k], ahead, weight)
        else:
            total = _grid_of_1(
                like,
                address,
                at[k],
                ahead,
                lines,
                row_stride,
                row_step,
                columns,
                0,
                weight,
                step,
            )
        out[k * every + every - 1] += total


@jit
def _sum_heads(like, layer, factors, firsts, valid, at, every, out):
    """Sum some units of a view; the arguments are as of `_sum_single`."""
    last = len(at) - 1
    for k in range(len(firsts)):
        total = np.uint64(0)
        ahead = at[min(k + layer.units_ahead, last)] - at[k]
        for part in range(layer.parts):
            held = min(layer.tokens, valid[k] - part * layer.tokens)
            if held <= 0:
                break
            state = firsts[k] + part * layer.tokens
            odd = np.uint64(2 * (state * layer.pieces + layer.first_piece) + 1)
            lines, columns = held, layer.width
            if layer.is_one_run:
                lines, columns = 1, held * layer.width
            for head in range(layer.heads):
                factor = factors[layer.first_factor + head]
                to_prefetch = layer.elements_ahead
                if to_prefetch == 0:
                    to_prefetch = layer.heads_ahead * layer.head_stride
                    if head + layer.heads_ahead >= layer.heads:
                        to_prefetch += ahead - layer.heads * layer.head_stride
                total += _grid_of_1(
                    like,
                    layer.address,
                    at[k] + part * layer.part_stride + head * layer.head_stride,
                    to_prefetch,
                    lines,
                    layer.token_stride,
                    _TWO * factor * np.uint64(layer.pieces),
                    columns,
                    0,
                    factor * odd,
                    _TWO * factor * np.uint64(layer.per_column),
                )
        out[k * every + every - 1] += total


@jit
def _sum_dense(like, layers, begin, end, factors, rows, out):
    """Sum views of one layer, of which every token's pieces follow one another.

    What the views share is computed once, for some units at a time.
    """
    shared = layers[begin]
    every = shared.units_per_state
    number = len(out) // every
    of_states = _exponent(shared.tokens_per_states)
    of_inner = _exponent(shared.inner)
    of_block = _exponent(shared.outer * shared.inner)
    blocks, kernel_blocks, units, at, firsts, valid = np.empty(
        (6, _AT_ONCE + _MOST_AHEAD), np.int64
    )
    for start in range(0, number, _AT_ONCE):
        many = min(_AT_ONCE, number - start)
        seen = min(_AT_ONCE + _MOST_AHEAD, number - start)
        # A state that spans several units ends in the last of them.
        first_row = start * every + every - 1
        for k in range(seen):
            blocks[k], kernel_blocks[k], units[k] = _place(
                rows[0][first_row + k * every], shared, of_block, of_inner
            )
        for k in range(many):
            firsts[k], valid[k] = _states(
                rows, first_row + k * every, shared, of_states
            )
        sums = out[start * every :]
        for index in range(begin, end):
            layer = layers[index]
            block, outer = layer.block_stride, layer.outer_stride
            inner = layer.inner_stride
            for k in range(seen):
                at[k] = blocks[k] * block + kernel_blocks[k] * outer + units[k] * inner
            if layer.heads == 1 and layer.parts == 1:
                _sum_single(
                    like,
                    layer,
                    factors[layer.first_factor],
                    firsts[:many],
                    valid[:many],
                    at[:seen],
                    every,
                    sums,
                )
            else:
                _sum_heads(
                    like,
                    layer,
                    factors,
                    firsts[:many],
                    valid[:many],
                    at[:seen],
                    every,
                    sums,
                )


@jit
def _sum_apart(like, layer, factors, rows, out):
    """Sum a view whose tokens lie apart, or beside one another.

    Units of one kernel block share lines of the cache: they are summed together, head
    by head, so that a line is read from memory once.
    """
    number, every = len(out), layer.units_per_state
    of_states = _exponent(layer.tokens_per_states)
    of_inner = _exponent(layer.inner)
    of_block = _exponent(layer.outer * layer.inner)
    heads = 1 if layer.is_side_by_side else layer.heads
    at, pieces, held = np.empty((3, _MOST_TOGETHER), np.int64)
    # A state that spans several units ends in the last of them.
    row = every - 1
    while row < number:
        place = _place(rows[0][row], layer, of_block, of_inner)
        begin = _begin(layer, place)
        together, next_row = 0, row
        while True:
            first, valid = _states(rows, next_row, layer, of_states)
            at[together] = _begin(layer, place)
            pieces[together] = first * layer.pieces + layer.first_piece
            held[together] = min(layer.parts * layer.tokens, valid)
            together, next_row = together + 1, next_row + every
            if together == _MOST_TOGETHER or next_row >= number:
                break
            following = _place(rows[0][next_row], layer, of_block, of_inner)
            if following[0] != place[0] or following[1] != place[1]:
                break
            place = following
        soon = rows[0][min(row + max(layer.units_ahead, together) * every, number - 1)]
        ahead = _begin(layer, _place(soon, layer, of_block, of_inner)) - begin
        heads_ahead = max(layer.heads_ahead // together, 1)
        for head in range(heads):
            to_prefetch = layer.elements_ahead
            if to_prefetch == 0:
                to_prefetch = heads_ahead * layer.head_stride
                if head + heads_ahead >= heads:
                    to_prefetch += ahead - heads * layer.head_stride
            for k in range(together):
                if held[k] > 0:
                    out[row + k * every] += _tiles(
                        like,
                        layer,
                        at[k] + head * layer.head_stride,
                        to_prefetch,
                        held[k],
                        factors[layer.first_factor + head],
                        np.uint64(pieces[k]),
                    )
        row = next_row


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
    size = number * number_stride
    rows = (
        carray(_pointer(rows_at), size, np.int64)[::number_stride],
        carray(_pointer(rows_at + 8 * row_stride), size, np.int64)[::number_stride],
        carray(_pointer(rows_at + 16 * row_stride), size, np.int64)[::number_stride],
    )
    out = carray(_pointer(out_at), number * out_stride, np.uint64)[::out_stride]
    index = 0
    while index < len(layers):
        layer = layers[index]
        if layer.is_dense:
            _sum_dense(like, layers, index, index + layer.views, factors, rows, out)
        else:
            _sum_apart(like, layer, factors, rows, out)
        index += layer.views


def prepare(layers: Sequence[LayerView]) -> SumRows:
    """Build the function that sums `layers`; the caches must stay where they are."""
    tables = layer_tables(layers)

    def run(rows: torch.Tensor, out: torch.Tensor) -> None:
        number = rows.shape[1]
        at, sums = (rows.data_ptr(), *rows.stride()), (out.data_ptr(), *out.stride())
        for table in tables:
            _sum_layers(table.like, table.layers, table.factors, number, *at, *sums)

    return run
