# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check a connector that keeps KV and loads it back.

Its loads bring stored checksums, or the ledger checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_checksum.testing.diagnosis import (
    Load,
    look_at_load,
    look_at_verdict,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.forward import tokens
from vllm.distributed.kv_transfer.kv_checksum.testing.instance import (
    NUM_BLOCKS,
    Instance,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Fault
from vllm.distributed.kv_transfer.kv_checksum.testing.suite import Suite


def check(suite: Suite) -> None:
    """Run all cases."""
    p = d = suite.instance("kv_both")
    suite.require_coverage(d)
    by_ledger = suite.carrier is KVChecksumCarrier.LEDGER
    if not (by_ledger or suite.factory.loads_own):
        d = suite.instance("kv_both")
    size = suite.factory.block_size
    for number in (3 * size + 5, size + 1, 4 * size):
        with suite.case(f"a load of {number} tokens", p, d):
            prompt = tokens(number, number)
            _store(suite, p, d, prompt)
            _check_one(suite, p, d, prompt)
    suite.end_stage()
    with suite.case("a load behind a local prefix", p, d):
        # Its first blocks are in the prefix cache from the case before.
        prompt = tokens(4 * size, 4 * size)[: 2 * size] + tokens(3 * size + 4)
        _store(suite, p, d, prompt)
        _compute(suite, d, prompt[: 2 * size])
        _check_one(suite, p, d, prompt)
    suite.end_stage()
    with suite.case("a request that is aborted while it loads", p, d):
        prompt = tokens(3 * size + 5, 300)
        _store(suite, p, d, prompt)
        request = d.add(suite.name(), prompt, None)
        d.step()
        suite.abort(d, request)
        suite.linger(d)
    with suite.case("a load behind an aborted one", p, d):
        _empty(suite, d)
        _check_one(suite, p, d, prompt)
    suite.end_stage()
    _check_damage(suite, p, d)


def _compute(suite: Suite, instance: Instance, prompt: list[int]) -> str:
    """Run a request to its end and return its id."""
    req_id = suite.name()
    request = instance.add(req_id, prompt, None, max_tokens=2)
    suite.run(request.is_finished, instance)
    return req_id


def _store(suite: Suite, p: Instance, d: Instance, prompt: list[int]) -> None:
    """Compute a prompt, and have it where `d` can only load it from."""
    _compute(suite, p, prompt)
    suite.factory.wait_until_stored(p)
    _empty(suite, d)


def _empty(suite: Suite, instance: Instance) -> None:
    """Empty an instance's prefix cache.

    Loads that the ledger checks need prompts that push the others out: a reset empties
    the ledger, too.
    """
    if suite.carrier is not KVChecksumCarrier.LEDGER:
        suite.run(instance.scheduler.reset_prefix_cache, instance)
        return
    for seed in range(2):
        number = (NUM_BLOCKS - 3) * suite.factory.block_size
        _compute(suite, instance, tokens(number, 10_000 + instance.steps + seed))


def _check_one(suite: Suite, p: Instance, d: Instance, prompt: list[int]) -> None:
    d.stats.clear()
    d.watch_other_blocks()
    load = Load(_compute(suite, d, prompt), None, p, d)
    suite.linger(d)
    found = look_at_load(load)
    suite.add(found)
    if not any(fault is Fault.NOTHING_LOADED for fault, _ in found):
        suite.add(look_at_verdict(load, suite.carrier))


def _check_damage(suite: Suite, p: Instance, d: Instance) -> None:
    """Damage a kept block, or its load; then ask for the same prompt again."""
    prompt = tokens(4 * suite.factory.block_size + 5, 500)
    mismatch, verified = (
        metrics.loads_key(outcome, suite.carrier)
        for outcome in ("mismatch", "verified")
    )
    with suite.case("a load of damaged KV", p, d):
        if suite.carrier is KVChecksumCarrier.STORED:
            with _stored_damaged(suite, p):
                _compute(suite, p, prompt)
                suite.factory.wait_until_stored(p)
        else:
            _compute(suite, p, prompt)
            suite.factory.wait_until_stored(p)
            d.damage = True
        _empty(suite, d)
        d.stats.clear()
        _compute(suite, d, prompt)
        d.damage = False
        if d.stats[verified] and not d.stats[mismatch]:
            suite.add([(Fault.DAMAGE_NOT_SEEN, "its load was verified")])
    suite.end_stage()
    with suite.case("the same prompt behind a load of damaged KV", p, d):
        for instance in {p, d}:
            suite.factory.wait_until_stored(instance)
        _empty(suite, d)
        d.stats.clear()
        req_id = _compute(suite, d, prompt)
        if d.stats[mismatch] or d.seen.wrong_at_use[req_id]:
            suite.add([(Fault.BAD_VALUES_KEPT, f"{req_id} got the bad block again")])


@contextmanager
def _stored_damaged(suite: Suite, p: Instance) -> Iterator[None]:
    """Damage a block between its checksum and its storing; undo that at the end."""
    worker = p.active.kv_checksum_worker
    save = worker.save_block_checksums
    damaged: list[int] = []

    def save_and_damage(runs: Sequence[BlockRun]) -> None:
        save(runs)
        ids = [int(i) for run in runs for i in run.block_ids]
        if not damaged and len(ids) > 1:
            damaged.append(ids[1])
            p.flip_bit(ids[1])

    worker.save_block_checksums = save_and_damage
    try:
        yield
    finally:
        worker.save_block_checksums = save
        for block_id in damaged:
            p.flip_bit(block_id)
