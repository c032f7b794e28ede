# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test every P/D path with the connectors' own workers over real NIXL and Mooncake.

Real schedulers, connectors and libraries, P and D in one process; only the forward is
faked (`kv_checksum_real_workers`).
"""

from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.fault_drill import damage
from vllm.distributed.kv_transfer.kv_checksum.metrics import VERDICTS
from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig import real_workers as real
from .rig.instances import tokens
from .rig.versions import REPORTED_PUSH, needs, older_than, without

NUM_BLOCKS = 1500
_numbers = count()


PATHS = (
    "pull",
    pytest.param("push", marks=needs("0.31.0", REPORTED_PUSH)),
    "mooncake",
)


@pytest.fixture(scope="module", params=PATHS)
def side(request, model):
    """Yield P and D with checksums on, `p_off` and `d_off` without, over one path."""
    with ExitStack() as stack:

        def start(role, enabled):
            return real.real_instance(
                stack,
                model,
                role,
                request.param,
                enable_kv_checksum=enabled,
                num_blocks=NUM_BLOCKS,
            )

        yield SimpleNamespace(
            transport=request.param,
            p=start("kv_producer", True),
            d=start("kv_consumer", True),
            p_off=start("kv_producer", False),
            d_off=start("kv_consumer", False),
        )


@pytest.fixture
def pair(side):
    p, d = side.p, side.d
    p.stats.clear()
    d.stats.clear()
    yield p, d
    p.alter = lambda data: data
    p.transport.draft_layers = ()
    d.damage = lambda instance, req_id, block_ids: None
    d.on_reports = lambda reports: None
    settle(p, d)


def settle(p, d):
    """Step until no scheduler, worker or connector holds any request."""

    def left():
        held = {**p.scheduler.requests, **d.scheduler.requests}
        return held or any(p.tables().values()) or any(d.tables().values())

    real.run(p, d, lambda: not left())


def names():
    """Return P's and D's id of one request: a client's, with vLLM's random suffixes."""
    number = next(_numbers)
    return f"cmpl-{number}-0-aaaaaaaa", f"cmpl-{number}-0-bbbbbbbb"


def start_load(p, d, prompt, max_tokens=2):
    p_id, d_id = names()
    return d.add(d_id, prompt, rig.prefill(p, p_id, prompt), max_tokens)


def load(p, d, prompt):
    request = start_load(p, d, prompt)
    real.run(p, d, request.is_finished)
    return d.results[request.request_id][-1]


def test_loads_verify(pair):
    p, d = pair
    right = []
    d.damage = lambda d, req_id, _: right.append(
        d.answer_kv_is_right(d.scheduler.requests[req_id])
    )
    lengths = (1, 31, 32, 33, 300)
    for number in lengths:
        out = load(p, d, tokens(number, next(_numbers)))
        assert out.finish_reason == FinishReason.LENGTH
    assert right == [True] * len(lengths)
    assert d.loads("verified") == len(lengths) and d.stats["blocks_mismatched"] == 0
    assert sum(k.startswith(("loads:", "unverified")) for k in d.stats) == 1


@needs("0.33.0", "step that it finalizes later")
def test_a_send_is_summed_behind_the_drafter(pair):
    """The drafter's layers get their KV after the step's other reports are made."""
    p, d = pair
    right = []
    d.damage = lambda d, req_id, _: right.append(
        d.answer_kv_is_right(d.scheduler.requests[req_id])
    )
    p.transport.draft_layers = (rig.LAYERS - 1,)
    load(p, d, tokens(100, next(_numbers)))
    assert right == [True]
    assert d.loads("verified") == 1 and sum(d.loads(v) for v in VERDICTS) == 1


def test_a_load_that_failed_is_not_summed(pair, monkeypatch):
    """Its connector names it among those that finished, and among those that failed."""
    p, d = pair
    take, records = d.transport.take_results, []

    def failed(finished_req_ids):
        results = take(finished_req_ids)
        results.failed_recving |= results.finished_recving
        return results

    monkeypatch.setattr(d.transport, "take_results", failed)
    d.on_reports = lambda reports: records.extend(
        record
        for r in reports
        if r.kv_checksums
        for record in r.kv_checksums.finalize()
    )
    out = load(p, d, tokens(100, next(_numbers)))
    assert out.finish_reason == FinishReason.ERROR and d.stats["loads_failed"] == 1
    assert not any(record.checksums for record in records)


@pytest.mark.parametrize("sides", [("p_off", "d"), ("p", "d_off")])
def test_one_side_without_checksums(side, sides):
    """Transfers work; only a consumer that has checksums on says what is missing."""
    p, d = (getattr(side, name) for name in sides)
    d.stats.clear()
    right = []
    d.damage = lambda d, req_id, _: right.append(
        d.answer_kv_is_right(d.scheduler.requests[req_id])
    )
    out = load(p, d, tokens(100, next(_numbers)))
    assert out.finish_reason == FinishReason.LENGTH and right == [True]
    if sides[1] == "d":
        assert d.loads("unverified") == d.stats["unverified:no_payload"] == 1
    else:
        assert not any(d.stats.values())
    settle(p, d)


def test_200_concurrent_requests(pair):
    p, d = pair
    prompts = {
        names(): tokens(1 + 7 * i % 190, seed=next(_numbers)) for i in range(200)
    }
    waiting = {}
    for (p_id, _), prompt in prompts.items():
        params = p.transport.producer_params(p_id)
        waiting[p_id] = (p.add(p_id, prompt, params), params)
    loads = []

    def forward_finished():
        """Forward P's answers as a router does."""
        for p_id, d_id in prompts:
            request, params = waiting.get(p_id, (None, None))
            if request is not None and request.is_finished():
                del waiting[p_id]
                answer = p.results[p_id][-1].kv_transfer_params
                params = p.transport.consumer_params(p, params, answer)
                loads.append(d.add(d_id, prompts[p_id, d_id], params, max_tokens=2))
        return not waiting and all(r.is_finished() for r in loads)

    real.run(p, d, forward_finished, timeout_s=60)
    assert d.loads("verified") == len(loads) == 200
    assert sum(k.startswith(("loads:", "unverified")) for k in d.stats) == 1


