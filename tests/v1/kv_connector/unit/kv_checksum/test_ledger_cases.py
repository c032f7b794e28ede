# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ledger in rarer cases: rolled-back steps, resets, failures, other bits.

What is loaded and what is right are known as in `test_ledger_loads`. Where a case needs
no scheduler, `LedgerLoads` stands alone.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.scheduler import ledger_loads, scheduler
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import tier_blocks
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import Ledger
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from .rig import caches as u
from .rig import instances as rig
from .rig import loaded, tier
from .rig.instances import MODES
from .rig.tier import (
    PROMPT,
    SYNC,
    ended_well,
    first_use,
    make,
    served_on_wrong_kv,
    tokens_of,
)

WHOLE = rig.tokens(192)
"""A prompt of full blocks."""


@pytest.fixture(params=SYNC)
def how(request):
    return SYNC[request.param]


def other_bits(d, req_id, position, by=1):
    """What a request computes of one block gets other bits, as of another kernel."""
    write = d.write

    def otherwise(request, first, last):
        write(request, first, last)
        if request.request_id == req_id and first <= position * 16 + 15 < last:
            rows = d.scheduler.kv_cache_manager.get_block_ids(req_id)
            d.kv[1][rows[0][position], 0, 15] += by

    d.write = otherwise


def compute(d, req_id, prompt, max_tokens=1):
    """Have a prompt computed here, and its blocks given up again."""
    d.tier.offers = False
    d.ask(req_id, prompt, max_tokens)
    d.evict()


def forget_cached(d):
    """Take all blocks out of the prefix cache."""
    pool = d.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})


# ---- which blocks are entered


def alone(num_groups=1):
    """A ledger of a model whose groups have two layers each."""
    groups = [(u.names(2 * g, 2 * g + 1), u.full_spec()) for g in range(num_groups)]
    return ledger_loads.LedgerLoads(Ledger(100), u.config(8, *groups), 16, 1)


def full_blocks(*ids):
    """A request, and its blocks with their hashes."""
    hashes = [BlockHash(sha256(i)) for i in ids]
    blocks = [KVCacheBlock(i) for i in ids]
    for block, block_hash in zip(blocks, hashes, strict=True):
        block.set_block_hash(make_block_hash_with_group_id(block_hash, 0))
    return SimpleNamespace(request_id="r", block_hashes=hashes), blocks


@pytest.mark.parametrize("scheduled", [set(), {"other"}])
def test_blocks_that_are_another_s_by_now_are_not_summed(scheduled):
    """The request has ended: who got a block since, and fills it, gives it a hash."""
    loads = alone()
    request, blocks = full_blocks(3, 4, 5, 6)
    _, (theirs,) = full_blocks(7)
    loads.note(request, 0, blocks, 0, 4)
    blocks[1].reset_hash()
    blocks[2].reset_hash()
    blocks[2].set_block_hash(theirs.block_hash)
    full = loads.take_full_blocks(scheduled, seq=9)
    assert u.groups_of(full) == {0: (0, [3, 6])}
    assert full.positions[0].tolist() == [0, 3] and full.seq == 9
    ((_, asked),) = loads._pending.items()
    assert asked.hashes == {0: [request.block_hashes[0], request.block_hashes[3]]}


def test_a_block_that_was_loaded_in_part_is_not_entered(model, how):
    """Its last token is computed here; the others are whatever the tier brought.

    In the step that loads it, it is whole when it is summed; else it is not looked up.
    """
    old = make(model, leave=1)
    old.ask("first", WHOLE)
    d = make(model, leave=1, **how)
    d.tier.stored = old.tier.stored
    for number in (1, 2):
        d.ask(f"r{number}", WHOLE)
        d.evict()
        assert d.stats["unverified:not_in_ledger"] == number
        assert d.stats["ledger_misses"] == (12 if how.get("sync") else 11) * number


