# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test loads of compressed caches from tiers: stored checksums, and the ledger.

A group of latents of 1, 4 and 64 tokens per state stands beside attention and a ring.
Stored checksums travel with vLLM's own managers, workers and threads, and a real
Mooncake store; the ledger judges what a fake tier brings back. What a load must bring
is known from the blocks' positions: tiers hold whole blocks of what vLLM caches by
prefix, which rings are not.
"""

import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from rig.mooncake_store import MooncakeStore

import vllm
from vllm.distributed.kv_transfer.kv_checksum.scheduler import ledger_loads
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import tier_blocks
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import Ledger
from vllm.distributed.kv_transfer.kv_checksum.scheduler.local_hits import LocalHits
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from .rig import caches as u
from .rig import instances as rig
from .rig import real_workers as real
from .rig import tier
from .rig.compressing import LATENTS, Compressing
from .rig.versions import needs

pytestmark = [
    pytest.mark.skipif(
        vllm.__version__.startswith("0.32"), reason="vLLM 0.32.0 lacks these models"
    ),
    needs("0.31.0", "window that is computed again, and no store for these rings"),
]

SIZE = 64
PROMPT = rig.tokens(3 * SIZE + 20)
"""Of it three blocks come back: 192 tokens, of each group but the ring's."""

LATENT_GROUP, RING_GROUP_ID = 1, 2

SEEN = [(8, 1, 5), (9, 2, 15), (10, 0, 0)]
"""Layer, position of the block and state of a flipped bit that counts."""

UNSEEN = [(8, 3, 5), (9, 3, 1), (10, 3, 0)]
"""Likewise of one in the block that is computed here, and of an open group."""


def flip(cell):
    cell.view(torch.uint8)[3] ^= 4


def flip_latent(d, request, layer, position, state):
    flip(d.latents[layer][d.rows(request)[0][position], 0, state])


def flip_ring(d, request):
    for slot in range(d.ring):
        flip(d.rings[d.rows(request)[1][0], 0, slot])


def assert_all_but_the_ring_verified(d, number, carrier, log):
    """Check that all blocks were compared, and that it was said once what was not."""
    assert d.stats[f"loads:verified:{carrier}"] == d.stats["loads_started"] == number
    assert d.stats["blocks_compared"] == 6 * number
    assert d.stats["left_out:states"] == number
    assert not any(key.startswith("unverified") for key in d.stats)
    (said,) = (line for line in log if "leave out" in line)
    assert f"group {RING_GROUP_ID}: states" in said


def assert_one_block_differs(d, carrier, position, log):
    assert d.stats[f"loads:mismatch:{carrier}"] == d.stats["blocks_mismatched"] == 1
    (said,) = (line for line in log if "KV checksum mismatch" in line)
    assert f"group {LATENT_GROUP}: 1 of 3 blocks differ, position {position} " in said


# ---- stored checksums


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with MooncakeStore(tmp_path_factory.mktemp("mooncake")) as store:
        yield store


@pytest.fixture(params=["host memory", "Mooncake store"])
def stored(request, model):
    """Yield an instance that has stored the prompt, and holds nothing of it itself."""
    if torch.cuda.is_available():
        pytest.skip("with a device, vLLM has it copy the blocks")
    settings = dict(make=Compressing, block_size=SIZE)
    with ExitStack() as stack:
        stack.enter_context(real.without_a_device())
        if request.param == "host memory":
            instance = real.offloading_instance(stack, model, **settings)
        else:
            store = request.getfixturevalue("store")
            instance = real.storing_instance(stack, model, store, **settings)
        ask(instance, "first")
        forget(instance)
        yield instance


def ask(instance, req_id, prompt=PROMPT):
    request = instance.add(req_id, prompt, None, max_tokens=2)
    step_until(instance, request.is_finished)
    worker = getattr(instance.transport.worker, "connector_worker", None)
    if worker is not None:
        worker.kv_send_thread.request_queue.join()
    return request


def forget(instance):
    step_until(instance, instance.scheduler.reset_prefix_cache)
    instance.stats.clear()


def step_until(instance, done):
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, instance.scheduler.requests
        instance.step()
        time.sleep(0.001)


def damaged_by(instance, damage):
    """Let `damage` at a load's blocks once they have arrived and are not summed."""
    instance.damage = lambda d, req_id, ids: damage(d.scheduler.requests[req_id])


def test_stored_latents_verify_and_the_ring_beside_them_is_said(stored, log):
    for number in range(1, 3):
        ask(stored, f"again{number}")
        step_until(stored, stored.scheduler.reset_prefix_cache)
    assert_all_but_the_ring_verified(stored, 2, "stored", log)


@pytest.mark.parametrize(("layer", "position", "state"), SEEN)
def test_a_flipped_bit_of_a_stored_latent_is_a_mismatch_at_its_block(
    stored, layer, position, state, log
):
    damaged_by(stored, lambda r: flip_latent(stored, r, layer, position, state))
    ask(stored, "bad")
    assert_one_block_differs(stored, "stored", position, log)
    assert stored.stats["stored_blocks_dropped"] == 1