def abort(instance, request):
    instance.scheduler.finish_requests(
        request.request_id, rig.RequestStatus.FINISHED_ABORTED
    )


def test_a_producer_aborted_in_its_prefill_leaves_nothing(pair):
    p, d = pair
    params = p.transport.producer_params("aborted")
    request = p.add(names()[0], tokens(300, next(_numbers)), params)
    p.step()
    assert 0 < request.num_computed_tokens < 300
    abort(p, request)
    settle(p, d)


@pytest.mark.parametrize("stage", ["before", "loading", "before verdict"])
def test_a_load_aborted_at_each_stage_leaves_nothing(pair, side, stage):
    p, d = pair
    if (side.transport, stage) == ("mooncake", "before") and older_than("0.32.0"):
        pytest.skip(without("right end of a load aborted so early, checked or not"))
    request = start_load(p, d, tokens(300, next(_numbers)))
    reported = []

    def on_reports(reports):
        if any(r.finished_recving for r in reports):
            reported.extend(reports)
            if stage == "before verdict":
                assert d.tables()["recvs"] == 1
                abort(d, request)

    d.on_reports = on_reports
    if stage == "before":
        abort(d, request)
        # A producer may hold the blocks for the rest of their lease.
        leases = getattr(p.transport.worker.connector_worker, "_reqs_to_send", {})
        leases.update(dict.fromkeys(leases, 0.0))
    else:
        d.transport.hold_loads = True
        d.step(p)
        assert d.tables()["recvs"] == d.tables()["worker0"] == 1
        if stage == "loading":
            abort(d, request)
            d.step(p)
            # Nobody may report its end any more.
            assert d.tables()["worker0"] == 0
        d.transport.hold_loads = False
        real.run(p, d, lambda: reported)
    settle(p, d)
    assert not any(k.startswith("loads:") for k in d.stats)


