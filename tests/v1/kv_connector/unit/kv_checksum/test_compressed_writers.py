# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that compressed caches and rings are read as vLLM's own writers fill them.

A state is written; the bytes that it left are exactly those that the worker's sum
depends on once the state's last token counts, and none before.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup

from .rig import compressed
from .rig.versions import needs
from .rig.writers import allocate
from .test_writers import BLOCK, Sums, needs_triton, written_bytes

old_vllm = needs("0.33.0", "such models")
pytestmark = [needs_triton, old_vllm]

CASES = [
    pytest.param(writer, layout, id=f"{writer.label}-{layout.name}")
    for writer in compressed.WRITERS
    for layout in writer.layouts
]


@pytest.mark.parametrize(("writer", "layout"), CASES)
def test_a_states_sum_is_of_the_bytes_that_its_writer_leaves(writer, layout):
    states, ratio = writer.spec.num_states, writer.spec.tokens_per_state
    step = 1 if writer.spec.page_size_bytes < 5000 else 61
    sums = functools.cache(Sums(writer, layout, step).bytes_of)

    def left_by(*slots):
        return {at for at in written_bytes(writer, layout, *slots) if at % step == 0}

    assert sums(0) == set()
    for slot in (0, 1, states - 1):
        before, at = sums(slot * ratio), left_by(slot)
        # The open group does not count.
        assert sums((slot + 1) * ratio - 1) == before or ratio == 1
        assert at and sums((slot + 1) * ratio) - before == at
        assert before <= sums((slot + 1) * ratio)
    assert sums(states * ratio) == left_by(*range(states))


SPLIT = [
    compressed.v41(compressed.FLASHMLA, 2, 584),
    compressed.v41(compressed.FLASHMLA, 2, 528),
    compressed.v41_indexer(2, False),
    compressed.kpool(False),
]


@pytest.mark.parametrize("writer", SPLIT, ids=lambda w: w.label)
def test_kernel_blocks_of_a_packed_cache_are_read_one_by_one(writer):
    """VLLM shows the cache by blocks, and writers count in parts of them."""
    small, ratio = writer.spec, writer.spec.tokens_per_state
    # A stride of whole kernel blocks, as planning makes it.
    page = 3 * small.num_states * small.state_content_size_bytes
    doubled = dict(block_size=2 * small.block_size, page_size_padded=page)
    writer = replace(writer, spec=replace(small, alignment=None, **doubled))
    group = SimpleNamespace(
        kernel_block_size=small.block_size, kv_cache_spec=writer.spec
    )

    def bound(cache):
        return AttentionGroup.map_kv_cache_to_kernel_blocks(group, cache).squeeze(1)

    cache, raw = allocate(writer.spec, 3, KVCacheLayout.BLHNC)
    sums = functools.cache(Sums(writer, KVCacheLayout.BLHNC, bound=bound).bytes_of)
    states = small.num_states
    for state in (0, states - 1, states, 2 * states - 1):
        kernel_blocks = bound(cache)
        results = []
        for before in (0, 255):
            raw.fill_(before)
            block = BLOCK * group.kernel_block_stride + state // states
            slot = torch.tensor([block * states + state % states])
            writer.write(kernel_blocks[:, None], slot)
            results.append(raw.clone())
        left = (results[0] == results[1])[BLOCK].nonzero().flatten().tolist()
        assert left
        assert sums((state + 1) * ratio) - sums(state * ratio) == {*left}


def test_every_compressed_layout_that_is_covered_has_a_writer():
    seen = {
        (w.backend, w.cells) for w in compressed.WRITERS if w.spec.tokens_per_state != 1
    }
    listed = {
        (path, cells) for path, kinds in formats.COMPRESSED.items() for cells in kinds
    }
    assert seen == listed
