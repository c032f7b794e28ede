# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test sums of another step, of another request of the same id, or of part of one."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumOutput,
    KVChecksumRecord,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.checksum import replica_checks
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import (
    NotComparable,
    PendingSend,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.stored_loads import (
    compare_stored,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified

from .rig import caches as u
from .rig import instances as rig
from .rig.faults.instances import FaultyInstance
from .rig.faults.records import Faults
from .rig.instances import flip_bit, load, pair, tokens
from .rig.stored import HASHES, caches, workers_of


def preempt(instance):
    (request,) = instance.scheduler.running
    instance.scheduler.running.clear()
    instance.scheduler._preempt_request(request, 0.0, drop_stale_output=True)


def test_a_producer_that_resumes_behind_its_prompt_sends_sums_of_what_it_holds(model):
    """It finds another block of the same prefix, which another step has filled."""
    faults = Faults(random.Random(0), frozenset(), Counter())
    settings = dict(async_scheduling=True, faults=faults)
    p = FaultyInstance(model, "kv_producer", **settings)
    _, d = pair(model, d=dict(kv_checksum_fail_closed=True))
    prompt = tokens(48)
    request = p.add("p", prompt, dict(do_remote_decode=True), max_tokens=4)
    p.step()
    preempt(p)  # in the step that finishes the prompt: its last block comes twice
    while request.num_output_tokens < 2:
        p.step()
    last = p.scheduler.kv_cache_manager.get_block_ids("p")[0][2]
    preempt(p)
    p.step()
    assert p.scheduler.kv_cache_manager.get_block_ids("p")[0][2] != last
    params = p.run(request).kv_transfer_params
    d.run(d.add("r", prompt, params), p)
    assert d.loads("verified") == 1


def test_sums_of_an_earlier_load_of_the_id_count_for_nothing(model, transport):
    """The second load is damaged, and its own record gets lost."""
    p, d = pair(model, transport=transport)
    seen = []

    def keep(reports):
        for report in reports:
            if report.kv_checksums is not None:
                seen.append(pickle.dumps(report.kv_checksums))

    d.on_reports = keep
    load(p, d, 50)
    d.scheduler.reset_prefix_cache()
    (first,) = seen

    def replace(reports):
        for report in reports:
            if report.kv_checksums is not None:
                payload = report.kv_checksums.finalize()[0].received
                report.kv_checksums = pickle.loads(first)
                report.kv_checksums.finalize()[0].received = payload

    d.on_reports, d.damage = replace, flip_bit
    p.transport.sent.clear()
    params = rig.prefill(p, "p-again", tokens(50))
    d.run(d.add("r", tokens(50), params, max_tokens=2), p)
    assert d.loads("verified") == 1
    assert d.stats["unverified:workers_missing"] == 1


def test_a_scheduler_never_uses_the_numbers_of_one_before_it(model):
    numbers = set()
    for _ in range(2):
        p, d = pair(model)
        params = rig.prefill(p, "p", tokens(50))
        d.add("r", tokens(50), params)
        output = d.schedule()
        numbers.add(output.kv_checksum_scheduled.reqs_to_recv["r"].seq)
    assert len(numbers) == 2


def test_a_load_that_starts_as_a_request_of_its_id_ends():
    """The scheduler may learn of the end and start anew between two steps."""
    w = u.worker(
        u.config(8, (u.names(0), u.full_spec())),
        {u.names(0)[0]: u.random_cache(8, u.full_spec())},
    )
    old, new = (
        KVChecksumBlocks(32, {0: (0, ids)}, seq)
        for seq, ids in ((1, [1, 2]), (2, [3, 4]))
    )
    w.bind(KVChecksumScheduled(reqs_to_recv={"r": old}))
    w.post_forward(None, set(), set())
    w.bind(KVChecksumScheduled(reqs_to_recv={"r": new}))
    w.post_forward(None, set(), {"r"})
    w.bind(None)
    (record,) = w.post_forward({"r"}, set(), set()).finalize()
    assert record.seqs == {"r": 2} and not w._recvs


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_worker_that_reports_part_of_its_groups(model, transport, side):
    p, d = pair(model, tp=2, window=40, transport=transport)

    def lose(reports):
        for report in reports[1:]:
            output = report.kv_checksums or KVChecksumOutput([])
            for record in output.finalize():
                for groups in record.checksums.values():
                    del groups[1]

    {"p": p, "d": d}[side].on_reports = lose
    load(p, d, 50)
    reason = {"p": "no_payload", "d": "other_blocks"}[side]
    assert d.stats[f"unverified:{reason}"] == d.loads("unverified") == 1


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_worker_that_summed_another_number_of_tokens(model, transport, side, change):
    """One TP rank of two: both summed the same blocks, but not the same slots."""
    p, d = pair(model, tp=2, transport=transport)

    def miscount(reports):
        output = reports[1].kv_checksums or KVChecksumOutput([])
        for record in output.finalize():
            for req_id in record.num_tokens:
                record.num_tokens[req_id] += change

    {"p": p, "d": d}[side].on_reports = miscount
    load(p, d, 50)
    reason = {"p": "no_payload", "d": "other_blocks"}[side]
    assert d.stats[f"unverified:{reason}"] == d.loads("unverified") == 1


def test_copies_of_other_blocks_are_not_added_up():
    """Report as many of them, from another position on."""
    values = np.ones((3, 1), np.uint64)
    one, two = ((1, 0), 0), ((2, 0), 1)
    parts = {key: KVChecksumGroup(at, (key,), values[:, 0]) for key, at in (one, two)}
    parts[2, 1] = parts[2, 0]
    with pytest.raises(ValueError, match="different blocks"):
        replica_checks(parts)
    parts[1, 0].start = 1
    assert [check.tolist() for check in replica_checks(parts)] == [[2] * 3] * 2


@pytest.mark.parametrize("lost", ["checksums", "fingerprints", "stored"])
def test_stored_checksums_of_a_worker_that_reports_part(lost):
    workers = workers_of(caches(seed=4)[1])
    for worker in workers:
        worker.init_block_checksums([0])
        worker.save_block_checksums([BlockRun(0, 0, [3, 4], HASHES[:2])])
        blocks = KVChecksumBlocks(32, {0: (0, [3, 4])}, stored=True)
        worker.bind(KVChecksumScheduled(reqs_to_load={"r": blocks}))
    records = [w.post_forward({"r"}, set(), set()).finalize()[0] for w in workers]
    assert compare_stored(records, "r", 0, 0, HASHES[:2], 1).unverified is None
    table = getattr(records[-1], lost)
    del (table if lost == "fingerprints" else table["r"])[0]
    verdict = compare_stored(records, "r", 0, 0, HASHES[:2], 1)
    assert verdict.unverified in (Unverified.OTHER_BLOCKS, Unverified.ONE_SIDE_ONLY)
    assert verdict.compared == 0


@pytest.mark.parametrize(
    ("start", "number", "right"),
    [(8, 12, True), (8, 11, False), (8, 8, False), (4, 12, False), (2, 12, False)],
)
def test_a_worker_reports_every_unit_that_was_asked_for(start, number, right):
    """Ask for three blocks of four units each, from the request's third block on."""
    asked = KVChecksumBlocks(320, {0: (2, [7, 5, 6])}, seq=4)
    values = np.zeros((number, 1), np.uint64)
    record = KVChecksumRecord(
        0,
        0,
        {"r": {0: KVChecksumGroup(start, ((1, 0),), values)}},
        fingerprints={0: 1},
        num_tokens={"r": 320},
        seqs={"r": 4},
    )
    pending = PendingSend("r", asked)
    pending.take(record)
    if right:
        assert pending.parts(0, 4)[1, 0].values.shape == (12,)
        return
    with pytest.raises(NotComparable, match="other_blocks"):
        pending.parts(0, 4)
