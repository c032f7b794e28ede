# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that requests and groups without blocks make no rows beside the others."""

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_checksum.worker.rows import build_rows

from .rig import caches as u

NOTHING = ([], (), np.zeros(0, np.int64), np.zeros(0))


@pytest.fixture
def caches():
    spec = u.full_spec()
    return {n: u.random_cache(20, spec, seed=n) for n in range(4)}


@pytest.fixture
def worker(caches):
    """Return a worker of two groups of two layers."""
    groups = [([*u.names(0), *u.names(1)], u.full_spec())]
    groups += [([*u.names(2), *u.names(3)], u.full_spec())]
    named = {u.names(n)[0]: cache for n, cache in caches.items()}
    return u.worker(u.config(20, *groups), named)


def expected(caches, group_id, ids, start, num_tokens):
    layers = {n: c for n, c in caches.items() if n // 2 == group_id}
    return u.expected_sums(layers, ids, start, num_tokens)


def assert_empty(record, req_id, group_id, start):
    """Check that nothing of the group was summed, although there are layers here."""
    group = record.checksums[req_id][group_id]
    assert group.start == start and group.values.shape == (0, 1)
    assert group.values.dtype == np.uint64


@pytest.mark.parametrize("ids", NOTHING, ids=lambda i: type(i).__name__)
@pytest.mark.parametrize(("num_tokens", "start"), [(0, 0), (32, 2)])
def test_no_blocks_at_all(worker, ids, num_tokens, start):
    blocks = KVChecksumBlocks(num_tokens, {0: (start, ids), 1: (start, ids)})
    record = u.send_record(worker, blocks)
    assert_empty(record, "r", 0, start)
    assert_empty(record, "r", 1, start)
    assert record.num_tokens == {"r": num_tokens}
    # A device is given no launch of nothing.
    rows, segments, _ = build_rows(worker.groups, {"r": blocks})
    assert rows.shape == (3, 0) and segments == []


@pytest.mark.parametrize("ids", NOTHING, ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("order", [("empty", "full"), ("full", "empty")])
def test_beside_requests_that_have_some(worker, caches, ids, order):
    work = {
        "full": KVChecksumBlocks(40, {0: (1, [4, 9]), 1: (0, np.array([3, 5, 7]))}),
        "empty": KVChecksumBlocks(16, {0: (1, ids), 1: (1, ids)}),
    }
    worker.bind(KVChecksumScheduled(reqs_to_send={name: work[name] for name in order}))
    (record,) = worker.post_forward(None, set(), set()).finalize()
    assert u.values_of(record, "full", 0) == expected(caches, 0, [4, 9], 1, 40)
    assert u.values_of(record, "full", 1) == expected(caches, 1, [3, 5, 7], 0, 40)
    for group_id in (0, 1):
        assert_empty(record, "empty", group_id, 1)


def test_a_group_without_beside_one_with(worker, caches):
    for empty, full in ((0, 1), (1, 0)):
        blocks = KVChecksumBlocks(40, {empty: (3, []), full: (0, [8, 2, 6])})
        record = u.send_record(worker, blocks)
        assert_empty(record, "r", empty, 3)
        found = u.values_of(record, "r", full)
        assert found == expected(caches, full, [8, 2, 6], 0, 40)


@pytest.mark.parametrize("size", [16, 32])
def test_blocks_at_positions_of_their_own(size):
    """Beside some that follow one another; each has the sums of its place."""
    spec = u.full_spec(block_size=size)
    caches = {n: u.random_cache(20, spec, seed=n) for n in range(2)}
    named = {u.names(n)[0]: cache for n, cache in caches.items()}
    w = u.worker(u.config(20, ([*named], spec)), named)
    ids, positions = [7, 3, 12], [4, 0, 9]
    work = {
        "before": KVChecksumBlocks(3 * size, {0: (1, [5, 6])}),
        "apart": KVChecksumBlocks(
            2**62, {0: (0, np.array(ids))}, positions={0: np.array(positions)}
        ),
        "behind": KVChecksumBlocks(3 * size, {0: (2, [4])}),
    }
    w.bind(KVChecksumScheduled(full_blocks=work))
    (record,) = w.post_forward(None, set(), set()).finalize()
    assert u.values_of(record, "apart") == [
        value
        for block, at in zip(ids, positions, strict=True)
        for value in u.expected_sums(caches, [block], at, (at + 1) * size)
    ]
    for name, start in (("before", 1), ("behind", 2)):
        blocks = work[name].groups[0][1]
        right = u.expected_sums(caches, blocks, start, 3 * size)
        assert u.values_of(record, name) == right


def test_blocks_without_tokens_have_sums_of_nothing(worker):
    record = u.send_record(worker, KVChecksumBlocks(0, {0: (0, [4])}))
    assert u.values_of(record) == [0]


def test_loads_of_stored_blocks(worker):
    entries = worker.init_block_checksums([0, 1])
    hashes = [bytes([i]) * 32 for i in range(2)]
    worker.save_block_checksums([BlockRun(0, 0, [], []), BlockRun(1, 0, [], [])])
    assert not torch.any(entries)
    worker.save_block_checksums(
        [BlockRun(0, 0, [], []), BlockRun(0, 0, [4, 5], hashes)]
    )
    assert torch.count_nonzero(entries) == 2
    blocks = KVChecksumBlocks(32, {0: (0, [4, 5]), 1: (2, [])}, stored=True)
    nothing = KVChecksumBlocks(32, {0: (2, []), 1: (2, [])}, stored=True)
    for loads in ({"r": blocks, "n": nothing}, {"n": nothing}):
        worker.bind(KVChecksumScheduled(reqs_to_load=loads))
        (record,) = worker.post_forward(set(loads), set(), set()).finalize()
        assert_empty(record, "n", 0, 2)
        assert {len(v) for v in record.stored["n"].values()} == {0}
        if "r" in loads:
            assert (
                record.stored["r"][0].tolist()
                == entries[[4, 5]].numpy().view(np.uint64).tolist()
            )
