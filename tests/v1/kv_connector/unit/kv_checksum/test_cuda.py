# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test on a CUDA GPU that sums reach the host in order, and that no step waits.

Torch and Triton are enough. The kernel's own tests run on a GPU, too.
"""

import threading

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bare_worker import bare_worker

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun

from .rig import reference
from .rig.cells import random_cells, view

CYCLES = 200_000_000
"""For which a stream is kept busy: more than 0.1 s."""


class Cache:
    """Two groups of one layer each on the GPU, and what they should hold."""

    def __init__(self):
        self.cells = [random_cells(8, 2, 16, 64, seed=n) for n in (0, 1)]
        self.there = [cells.cuda() for cells in self.cells]
        self.worker = bare_worker(
            {n: (16, [view(self.cells[n], self.there[n], layer=n)]) for n in range(2)}
        )
        # As vLLM does after its warm-up.
        torch.cuda.synchronize()

    def right(self, group, ids, start, num_tokens):
        return [
            reference.block_sum(
                {group: self.cells[group][block].numpy()}, (start + i) * 16, num_tokens
            )
            for i, block in enumerate(ids)
        ]


@pytest.fixture
def cache():
    return Cache()


WORK = {
    "r": KVChecksumBlocks(57, {0: (1, [5, 2, 7]), 1: (0, [1])}),
    "s": KVChecksumBlocks(40, {0: (0, [0, 3]), 1: (1, [6, 4])}),
}
"""Two requests and two groups, the first of which has five rows."""


def check(cache, record, work=WORK):
    for req_id, blocks in work.items():
        for group, (start, ids) in blocks.groups.items():
            found = record.checksums[req_id][group].values[:, 0].tolist()
            assert found == cache.right(group, ids, start, blocks.num_tokens)


def finalized(output):
    """Call `finalize` on another thread, as executors do."""
    records = []
    thread = threading.Thread(target=lambda: records.extend(output.finalize()))
    thread.start()
    thread.join()
    return records


@pytest.fixture
def busy():
    """Enter a stream that is kept busy before and after what is issued to it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        yield stream
    torch.cuda.synchronize()


def test_two_requests_and_two_groups_the_first_of_odd_size(cache):
    cache.worker.bind(KVChecksumScheduled(reqs_to_send=WORK))
    (record,) = cache.worker.post_forward(None, set(), set()).finalize()
    check(cache, record)


def test_sums_are_copied_after_they_are_made_and_before_later_writes(cache, busy):
    cache.worker.bind(KVChecksumScheduled(reqs_to_send=WORK))
    output = cache.worker.post_forward(None, set(), set())
    for there in cache.there:
        there.zero_()  # the next forward
    torch.cuda._sleep(CYCLES)
    (record,) = finalized(output)
    check(cache, record)


def test_memory_of_sums_that_nobody_waits_for_is_not_reused_too_early(cache, busy):
    """Drop outputs while their copies are late, and give their memory to others."""
    worker, kept = cache.worker, []
    # The copies are as late as their stream is.
    with torch.cuda.stream(worker._copy_stream):
        torch.cuda._sleep(CYCLES)
    for number in range(20):
        worker.bind(KVChecksumScheduled(reqs_to_send=WORK))
        output = worker.post_forward(None, set(), set())
        if number % 2:
            kept.append(output)
        torch.full((8, 2), 7, dtype=torch.int64, device="cuda")
        del output
    for output in kept:
        (record,) = finalized(output)
        check(cache, record)


def test_steps_whose_outputs_are_finalized_later_and_in_another_order(cache, busy):
    worker, outputs = cache.worker, []
    for stream in (busy, torch.cuda.Stream(), busy):
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        torch.cuda._sleep(CYCLES // 10)
        worker.bind(KVChecksumScheduled(reqs_to_send=WORK, reqs_to_recv=WORK))
        outputs.append(worker.post_forward({*WORK}, set(), set()))
    for output in reversed(outputs):
        for record in finalized(output):
            check(cache, record)


def test_a_forward_in_a_cuda_graph_is_summed_behind_its_replay(cache):
    """The graph writes the cells, which before it are others."""
    inputs = [cells.cuda() for cells in cache.cells]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(CYCLES // 10)
        for there, values in zip(cache.there, inputs, strict=True):
            there.copy_(values)
    for there in cache.there:
        there.zero_()
    outputs = []
    for _ in range(3):
        graph.replay()
        cache.worker.bind(KVChecksumScheduled(reqs_to_send=WORK))
        outputs.append(cache.worker.post_forward(None, set(), set()))
        for there in cache.there:
            there.zero_()
    for output in outputs:
        (record,) = finalized(output)
        check(cache, record)


def test_block_checksums_are_those_of_the_blocks_when_they_are_stored(cache, busy):
    worker, ids = cache.worker, [5, 2]
    stored = worker.init_block_checksums([0])
    hashes = [bytes(range(n, n + 32)) for n in ids]
    worker.save_block_checksums([BlockRun(0, 3, ids, hashes)])
    for there in cache.there:
        there.zero_()
    store = torch.cuda.Stream()
    store.wait_stream(busy)
    with torch.cuda.stream(store):
        host = stored[ids].to("cpu")
    tags = [np.frombuffer(h[:8], "<u8")[0] for h in hashes]
    right = np.array(cache.right(0, ids, 3, 80), np.uint64) ^ np.array(tags)
    assert host.numpy().view(np.uint64).tolist() == right.tolist()


def test_the_step_does_not_wait_for_the_device(cache):
    worker = cache.worker
    worker.init_block_checksums([0])
    stored = KVChecksumBlocks(32, {0: (0, [4, 5])}, stored=True)
    hashes = [bytes([n]) * 32 for n in (4, 5)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        worker.save_block_checksums([BlockRun(0, 0, [4, 5], hashes)])
        worker.bind(
            KVChecksumScheduled(reqs_to_send=WORK, reqs_to_load={"stored": stored})
        )
        output = worker.post_forward({"stored"}, set(), set())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loaded, sent = output.finalize()
    check(cache, sent)
    assert loaded.stored["stored"][0].shape == (2,)
