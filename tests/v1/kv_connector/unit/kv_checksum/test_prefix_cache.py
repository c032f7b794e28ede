# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that bad KV which is served all the same (fail-open) reaches no later request.

Whether a later request's KV is right is told from what a local prefill writes, not from
a verdict.
"""

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.scheduler.prefix_cache import disown
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from .rig import hybrid, store
from .rig import instances as rig

PROMPT = rig.tokens(112)
LATER = [112, 113, 90, 60, 150]
"""Lengths of the requests that share the prompt's beginning, then go their own way."""


def prompt_of(length, number):
    return (PROMPT + rig.tokens(100, 50 + number))[:length]


def damage_first_load(d, group, which):
    """Flip one bit of a block of the first load alone."""

    def loaded(req_id, block_ids):
        d.loaded = lambda *args: None
        ids = block_ids[group]
        block = ids[min(which, len(ids) - 1)]
        d.kv[d.layers[group][1]][block].view(torch.uint8)[1, 2, 3] ^= 4

    d.loaded = loaded


def look_at(d, requests, right):
    """Note whether the KV of each running request is right."""
    for request in requests:
        if request.num_output_tokens and not request.is_finished():
            right.setdefault(request.request_id, d.answer_kv_is_right(request))


@pytest.mark.parametrize("block", [0, 2, -1])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("when", ["later", "waiting", "waiting, async scheduling"])
def test_requests_that_share_the_prefix_of_a_damaged_load(
    model, transport, block, window, when
):
    """Case 8: they loaded the rest alone, and found the bad block in the cache."""
    d_settings, together = dict(async_scheduling="async" in when), when != "later"
    p, d = rig.pair(model, None, d_settings, transport=transport, window=window)
    group = 0 if window is None else 1
    damage_first_load(d, group, block)
    prompts = [PROMPT, *(prompt_of(n, i) for i, n in enumerate(LATER))]
    requests, right = [], {}
    for number, prompt in enumerate(prompts):
        params = rig.prefill(p, f"p{number}", prompt)
        requests.append(d.add(f"r{number}", prompt, params, max_tokens=40))
        while not together and not requests[-1].is_finished():
            p.step()
            d.step(p)
            look_at(d, requests, right)
    while not all(r.is_finished() for r in requests):
        p.step()
        d.step(p)
        look_at(d, requests, right)
    assert d.loads("mismatch") == 1
    bad = [req_id for req_id, is_right in right.items() if not is_right]
    assert bad == ["r0"] and len(right) == len(prompts)
    assert d.loads("verified") == d.stats["loads_started"] - 1 >= len(LATER)


@pytest.mark.parametrize("extra", [1, 3])
def test_a_window_s_first_block_that_came_in_part(model, transport, extra):
    """D's blocks are larger than P's, which had given up the first of two halves.

    The first request needs tokens from 54 on; the second finds its block of tokens 32
    to 63 and needs some before 48, which never came.
    """
    d_settings = dict(block_size=32, kv_checksum_fail_closed=True, policy="fail")
    p, d = rig.pair(model, None, d_settings, transport=transport, window=24)
    right = {}
    for number, prompt in enumerate([PROMPT[:77], PROMPT[:65] + rig.tokens(extra, 9)]):
        params = rig.prefill(p, f"p{number}", prompt)
        request = d.add(f"r{number}", prompt, params, max_tokens=3)
        while not request.is_finished():
            p.step()
            d.step(p)
            look_at(d, [request], right)
    assert d.stats["left_out:partial_blocks"] == 1 and d.loads("verified") == 2
    assert right == {"r0": True, "r1": True}


def test_what_was_generated_from_bad_kv_is_not_found_either(model):
    """Ask for the second turn of a conversation whose first load was damaged."""
    p, d = rig.pair(model)
    damage_first_load(d, 0, 2)
    request, _ = rig.load(p, d, 0, "turn1", prompt=PROMPT)
    longer = [*request.all_token_ids, *rig.tokens(20, 3)]
    again = d.add("turn2", longer, None, max_tokens=2)
    while not again.num_output_tokens:
        d.step(p)
    assert d.scheduled[-1][0] == "turn2" and d.answer_kv_is_right(again)
    # Two blocks before the bad one are good.
    assert sum(n for r, n in d.scheduled if r == "turn2") == len(longer) - 32


