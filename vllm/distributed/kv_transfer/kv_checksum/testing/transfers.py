# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check a connector that moves KV from a producer to a consumer, with checksums."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing.diagnosis import (
    Load,
    look_at_checksums,
    look_at_load,
    look_at_verdict,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.forward import tokens
from vllm.distributed.kv_transfer.kv_checksum.testing.instance import Instance
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Fault
from vllm.distributed.kv_transfer.kv_checksum.testing.suite import Suite


def check(suite: Suite) -> None:
    """Run all cases."""
    p, d = suite.instance("kv_producer"), suite.instance("kv_consumer")
    suite.require_coverage(d)
    size = suite.factory.block_size
    for number in (3 * size, 3 * size + 5, 1, size - 1, 2 * size + 1, 9 * size + 2):
        with suite.case(f"a load of {number} tokens", p, d):
            _check_one(suite, p, d, tokens(number, number))
    with suite.case("a load behind a local prefix", p, d):
        # The last prompt's first blocks are in the consumer's prefix cache.
        prompt = tokens(9 * size + 2, 9 * size + 2)[: 4 * size] + tokens(2 * size + 3)
        _check_one(suite, p, d, prompt)
    for stage in (_check_several, _check_damage, _check_aborts, _check_one_side):
        suite.end_stage()
        stage(suite, p, d)


def _prefill(suite: Suite, p: Instance, prompt: list[int]) -> tuple[str, Any]:
    """Compute a prompt; return the request's id and what the consumer is asked with."""
    req_id = suite.name()
    params = suite.factory.producer_params(req_id)
    request = p.add(req_id, prompt, params)
    suite.run(request.is_finished, p)
    answer = p.answers.get(req_id)
    return req_id, suite.factory.consumer_params(p, params, answer)


def _start(suite: Suite, p: Instance, d: Instance, prompt: list[int]) -> Load:
    producer_id, params = _prefill(suite, p, prompt)
    load = Load(suite.name_on_consumer(producer_id), producer_id, p, d)
    d.add(load.req_id, prompt, params, max_tokens=2)
    return load


def _load(suite: Suite, p: Instance, d: Instance, prompt: list[int]) -> Load:
    """Compute a prompt on the producer and load it on the consumer."""
    load = _start(suite, p, d, prompt)
    request = d.scheduler.requests[load.req_id]
    suite.run(request.is_finished, p, d)
    return load


def _check_one(suite: Suite, p: Instance, d: Instance, prompt: list[int]) -> None:
    d.watch_other_blocks()
    load = _load(suite, p, d, prompt)
    suite.linger(p, d)
    found = look_at_load(load)
    suite.add(found)
    if not any(fault is Fault.NOTHING_LOADED for fault, _ in found):
        suite.add(look_at_verdict(load, suite.carrier))


def _check_several(suite: Suite, p: Instance, d: Instance) -> None:
    """Load several prompts at a time, in another order than they were computed."""
    with suite.case("several loads at a time", p, d):
        size = suite.factory.block_size
        prompts = [tokens(n * size + 3 * n, 100 + n) for n in (4, 1, 3, 2)]
        sent = [_prefill(suite, p, prompt) for prompt in prompts]
        loads = []
        for (producer_id, params), prompt in reversed([*zip(sent, prompts)]):
            load = Load(suite.name_on_consumer(producer_id), producer_id, p, d)
            d.add(load.req_id, prompt, params, max_tokens=2)
            loads.append(load)
        left = [d.scheduler.requests[load.req_id] for load in loads]
        suite.run(lambda: all(r.is_finished() for r in left), p, d)
        suite.linger(p, d)
        found = [finding for load in loads for finding in look_at_load(load)]
        verified = d.stats[metrics.loads_key("verified", suite.carrier)]
        if verified < len(loads):
            if suite.carrier is KVChecksumCarrier.CONNECTOR:
                found += [f for x in loads for f in look_at_checksums(x, suite.carrier)]
            text = f"{verified} of {len(loads)} were verified"
            found = found or [(Fault.UNVERIFIED, text)]
        suite.add(found)


def _check_damage(suite: Suite, p: Instance, d: Instance) -> None:
    with suite.case("a load whose KV is damaged when it is reported", p, d):
        d.damage = True
        load = _load(suite, p, d, tokens(3 * suite.factory.block_size + 5, 200))
        d.damage = False
        if d.stats[metrics.loads_key("verified", suite.carrier)]:
            suite.add([(Fault.DAMAGE_NOT_SEEN, f"{load.req_id} was verified")])


def _check_aborts(suite: Suite, p: Instance, d: Instance) -> None:
    """Abort requests on either side; what follows must not suffer."""
    size = suite.factory.block_size
    with suite.case("a consumer's request that is aborted while it loads", p, d):
        load = _start(suite, p, d, tokens(3 * size + 5, 300))
        d.step()
        suite.abort(d, d.scheduler.requests[load.req_id])
        suite.linger(p, d)
    with suite.case("a producer's request that is aborted while it prefills", p, d):
        req_id = suite.name()
        params = suite.factory.producer_params(req_id)
        request = p.add(req_id, tokens(300, 301), params)
        p.step()
        suite.abort(p, request)
        suite.linger(p, d)
    with suite.case("a load behind aborted ones", p, d):
        _check_one(suite, p, d, tokens(3 * size + 5, 302))


def _check_one_side(suite: Suite, p: Instance, d: Instance) -> None:
    """Load where the peer has checksums off, as during a rollout."""
    prompt, other = (tokens(3 * suite.factory.block_size + 5, n) for n in (400, 401))
    instead = Fault.NEEDS_BOTH_SIDES
    with suite.case("a producer with checksums off", p, d, instead=instead):
        off = suite.instance("kv_producer", enable_kv_checksum=False)
        suite.add(look_at_load(_load(suite, off, d, prompt)))
    with suite.case("a consumer with checksums off", p, d, instead=instead):
        off = suite.instance("kv_consumer", enable_kv_checksum=False)
        suite.add(look_at_load(_load(suite, p, off, other)))
