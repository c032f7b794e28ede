# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what a real consumer's scheduler computes again after a load was found bad."""

import pytest
import torch

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from .rig import instances as rig
from .rig.instances import MODES, change_payload, fewer_tokens, load, pair, tokens

RECOMPUTE = MODES["recompute"]


def flip_in(**positions):
    """Damage that flips a bit in the block at a position of each named request."""

    def damage(instance, req_id, block_ids):
        if req_id in positions:
            (row,) = instance.scheduler.kv_cache_manager.get_block_ids(req_id)
            block = row[positions[req_id]]
            instance.kv[2][block].view(torch.uint8)[0, 0, 1] ^= 32

    return damage


def cached_kv_is_right(d, request):
    """Return whether every block of the prompt that others can hit holds the right KV.

    Steps in flight fill blocks that can be hit already.
    """
    spans = [rig.spans(step).get(request.request_id, (0, 0)) for step in d.steps]
    pool = d.scheduler.kv_cache_manager.block_pool
    (row,) = d.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    ids = torch.tensor(request.prompt_token_ids)
    for start, block in zip(range(0, len(ids), d.block_size), row, strict=False):
        if pool.blocks[block].block_hash is None:
            continue
        if any(first <= start < last for first, last in spans):
            continue
        at = torch.arange(start, start + d.block_size)
        for n in d.layers[0]:
            right = rig.token_kv(n, at, ids[start : start + d.block_size])
            if not torch.equal(d.kv[n][block].transpose(0, 1), right):
                return False
    return True


def run_to_first_token(d, p, *requests):
    while not all(r.num_output_tokens for r in requests):
        p.step()
        d.step(p)
        assert all(cached_kv_is_right(d, r) for r in requests)
    assert all(d.answer_kv_is_right(r) for r in requests)


def computed(d, req_id="r"):
    return sum(n for r, n in d.scheduled if r == req_id)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("local", "position"), [(0, 0), (0, 1), (0, 20), (0, 43), (48, 3), (48, 30)]
)
def test_a_recompute_starts_at_the_first_bad_block(model, local, position, ahead, log):
    p, d = pair(model, None, dict(RECOMPUTE, async_scheduling=ahead))
    assert isinstance(d.scheduler, AsyncScheduler) == ahead
    prompt = tokens(700)
    if local:
        load(p, d, local, "warm", prompt=prompt[:local])
    d.damage = flip_in(r=position)
    request = d.add("r", prompt, rig.prefill(p, "p", prompt), max_tokens=3)
    run_to_first_token(d, p, request)
    assert computed(d) == 700 - 16 * position
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert line.endswith(f"; recomputing from token {16 * position}")
    assert (d.loads("mismatch"), d.stats["recomputed"]) == (1, 1)

    # A second turn finds all that is right here, and loads the rest.
    d.run(request, p)
    d.stats.clear()
    longer = [*request.all_token_ids, *tokens(40, 1)]
    second = d.add("r2", longer, rig.prefill(p, "p2", longer), max_tokens=2)
    run_to_first_token(d, p, second)
    assert (d.loads("verified"), d.stats["blocks_compared"]) == (1, 47 - 43)
    assert computed(d, "r2") == 1


@pytest.mark.parametrize(
    ("p_size", "d_size", "position", "kept"), [(32, 16, 5, 80), (16, 32, 2, 64)]
)
def test_at_different_block_sizes(model, p_size, d_size, position, kept):
    p, d = pair(model, dict(block_size=p_size), dict(RECOMPUTE, block_size=d_size))
    d.damage = flip_in(r=position)
    prompt = tokens(150)
    request = d.add("r", prompt, rig.prefill(p, "p", prompt), max_tokens=2)
    run_to_first_token(d, p, request)
    assert computed(d) == 150 - kept


def test_loads_that_fail_in_one_step(model):
    p, d = pair(model, None, RECOMPUTE)
    bad = {"a": 5, "b": 2, "c": 0}
    d.damage = flip_in(**bad)
    requests = []
    for i, req_id in enumerate([*bad, "good"]):
        prompt = tokens(100, i)
        params = rig.prefill(p, f"p-{req_id}", prompt)
        requests.append(d.add(req_id, prompt, params, max_tokens=9))
    run_to_first_token(d, p, *requests)
    first = dict(reversed(d.scheduled))
    assert first == {"a": 100 - 80, "b": 100 - 32, "c": 100, "good": 1}


def later_start(payload):
    group = payload.groups[0]
    group.start, group.values = 1, group.values[1:]


def another_group(payload):
    payload.groups[1] = payload.groups[0]


@pytest.mark.parametrize("change", [later_start, another_group, fewer_tokens])
def test_what_was_not_compared_is_recomputed_too(model, change, log):
    p, d = pair(model, None, RECOMPUTE)
    p.alter = change_payload(change)
    d.damage = flip_in(r=1)
    prompt = tokens(100)
    request = d.add("r", prompt, rig.prefill(p, "p", prompt), max_tokens=2)
    run_to_first_token(d, p, request)
    assert d.loads("mismatch") == 1 and computed(d) == 100
    assert any(x.endswith("; recomputing from token 0") for x in log)
    # It has one end; why a part of it was not compared is no second one.
    assert not any(key.startswith("unverified") for key in d.stats)


def window_spec(num_kv_heads, block_size, head_size):
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=torch.bfloat16,
        sliding_window=40,
    )


@pytest.mark.parametrize("groups", ["two groups", "a window"])
def test_other_models_recompute_whole(model, groups, monkeypatch):
    if groups == "a window":
        monkeypatch.setattr(rig.u, "full_spec", window_spec)
        p, d = pair(model, None, RECOMPUTE)
    else:
        second = rig.u.full_spec(rig.HEADS, 16, rig.HEAD_SIZE)
        monkeypatch.setattr(rig, "SlidingWindowSpec", lambda **_: second)
        p, d = pair(model, None, RECOMPUTE, window=40)

    def damage(instance, req_id, block_ids):
        instance.kv[2][block_ids[-1]].view(torch.uint8)[0, 0, 1] ^= 32

    d.damage = damage
    load(p, d, 100)
    assert d.loads("mismatch") == 1 and computed(d) == 101
