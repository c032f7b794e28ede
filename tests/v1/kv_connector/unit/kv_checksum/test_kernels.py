# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that every backend gives the definition's bits: PyTorch, numba, Triton.

The Triton kernel runs on a GPU if there is one, else in Triton's interpreter. Torch and
Triton are enough.
"""

import importlib.util
from fractions import Fraction

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    torch_reference,
    triton_kernel,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SkipGroup

from .rig import reference
from .rig.cells import (
    LAYOUTS,
    ROWS,
    SHAPES,
    Backend,
    expected,
    factors_of,
    kernel_split,
    random_cells,
    rows_for,
    run,
    view,
)

GPU = torch.cuda.is_available()
IMPLEMENTATIONS = {
    "torch": Backend(torch_reference.prepare),
    "triton": Backend(triton_kernel.prepare, "cuda" if GPU else "cpu"),
}
if GPU:
    IMPLEMENTATIONS["torch on the GPU"] = Backend(torch_reference.prepare, "cuda")
# Where vLLM is not installed, numba need not be there.
if importlib.util.find_spec("numba"):
    from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import numba_kernel

    IMPLEMENTATIONS["numba"] = Backend(numba_kernel.prepare)


@pytest.fixture(params=IMPLEMENTATIONS)
def prepare(request):
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_definitions_value(prepare, shape, layout):
    """Sum whole, partial and empty blocks."""
    cells = random_cells(*shape)
    rows = rows_for(shape[2])
    assert run(prepare, [view(cells, layout(cells))], rows) == expected(cells, rows)


def test_large_factors(prepare):
    cells = random_cells(4, 2, 16, 32)
    rows = ROWS.clone()
    rows[2] = 16
    big = dict(layer=2**20, first_head=2**16 - 2)
    got = run(prepare, [view(cells, cells, **big)], rows)
    assert got == expected(cells, rows, **big)


@pytest.mark.parametrize("tokens", [16, 12])
def test_a_token_in_several_views(prepare, tokens):
    """Keep a block's values before its scales, as a sparse indexer does.

    Tiles do not divide 12 scales, so these are summed in several steps.
    """
    cells = random_cells(4, 1, tokens, 132)
    stored = torch.cat([cells[..., :128].flatten(1), cells[..., 128:].flatten(1)], 1)
    words = stored.contiguous().view(torch.int32)
    values = words[:, : tokens * 32].view(4, 1, 1, tokens, 32)
    scales = words[:, tokens * 32 :].view(4, 1, 1, tokens, 1)
    rows = ROWS.clone()
    rows[2] = torch.tensor([tokens, 3, 0, 9])
    parts = [
        LayerView("", part, 4, 33, factors_of(3, 1), (1, 0), first, unit_tokens=tokens)
        for part, first in ((values, 0), (scales, 32))
    ]
    assert run(prepare, parts, rows) == expected(cells, rows)


def test_rows_side_by_side(prepare):
    """Keep a state's rows in the last dim: heads are neighbours, pieces lie apart."""
    cells = random_cells(4, 37, 1, 6)
    stored = cells.view(torch.int16).view(4, 37, 3).transpose(1, 2).contiguous()
    blocks = stored.transpose(1, 2).view(4, 1, 37, 1, 3)
    layer_view = LayerView("", blocks, 2, 3, factors_of(3, 37), (1, 0))
    rows = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 0, 1]])
    assert run(prepare, [layer_view], rows) == expected(cells, rows)


def test_units_of_blocks_whose_tokens_lie_apart(prepare):
    """Keep one piece of all tokens together, so that a block's units share lines."""
    cells = random_cells(4, 3, 64, 72)
    stored = cells.view(torch.int64).transpose(2, 3).contiguous()
    blocks = stored.transpose(2, 3).unsqueeze(1)
    rows = rows_for(64)
    layer = LayerView("", blocks, 8, 9, factors_of(3, 3), (1, 0))
    assert run(prepare, [layer], rows) == expected(cells, rows, first_head=0)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("rows_first", [True, False])
def test_rows_of_a_state_that_tp_splits(prepare, width, rows_first):
    """A convolution's rows lie one after the other, or side by side, by its layout."""
    cells = random_cells(4, 24, 1, 3 * width)
    dtype = {2: torch.int16, 4: torch.int32}[width]
    stored = cells.view(dtype).view(4, 24, 3)
    if not rows_first:
        stored = stored.transpose(1, 2).contiguous().transpose(1, 2)
    # Rank 1 of 2 holds the second half of the rows.
    blocks = stored[:, 12:].view(4, 1, 12, 1, 3)
    layer = LayerView("", blocks, width, 3, factors_of(3, 12, 12), (1, 0))
    rows = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 0, 1]])
    right = [
        sum(
            reference.slice_sum(cells[block, row].numpy(), 3, row, 0, valid, width)
            for row in range(12, 24)
        )
        & reference.MASK
        for block, _, valid in rows.T.tolist()
    ]
    assert run(prepare, [layer], rows) == right


def test_a_state_of_24k_pieces(prepare):
    """One slice, which several programs of the kernel share."""
    cells = random_cells(2, 1, 1, 8 * 24 * 1024)
    rows = torch.tensor([[1, 0], [0, 0], [1, 1]])
    assert run(prepare, [view(cells, cells)], rows) == expected(cells, rows)


