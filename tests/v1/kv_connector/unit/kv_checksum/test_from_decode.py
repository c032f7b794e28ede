# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the second turn of a chat: P loads what D computed, and verifies it.

NIXL pull's bidirectional transfer, with real schedulers and workers. What is sent and
loaded, the connector's own parameters and metadata tell; the sums are computed anew in
NumPy from the blocks that the answer names.
"""

import base64
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumCarrier,
)
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.answers import (
    MAX_STEPS,
    PendingAnswers,
)
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.engine import FinishReason

from .rig import hybrid, reference
from .rig import instances as rig
from .rig.instances import MODES, RequestStatus, tokens

BOTH = dict(
    kv_connector_extra_config=dict(bidirectional_kv_xfer=True, kv_recompute_threshold=0)
)

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


def pair(model, p=None, d=None, make=rig.pair, **both):
    return make(model, p, d, **BOTH, **both)


def first_turn(p, d, number=50, decoded=20, stop_after=None):
    """Run the first turn; D's request and the parameters of its answer.

    D's request ends by its length, or by a stop token once some tokens are decoded.
    """
    prompt = tokens(number)
    params = rig.prefill(p, "p1", prompt)
    request = d.add("turn1", prompt, params, max_tokens=decoded)
    while stop_after is not None and request.num_output_tokens < stop_after:
        d.step(p)
    if stop_after is not None:
        request.sampling_params.stop_token_ids = [7]
    return request, d.run(request, p).kv_transfer_params


def second_turn(p, d, request, params, more=40, prompt=None):
    """Run the second turn on P, until it ends; P's request."""
    prompt = prompt or [*request.all_token_ids, *tokens(more, 1)]
    p.scheduled.clear()
    second = p.add("turn2", prompt, params)
    for _ in range(20):
        d.step(p)
        p.step(d)
        if second.is_finished():
            break
    return second


def payload_of(params):
    return wire.decode(base64.b64decode(params[KV_TRANSFER_PARAMS_KEY]))


@AHEAD
@pytest.mark.parametrize("decoded", [1, 2, 13, 14, 15, 16, 31])
def test_what_d_computed_is_verified(model, decoded, ahead):
    """P loads up to D's last computed token, inside a block or at its end."""
    p, d = pair(model, None, dict(async_scheduling=ahead))
    request, params = first_turn(p, d, decoded=decoded)
    offered = params["remote_num_tokens"]
    assert offered == 50 + decoded - 1
    second = second_turn(p, d, request, params)
    loaded = sum(n for _, n in p.scheduled)
    # P kept the whole blocks of the first turn's prompt.
    assert loaded == second.num_prompt_tokens - offered
    assert p.loads("verified") == p.stats["loads_started"] == 1
    assert p.stats["blocks_compared"] == -(-offered // 16) - 50 // 16
    assert not any(d.tables().values())
    # And the whole prompt goes on to D.
    params = p.results["turn2"][-1].kv_transfer_params
    third = d.add("turn2", second.prompt_token_ids, params, max_tokens=2)
    d.run(third, p)
    assert d.loads("verified") == 2


@AHEAD
def test_a_stopped_answer_is_verified_up_to_the_last_step(model, ahead):
    """With asynchronous scheduling, one more step was under way when it stopped."""
    p, d = pair(model, None, dict(async_scheduling=ahead))
    request, params = first_turn(p, d, decoded=40, stop_after=6)
    assert request.status == RequestStatus.FINISHED_STOPPED
    assert request.num_output_tokens < 40
    assert params["remote_num_tokens"] == request.num_tokens - 1 + ahead
    second_turn(p, d, request, params)
    assert p.loads("verified") == p.stats["loads_started"] == 1


def test_the_payload_is_that_of_the_blocks_that_the_answer_names(model):
    p, d = pair(model)
    request, params = first_turn(p, d, decoded=23)
    payload, number = payload_of(params), params["remote_num_tokens"]
    (blocks,) = params["remote_block_ids"]
    kv = {n: reference.logical_bytes(d.kv[n]) for n in range(rig.LAYERS)}
    sums = [
        reference.block_sum({n: kv[n][block] for n in kv}, 16 * at, number)
        for at, block in enumerate(blocks)
    ]
    assert payload.groups[0].values.tolist() == sums
    assert payload.num_tokens == number == 72
    ids = list(request.all_token_ids)[:number]
    assert tuple(payload.prompt) == reference.prompt_digests(ids)
    assert d.stats["payload_bytes"] == len(params[KV_TRANSFER_PARAMS_KEY])


SPLITS = [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 1), (2, 2)), ((2, 1), (2, 1))]