def test_what_is_found_in_the_prefix_cache_is_not_entered(model, how):
    """A block that was damaged there is not right because more was computed behind."""
    d = make(model, **how)
    d.ask("first", PROMPT)
    request = d.add("which", PROMPT + rig.tokens(30, 3), None)
    found = d.scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
    d.kv[2][found[4].block_id, 0, 3, 2] += 1
    stored = {
        key: {n: kv.clone() for n, kv in v.items()} for key, v in d.tier.stored.items()
    }
    key = (0, request.block_hashes[4])
    stored[key] = {n: d.kv[n][found[4].block_id].clone() for n in d.layers[0]}
    d.run(request)
    d.tier.stored = stored
    d.evict()
    d.ask("again", PROMPT)
    assert d.outcome("mismatch") == d.stats["blocks_mismatched"] == 1


def test_blocks_of_several_units_are_remembered(model, how):
    """A block of 32 tokens has two; decoded ones and those behind a hit, too."""
    d = make(model, block_size=32, **how)
    d.ask("first", PROMPT, max_tokens=60, steps=80)
    forget_cached(d)
    d.ask("again", PROMPT + [7] * 59 + [9] * 20)
    assert [len(load[0]) for load in d.loaded_blocks] == [8]
    assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 8


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_in_several_chunks_is_remembered(model, how, ahead):
    """Steps that fill blocks follow one another, the next before one has reported."""
    d = make(model, num_blocks=100, async_scheduling=ahead, **how)
    prompt = rig.tokens(700)
    d.ask("first", prompt)
    d.evict()
    d.ask("again", prompt)
    assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 43


@pytest.mark.parametrize("skips", [0, 1])
def test_a_group_that_workers_skip_leaves_the_others(model, how, skips):
    """Groups beside it are remembered, and compared."""
    d = make(model, window=40, num_blocks=100, **how)
    for worker in d.workers:
        worker.skipped[skips] = "compressed: for the test"
        del worker.groups[skips]
    d.ask("first", PROMPT)
    d.evict()
    d.spoil = lambda d, load: tier.flip_bit(d, load, group_id=1 - skips)
    d.ask("again", PROMPT)
    assert d.outcome("mismatch") == d.stats["blocks_mismatched"] == 1


def test_what_waits_is_entered_when_it_is_asked_for(model, how, monkeypatch):
    """And what waits is a share of a step's at most, so that it never piles up."""
    monkeypatch.setattr(ledger_loads, "_ENTERED_PER_STEP", 1)
    d = make(model, **how)
    d.ask("first", PROMPT, max_tokens=1)
    ledger = d.scheduler.kv_checksum.ledger
    assert ledger.num_waiting == 11 and len(ledger.ledger) == 1
    forget_cached(d)
    d.ask("again", PROMPT)
    assert d.outcome("verified") == 1 and not ledger.num_waiting


def test_what_waits_does_not_pile_up(model, monkeypatch):
    monkeypatch.setattr(ledger_loads, "_ENTERED_PER_STEP", 1)
    d = make(model, num_blocks=100)
    ledger, most = d.scheduler.kv_checksum.ledger, 0
    for number in range(80):
        d.ask(f"r{number}", rig.tokens(240, number), max_tokens=1)
        most = max(most, ledger.num_waiting)
    # 15 a step are filled, and an eighth of what waits is entered.
    assert most < 15 * 8 + 15


# ---- preemption and failures


def test_what_is_computed_again_after_a_preemption_is_entered(model, how):
    """Though it had been loaded before, and was not known."""
    old = first_use(model)
    d = make(model, num_blocks=23, **how)
    d.tier.stored = dict(old.tier.stored)
    grows = d.add("grows", rig.tokens(40, 7), None, max_tokens=150)
    d.step()
    request = d.add("loads", PROMPT, None, max_tokens=60)
    while not request.num_preemptions:
        assert not request.is_finished()
        d.step()
    assert d.stats["unverified:not_in_ledger"] == 1
    d.tier.offers = False
    forget_cached(d)
    d.run(grows, steps=200)
    d.run(request, steps=200)
    d.evict()
    d.ask("again", PROMPT)
    assert d.outcome("verified") == 1