def test_a_ring_that_no_store_brings_back_does_not_count(stored, log):
    """Nor does a step behind the load read it: whole groups come back."""
    damaged_by(stored, lambda request: flip_ring(stored, request))
    ask(stored, "good")
    assert_all_but_the_ring_verified(stored, 1, "stored", log)


# ---- the ledger


class CompressingTier(tier.TierInstance, Compressing):
    """Stores every full block of attention and latents, and loads what it lacks."""

    def cache(self, layer):
        return self.latents[layer] if layer in LATENTS else self.kv[layer]

    def layers_of(self, group_id):
        return LATENTS if group_id == LATENT_GROUP else super().layers_of(group_id)


@pytest.fixture(params=tier.SYNC)
def how(request):
    return tier.SYNC[request.param]


def first_use(model, prompt=PROMPT, **settings):
    """Return an instance that has computed a prompt and holds it in the tier alone."""
    d = CompressingTier(model, block_size=SIZE, **settings)
    d.ask("first", prompt)
    give_up(d)
    d.stats.clear()
    return d


def give_up(d):
    pool = d.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})


def spoiled_by(d, damage):
    """Let `damage` at a load's blocks once they have arrived."""

    def spoil(d, load):
        (request,) = d.scheduler.requests.values()
        damage(request)

    d.spoil = spoil


def test_latents_from_a_tier_verify_and_the_ring_beside_them_is_said(model, how, log):
    d = first_use(model, **how)
    for number in range(1, 3):
        d.ask(f"again{number}", PROMPT)
        give_up(d)
    assert_all_but_the_ring_verified(d, 2, "ledger", log)


@pytest.mark.parametrize(("layer", "position", "state"), SEEN)
def test_a_flipped_bit_of_a_latent_from_a_tier_is_a_mismatch_at_its_block(
    model, how, layer, position, state, log
):
    d = first_use(model, **how)
    spoiled_by(d, lambda request: flip_latent(d, request, layer, position, state))
    d.ask("bad", PROMPT)
    assert_one_block_differs(d, "ledger", position, log)


def test_what_a_tier_does_not_bring_back_does_not_count(model, how, log):
    d = first_use(model, **how)

    def damage(request):
        flip_ring(d, request)
        # Of a load between steps, a request has no further blocks yet.
        for place in UNSEEN if "sync" in how else ():
            flip_latent(d, request, *place)

    spoiled_by(d, damage)
    d.ask("good", PROMPT)
    assert_all_but_the_ring_verified(d, 1, "ledger", log)


@pytest.mark.parametrize("layer", LATENTS)
def test_a_load_that_ends_inside_a_group_is_no_mismatch(model, how, layer):
    """Load 175 of 192 tokens: the last block's states of 64 tokens are open."""
    d = first_use(model, PROMPT[: 3 * SIZE], leave=17, **how)
    last = SIZE // LATENTS[layer] - 1
    spoiled_by(d, lambda request: flip_latent(d, request, layer, 2, last))
    d.ask("again", PROMPT[: 3 * SIZE])
    assert d.stats["loads_started"] == 1 and not d.outcome("mismatch")
    # What the step completes is right again, and known.
    assert d.outcome("verified" if "sync" in how else "unverified") == 1


# ---- windows that are computed again


def replayed():
    """Return groups of which the second, of smaller blocks, is never cached."""
    window = SlidingWindowMLASpec(
        block_size=32,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        sliding_window=40,
        bounded_replay=True,
    )
    full = u.full_spec(block_size=SIZE)
    return u.config(9, (u.names(0), full), (u.names(1), window))


@pytest.mark.parametrize("is_sync", [False, True])
def test_a_tier_brings_nothing_of_windows_that_are_computed_again(is_sync):
    rows = [[KVCacheBlock(i) for i in ids] for ids in ((1, 2), (3, 4, 5, 6))]
    found = tier_blocks(replayed(), SimpleNamespace(blocks=rows), 0, 2 * SIZE, is_sync)
    assert u.groups_of(found.blocks) == {0: (0, [1, 2])}
    assert found.empty == {1} and not found.left_out


def test_the_ledger_knows_no_windows_that_are_computed_again():
    """Their blocks may be smaller than what a hash covers."""
    ledger = ledger_loads.LedgerLoads(Ledger(9), replayed(), SIZE, 1)
    hashes = [sha256(i) for i in range(4)]
    request = SimpleNamespace(request_id="r", block_hashes=hashes)
    ledger.deny_from(request, SIZE, 1)
    assert ledger.num_allowed(request, 0, 4 * SIZE) == SIZE
    rows = [[KVCacheBlock(i) for i in ids] for ids in ((1, 2), (3, 4, 5, 6))]
    hits = LocalHits(replayed(), 1.0)
    hit = hits.choose("r", SimpleNamespace(blocks=rows), 2 * SIZE, 1)
    assert list(hit.blocks.groups) == [0]
