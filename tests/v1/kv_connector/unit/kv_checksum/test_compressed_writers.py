# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that compressed caches and rings are read as vLLM's own writers fill them.

A state is written; the bytes that it left are exactly those that the worker's sum
depends on once the state's last token counts, and none before.
"""

import functools

import pytest

from vllm.distributed.kv_transfer.kv_checksum.worker import formats

from .rig import compressed
from .test_writers import Sums, needs_triton, written_bytes

pytestmark = needs_triton

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


def test_every_compressed_layout_that_is_covered_has_a_writer():
    seen = {
        (w.backend, w.cells) for w in compressed.WRITERS if w.spec.tokens_per_state != 1
    }
    listed = {
        (path, cells) for path, kinds in formats.COMPRESSED.items() for cells in kinds
    }
    assert seen == listed
