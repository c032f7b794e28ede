# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test rings: blocks that keep the raw rows of the tokens not yet compressed.

vLLM's own writers fill them, and its own kernels of the next step tell which rows
that step reads: exactly those are summed.
"""

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.distributed.kv_transfer.kv_checksum.worker.views import Ring
from vllm.v1.kv_cache_interface import KVCacheLayout

from .rig import caches as u
from .rig import compressed, reference
from .rig.versions import needs
from .rig.writers import allocate
from .test_writers import needs_triton

old_vllm = needs("0.33.0", "such models")
pytestmark = old_vllm

BLOCK, NAME = 2, u.names(3)[0]

ROWS = {
    "deepseek_v41": (2, 8, 4096),
    "glm5next": (4, 8, 256),
    "qwen4_exp": (4, 8, 280),
    "step5": (8, 11, 1024),
}
"""Tokens that are compressed together, slots, and bytes of a row, by model."""


def layer_of(writer):
    """Return a layer as vLLM's: of its class only what the feature asks it."""

    class Layer:
        kv_cache = torch.empty(0)

        def get_attn_backend(self):
            return writer.backend_class

    vars_of = Layer()
    for name, value in writer.layer.items():
        setattr(vars_of, name, value)
    return vars_of


class Filled:
    """A ring that vLLM's writer filled with `num_tokens` tokens, by chunks."""

    def __init__(self, model, num_tokens, chunk):
        self.model, self.writer = model, (writer := compressed.RINGS[model])
        self.num_tokens = num_tokens
        self.cache, self.raw = allocate(writer.spec, 4, KVCacheLayout.BLHNC)
        for first in range(0, num_tokens, chunk):
            positions = range(first, min(num_tokens, first + chunk))
            writer.write(self.cache, BLOCK, positions)

    def rows(self):
        """Return per last position the bytes that the token leaves in the block."""
        kept, found = self.raw.clone(), {}
        slots = ROWS[self.model][1]
        for position in range(max(0, self.num_tokens - slots), self.num_tokens):
            results = []
            for before in (0, 255):
                self.raw.fill_(before)
                self.writer.write(self.cache, BLOCK, [position])
                results.append(self.raw[BLOCK].clone())
            found[position] = (results[0] == results[1]).nonzero().flatten()
        self.raw.copy_(kept)
        return found

    def next_steps(self):
        """Return what completing the group makes of the ring.

        A step may begin with the next token or compute the last one once more.
        """
        kept, made = self.raw.clone(), []
        for first in (self.num_tokens - 1, self.num_tokens):
            end = (first // self.writer.group + 1) * self.writer.group
            made.append(self.writer.read(self.cache, BLOCK, range(first, end)).clone())
            self.raw.copy_(kept)
        return made

    def read_rows(self):
        """Return the rows of which a change shows in a next step, by position."""
        before, found = self.next_steps(), {}
        for position, row in self.rows().items():
            kept = self.raw[BLOCK, row].clone()
            self.raw[BLOCK, row] ^= 0x11
            after = self.next_steps()
            self.raw[BLOCK, row] = kept
            if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                found[position] = row
        return found

    def worker(self, **kwargs):
        layer = formats.layer_format(None, NAME, layer_of(self.writer), self.cache)
        cfg = u.config(4, ([NAME], self.writer.spec))
        w = u.worker(cfg, {NAME: self.cache}, formats={NAME: layer}, **kwargs)
        assert w.skipped == {}
        return w


MODELS = sorted(compressed.RINGS)


@needs_triton
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_tokens", "chunk"), [(5, 5), (22, 9), (24, 24), (17, 16)])
def test_what_the_next_step_reads_is_summed_and_nothing_else(model, num_tokens, chunk):
    filled = Filled(model, num_tokens, chunk)
    rows, worker = filled.read_rows(), filled.worker()
    expected = torch.cat([torch.empty(0, dtype=torch.int64), *rows.values()])
    blocks = KVChecksumBlocks(num_tokens, {0: (0, [BLOCK])})
    (before,) = u.values_of(u.send_record(worker, blocks))
    step = max(1, filled.raw.shape[1] // 200) | 1
    summed = set()
    for at in range(0, filled.raw.shape[1], step):
        filled.raw[BLOCK, at] ^= 1
        if u.values_of(u.send_record(worker, blocks)) != [before]:
            summed.add(at)
        filled.raw[BLOCK, at] ^= 1
    assert summed == {at for at in expected.tolist() if at % step == 0}


def plain_sum(filled, group, slots, row):
    """Evaluate the definition over the positions that count, token by token."""
    n, heads = filled.num_tokens, filled.cache.shape[1]
    block = filled.raw[BLOCK].numpy().reshape(heads, -1)
    total, first = 0, (n - 1) // group * group
    for position in range(first, n):
        if position % group == group - 1:
            continue
        at = position % slots * row
        for head in range(heads):
            cell = block[head, at : at + row][None]
            total += reference.slice_sum(cell, 3, head, position, n)
    return total % 2**64


@needs_triton
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [1, 2, 21, 24])
def test_a_rings_sum_is_that_of_its_rows_by_position(model, num_tokens):
    filled = Filled(model, num_tokens, 7)
    blocks = KVChecksumBlocks(num_tokens, {0: (0, [BLOCK])})
    record = u.send_record(filled.worker(), blocks)
    assert u.values_of(record) == [plain_sum(filled, *ROWS[model])]
    assert record.checksums["r"][0].start == 0


@needs_triton
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_holds_a_ring_whole(model):
    filled = Filled(model, 21, 21)
    blocks = KVChecksumBlocks(21, {0: (0, [BLOCK])})
    alone = u.whole_sums([filled.worker()], blocks)
    ranks = [filled.worker(tp_rank=rank, tp_size=2) for rank in range(2)]
    assert u.whole_sums(ranks, blocks) == alone * 2
    fingerprints = {w.groups[0].fingerprint for w in [filled.worker(), *ranks]}
    assert len(fingerprints) == 1


def test_every_ring_that_is_covered_has_a_writer():
    assert {w.backend for w in compressed.RINGS.values()} == set(formats.RINGS)


def test_a_layer_that_does_not_tell_its_groups_is_skipped():
    writer = compressed.qsa_ring()
    cache, _ = allocate(writer.spec, 4, KVCacheLayout.BLHNC)
    writer.layer = {}
    layer = formats.layer_format(None, NAME, layer_of(writer), cache)
    cfg = u.config(4, ([NAME], writer.spec))
    w = u.worker(cfg, {NAME: cache}, formats={NAME: layer})
    assert w.skipped[0].startswith("backend: ")


@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 9, 30])
def test_every_written_slot_counts_where_groups_are_not_known(num_tokens):
    (first,), (number,) = Ring(8).counted(np.array([num_tokens]))
    counted = set(range(first, first + number))
    assert counted == {p for p in range(num_tokens) if p >= num_tokens - 8}


