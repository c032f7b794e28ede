# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test sums of 16 tokens: any two block sizes, and prefix hits of the consumer.

Whether a load is right is told by the KV that a forward writes.
"""

import random

import pytest
import torch

from .rig import instances as rig
from .rig.instances import load, pair, tokens

SIZES = (16, 32, 48, 64, 96, 128)


def flip_at(position):
    """Damage one bit of the loaded block at a position of D's."""

    def flip(instance, req_id, block_ids):
        request = instance.scheduler.requests[req_id]
        row = instance.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
        assert row[position] in block_ids
        slots = request.num_prompt_tokens - position * instance.block_size
        slot = random.Random(position).randrange(min(slots, instance.block_size))
        instance.kv[2][row[position]].view(torch.uint8)[1, slot, 5] ^= 32

    return flip


@pytest.mark.parametrize("d_size", SIZES)
@pytest.mark.parametrize("p_size", SIZES)
def test_any_two_multiples_of_16_compare_in_full(model, p_size, d_size, log):
    p, d = pair(
        model,
        dict(block_size=p_size),
        dict(block_size=d_size, kv_checksum_fail_closed=True),
    )
    prompt = tokens(300)
    load(p, d, 2 * d_size, "warm", prompt=prompt[: 2 * d_size])
    number, blocks = 290, -(-290 // d_size)
    d.stats.clear()
    load(p, d, number, prompt=prompt[:number])
    # What the first load brought is local now.
    assert d.loads("verified") == 1
    assert d.stats["blocks_compared"] == max(1, blocks - 2)
    damaged = sorted({0, blocks // 2, blocks - 2, blocks - 1})
    for position in damaged:
        d.damage = flip_at(position)
        load(p, d, number, f"bad{position}", prompt=tokens(number, position + 9))
    lines = [x for x in log if "KV checksum mismatch" in x]
    assert d.loads("mismatch") == len(lines) == len(damaged)
    for position, line in zip(damaged, lines, strict=True):
        assert f"1 of {blocks} blocks differ, position {position} sent" in line


@pytest.mark.parametrize("window", [None, 40, 100])
@pytest.mark.parametrize(
    ("p_size", "d_size"), [(32, 16), (16, 32), (64, 48), (128, 16)]
)
def test_intact_loads_of_prompts_that_share_prefixes_verify(
    model, transport, p_size, d_size, window
):
    p, d = pair(
        model,
        dict(block_size=p_size),
        dict(block_size=d_size, num_blocks=90),
        transport=transport,
        window=window,
    )
    drawn = random.Random(p_size)
    bases = [tokens(400, seed) for seed in range(3)]
    for i in range(25):
        shared = drawn.choice(bases)[: drawn.randrange(2, 260)]
        prompt = shared + tokens(drawn.randrange(1, 40), 100 + i)
        load(p, d, len(prompt), f"r{i}", prompt=prompt)
    started = d.stats["loads_started"]
    assert d.loads("verified") == started > 20, d.stats


@pytest.mark.parametrize(
    ("p_size", "d_size", "outcome"),
    [
        (24, 24, "verified"),
        (8, 24, "verified"),
        (24, 8, "verified"),
        (8, 16, "verified"),
        (8, 64, "verified"),
        (64, 8, "verified"),
        (40, 16, "unverified"),
        (24, 64, "unverified"),
        (24, 40, "unverified"),
    ],
)
def test_block_sizes_that_are_no_multiples_of_16(model, p_size, d_size, outcome):
    p, d = pair(model, dict(block_size=p_size), dict(block_size=d_size))
    load(p, d, 200)
    assert d.loads(outcome) == 1
    assert d.stats.get("unverified:block_sizes", 0) == (outcome == "unverified")
    if outcome == "verified":
        d.damage = flip_at(3)
        load(p, d, 200, "bad", prompt=tokens(200, 1))
        assert d.loads("mismatch") == 1


PAYLOAD_BYTES = 264
"""As base64: 19 values of 8 bytes, digests, and what tells them apart."""


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_payload_is_as_long_whatever_the_block_size(model, size):
    p, d = pair(model, dict(block_size=size), dict(block_size=size))
    load(p, d, 300)
    assert p.stats["payload_bytes"] == PAYLOAD_BYTES


# ---- a router appends a token to D's prompt


@pytest.mark.parametrize("number", [15, 17, 30, 33, 100])
@pytest.mark.parametrize("d_size", [16, 32])
def test_a_token_that_is_appended_is_computed_here(model, number, d_size):
    """P's tokens are compared; D computes the last one whatever was loaded for it.

    Where that takes one more block than P has, NIXL loads nothing.
    """
    p, d = pair(model, None, dict(block_size=d_size, kv_checksum_fail_closed=True))
    prompt = tokens(number)
    for req_id, damage in (("good", None), ("bad", flip_at(0))):
        params = rig.prefill(p, f"p-{req_id}", prompt)
        if damage:
            d.damage = damage
        longer = [*prompt, 7]
        d.run(d.add(req_id, longer, params, max_tokens=1), p)
        prompt = tokens(number, 1)
    assert (d.loads("verified"), d.loads("mismatch")) == (1, 1)
    assert d.loads("unverified") == 0


@pytest.mark.parametrize("more", [1, 2])
def test_other_paths_and_more_tokens_are_not_compared(model, transport, more):
    p, d = pair(model, transport=transport)
    prompt = tokens(100)
    params = rig.prefill(p, "p", prompt)
    request = d.add("r", [*prompt, *tokens(more, 1)], params, max_tokens=2)
    d.run(request, p)
    by_params = transport == "pull"
    outcome = "verified" if by_params and more == 1 else "unverified"
    assert d.loads(outcome) == 1, d.stats
    assert d.stats.get("unverified:num_tokens", 0) == (outcome == "unverified")
