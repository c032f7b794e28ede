# SPDX-License-Identifier: Apache-2.0
"""Whatever sums layers gives the definition's bits: PyTorch, numba, Triton.

Without a GPU the Triton kernel runs in Triton's interpreter.
"""

import kv_checksum_reference as reference
import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import cpu_path, kernels, torch_path
from vllm.distributed.kv_transfer.kv_checksum.checksum import slice_factor
from vllm.distributed.kv_transfer.kv_checksum.layout import LayerView, integer_view

IMPLEMENTATIONS = {
    "torch": torch_path.sum_layer,
    "numba": cpu_path.sum_layer,
    "triton": kernels.sum_layer,
}


@pytest.fixture(params=IMPLEMENTATIONS)
def sum_layer(request):
    return IMPLEMENTATIONS[request.param]


def factors_of(layer, heads, first_head=0):
    values = [slice_factor(layer, first_head + h) for h in range(heads)]
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


def view(cells, cache, layer=3, first_head=0):
    """A view of `cache`, a uint8 ``[B, H, N, C]`` cache that holds `cells` blocks."""
    content = cells.shape[-1]
    width = next(w for w in (8, 4, 2) if content % w == 0)
    blocks = integer_view(cache, len(cells), width)
    factors = factors_of(layer, cells.shape[1], first_head)
    return LayerView("", blocks, width, content // width, factors, (1, 0))


def random_cells(*shape, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).randint(0, 256, shape, "u1"))


def head_major(cells):
    return cells


def token_major(cells):
    return cells.transpose(1, 2).contiguous().transpose(1, 2)


def kernel_split(cells):
    blocks, heads, tokens, content = cells.shape
    parts = cells.view(blocks, heads, 2, tokens // 2, content).transpose(1, 2)
    return parts.reshape(blocks * 2, heads, tokens // 2, content)


def kernel_split_token_major(cells):
    return token_major(kernel_split(cells))


def interleaved(cells):
    """Another layer's page of the same size before each block."""
    wide = torch.zeros(len(cells), 2, *cells.shape[1:], dtype=torch.uint8)
    wide[:, 1] = cells
    return wide[:, 1]


LAYOUTS = [
    head_major,
    token_major,
    kernel_split,
    kernel_split_token_major,
    interleaved,
]

SHAPES = {
    "GQA": (4, 3, 16, 64),
    "one head, several tiles": (4, 1, 16, 1152),
    "chunks beyond 16K pieces": (4, 2, 64, 8 * 160),
    "many heads": (4, 40, 4, 16),
    "4-byte pieces": (4, 5, 6, 132),
    "2-byte pieces": (4, 3, 10, 22),
    "one piece": (4, 1, 2, 8),
}

ROWS = torch.tensor([[2, 0, 3, 1], [4096, 0, 12, 500_000], [0, 0, 0, 0]])


def expected(cells, rows, layer=3, first_head=0):
    data = cells.numpy()
    return [
        reference.block_sum({layer: data[b]}, first, first + valid, first_head)
        for b, first, valid in rows.T.tolist()
    ]


def run(sum_layer, layer_view, rows):
    out = torch.zeros(rows.shape[1], dtype=torch.int64)
    sum_layer(layer_view, rows, out)
    return [int(v) for v in out.numpy().view(np.uint64)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_definitions_value(sum_layer, shape, layout):
    """Whole, partial and empty blocks."""
    cells = random_cells(*shape)
    rows = ROWS.clone()
    rows[2] = torch.tensor([shape[2], shape[2] - 1, 0, shape[2] // 2 + 1])
    assert run(sum_layer, view(cells, layout(cells)), rows) == expected(cells, rows)


def test_large_factors(sum_layer):
    cells = random_cells(4, 2, 16, 32)
    rows = ROWS.clone()
    rows[2] = 16
    big = dict(layer=2**20, first_head=2**16 - 2)
    got = run(sum_layer, view(cells, cells, **big), rows)
    assert got == expected(cells, rows, **big)


def test_a_token_in_several_views(sum_layer):
    """Values of a block, then its scales, as a sparse indexer keeps them."""
    cells = random_cells(4, 1, 16, 132)
    stored = torch.cat([cells[..., :128].flatten(1), cells[..., 128:].flatten(1)], 1)
    words = stored.contiguous().view(torch.int32)
    values = words[:, : 16 * 32].view(4, 1, 1, 16, 32)
    scales = words[:, 16 * 32 :].view(4, 1, 1, 16, 1)
    rows = ROWS.clone()
    rows[2] = torch.tensor([16, 3, 0, 9])
    out = torch.zeros(4, dtype=torch.int64)
    for part, first in ((values, 0), (scales, 32)):
        layer_view = LayerView("", part, 4, 33, factors_of(3, 1), (1, 0), first)
        sum_layer(layer_view, rows, out)
    assert [int(v) for v in out.numpy().view(np.uint64)] == expected(cells, rows)


def test_rows_side_by_side(sum_layer):
    """A state's rows in the last dim: heads are neighbours, pieces lie apart."""
    cells = random_cells(4, 37, 1, 6)
    stored = cells.view(torch.int16).view(4, 37, 3).transpose(1, 2).contiguous()
    blocks = stored.transpose(1, 2).view(4, 1, 37, 1, 3)
    layer_view = LayerView("", blocks, 2, 3, factors_of(3, 37), (1, 0))
    rows = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 0, 1]])
    assert run(sum_layer, layer_view, rows) == expected(cells, rows)


def test_sums_are_added_to_one_column_of_a_wider_matrix(sum_layer):
    cells = random_cells(4, 2, 16, 32)
    rows = ROWS.clone()
    rows[2] = 16
    out = torch.arange(12).view(4, 3)
    sum_layer(view(cells, cells), rows, out[:, 1])
    sums = np.array(expected(cells, rows), np.uint64).view(np.int64)
    with np.errstate(over="ignore"):
        assert out[:, 1].tolist() == (sums + np.array([1, 4, 7, 10])).tolist()
    assert out[:, 0].tolist() == [0, 3, 6, 9] and out[:, 2].tolist() == [2, 5, 8, 11]