def test_an_error_response_carries_nothing(side, pair, monkeypatch):
    if side.transport != "mooncake":
        pytest.skip("only Mooncake's producer answers")
    p, d = pair
    monkeypatch.setattr(
        p.transport.worker.connector_worker, "_send_blocks", lambda *args: -1
    )
    receiver = d.transport.worker.connector_worker
    responses = []
    process = receiver.process_pulling_result
    monkeypatch.setattr(
        receiver,
        "process_pulling_result",
        lambda response, pulls: responses.append(response) or process(response, pulls),
    )
    request = start_load(p, d, tokens(100, next(_numbers)))
    real.run(p, d, request.is_finished)
    assert d.results[request.request_id][-1].finish_reason == FinishReason.ERROR
    assert [bytes(r.kv_checksums) for r in responses] == [b""]
    assert responses[0].err_reqs
    # The producer keeps the blocks until its time-out.
    sends = p.transport.worker.connector_worker.reqs_need_send
    for send in list(sends.values()):
        send.expire_time = 0.0
    assert not any(k.startswith("loads:") for k in d.stats)


def damage_with(kind, others):
    """Damage a finished load as the fault drill does."""

    def damage_load(instance, req_id, block_ids):
        group = instance.kv_config.kv_cache_groups[0]
        layers = [
            damage.LayerCache(instance.kv[n], instance.num_blocks)
            for n, _ in enumerate(group.layer_names)
        ]
        num_tokens = instance.scheduler.requests[req_id].num_prompt_tokens
        loaded = damage.LoadedBlocks(layers, list(block_ids), 0, num_tokens, others)
        damage.inflict(kind, loaded)

    return damage_load


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_to_loaded_kv_is_seen(pair, kind):
    p, d = pair
    d.damage = damage_with(kind, others=[NUM_BLOCKS - 2, NUM_BLOCKS - 3])
    load(p, d, tokens(100, next(_numbers)))
    assert d.loads("mismatch") == 1


@pytest.mark.parametrize("kind", damage.PAYLOAD_KINDS)
def test_damage_to_payloads_is_seen(pair, kind):
    p, d = pair
    other = []
    p.alter = lambda data: other.append(data) or data
    load(p, d, tokens(100, next(_numbers)))
    p.alter = lambda data: damage.damage_payload(kind, data, other[0])
    load(p, d, tokens(100, next(_numbers)))
    seen = "mismatch" if kind == "other_request_payload" else "unverified"
    assert (d.loads("verified"), d.loads(seen)) == (1, 1)


def test_what_d_decoded_is_read_back_and_verified(model):
    """D hands the blocks out, and P reads and checks them in the next turn."""
    options = dict(bidirectional_kv_xfer=True, kv_recompute_threshold=0)
    with ExitStack() as stack:
        p, d = (
            real.real_instance(
                stack, model, role, "pull", kv_connector_extra_config=options
            )
            for role in ("kv_producer", "kv_consumer")
        )
        for bad in (False, True):
            request = start_load(p, d, tokens(100, next(_numbers)), max_tokens=20)
            real.run(p, d, lambda r=request: r.is_finished() and not d.held_answers())
            params = d.results[request.request_id][-1].kv_transfer_params
            if bad:
                p.damage = flip_in_the_last_block
            longer = [*request.all_token_ids, *tokens(40, next(_numbers))]
            second = p.add(names()[0], longer, params)
            real.run(p, d, second.is_finished)
        assert p.loads("verified") == p.loads("mismatch") == 1
        assert p.stats["loads_started"] == 2


def flip_in_the_last_block(p, req_id, block_ids):
    """Flip a bit of a token that D decoded; of 119 loaded ones, P has 96 itself."""
    p.kv[2][block_ids[3]].view(torch.uint8)[1, 4, 5] ^= 16
