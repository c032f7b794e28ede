# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that every backend gives the definition's bits: PyTorch, numba, Triton.

Without a GPU the Triton kernel runs in Triton's interpreter.
"""

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    numba_kernel,
    torch_reference,
    triton_kernel,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SkipGroup

from .rig.cells import (
    LAYOUTS,
    ROWS,
    SHAPES,
    expected,
    factors_of,
    kernel_split,
    random_cells,
    rows_for,
    run,
    view,
)

IMPLEMENTATIONS = {
    "torch": torch_reference.prepare,
    "numba": numba_kernel.prepare,
    "triton": triton_kernel.prepare,
}


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


def test_a_token_in_several_views(prepare):
    """Keep a block's values before its scales, as a sparse indexer does."""
    cells = random_cells(4, 1, 16, 132)
    stored = torch.cat([cells[..., :128].flatten(1), cells[..., 128:].flatten(1)], 1)
    words = stored.contiguous().view(torch.int32)
    values = words[:, : 16 * 32].view(4, 1, 1, 16, 32)
    scales = words[:, 16 * 32 :].view(4, 1, 1, 16, 1)
    rows = ROWS.clone()
    rows[2] = torch.tensor([16, 3, 0, 9])
    parts = [
        LayerView("", part, 4, 33, factors_of(3, 1), (1, 0), first)
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