def test_requests_of_several_groups_and_a_ring_in_one_step():
    """Rows of a ring are as many as count, and its sums still one per request."""
    spec = compressed.ring(8, head_size=16, dtype=torch.bfloat16)
    full = u.full_spec()
    caches = {n: u.random_cache(8, full, seed=i) for i, n in enumerate(u.names(0, 1))}
    ring = torch.randn(8, 1, 8, 16).bfloat16()
    caches = {u.names(0)[0]: caches[u.names(0)[0]], NAME: ring}
    cfg = u.config(8, (u.names(0), full), ([NAME], spec))
    layer = formats.LayerFormat(ring_group=4)
    w = u.worker(cfg, caches, formats={NAME: layer})
    work = {
        str(n): KVChecksumBlocks(n, {0: (0, [n % 8]), 1: (0, [n % 8])})
        for n in (1, 4, 6, 13)
    }
    work["none"] = KVChecksumBlocks(9, {0: (0, [5]), 1: (0, [])})
    w.bind(KVChecksumScheduled(reqs_to_send=work))
    (record,) = w.post_forward(None, set(), set()).finalize()
    for req_id, blocks in work.items():
        assert u.values_of(record, req_id, 0) == u.expected_sums(
            {0: caches[u.names(0)[0]]}, [blocks.groups[0][1][0]], 0, blocks.num_tokens
        )
        if req_id == "none":
            assert u.values_of(record, req_id, 1) == [0]
            continue
        alone = u.send_record(w, KVChecksumBlocks(blocks.num_tokens, blocks.groups))
        assert u.values_of(record, req_id, 1) == u.values_of(alone, group_id=1)
        assert len(u.values_of(record, req_id, 1)) == 1