@pytest.mark.parametrize(("p_split", "d_split"), SPLITS)
@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)])
def test_other_splits_and_block_sizes(model, p_split, d_split, sizes):
    settings = [
        dict(tp=tp, pp=pp, block_size=size)
        for (tp, pp), size in zip((p_split, d_split), sizes, strict=True)
    ]
    p, d = pair(model, *settings)
    request, params = first_turn(p, d)
    second_turn(p, d, request, params)
    assert p.loads("verified") == p.stats["loads_started"] == 1


def flip_in_place(position, slot):
    """Flip a bit of one token of P's block at a position, once it is loaded."""

    def damage(p, req_id, block_ids):
        (row,) = p.scheduler.kv_cache_manager.get_block_ids(req_id)
        p.kv[2][row[position]].view(torch.uint8)[1, slot, 5] ^= 16

    return damage


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("position", "slot"), [(3, 0), (3, 15), (4, 0), (4, 4)], ids=str
)
def test_a_flipped_bit_is_found_where_it_is(model, mode, position, slot, log):
    """Of the last block, whose five tokens D computed, P loads no more."""
    p, d = pair(model, MODES[mode])
    request, params = first_turn(p, d)
    assert params["remote_num_tokens"] == 69
    p.damage = flip_in_place(position, slot)
    second = second_turn(p, d, request, params)
    assert p.loads("mismatch") == p.stats["loads_started"] == 1
    assert p.stats["blocks_mismatched"] == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert f"position {position}" in line or f"{position}:" in line
    assert params["remote_host"] in line
    reason = p.results["turn2"][-1].finish_reason
    assert (reason == FinishReason.ERROR) == (mode == "fail")
    computed = sum(n for _, n in p.scheduled)
    # Up to the bad block, what was loaded counts; D is not asked again.
    number = second.num_prompt_tokens
    kept = {"open": 69, "fail": number, "recompute": 16 * position}[mode]
    assert computed == number - kept


def test_bytes_behind_the_last_token_do_not_count(model):
    p, d = pair(model)
    request, params = first_turn(p, d)
    p.damage = flip_in_place(4, 5)
    second_turn(p, d, request, params)
    assert p.loads("verified") == p.stats["loads_started"] == 1


def test_a_block_that_d_gave_to_others_is_seen(model):
    """Its lease ran out, say, and nobody told P."""
    p, d = pair(model)
    request, params = first_turn(p, d)
    (blocks,) = params["remote_block_ids"]
    for n in range(rig.LAYERS):
        d.kv[n][blocks[3]] = d.kv[n][blocks[0]]
    second_turn(p, d, request, params)
    assert p.loads("mismatch") == p.stats["blocks_mismatched"] == 1


def test_a_prompt_that_does_not_go_on_from_d_s_tokens_is_seen(model):
    """A chat template may write an answer in other tokens than were decoded."""
    p, d = pair(model, MODES["recompute"])
    request, params = first_turn(p, d)
    prompt = [*request.all_token_ids, *tokens(40, 1)]
    prompt[60] += 1
    second_turn(p, d, request, params, prompt=prompt)
    assert p.loads("mismatch") == p.stats["other_prompts"] == 1
    assert sum(n for _, n in p.scheduled) == len(prompt)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_without_a_payload(model, mode):
    """D has no checksums, or a router drops the key."""
    p, d = pair(model, MODES[mode])
    request, params = first_turn(p, d)
    del params[KV_TRANSFER_PARAMS_KEY]
    second = second_turn(p, d, request, params)
    assert p.loads("unverified") == p.stats["unverified:no_payload"] == 1
    reason = p.results["turn2"][-1].finish_reason
    assert (reason == FinishReason.ERROR) == (mode == "fail")
    computed = sum(n for _, n in p.scheduled)
    number = second.num_prompt_tokens
    assert computed == {"open": number - 69, "fail": 0}.get(mode, number)


def test_a_payload_of_the_first_turn_does_not_do(model):
    """A router that keeps P's parameters beside those of a D without checksums."""
    p, d = pair(model)
    stale = rig.prefill(p, "other", tokens(50))[KV_TRANSFER_PARAMS_KEY]
    request, params = first_turn(p, d)
    second_turn(p, d, request, params | {KV_TRANSFER_PARAMS_KEY: stale})
    assert p.loads("unverified") == p.stats["unverified:num_tokens"] == 1