@pytest.mark.parametrize("policy", ["open", "recompute"])
def test_what_is_computed_in_place_of_a_failed_load_is_entered(model, policy):
    """The connector reports its blocks; the request computes them."""
    settings = {"open": dict(policy="recompute"), "recompute": MODES["recompute"]}
    d = first_use(model, delay=1, **settings[policy])
    d.scheduler.kv_checksum.ledger.clear()
    step = d.transport.step

    def failing(instance, producer, output):
        reports = step(instance, producer, output)
        for report in reports:
            if "fails" in (report.finished_recving or ()):
                report.failed_recving = {"fails"}
        return reports

    d.transport.step = failing
    d.tier.offers = True
    request = d.add("fails", PROMPT, None, max_tokens=2)
    while not d.stats.get("loads_failed"):
        d.step()
    d.tier.offers = False
    d.run(request)
    assert ended_well(d, "fails")
    d.evict()
    d.ask("again", PROMPT)
    assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 12


@pytest.mark.parametrize("mode", ["fail", "recompute"])
def test_a_load_of_which_nothing_was_reported_is_tried_once(model, how, mode):
    """Nothing of it is known to be bad, so its blocks are not denied."""
    d = first_use(model, **how, **MODES[mode])
    (worker,) = d.workers
    report = worker.post_forward

    def lost(*args, **kwargs):
        output = report(*args, **kwargs)
        return None if "again" in d.scheduler.requests else output

    worker.post_forward = lost
    out = d.ask("again", PROMPT)
    assert d.stats["unverified:workers_missing"] == d.stats["loads_started"] == 1
    assert (out.finish_reason == FinishReason.ERROR) == (mode == "fail")
    worker.post_forward = report
    forget_cached(d)
    d.ask("next", PROMPT)
    assert d.outcome("verified") == 1 and ended_well(d, "next")


# ---- resets


def test_a_reset_forgets_what_is_on_its_way():
    """What was noted, and what workers were asked for."""
    loads = alone()
    request, blocks = full_blocks(3, 4)
    loads.note(request, 0, blocks, 0, 2)
    loads.note_rewritten(request, [blocks], 32)
    loads.clear()
    assert loads.take_full_blocks({"r"}, seq=1) is None
    loads.note(request, 0, blocks, 0, 2)
    assert loads.take_full_blocks({"r"}, seq=2) is not None
    loads.clear()
    assert not loads.pending()


def test_what_waits_is_forgotten_by_a_reset(model, how, monkeypatch):
    monkeypatch.setattr(ledger_loads, "_ENTERED_PER_STEP", 1)
    d = make(model, **how)
    d.ask("first", PROMPT, max_tokens=1)
    assert d.scheduler.reset_prefix_cache()
    d.ask("again", PROMPT)
    assert d.stats["unverified:not_in_ledger"] == d.stats["loads_started"] == 1
    assert d.stats["ledger_misses"] == 12


def test_a_reset_allows_what_was_bad(model, how):
    """What is stored from then on is of the new weights."""
    d = first_use(model, **how)
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    d.ask("again", PROMPT)
    assert d.outcome("mismatch") == 1
    assert d.scheduler.reset_prefix_cache()
    d.spoil = lambda d, load: None
    d.ask("later", PROMPT)
    assert [len(load[0]) for load in d.loaded_blocks] == [12, 12]


# ---- judging


def test_what_is_loaded_beside_a_local_hit_is_compared_alone(model, how):
    d = first_use(model, **how)
    d.tier.offers = False
    d.ask("warm", PROMPT[:56])
    d.tier.offers = True
    d.ask("again", PROMPT)
    assert [len(load[0]) for load in d.loaded_blocks] == [9]
    assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 9


