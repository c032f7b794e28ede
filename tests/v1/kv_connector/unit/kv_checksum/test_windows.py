# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test sliding windows whose first blocks are given up before the transfer."""

import pytest
import torch

from vllm.v1.engine import FinishReason

from .rig.instances import load, pair, tokens

FAIL = dict(kv_checksum_fail_closed=True, policy="fail")


@pytest.mark.parametrize(("sizes", "partial"), [((16, 16), 0), ((16, 32), 1)])
def test_blocks_given_up_before_the_transfer_are_not_compared(
    model, transport, sizes, partial, log
):
    """Of 174 tokens, 158 are in the window: P summed its block of the first 16, and
    frees it before the connector is handed the rest. A larger block of D begins
    with tokens that never came."""
    p, d = pair(
        model,
        dict(block_size=sizes[0]),
        dict(block_size=sizes[1], **FAIL),
        window=158,
        transport=transport,
    )
    for i in range(2):
        _, out = load(p, d, 174, f"r{i}", prompt=tokens(174, i))
        assert out.finish_reason == FinishReason.LENGTH
    assert d.loads("verified") == 2
    assert d.stats.get("left_out:partial_blocks", 0) == 2 * partial
    said = [x for x in log if "leave out a part of KV cache group 1" in x]
    assert len(said) == partial


def test_the_other_blocks_of_such_a_window_are_compared(model):
    p, d = pair(model, dict(block_size=16), dict(block_size=32, **FAIL), window=158)

    def flip(instance, req_id, block_ids):
        row = instance.scheduler.kv_cache_manager.get_block_ids(req_id)[1]
        instance.kv[d.layers[1][0]][row[1]].view(torch.uint8)[0, 0, 0] ^= 1

    d.damage = flip
    _, out = load(p, d, 174)
    assert out.finish_reason == FinishReason.ERROR
    assert d.stats["blocks_mismatched"] == 1
