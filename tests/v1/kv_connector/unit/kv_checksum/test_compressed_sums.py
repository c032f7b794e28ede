# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the sums of caches whose states cover several tokens, or a part of one.

The second implementation counts in plain integers: a state belongs to the unit that
holds its last token, and counts once that token does.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    numba_kernel,
    torch_reference,
    triton_kernel,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    SkipGroup,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

from .rig import caches as u
from .rig import reference
from .rig.cells import (
    head_major,
    interleaved,
    kernel_split,
    random_cells,
    run,
    token_major,
    view,
)

IMPLEMENTATIONS = {
    "torch": torch_reference.prepare,
    "numba": numba_kernel.prepare,
    "triton": triton_kernel.prepare,
}
RATIOS = (2, 4, 8, 64, 128, Fraction(1, 4))
BLOCK = 128


def plain_units(cells, ratio, position, num_tokens):
    """Return the sums of one block's units.

    Args:
        cells: uint8 ``(heads, states, bytes)``.
        ratio: tokens per state.
        position: of the block in the request.
        num_tokens: tokens of the request.

    """
    heads, states, _ = cells.shape
    sums = [0] * (BLOCK // 16)
    for state in range(states):
        number = position * states + state
        last_token = int((number + 1) * ratio - 1)
        if ratio >= 1 and last_token >= num_tokens:
            continue
        if ratio < 1 and number // ratio.denominator >= num_tokens:
            continue
        token = number // ratio.denominator if ratio < 1 else last_token
        for head in range(heads):
            cell = cells[head, state][None]
            sums[token % BLOCK // 16] += reference.slice_sum(
                cell, 3, head, number, number + 1
            )
    return [value % 2**64 for value in sums]


def rows_of(block, position, num_tokens):
    units = torch.arange(BLOCK // 16)
    first = position * BLOCK + 16 * units
    return torch.stack(
        [block * len(units) + units, first, (num_tokens - first).clamp(0, 16)]
    )


@pytest.mark.parametrize("prepare", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("ratio", RATIOS, ids=str)
@pytest.mark.parametrize("layout", [head_major, token_major, interleaved])
def test_units_are_of_the_states_that_end_in_them(prepare, ratio, layout):
    cells = random_cells(3, 2, int(BLOCK / ratio), 24)
    plain = view(cells, layout(cells))
    layer = replace(plain, tokens_per_state=ratio)
    for num_tokens in (5 * BLOCK, 4 * BLOCK + 67, 4 * BLOCK + 15, 4 * BLOCK):
        rows = rows_of(1, 4, num_tokens)
        expected = plain_units(cells[1].numpy(), ratio, 4, num_tokens)
        assert run(prepare, [layer], rows) == expected


@pytest.mark.parametrize("prepare", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("ratio", [4, 64])
def test_kernel_blocks_of_states(prepare, ratio):
    """DeepSeek's indexers of 128 tokens a kernel block are seen so."""
    cells = random_cells(3, 1, BLOCK // ratio, 24)
    number = 2 if ratio == 64 else 4
    layer = replace(view(cells, kernel_split(cells, number)), tokens_per_state=ratio)
    rows = rows_of(2, 1, 2 * BLOCK - 5)
    expected = plain_units(cells[2].numpy(), ratio, 1, 2 * BLOCK - 5)
    assert run(prepare, [layer], rows) == expected


def test_states_that_units_cut_are_not_read():
    cells = random_cells(3, 1, 4, 24)
    with pytest.raises(SkipGroup, match="do not nest"):
        replace(view(cells, cells), tokens_per_state=24)


def latents(ratio, block_size=BLOCK):
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=12,
        dtype=torch.bfloat16,
        tokens_per_state=ratio,
    )


def test_a_group_of_several_ratios_adds_its_layers_up():
    names = [f"model.layers.3.{x}" for x in ("a", "b", "c")]
    specs = dict(zip(names, map(latents, (1, 4, 64)), strict=True))
    cells = {
        n: random_cells(4, 1, s.num_states, 24, seed=i)
        for i, (n, s) in enumerate(specs.items())
    }
    caches = {n: c.view(torch.bfloat16) for n, c in cells.items()}
    group = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    w = u.worker(u.config(4, (names, group)), caches)
    number = 2 * BLOCK + 70
    record = u.send_record(w, KVChecksumBlocks(number, {0: (1, [3, 1])}))
    expected = [0] * 16
    for head, (name, spec) in enumerate(specs.items()):
        # Caches of one layer number their heads one after another.
        for i, block in enumerate((3, 1)):
            wide = torch.zeros(head + 1, spec.num_states, 24, dtype=torch.uint8)
            wide[head] = cells[name][block, 0]
            sums = plain_units(wide.numpy(), spec.tokens_per_state, 1 + i, number)
            for unit, value in enumerate(sums, 8 * i):
                expected[unit] = (expected[unit] + value) % 2**64
    assert u.values_of(record) == expected


@pytest.mark.parametrize("number", [600, 511, 512, 130])
def test_larger_blocks_add_up_from_smaller_ones(number):
    """Units are of tokens, so they are the same whatever the block sizes are."""
    name, ratio = u.names(0)[0], 64
    states = random_cells(12, 1, 1, 24)
    sums = []
    for size in (64, 128):
        cells = states.reshape(-1, 1, size // ratio, 24).contiguous()
        caches = {name: cells.view(torch.bfloat16)}
        cfg = u.config(len(cells), ([name], latents(ratio, size)))
        blocks = KVChecksumBlocks(number, {0: (0, list(range(-(-number // size))))})
        values = u.values_of(u.send_record(u.worker(cfg, caches), blocks))
        sums.append(values[: -(-number // 16)])
    assert sums[0] == sums[1] and sum(v != 0 for v in sums[0]) == number // ratio


def test_the_fingerprint_names_the_ratio_unless_it_is_one():
    name = u.names(0)[0]

    def fingerprint(spec):
        caches = {name: torch.zeros(4, 1, spec.num_states, 12, dtype=torch.bfloat16)}
        return u.worker(u.config(4, ([name], spec)), caches).groups[0].fingerprint

    found = {r: fingerprint(latents(r)) for r in (1, 2, 4)}
    assert len(set(found.values())) == 3
    assert fingerprint(latents(4, 64)) == found[4]


def test_views_without_states_are_as_they_were():
    cells = random_cells(4, 2, 64, 32)
    layer = view(cells, cells)
    assert isinstance(layer, LayerView) and layer.state_ratio == (1, 1)
    assert triton_kernel.kernel_and_constants(layer)[1]["TOKENS_PER_STATE"] == 1