def test_the_first_of_five_sums_is_no_mismatch(model, how):
    """Each batch may give one KV other bits, and the tier keeps the first."""
    d = make(model, **how)
    compute(d, "first", PROMPT)
    for number in range(1, 5):
        other_bits(d, f"r{number}", position=3, by=2**number)
        compute(d, f"r{number}", PROMPT)
    d.ask("again", PROMPT)
    assert d.stats["unverified:not_in_ledger"] == d.stats["ledger_misses"] == 1
    assert d.stats["blocks_compared"] == 11 and not d.outcome("mismatch")


def test_the_last_token_of_a_whole_prompt_may_get_other_bits(model):
    """It is computed again, in a block that was verified: both are right then."""
    d = make(model, leave=0, kv_checksum_scrub=1.0)
    d.ask("first", WHOLE)
    d.evict()
    other_bits(d, "again", position=11)
    d.ask("again", WHOLE)
    assert d.outcome("verified") == 1
    d.ask("hit", WHOLE + rig.tokens(20, 3))
    assert d.stats["loads:verified:local"] == 1 and d.stats["blocks_compared"] == 24
    assert not d.stats.get("loads:mismatch:local")


# ---- what is denied


def test_behind_a_local_hit_good_blocks_are_loaded_up_to_a_denied_one(model, how):
    d = first_use(model, limits=True, **how)
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    d.ask("again", PROMPT)
    d.evict()
    d.spoil = lambda d, load: None
    d.tier.offers = False
    d.ask("warm", PROMPT[:56])
    d.tier.offers = True
    d.ask("later", PROMPT)
    assert [len(load[0]) for load in d.loaded_blocks[1:]] == [2]


LONG = PROMPT + rig.tokens(20, 3)


@pytest.mark.parametrize("mode", ["open", "recompute"])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_computed_from_bad_kv_is_neither_loaded_nor_known(model, mode, ahead):
    """Its connector has stored it under a good key, and its sum was asked for."""
    d = first_use(model, sync=True, async_scheduling=ahead, **MODES[mode])
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    writes, write = [], d.write

    def from_bad(request, first, last):
        """The forward reads what was loaded; here it is told that it is bad."""
        write(request, first, last)
        if request.request_id == "again" and not writes and first == 192:
            writes.append(first)
            (row,) = d.scheduler.kv_cache_manager.get_block_ids("again")
            d.kv[1][row[12], 0, 3] += 1

    d.write = from_bad
    request = d.add("again", LONG, None, max_tokens=2)
    d.run(request)
    assert d.outcome("mismatch") == 1 and writes
    key = (0, list(d.add("hash", LONG, None).block_hashes)[12])
    d.run(d.scheduler.requests["hash"])
    assert key in d.tier.stored
    d.evict()
    # The bad block is stored anew; what stands behind it is not.
    d.spoil = lambda d, load: None
    other = d.add("allow", LONG, None)
    d.tier.ledger.allow_stored(other, 0, 5, 6)
    d.run(other)
    assert [len(load[0]) for load in d.loaded_blocks[1:]] == []
    d.evict()
    third = d.add("third", LONG, None)
    d.tier.ledger.allow_stored(third, 0, 12, 13)
    d.run(third)
    assert [len(load[0]) for load in d.loaded_blocks[1:]] == [13]
    assert not d.outcome("verified")


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_decoded_from_bad_kv_is_nobody_else_s(model, ahead):
    """Fail-open, the request goes on; blocks that it fills have hashes of their own."""
    d = first_use(model, sync=True, async_scheduling=ahead)
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    d.ask("loads", PROMPT, max_tokens=60, steps=80)
    assert d.outcome("mismatch") == 1 and ended_well(d, "loads")
    other = d.add("other", PROMPT + [7] * 59, None)
    found = d.scheduler.kv_cache_manager.get_computed_blocks(other)[0].blocks[0]
    assert len(found) <= 5 and len(other.block_hashes) == 16
    held = [at for at, h in enumerate(other.block_hashes) if (0, h) in d.tier.stored]
    assert held == [*range(12)]