@pytest.mark.parametrize("tokens_per_state", [2, 4, 128, Fraction(1, 2)])
def test_states_of_several_tokens_or_of_parts_of_one(prepare, tokens_per_state):
    """A state counts in the unit of 16 tokens in which it ends."""
    states = 256 // tokens_per_state
    cells = random_cells(3, 1, int(states), 72)
    blocks = cells.view(torch.int64).view(3, 1, 1, int(states), 9)
    layer = LayerView(
        "", blocks, 8, 9, factors_of(3, 1), (1, 0), tokens_per_state=tokens_per_state
    )
    rows, right = [], []
    for block, position in ((2, 0), (0, 5)):
        for unit in range(16):
            first, valid = position * 256 + unit * 16, 16 - (unit == 15)
            rows.append([block * 16 + unit, first, valid])
            begin = int(first / Fraction(tokens_per_state))
            end = int((first + valid) / Fraction(tokens_per_state))
            at = begin % int(states)
            held = cells[block, 0, at : at + end - begin].numpy()
            right.append(reference.slice_sum(held, 3, 0, begin, end))
    assert run(prepare, [layer], torch.tensor(rows).T.contiguous()) == right


@pytest.mark.parametrize("units_per_state", [1, 2])
def test_long_requests(prepare, units_per_state):
    """Sum more units than a backend takes at once, of blocks of two states."""
    states, per_state = 150, 16 * units_per_state
    cells = random_cells(states // 2, 1, 2, 72)
    blocks = cells.view(torch.int64).view(states // 2, 1, 1, 2, 9)
    layer = LayerView(
        "", blocks, 8, 9, factors_of(3, 1), (1, 0), tokens_per_state=per_state
    )
    number = states * units_per_state
    tokens = torch.arange(number) * 16
    rows = torch.stack([torch.arange(number), tokens, torch.full_like(tokens, 16)])
    right = [0] * number
    for state in range(states):
        held = cells[state // 2, 0, state % 2][None].numpy()
        last = (state + 1) * units_per_state - 1
        right[last] = reference.slice_sum(held, 3, 0, state, state + 1)
    assert run(prepare, [layer], rows) == right


def test_rings_have_a_unit_per_slot(prepare):
    cells = random_cells(4, 1, 8, 512)
    blocks = cells.view(torch.int64).view(4, 1, 1, 8, 64)
    layer = LayerView("", blocks, 8, 64, factors_of(3, 1), (1, 0), unit_tokens=1)
    rows = torch.tensor([[3 * 8 + 5, 7, 0], [4093, 12, 8], [1, 1, 0]])
    right = [
        reference.slice_sum(cells[u // 8, 0, u % 8][None].numpy(), 3, 0, at, at + ok)
        for u, at, ok in rows.T.tolist()
    ]
    assert run(prepare, [layer], rows) == right


def test_pieces_that_lie_apart(prepare):
    cells = random_cells(4, 2, 16, 24)
    wide = torch.zeros(4, 1, 2, 16, 6, dtype=torch.int64)
    wide[..., ::2] = cells.view(torch.int64).view(4, 1, 2, 16, 3)
    layer = LayerView("", wide[..., ::2], 8, 3, factors_of(3, 2), (1, 0))
    rows = rows_for(16)
    assert run(prepare, [layer], rows) == expected(cells, rows)


def test_layers_of_several_shapes(prepare):
    """Those of one shape share a launch of the kernel."""
    layers, total = [], np.zeros(4, np.uint64)
    rows = rows_for(16)
    for number, shape in enumerate([(4, 2, 16, 32), (4, 3, 16, 64), (4, 2, 16, 32)]):
        cells = random_cells(*shape, seed=number)
        layers.append(view(cells, cells, layer=number))
        total += np.array(expected(cells, rows, layer=number), np.uint64)
    assert run(prepare, layers, rows) == total.tolist()


def test_sums_are_added_to_one_column_of_a_wider_matrix(prepare):
    cells = random_cells(4, 2, 16, 32)
    rows = ROWS.clone()
    rows[2] = 16
    out = torch.arange(12).view(4, 3)
    prepare([view(cells, cells)])(rows, out[:, 1])
    sums = np.array(expected(cells, rows), np.uint64).view(np.int64)
    with np.errstate(over="ignore"):
        assert out[:, 1].tolist() == (sums + np.array([1, 4, 7, 10])).tolist()
    assert out[:, 0].tolist() == [0, 3, 6, 9] and out[:, 2].tolist() == [2, 5, 8, 11]


def test_kernel_blocks_that_units_cut_are_not_read():
    cells = random_cells(4, 2, 48, 32)
    with pytest.raises(SkipGroup, match="24 tokens and units of 16 do not nest"):
        view(cells, kernel_split(cells))


@pytest.mark.parametrize("offset", range(8))
def test_no_kernel_is_told_of_an_alignment_that_its_cache_lacks(offset):
    """On a GPU a wide read of an address that is none ends the process."""
    memory = torch.zeros(8 + 2 * 16 * 8, dtype=torch.int16)
    blocks = memory.as_strided((2, 1, 1, 16, 8), (128, 128, 128, 8, 1), offset)
    layer = LayerView("", blocks, 2, 8, factors_of(3, 1), (1, 0))
    address = blocks.data_ptr()
    told = triton_kernel.kernel_and_constants(layer)[1]["ALIGNMENT"]
    assert told == min(address & -address, 16)
