# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that each group sums what its connector loads, however far groups lag.

`Instance.schedule` holds it against the connector's own metadata in every step; these
tests bring about the loads in which groups differ, and damage what the metadata names.
"""

import random
from dataclasses import replace

import pytest
import torch

from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from .rig import caches as u
from .rig import hybrid
from .rig import instances as rig

CLOSED = dict(kv_checksum_fail_closed=True)


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch):
    """Set the conv states' layout that NIXL transfers: the only one."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")


class Chunked(rig.Instance):
    """Full attention beside chunked-local attention of 64 tokens."""

    def token_specs(self, window):
        chunked = ChunkedLocalAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=rig.HEADS,
            head_size=rig.HEAD_SIZE,
            dtype=torch.bfloat16,
            attention_chunk_size=64,
        )
        return [u.full_spec(rig.HEADS, self.block_size, rig.HEAD_SIZE), chunked]


class WithDraft(hybrid.Hybrid):
    """Full attention and states, and a drafter's layers with a spec of their own."""

    def token_specs(self, window):
        full = u.full_spec(rig.HEADS, self.block_size, rig.HEAD_SIZE)
        return [full, replace(full, sliding_window=4096)]

    def __init__(self, *args, **settings):
        super().__init__(*args, mode="align", **settings)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        coordinator.attention_groups = [
            group._replace(use_eagle=group.group_ids == [1])
            for group in coordinator.attention_groups
        ]
        coordinator.single_type_managers[1].use_eagle = True


KINDS = {
    "window": (rig.Instance, dict(window=40), {}, {}),
    "window, small blocks on P": (
        rig.Instance,
        dict(window=100),
        {},
        dict(block_size=32),
    ),
    "states": (hybrid.Hybrid, dict(mode="align"), {}, {}),
    "states, no cache": (hybrid.Hybrid, dict(mode="none"), {}, {}),
    "states and window": (hybrid.Hybrid, dict(mode="align", window=64), {}, {}),
    "states, window, scratch": (
        hybrid.Hybrid,
        dict(mode="align", window=64, scratch=2),
        {},
        {},
    ),
    "draft": (WithDraft, {}, {}, {}),
    "chunked": (Chunked, {}, {}, {}),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_and_evictions(model, kind, seed, transport):
    """Use few blocks, so that groups lose their prefixes apart from each other."""
    make, both, p_settings, d_settings = KINDS[kind]
    p = make(model, "kv_producer", transport=transport, **both, **p_settings)
    d = make(
        model,
        "kv_consumer",
        transport=transport,
        num_blocks=60,
        **both,
        **d_settings,
    )
    draw = random.Random(seed)
    bases = [rig.tokens(400, s) for s in range(3)]
    for k in range(25):
        prompt = draw.choice(bases)[: draw.randrange(2, 260)]
        prompt = prompt + rig.tokens(draw.randrange(1, 40), 100 + k)
        params = rig.prefill(p, f"p{k}", prompt)
        request = d.add(f"r{k}", prompt, params, max_tokens=draw.randrange(1, 20))
        d.run(request, p, steps=80)
    judged = d.loads("verified") + d.loads("unverified")
    assert d.stats["loads_started"] == judged == d.loads_compared > 15
    assert d.loads("unverified") == d.stats.get("unverified:unaligned_start", 0)
    if p.block_size == d.block_size:
        assert not d.loads("unverified")


def damage_loaded(d, group, which):
    """Damage one block of a group that the connector was told to load."""
    hit = []

    def loaded(req_id, block_ids):
        block = block_ids[group][which]
        hit.append(block)
        for n in d.layers[group]:
            d.kv[n][block].view(torch.uint8).bitwise_xor_(0x5A)

    d.loaded = loaded
    return hit


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("evict", [False, True])
def test_a_window_that_lags_behind_full_attention(model, transport, evict, which):
    """Case 1: D's window group lost its prefix, or holds less of it."""
    p, d = hybrid.pair(model, {}, CLOSED, transport=transport, mode="align", window=64)
    prompt = rig.tokens(101)
    rig.load(p, d, 65, "warm", prompt=prompt[:65])
    pool = d.scheduler.kv_cache_manager.block_pool
    if evict:
        hashed = [b for b in pool.blocks if b.block_hash is not None]
        window = {b.block_id for b in hashed if get_group_id(b.block_hash) == 1}
        assert window
        pool.evict_blocks(window)
    d.stats.clear()
    hit = damage_loaded(d, 1, which)
    rig.load(p, d, 101, prompt=prompt)
    assert hit and d.loads("mismatch") == d.stats["blocks_mismatched"] == 1


def test_a_drafter_s_layers_lag_by_one_block(model, transport):
    """Case 2: a drafter's group begins one block behind every local hit."""
    p = WithDraft(model, "kv_producer", transport=transport)
    d = WithDraft(model, "kv_consumer", transport=transport, **CLOSED)
    base = rig.tokens(64)
    rig.load(p, d, 0, "turn1", prompt=base + rig.tokens(37, 5))
    d.stats.clear()
    starts = {}
    add_recv = d.scheduler.kv_checksum.add_recv

    def note(request, num_local, *args):
        add_recv(request, num_local, *args)
        load = d.scheduler.kv_checksum._recvs[request.request_id]
        starts.update({g: s for g, (s, _) in load.blocks.groups.items()})

    d.scheduler.kv_checksum.add_recv = note
    damage_loaded(d, 1, 0)
    rig.load(p, d, 0, "turn2", prompt=base + rig.tokens(37, 6))
    # vLLM has Mooncake's groups begin where all of them have a local hit.
    assert starts[1] == starts[0] - (transport != "mooncake")
    assert d.loads("mismatch") == d.stats["blocks_mismatched"] == 1


@pytest.mark.parametrize("number", [64, 65, 100, 128, 192])
def test_a_chunk_that_ends_with_the_prompt_brings_nothing(model, transport, number):
    """Case 10: the next token begins a chunk, so that no block of it is loaded."""
    p = Chunked(model, "kv_producer", transport=transport)
    d = Chunked(model, "kv_consumer", transport=transport, **CLOSED)
    rig.load(p, d, number)
    assert d.loads("verified") == 1
    d.damage = lambda instance, req_id, ids: None
    damage_loaded(d, 0, 0)
    rig.load(p, d, number, "bad", prompt=rig.tokens(number, 9))
    assert d.loads("mismatch") == 1


@pytest.mark.parametrize("number", [97, 99, 100, 101])
@pytest.mark.parametrize("tokens", [True, False], ids=["hybrid", "states alone"])
def test_a_state_is_compared_at_its_own_token_count_alone(
    model, transport, number, tokens
):
    """Case 5: a running state is that of exactly one count of tokens."""
    p, d = hybrid.pair(model, transport=transport, tokens=tokens)
    prompt = rig.tokens(101)
    params = rig.prefill(p, "p", prompt[:100])
    d.run(d.add("r", prompt[:number], params, max_tokens=2), p)
    if number == 100:
        assert d.loads("verified") == 1
    else:
        assert d.loads("unverified") == d.stats["unverified:num_tokens"] == 1