# ---- who else uses it


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_found_bad_blocks_and_still_loads_more(model, mode, ahead):
    """Its own load, between steps, begins behind what another loaded in the step."""
    d = make(model, num_blocks=80, delay=3, async_scheduling=ahead, **MODES[mode])
    prompt = PROMPT + rig.tokens(50, 3)
    d.ask("first", prompt)
    d.evict()
    asked = d.tier.get_num_new_matched_tokens

    def by_request(request, num_computed_tokens):
        d.tier.is_sync = request.request_id == "loads"
        return asked(request, num_computed_tokens)

    d.tier.get_num_new_matched_tokens = by_request
    loads = []

    def spoil(d, load):
        loads.append((load.is_sync, [at for _, at, _ in load.blocks[0]]))
        if load.is_sync:
            tier.flip_bit(d, load, at=5)

    d.spoil = spoil
    served = served_on_wrong_kv(d)
    d.add("loads", PROMPT, None, max_tokens=4)
    d.add("shares", prompt, None, max_tokens=4)
    for _ in range(30):
        d.step()
    assert loads == [(True, [*range(12)]), (False, [12, 13, 14])]
    assert d.outcome("mismatch") == 1 and bool(served) == (mode == "open")
    ends = [d.results[r][-1].finish_reason for r in ("loads", "shares")]
    assert ends == [FinishReason.ERROR if mode == "fail" else FinishReason.LENGTH] * 2
    assert len(tokens_of(d, "shares")) == (0 if mode == "fail" else 4)
    d.spoil = lambda d, load: None
    last = d.add("last", prompt, None, max_tokens=30)
    for _ in range(8):
        d.step()
    assert d.answer_kv_is_right(last)