def test_tokens_computed_behind_the_last_one_are_unverified(model):
    """Where drafts behind a stop token were accepted, vLLM offers their KV as well."""
    p, d = pair(model)

    def accept_drafts(reports):
        request = d.scheduler.requests.get("turn1")
        if request is not None and request.num_output_tokens == 19:
            request.num_computed_tokens += 2

    d.on_reports = accept_drafts
    request, params = first_turn(p, d)
    assert params["remote_num_tokens"] == request.num_tokens + 1 == 71
    assert payload_of(params).num_tokens == 70
    second_turn(p, d, request, params)
    assert p.loads("unverified") == p.stats["unverified:num_tokens"] == 1


@AHEAD
def test_an_answer_waits_for_its_sums_and_nobody_else_does(model, ahead):
    """Its last output comes one step later, or two, whole; others come as ever."""
    p, d = pair(model, None, dict(async_scheduling=ahead))
    other = d.add("other", tokens(20, 5), None, max_tokens=60)
    prompt = tokens(50)
    request = d.add("turn1", prompt, rig.prefill(p, "p", prompt), max_tokens=20)
    received = {"other": [], "turn1": []}
    ended = steps = None
    for step in range(60):
        results = d.step(p)
        if results is None:
            continue
        outs = [o for client in results.values() for o in client.outputs]
        for out in outs:
            received[out.request_id].append(out)
        if other.num_output_tokens and not other.is_finished():
            assert [o.request_id for o in outs].count("other") == 1, step
        if request.is_finished() and ended is None:
            ended = step
            assert "turn1" not in [o.request_id for o in outs]
        if received["turn1"] and received["turn1"][-1].finish_reason is not None:
            steps = step - ended
            break
    assert steps == 1 + ahead
    ids = [t for out in received["turn1"] for t in out.new_token_ids]
    assert ids == list(request.output_token_ids) and len(ids) == 20
    assert [o.finish_reason for o in received["turn1"]].count(FinishReason.LENGTH) == 1
    assert payload_of(received["turn1"][-1].kv_transfer_params).num_tokens == 69


@pytest.mark.parametrize("off", ["p", "d", "direction"])
def test_no_answer_waits_where_nobody_loads_it(model, off):
    settings = dict(enable_kv_checksum=False)
    extra = BOTH["kv_connector_extra_config"]
    one_way = dict(kv_connector_extra_config={**extra, "bidirectional_kv_xfer": False})
    p = rig.Instance(model, "kv_producer", **BOTH, **(settings if off == "p" else {}))
    d_settings = {"d": {**BOTH, **settings}, "direction": one_way}.get(off, BOTH)
    d = rig.Instance(model, "kv_consumer", **d_settings)
    prompt = tokens(50)
    request = d.add("turn1", prompt, rig.prefill(p, "p", prompt), max_tokens=5)
    while not request.is_finished():
        d.step(p)
    waits = off == "p"
    assert (d.results["turn1"][-1].finish_reason is None) == waits
    d.step(p)
    out = d.results["turn1"][-1]
    assert out.finish_reason == FinishReason.LENGTH
    params = out.kv_transfer_params or {}
    assert (KV_TRANSFER_PARAMS_KEY in params) == waits
    assert bool(params.get("do_remote_decode")) == (off != "direction")


def test_an_answer_whose_sums_are_missing_leaves_without(model, log):
    p, d = pair(model)

    def lose(reports):
        if d.held_answers():
            for report in reports:
                report.kv_checksums = None

    d.on_reports = lose
    request, params = first_turn(p, d)
    assert params["remote_num_tokens"] == 69 and KV_TRANSFER_PARAMS_KEY not in params
    assert d.stats["unsent:workers_missing"] == 1
    assert any("KV checksums not sent: workers_missing" in x for x in log)
    second_turn(p, d, request, params)
    assert p.stats["unverified:no_payload"] == 1
    assert not d.held_answers()


