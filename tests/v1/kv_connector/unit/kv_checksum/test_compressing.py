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


# ---- other numbers of tokens

COUNTS = (1, 3, 4, 5, 22, 23, 24, 150)
"""Tokens that P computes: before, at and behind the end of a group."""


def load_another(p, d, number, appended=(), p_tokens=1):
    """Load a prompt to which a router has appended tokens; return its last output."""
    prompt = rig.tokens(number, number)
    params = rig.prefill(p, f"p-{number}", prompt, p_tokens)
    return d.run(d.add(f"r{number}", [*prompt, *appended], params, max_tokens=2), p)


def load_counts(p, d, **more):
    for number in COUNTS:
        out = load_another(p, d, number, **more)
        assert out.finish_reason == FinishReason.LENGTH
    assert d.stats["loads_started"] == len(COUNTS)
    return d.stats["blocks_mismatched"] == d.loads("mismatch") == 0


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_a_token_behind_what_was_sent_is_no_false_alarm(model, transport, steps_ahead):
    """Only NIXL pull tells D how many tokens P computed.

    With async scheduling P counts one more, which it has begun to compute.
    """
    p, d = pair(
        model, dict(async_scheduling=steps_ahead), transport=transport, block_size=SIZE
    )
    assert load_counts(p, d, appended=[7])
    outcome = "verified" if transport == "pull" else "unverified"
    assert d.loads(outcome) == len(COUNTS)
    if transport != "pull":
        assert d.stats["unverified:num_tokens"] == len(COUNTS)


def test_a_ring_of_a_producer_that_went_on_is_right_for_fewer_tokens(model, transport):
    """The rows of two more tokens lie in other slots."""
    p, d = pair(model, transport=transport, block_size=SIZE)
    assert load_counts(p, d, p_tokens=3)
    assert d.loads("verified") == len(COUNTS)


def test_a_ring_behind_two_tokens_more_is_not_compared(model, transport):
    p, d = pair(model, transport=transport, block_size=SIZE)
    assert load_counts(p, d, appended=[7, 7], p_tokens=3)
    assert d.stats["unverified:num_tokens"] == d.loads("unverified") == len(COUNTS)


def test_a_ring_that_a_token_follows_is_checked(model):
    """Its rows before the token that D computes itself count."""
    p, d = pair(model, dict(async_scheduling=True), transport="pull", block_size=SIZE)
    d.damage_ring = lambda block: flip(d.rings[block, 0, 20 % 8])
    load_another(p, d, 22, appended=[7])
    assert d.loads("mismatch") == d.stats["blocks_mismatched"] == 1
