# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test real schedulers of P and D with groups of compressed latents and of rings."""

import pytest
import torch

from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig.compressing import LATENTS, RING_GROUP, pair

SIZE = 64


def load(p, d, number, name, seed=None):
    prompt = rig.tokens(number, number if seed is None else seed)
    return rig.load(p, d, number, name, prompt=prompt)[1]


@pytest.mark.parametrize(
    ("p_settings", "d_settings"),
    [
        ({}, {}),
        (dict(tp=2), {}),
        ({}, dict(tp=2, pp=2)),
        (dict(block_size=128), {}),
        ({}, dict(block_size=128)),
    ],
)
def test_latents_and_rings_verify(model, transport, p_settings, d_settings):
    p, d = pair(
        model,
        {"block_size": SIZE, **p_settings},
        {"block_size": SIZE, "kv_checksum_fail_closed": True, **d_settings},
        transport=transport,
    )
    for number in (1, 4, 63, 64, 65, 150, 256):
        out = load(p, d, number, f"r{number}")
        assert out.finish_reason == FinishReason.LENGTH
    assert d.loads("verified") == 7 and d.stats["blocks_mismatched"] == 0
    assert not any(k.startswith(("unverified", "left_out")) for k in d.stats)


def flip(cell, i=3):
    cell.view(torch.uint8)[i] ^= 4


NUMBER = 150
"""Tokens of a load: 2 whole blocks and 22 tokens, or 5 states of 4 and 2 tokens."""

SEEN = [(n, 1, 0) for n in LATENTS] + [(8, 2, 21), (9, 2, 4)]
"""Layer, block and state of a flipped bit that counts."""

UNSEEN = [(8, 2, 22), (9, 2, 5), (10, 2, 0)]
"""Likewise of one that does not: behind the last token, or of an open group."""


@pytest.mark.parametrize(("layer", "block", "state"), SEEN)
def test_a_flipped_bit_of_a_latent_is_a_mismatch_at_its_block(
    model, transport, layer, block, state, log
):
    p, d = pair(model, transport=transport, block_size=SIZE)
    d.damage_latents = lambda ids: flip(d.latents[layer][ids[block], 0, state])
    load(p, d, NUMBER, "bad")
    assert d.loads("mismatch") == 1 and d.stats["blocks_mismatched"] == 1
    (line,) = [x for x in log if "blocks differ" in x]
    assert f"group 1: 1 of 3 blocks differ, position {block} sent" in line


@pytest.mark.parametrize(("layer", "block", "state"), UNSEEN)
def test_what_lies_behind_the_last_state_does_not_count(
    model, transport, layer, block, state
):
    p, d = pair(model, transport=transport, block_size=SIZE)
    d.damage_latents = lambda ids: flip(d.latents[layer][ids[block], 0, state])
    load(p, d, NUMBER, "good")
    assert d.loads("verified") == 1


@pytest.mark.parametrize("number", [1, 2, 4, 22, 23, 24])
def test_each_slot_of_a_ring_counts_as_long_as_it_is_read(model, transport, number):
    p, d = pair(model, transport=transport, block_size=SIZE)
    first = (number - 1) // RING_GROUP * RING_GROUP
    read = {at % 8 for at in range(first, number) if at % RING_GROUP != RING_GROUP - 1}
    for slot in range(8):
        d.damage_ring = lambda block, slot=slot: flip(d.rings[block, 0, slot])
        load(p, d, number, f"r{slot}", seed=slot)
        assert d.stats.pop("blocks_mismatched", 0) == (slot in read)
    assert d.loads("mismatch") == len(read)
    assert d.loads("verified") == 8 - len(read)


def test_a_ring_is_loaded_and_compared_behind_a_local_hit(model, transport):
    p, d = pair(model, transport=transport, block_size=SIZE)
    prompt = rig.tokens(NUMBER)
    rig.load(p, d, NUMBER, "first", prompt=prompt)
    compared = d.stats.pop("blocks_compared")
    d.damage_ring = lambda block: flip(d.rings[block, 0, NUMBER % 8])
    rig.load(p, d, NUMBER + 1, "next", prompt=[*prompt, 7])
    assert d.stats["blocks_compared"] == compared - 4
    assert d.loads("verified") == d.loads("mismatch") == 1
    assert d.stats["blocks_mismatched"] == 1


def test_rings_of_other_sizes_are_unverified(model, transport):
    p, d = pair(model, dict(ring=16), dict(ring=8), transport=transport, block_size=64)
    load(p, d, NUMBER, "r")
    assert d.stats["unverified:block_sizes"] == d.loads("unverified") == 1