@AHEAD
def test_an_answer_whose_step_is_dropped_leaves_all_the_same(model, ahead):
    """So does vLLM's fault tolerance: of such a step the scheduler learns nothing."""
    p, d = pair(model, None, dict(async_scheduling=ahead))
    prompt = tokens(50)
    request = d.add("turn1", prompt, rig.prefill(p, "p", prompt), max_tokens=5)
    while not request.is_finished():
        d.step(p)
    while not d.steps or d.steps[-1].kv_checksum_scheduled is None:
        d.steps.append(d.schedule())
    d.steps.clear()
    for _ in range(MAX_STEPS - 1):
        d.step(p)
    assert d.held_answers() == 1
    for _ in range(2):
        d.step(p)
    out = d.results["turn1"][-1]
    assert out.finish_reason == FinishReason.LENGTH
    assert KV_TRANSFER_PARAMS_KEY not in out.kv_transfer_params
    assert d.stats["unsent:workers_missing"] == 1
    assert not d.held_answers()


def test_aborted_while_its_answer_waits(model):
    p, d = pair(model)
    prompt = tokens(50)
    request = d.add("turn1", prompt, rig.prefill(p, "p", prompt), max_tokens=5)
    while not request.is_finished():
        d.step(p)
    assert d.held_answers() == 1
    d.scheduler.finish_requests("turn1", RequestStatus.FINISHED_ABORTED)
    d.step(p)
    assert not d.held_answers()
    assert not any(n for name, n in d.tables().items() if name != "loading")


def test_answers_of_one_id_are_kept_apart():
    """A client may use an id again before the first answer has left."""
    answers, requests, asked = PendingAnswers(), [], []
    for seq in (1, 2):
        request = SimpleNamespace(request_id="same", client_index=0)
        scheduled = KVChecksumScheduled()
        answers.start(request, KVChecksumBlocks(16, {}, seq), [[1]], scheduled)
        requests.append(request)
        asked.append(scheduled)
        answers.exchange({})
    summed = [answers.take_summed(scheduled) for scheduled in asked]
    assert [[a.request for a in found] for found in summed] == [[r] for r in requests]


@AHEAD
def test_answers_that_end_one_after_the_other_have_their_own_sums(model, ahead):
    p, d = pair(model, None, dict(async_scheduling=ahead))
    requests = []
    for number in range(4):
        prompt = tokens(50, number)
        params = rig.prefill(p, f"p{number}", prompt)
        requests.append(d.add(f"turn{number}", prompt, params, max_tokens=5 + number))
    for _ in range(20):
        d.step(p)
    for number, request in enumerate(requests):
        out = d.results[request.request_id][-1]
        assert out.finish_reason == FinishReason.LENGTH
        assert payload_of(out.kv_transfer_params).num_tokens == 54 + number


def test_steps_without_such_answers_do_not_look_at_outputs(model):
    p, d = pair(model)
    exchange = d.scheduler.kv_checksum.exchange_answers
    exchange(None)
    request, params = first_turn(p, d)
    exchange(None)
    second_turn(p, d, request, params)
    exchange(None)
    assert p.loads("verified") == 1


@AHEAD
@pytest.mark.parametrize("window", [20, 40, 300])
def test_windows(model, window, ahead):
    """D gives up what has left the window while it decodes."""
    p, d = pair(model, None, dict(async_scheduling=ahead), window=window)
    request, params = first_turn(p, d, number=100, decoded=30)
    assert payload_of(params).groups.keys() == {0, 1}
    second_turn(p, d, request, params)
    assert p.loads("verified") == p.stats["loads_started"] == 1


@AHEAD
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("bad", [False, True])
def test_states(model, mode, bad, ahead, monkeypatch):
    """A state is that after D's last computed token."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    p, d = pair(model, None, dict(async_scheduling=ahead), hybrid.pair, mode=mode)
    request, params = first_turn(p, d)
    if bad:
        p.damage_state = p.flip_state_bit
    second_turn(p, d, request, params)
    assert p.loads("mismatch" if bad else "verified") == p.stats["loads_started"] == 1
    assert p.stats["blocks_mismatched"] == bad


@pytest.mark.parametrize("carrier", [c for c in KVChecksumCarrier])
def test_only_parameters_carry_anything_back(carrier):
    """Other connectors have no answer of a decode instance that P would see."""
    params = dict(do_remote_decode=True, do_remote_prefill=False)
    request = SimpleNamespace(kv_transfer_params=params)
    back = carrier is KVChecksumCarrier.KV_TRANSFER_PARAMS
    assert carrier.of_request(request, receiving=True) is (carrier if back else None)
    params.update(do_remote_prefill=True)
    assert carrier.of_request(request, receiving=True) is carrier
