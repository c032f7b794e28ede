# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Loads that bring no checksums are held against what the instance computed.

What is loaded is known from the tier's own metadata, what is right from the forward's
own cells.
"""

import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import ledger_keys
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig import tier
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


@pytest.fixture(params=SYNC)
def how(request):
    return SYNC[request.param]


def test_an_intact_load_is_verified(model, how):
    d = first_use(model, **how)
    request = d.add("again", PROMPT, None, max_tokens=40)
    for _ in range(8):
        d.step()
    assert d.answer_kv_is_right(request)
    assert [len(ids) for (ids,) in (b.values() for b in d.loaded_blocks)] == [12]
    assert d.outcome("verified") == d.stats["loads_started"] == 1
    assert d.stats["blocks_compared"] == 12
    d.run(request)
    assert not d.stats.get("ledger_misses")


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_load_is_a_mismatch(model, how, mode, log):
    d = first_use(model, **how, **MODES[mode])
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    request = d.add("again", PROMPT, None, max_tokens=3)
    out = d.run(request)
    assert d.outcome("mismatch") == 1 and d.stats["blocks_mismatched"] == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert "position 5 " in line and "TierConnector" in line
    assert (out.finish_reason == FinishReason.ERROR) == (mode == "fail")
    assert d.stats.get("failed", 0) == (mode == "fail")
    assert d.stats.get("recomputed", 0) == (mode == "recompute")


def test_recompute_begins_at_the_first_bad_block(model, how):
    d = first_use(model, **how, **MODES["recompute"])
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    request = d.add("again", PROMPT, None, max_tokens=40)
    for _ in range(10):
        d.step()
    assert d.answer_kv_is_right(request)
    computed = [n for r, n in d.scheduled if r == "again" and n > 1]
    first = [200 - 192] if how.get("sync") else []
    assert computed == [*first, 200 - 80]
    assert len(d.loaded_blocks) == 1


def test_decoded_blocks_are_remembered_too(model, how):
    """A second turn: the prompt and its answer come back."""
    d = make(model, **how)
    d.ask("first", PROMPT, max_tokens=60)
    turn = PROMPT + [7] * 59 + rig.tokens(30, 5)
    d.evict()
    d.ask("again", turn)
    assert [len(ids) for (ids,) in (b.values() for b in d.loaded_blocks)] == [16]
    assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 16


@pytest.mark.parametrize("ahead", [False, True])
def test_with_a_step_ahead(model, how, ahead):
    """Whatever the scheduling, decoded blocks come back verified."""
    d = make(model, async_scheduling=ahead, **how)
    d.ask("first", PROMPT, max_tokens=60)
    d.evict()
    d.ask("again", PROMPT + [7] * 59 + [9] * 20)
    assert d.loaded_blocks and d.outcome("verified") == 1
    assert d.stats["blocks_compared"] == 16


@pytest.mark.parametrize("sizes", [dict(tp=2), dict(tp=4), dict(pp=2)], ids=str)
@pytest.mark.parametrize("bad", [False, True])
def test_parts_of_all_workers_are_added_up(model, how, sizes, bad):
    d = first_use(model, **how, **sizes)
    if bad:
        d.spoil = lambda d, load: tier.flip_bit(d, load, layer=3)
    d.ask("again", PROMPT)
    assert d.outcome("mismatch" if bad else "verified") == 1


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_windows(model, how, bad):
    """Of a window, what is loaded is what is compared; both groups are."""
    d = first_use(model, window=40, num_blocks=100, **how)
    if bad is not None:
        d.spoil = lambda d, load: tier.flip_bit(d, load, group_id=bad)
    d.ask("again", PROMPT)
    (loaded,) = d.loaded_blocks
    assert len(loaded[0]) == 12 and 3 <= len(loaded[1]) <= 4
    assert d.outcome("verified" if bad is None else "mismatch") == 1
    if bad is None:
        assert d.stats["blocks_compared"] == sum(map(len, loaded.values()))


@pytest.mark.parametrize("mode", MODES)
def test_what_another_instance_computed_is_not_known(model, how, mode):
    old = first_use(model, **how)
    d = make(model, **how, **MODES[mode])
    d.tier.stored = old.tier.stored
    out = d.ask("r", PROMPT)
    assert d.outcome("unverified") == d.stats["unverified:not_in_ledger"] == 1
    assert d.stats["ledger_misses"] == 12
    assert (out.finish_reason == FinishReason.ERROR) == (mode == "fail")
    # It is not entered either, unless it is computed here.
    d.evict()
    d.ask("again", PROMPT)
    if mode == "open":
        assert d.stats["unverified:not_in_ledger"] == 2 and not d.outcome("verified")
    else:
        assert d.stats["unverified:not_in_ledger"] == 1, "it must not fail again"
    d.evict()
    d.ask("third", PROMPT)
    # With "fail" the first request computed nothing.
    assert d.outcome("verified") == dict(open=0, fail=1, recompute=2)[mode]
    assert ended_well(d, "third")


def swap(d, load):
    """Two blocks change places."""
    (_, _, a), (_, _, b) = load.blocks[0][3], load.blocks[0][7]
    for cache in d.kv.values():
        cache[[a, b]] = cache[[b, a]]


def of_another_prefix(d, load):
    """The block of the same position of another prompt."""
    key = d.other[5]
    for n, kv in d.tier.stored[0, key].items():
        d.kv[n][load.blocks[0][5][2]] = kv


def half_written(d, load):
    for cache in d.kv.values():
        cache[load.blocks[0][4][2], :, 8:] = 0


def not_loaded(d, load):
    """The block holds what its last owner left there."""
    block = load.blocks[0][11][2]
    for n, cache in d.kv.items():
        cache[block] = cache[(block + 1) % d.num_blocks] if n % 2 else cache[0]


KINDS = [swap, of_another_prefix, half_written, not_loaded]


@pytest.mark.parametrize("damage", KINDS)
def test_kinds_of_damage(model, how, damage):
    d = make(model, **how)
    other = d.add("other", rig.tokens(200, 8), None)
    d.run(other)
    d.other = list(other.block_hashes)
    d.ask("first", PROMPT)
    d.evict()
    d.spoil = damage
    d.ask("again", PROMPT)
    assert d.outcome("mismatch") == 1
    assert d.stats["blocks_mismatched"] == (2 if damage is swap else 1)


@pytest.mark.parametrize("limits", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_block_fails_once(model, how, mode, limits):
    """The tier keeps it; the next requests load what stands before it, or nothing."""
    d = first_use(model, limits=limits, **how, **MODES[mode])
    d.spoil = lambda d, load: (
        any(a == 5 for _, a, _ in load.blocks[0]) and (tier.flip_bit(d, load, at=5))
    )
    d.ask("again", PROMPT)
    assert d.outcome("mismatch") == 1
    for number in range(3):
        d.evict()
        before = len(d.loaded_blocks)
        d.ask(f"later{number}", PROMPT)
        assert ended_well(d, f"later{number}")
        loads = d.loaded_blocks[before:]
        assert [len(load[0]) for load in loads] == ([5] if limits else [])
    assert d.outcome("mismatch") == 1
    # Stored anew, it may be loaded again.
    request = d.add("hash", PROMPT, None)
    d.tier.ledger.allow_stored(request, 0, 5, 6)
    d.run(request)
    d.evict()
    d.spoil = lambda d, load: None
    d.ask("last", PROMPT)
    assert len(d.loaded_blocks[-1][0]) == 12
    assert d.outcome("mismatch") == 1


def test_other_bits_of_the_same_prefix_are_right_too(model, how):
    """Compute the prefix twice, with other bits; the tier holds the first."""
    d = make(model, **how)
    d.ask("first", PROMPT)
    d.evict()
    d.tier.offers = False
    request = d.add("second", PROMPT, None)
    d.step()
    d.run(request)
    assert d.ask("x", rig.tokens(20)) and not d.loaded_blocks
    d.evict()
    d.ask("again", PROMPT)
    assert d.outcome("verified") == 1


def test_a_reset_of_the_prefix_cache_empties_it(model, how):
    """VLLM does so when the weights are new: what was stored is KV of the old ones."""
    d = first_use(model, **how)
    assert d.scheduler.reset_prefix_cache()
    d.ask("again", PROMPT)
    assert d.stats["unverified:not_in_ledger"] == d.stats["loads_started"] == 1


@pytest.mark.parametrize("leave", [0, 1, 9])
@pytest.mark.parametrize("sync", [False, True])
def test_loads_that_end_inside_a_block(model, leave, sync):
    """A whole prompt of full blocks is stored; the connector leaves some tokens."""
    if sync and not leave:
        pytest.skip("a step must compute a token")
    d = make(model, sync=sync, leave=leave)
    prompt = rig.tokens(192)
    d.ask("first", prompt)
    d.evict()
    d.ask("again", prompt)
    assert d.stats["loads_started"] == 1
    if sync or not leave:
        # The rest of the last block is computed here, with the same bits.
        assert d.outcome("verified") == 1 and d.stats["blocks_compared"] == 12
    else:
        assert d.stats["unverified:num_tokens"] == 1
        assert d.stats["blocks_compared"] == 11


def complete_with_other_bits(d, first):
    """Let request "again" compute the tokens from `first` on with other bits."""
    write = d.write

    def otherwise(request, start, stop):
        write(request, start, stop)
        if request.request_id == "again" and start == first:
            (ids,) = d.scheduler.kv_cache_manager.get_block_ids("again")
            d.kv[1][ids[11], 0, 15] += 1

    d.write = otherwise


def test_a_block_that_is_loaded_in_part_may_get_other_bits(model):
    """Its last token is computed here: other bits are no mismatch, nor verified."""
    d = make(model, sync=True, leave=1)
    prompt = rig.tokens(192)
    d.ask("first", prompt)
    d.evict()
    complete_with_other_bits(d, 191)
    d.ask("again", prompt)
    assert d.stats["unverified:num_tokens"] == 1 and not d.outcome("mismatch")


# ---- who else uses what a synchronous load brought


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps_later", [0, 1, 2])
def test_others_that_found_bad_blocks_in_the_prefix_cache(
    model, mode, ahead, steps_later
):
    """Scheduled in the same step as the load, in the next, or behind the verdict."""
    d = first_use(
        model, sync=True, num_blocks=80, async_scheduling=ahead, **MODES[mode]
    )
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    served = served_on_wrong_kv(d)
    d.add("loads", PROMPT, None, max_tokens=4)
    for _ in range(steps_later):
        d.step()
    d.add("shares", PROMPT + rig.tokens(20, 3), None, max_tokens=4)
    for _ in range(30):
        d.step()
    assert d.outcome("mismatch") == 1
    assert bool(served) == (mode == "open")
    ends = {r: d.results[r][-1].finish_reason for r in ("loads", "shares")}
    if mode == "fail":
        assert ends["loads"] == FinishReason.ERROR
        assert not tokens_of(d, "loads")
        # Whoever held the block when the verdict came ends too; later ones compute.
        met = steps_later == 0 or (ahead and steps_later == 1)
        assert (ends["shares"] == FinishReason.ERROR) == met
        assert len(tokens_of(d, "shares")) == (0 if met else 4)
    else:
        assert set(ends.values()) == {FinishReason.LENGTH}
        assert len(tokens_of(d, "loads")) == len(tokens_of(d, "shares")) == 4
    # Nothing that rests on it is found by its good hash.
    last = d.add("last", PROMPT + rig.tokens(20, 3), None, max_tokens=30)
    d.spoil = lambda d, load: None
    for _ in range(6):
        d.step()
    assert d.answer_kv_is_right(last)


@pytest.mark.parametrize("ahead", [False, True])
def test_several_groups_end_with_the_error_and_the_engine_goes_on(model, ahead):
    """VLLM raises where invalid blocks are of several groups."""
    settings = dict(window=40, num_blocks=100, async_scheduling=ahead)
    d = first_use(model, sync=True, **settings, **MODES["recompute"])
    d.spoil = lambda d, load: tier.flip_bit(d, load, group_id=1)
    out = d.ask("again", PROMPT)
    assert out.finish_reason == FinishReason.ERROR and not tokens_of(d, "again")
    assert d.stats["failed"] == 1 and not d.stats.get("recomputed")
    d.spoil = lambda d, load: None
    request = d.add("next", PROMPT, None, max_tokens=30)
    for _ in range(6):
        d.step()
    assert d.answer_kv_is_right(request)
    d.run(request)
    assert ended_well(d, "next")


# ---- KV that lies in the local prefix cache


def damage_cached(d, prompt, position, layer=2):
    """Change a bit of a block that the prefix cache holds; its id."""
    request = d.add("which", prompt, None)
    blocks, _ = d.scheduler.kv_cache_manager.get_computed_blocks(request)[:2]
    block_id = blocks.blocks[0][position].block_id
    d.run(request)
    d.kv[layer][block_id, 0, 3, 2] += 1
    return block_id


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_block_that_was_damaged_in_memory(model, mode, ahead, log):
    d = make(model, async_scheduling=ahead, kv_checksum_scrub=1.0, **MODES[mode])
    d.ask("first", PROMPT)
    block_id = damage_cached(d, PROMPT, 4)
    verified = d.stats["loads:verified:local"]
    served = served_on_wrong_kv(d)
    out = d.ask("again", PROMPT)
    assert d.stats["loads:mismatch:local"] == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert "position 4 " in line and "local prefix cache" in line
    assert (out.finish_reason == FinishReason.ERROR) == (mode == "fail")
    assert bool(served) == (mode == "open")
    # It is evicted: nobody finds it any more, and the tier's copy is right.
    assert d.scheduler.kv_cache_manager.block_pool.blocks[block_id].block_hash is None
    d.ask("later", PROMPT)
    assert d.stats["loads:mismatch:local"] == 1
    assert d.stats["loads:verified:local"] >= verified
    assert ended_well(d, "later")


def test_by_default_local_hits_are_not_summed(model):
    d = make(model)
    d.ask("first", PROMPT)
    damage_cached(d, PROMPT, 4)
    d.ask("again", PROMPT)
    assert not any(key.startswith("loads:") for key in d.stats)


def test_a_share_of_the_blocks_is_drawn(model):
    d = make(model, kv_checksum_scrub=0.25)
    d.ask("first", PROMPT)
    for number in range(40):
        d.ask(f"hit{number}", PROMPT)
    assert 40 * 12 * 0.15 < d.stats["blocks_compared"] < 40 * 12 * 0.35


def test_what_the_ledger_does_not_know_is_no_mismatch(model):
    d = make(model, kv_checksum_scrub=1.0, **MODES["fail"])
    d.ask("first", PROMPT)
    d.tier.ledger.clear()
    d.ask("again", PROMPT)
    assert ended_well(d, "again") and not d.stats.get("loads_started")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_ends_before_its_synchronous_load_is_judged(
    model, mode, shares, ahead
):
    """What it loaded is in the prefix cache, and others may hold it already."""
    d = first_use(
        model, sync=True, num_blocks=80, async_scheduling=ahead, **MODES[mode]
    )
    d.spoil = lambda d, load: tier.flip_bit(d, load, at=5)
    served = served_on_wrong_kv(d)
    d.add("loads", PROMPT, None, max_tokens=4)
    if shares:
        d.add("shares", PROMPT + rig.tokens(20, 3), None, max_tokens=4)
    schedule = d.scheduler.schedule

    def abort_after(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if "loads" in output.num_scheduled_tokens:
            d.scheduler.finish_requests("loads", rig.RequestStatus.FINISHED_ABORTED)
        return output

    d.scheduler.schedule = abort_after
    for _ in range(20):
        d.step()
    d.scheduler.schedule = schedule
    assert d.outcome("mismatch") == d.stats["loads_started"] == 1
    if mode != "open":
        assert not served
    d.spoil = lambda d, load: None
    last = d.add("last", PROMPT + rig.tokens(20, 3), None, max_tokens=30)
    for _ in range(6):
        d.step()
    assert d.answer_kv_is_right(last)
    assert not d.scheduler.kv_checksum._consequences.computes - {"shares"}


def test_a_request_that_ends_as_its_block_becomes_full(model):
    """Its block may be another's by the next step: then nothing is summed of it."""
    d = make(model, num_blocks=16, async_scheduling=True)
    for number in range(4):
        # The last token of the answer fills a block; the pool has few others.
        d.add(f"r{number}", rig.tokens(100, number), None, max_tokens=13)
    for _ in range(80):
        d.step()
    assert all(d.results[f"r{n}"][-1].finish_reason for n in range(4))
    for number in range(4):
        d.ask(f"again{number}", rig.tokens(100, number) + [7] * 40)
    assert d.outcome("verified") == d.stats["loads_started"]