def test_good_blocks_before_the_first_bad_one_are_found(model, transport):
    p, d = rig.pair(model, transport=transport)
    damage_first_load(d, 0, 5)
    rig.load(p, d, 0, "first", prompt=PROMPT)
    second = d.add("second", PROMPT, None, max_tokens=2)
    d.run(second, p)
    assert sum(n for r, n in d.scheduled if r == "second") == 112 - 5 * 16 + 1


@pytest.mark.parametrize("damaged", [False, True])
def test_a_bad_state_is_not_found(model, transport, damaged, monkeypatch):
    """Find neither it nor what stands behind it, which was computed from it."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    p, d = hybrid.pair(model, transport=transport, mode="align")
    if damaged:
        d.damage_state = d.flip_state_bit
    rig.load(p, d, 0, "first", prompt=PROMPT + [5])
    assert d.loads("mismatch") == damaged
    d.run(d.add("second", PROMPT + [5, 6], None, max_tokens=2), p)
    computed = sum(n for r, n in d.scheduled if r == "second")
    assert computed == (114 if damaged else 2) + 1


def test_a_store_does_not_get_them_under_their_own_keys(model):
    """Let a consumer also store: nothing bad may come back as good."""
    store.STORE.clear()
    a = store.StoringInstance(model)
    a.run(a.add("a", PROMPT, None, max_tokens=2))
    good = {
        h: {n: kv.clone() for n, kv in v.kv.items()} for h, v in store.STORE.items()
    }
    list(store.STORE.values())[2].kv[1].view(torch.uint8)[1, 2, 3] ^= 4
    b = store.StoringInstance(model)
    b.run(b.add("b", PROMPT, None, max_tokens=40))
    assert b.stats["loads:mismatch:stored"] == b.stats["stored_blocks_dropped"] == 1
    bad = [*good][2:]
    assert bad[0] not in store.STORE
    for block_hash in store.STORE.keys() & good.keys():
        for n, kv in store.STORE[block_hash].kv.items():
            assert torch.equal(
                kv.view(torch.uint8), good[block_hash][n].view(torch.uint8)
            )
    c = store.StoringInstance(model)
    request = c.add("c", PROMPT, None, max_tokens=2)
    while not request.num_output_tokens:
        c.step()
    assert c.answer_kv_is_right(request) and c.stats["loads:verified:stored"] == 1


@pytest.mark.parametrize("hash_function", [sha256, sha256_cbor])
@pytest.mark.parametrize("first_bad", [0, 15, 16, 40, 63, 64, 70])
def test_hashes_from_the_first_bad_token_on_are_of_nobody_else(
    hash_function, first_bad, model
):
    d = rig.Instance(model, "kv_consumer")
    init_none_hash(hash_function)
    d.hasher = get_request_block_hasher(16, hash_function)
    first, second, honest = (d.add(x, rig.tokens(70), None, 60) for x in "abc")
    for request in (first, second):
        disown(request, first_bad, 16)
    for request in (first, second, honest):
        request.append_output_token_ids(rig.tokens(50, 4))
    number = first_bad // 16
    expected = honest.block_hashes
    assert len(first.block_hashes) == len(expected) == 7
    assert first.block_hashes[:number] == expected[:number]
    for mine, others in ((first, second), (second, first)):
        theirs = {*expected, *others.block_hashes[number:]}
        assert not theirs & {*mine.block_hashes[number:]}
        assert {len(h) for h in mine.block_hashes} == {len(expected[0])}


def test_without_a_prefix_cache_there_is_nothing_to_keep_away(model):
    d = rig.Instance(model, "kv_consumer")
    d.hasher = None
    request = d.add("r", rig.tokens(70), None)
    disown(request, 0, 16)
    assert request.block_hashes == []