def preempt(d, request):
    """As the scheduler does with a step of the request in flight; it may resume."""
    d.scheduler.running.remove(request)
    d.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    d.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def test_a_request_loads_again_while_its_first_load_is_in_flight(model):
    """Each of its synchronous loads is judged with its own step."""
    d = first_use(model, sync=True, num_blocks=80, async_scheduling=True)
    request = d.add("r", PROMPT, None, max_tokens=4)
    d.step()
    preempt(d, request)
    forget_cached(d)
    d.run(request)
    assert ended_well(d, "r") and len(d.loaded_blocks) == 2
    assert d.outcome("verified") == d.stats["loads_started"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_first_load_that_was_bad_is_not_dropped_for_a_second(model, mode):
    """It left blocks in the prefix cache, which the request finds there itself."""
    d = first_use(model, sync=True, num_blocks=80, async_scheduling=True, **MODES[mode])

    def spoil(d, load):
        if load.blocks[0][0][1] == 0:
            tier.flip_bit(d, load, at=5)

    d.spoil = spoil
    served = served_on_wrong_kv(d)
    request = d.add("r", PROMPT, None, max_tokens=4)
    d.step()
    (row,) = d.scheduler.kv_cache_manager.get_block_ids("r")
    preempt(d, request)
    d.scheduler.kv_cache_manager.evict_blocks({*row[8:]})
    for _ in range(20):
        d.step()
    assert [len(load[0]) for load in d.loaded_blocks] == [12, 4]
    assert d.outcome("mismatch") == 1 and d.stats["loads_started"] == 2
    assert bool(served) == (mode == "open")
    assert not d.tables()["recvs"] and not d.scheduler.kv_checksum._replaced


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_lies_damaged_is_found_by_who_loads_the_rest(model, mode):
    """A request that waits for its load is one that holds the block."""
    d = make(model, delay=2, kv_checksum_scrub=1.0, num_blocks=80, **MODES[mode])
    d.ask("first", PROMPT)
    d.evict()
    d.tier.offers = False
    d.ask("warm", PROMPT[:100])
    d.tier.offers = True
    request = d.add("which", PROMPT[:100], None)
    found = d.scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
    d.run(request)
    verified = d.stats["loads:verified:local"]
    d.kv[2][found[4].block_id, 0, 3, 2] += 1
    served = served_on_wrong_kv(d)
    out = d.ask("again", PROMPT, max_tokens=4)
    assert d.stats["loads:mismatch:local"] == 1
    assert d.stats["loads:verified:local"] == verified
    assert (out.finish_reason == FinishReason.ERROR) == (mode == "fail")
    assert bool(served) == (mode == "open")


@pytest.mark.parametrize("bad", [False, True])
def test_a_load_of_a_request_that_found_bad_blocks_is_judged_by_its_own_prefix(
    model, bad
):
    """Fail-open it goes on, with hashes of its own from the bad block on."""
    d = tier.TierInstance(
        model, num_blocks=80, sync=True, delay=3, async_scheduling=True
    )
    prompt = rig.tokens(300)
    d.ask("first", prompt)
    d.evict()

    def spoil(d, load):
        if load.is_sync or bad:
            tier.flip_bit(d, load, at=2)

    d.spoil = spoil
    d.add("loads", prompt[:110], None, max_tokens=4)
    d.step()
    # Scheduled before the verdict: it finds the bad block, and loads the rest.
    d.tier.is_sync = False
    d.add("finds", prompt, None, max_tokens=4)
    for _ in range(20):
        d.step()
    assert [load[0] and len(load[0]) for load in d.loaded_blocks] == [6, 12]
    assert d.outcome("mismatch") == 1 + bad and d.stats["loads_started"] == 2
    assert d.outcome("verified") == (not bad)


# ---- states


def test_states_are_neither_asked_for_nor_remembered():
    states = MambaSpec(
        block_size=16,
        shapes=((4, 3), (8,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
    )
    groups = [
        KVCacheGroupSpec(u.names(0), u.full_spec()),
        KVCacheGroupSpec(u.names(1), states),
    ]
    config = KVCacheConfig(9, [], groups)
    rows = [[KVCacheBlock(i) for i in ids] for ids in ((1, 2), (3, 4))]
    held = SimpleNamespace(blocks=rows)
    for is_sync in (False, True):
        found = tier_blocks(config, held, 0, 32, is_sync)
        assert list(found.blocks.groups) == [0] and found.left_out == {1}
    ledger = ledger_loads.LedgerLoads(Ledger(9), config, 16, 1)
    request = SimpleNamespace(request_id="r", block_hashes=[sha256(0), sha256(1)])
    ledger.note(request, 1, rows[1], 0, 2)
    assert ledger.take_full_blocks({"r"}, 1) is None
    ledger.note(request, 0, rows[0], 0, 2)
    assert list(ledger.take_full_blocks({"r"}, 2).groups) == [0]


def test_a_group_of_states_is_said_and_counted(model, monkeypatch, log):
    """The other groups of the load are compared (fake: a window taken for states)."""
    d = tier.TierInstance(model, num_blocks=100, window=40)

    def without_window(*args):
        found = tier_blocks(*args)
        del found.blocks.groups[1]
        found.left_out.add(1)
        return found

    monkeypatch.setattr(scheduler, "tier_blocks", without_window)
    monkeypatch.setattr(scheduler, "holds_states", lambda config, group: group == 1)
    d.ask("first", rig.tokens(200))
    d.evict()
    # The oracle knows that the window is loaded and not asked for.
    monkeypatch.setattr(loaded, "differences", lambda *args: [])
    d.ask("again", rig.tokens(200))
    assert d.stats["left_out:states"] == d.outcome("verified") == 1
    assert [x for x in log if "leave out KV cache group 1: states" in x]