@pytest.mark.parametrize("sync", [False, True])
def test_a_block_with_bits_that_nobody_compared_is_no_mismatch_later(model, sync):
    """It was loaded in part and completed here, with other bits, and is found again."""
    d = make(model, sync=sync, leave=9, kv_checksum_scrub=1.0)
    prompt = rig.tokens(192)
    d.ask("first", prompt)
    d.evict()
    complete_with_other_bits(d, 183)
    d.ask("again", prompt)
    assert d.stats["unverified:num_tokens"] == d.outcome("unverified") == 1
    hits = d.stats.get("loads:verified:local", 0)
    d.ask("hit", prompt + [5] * 20)
    assert d.stats["loads:verified:local"] == hits + 1
    assert not d.stats.get("loads:mismatch:local")


# ---- what else KV is computed from


def adapter(number):
    return LoRARequest(f"adapter{number}", number, "none")


def image(identifier):
    place = PlaceholderRange(offset=3, length=8)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=place
    )


INPUTS = {
    "salt": [dict(cache_salt="a"), dict(cache_salt="b")],
    "adapter": [dict(lora_request=adapter(1)), dict(lora_request=adapter(2))],
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_kv_of_the_same_tokens_and_other_inputs_is_a_mismatch(model, how, inputs):
    """A tier that mixes them up: each is known to the ledger, under its own key."""
    d = make(model, **how)
    write = d.write

    def otherwise(request, first, last):
        """KV depends on the adapter, which the rig's forward has none of."""
        write(request, first, last)
        if any(getattr(request, k) == v for k, v in inputs[1].items()):
            (ids,) = d.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for at in range(first, last):
                d.kv[1][ids[at // 16], :, at % 16] += 1

    d.write = otherwise
    requests = [
        d.add(f"first{i}", PROMPT, None, **settings)
        for i, settings in enumerate(inputs)
    ]
    for request in requests:
        d.run(request)
    hashes = [list(request.block_hashes) for request in requests]
    assert not set(hashes[0]) & set(hashes[1])
    d.evict()
    for own, other in zip(*hashes, strict=True):
        d.tier.stored[0, own] = d.tier.stored[0, other]
    d.run(d.add("mixed", PROMPT, None, **inputs[0]))
    d.evict()
    d.run(d.add("right", PROMPT, None, **inputs[1]))
    assert d.outcome("mismatch") == d.outcome("verified") == 1
    assert d.stats["loads_started"] == 2


def test_keys_cover_what_vllm_s_block_hashes_cover(model):
    d = make(model)
    settings = [
        {},
        *(s for pair in INPUTS.values() for s in pair),
        dict(mm_features=[image("x")]),
        dict(mm_features=[image("y")]),
    ]
    requests = [d.add(f"r{i}", PROMPT, None, **some) for i, some in enumerate(settings)]
    keys = [ledger_keys(request.block_hashes, 0) for request in requests]
    assert len({int(k) for some in keys for k in some}) == 12 * len(settings)
