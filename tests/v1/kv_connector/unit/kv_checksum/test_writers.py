# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that every covered layout has been seen written by vLLM's own writer.

One token is written; the bytes that it left are exactly those that the worker's sum
depends on for that token, in a full and in a partial block.
"""

import ast
import functools
import os
from pathlib import Path

import pytest
import torch

import vllm
from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.v1.kv_cache_interface import KVCacheLayout

from .rig import caches as u
from .rig import compressed, model_writers
from .rig.versions import needs
from .rig.writers import MLA, WRITERS, allocate

needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs vLLM's Triton writers: set TRITON_INTERPRET=1",
)

old_vllm = needs("0.33.0", "such models")

BLOCK = 1


def written_bytes(writer, layout, *slots):
    """Return offsets within the block of the bytes that writing `slots` leaves."""
    cache, raw = allocate(writer.spec, 3, layout, gap=writer.gap)
    results = []
    for before in (0, 255):
        raw.fill_(before)
        writer.write(cache, BLOCK * cache.shape[2] + torch.tensor(slots))
        results.append(raw.clone())
    touched = (results[0] == results[1]).nonzero().tolist()
    assert {block for block, _ in touched} == {BLOCK}
    return {at for _, at in touched}


def layer_of(writer):
    """Return a layer as vLLM's: of its class only what the feature asks it."""

    class Layer:
        kv_cache = torch.empty(0)

        def get_attn_backend(self):
            return writer.backend_class

    layer = Layer()
    if writer.isa is not None:
        layer.isa = writer.isa
    return layer


class Sums:
    """A worker's sums of one block, each with one byte of it changed.

    Args:
        writer: what fills the blocks.
        layout: the memory layout of the cache.
        step: every which byte is changed.
        bound: returns the view of a cache that the layer is bound to.

    """

    def __init__(self, writer, layout, step=1, bound=None):
        page = writer.spec.page_size_bytes + writer.gap
        self.changed = range(0, page, step)
        number = len(self.changed)
        cache, raw = allocate(writer.spec, number + 1, layout, gap=writer.gap)
        raw[:] = torch.randint(
            0, 256, (page,), generator=torch.Generator().manual_seed(0)
        ).to(torch.uint8)
        raw[torch.arange(number), torch.tensor(self.changed)] ^= 1
        self.name = u.names(0)[0]
        layer = layer_of(writer)
        if bound is not None:
            layer.kv_cache = bound(cache)
        layer = formats.layer_format(None, self.name, layer, cache)
        cfg = u.config(number + 1, ([self.name], writer.spec))
        self.worker = u.worker(cfg, {self.name: cache}, formats={self.name: layer})
        assert self.worker.skipped == {}

    def bytes_of(self, num_tokens):
        """Return offsets of the bytes that the sum of so many tokens depends on."""
        blocks = {
            str(i): KVChecksumBlocks(num_tokens, {0: (0, [i])})
            for i in range(len(self.changed) + 1)
        }
        self.worker.bind(KVChecksumScheduled(reqs_to_send=blocks))
        (record,) = self.worker.post_forward(None, set(), set()).finalize()
        # Of whatever unit of the block.
        *values, whole = (u.values_of(record, req_id) for req_id in blocks)
        return {
            at for at, value in zip(self.changed, values, strict=True) if value != whole
        }


CASES = [
    pytest.param(
        writer,
        layout,
        id=f"{writer.label}-{layout.name}",
        marks=marks if writer.seen != "CPU" else [],
    )
    for writers, marks in (
        (WRITERS, [needs_triton]),
        (model_writers.WRITERS, [needs_triton, old_vllm]),
    )
    for writer in writers
    for layout in writer.layouts
]


@pytest.mark.parametrize(("writer", "layout"), CASES)
def test_a_tokens_sum_is_of_the_bytes_that_its_writer_leaves(writer, layout):
    if writer.needs and not torch.cpu.get_capabilities().get(writer.needs):
        pytest.skip(f"the CPU has no {writer.needs}")
    size = writer.spec.block_size
    sums = functools.cache(Sums(writer, layout).bytes_of)
    assert sums(0) == set()
    for slot in sorted({0, 1, size // 2 + 1, size - 1}):
        added = sums(slot + 1) - sums(slot)
        assert sums(slot) <= sums(slot + 1)
        assert added and added == written_bytes(writer, layout, slot), slot
    assert sums(size) == written_bytes(writer, layout, *range(size))


@old_vllm
@needs_triton
def test_an_indexer_is_skipped_where_its_writer_misses_the_block():
    """MiniMax-M3's operator takes blocks for dense ones, and others share theirs."""
    writer = model_writers.minimax_m3.minimax_index()
    for gap, missed in ((0, False), (256, True)):
        cache, raw = allocate(writer.spec, 3, KVCacheLayout.BLHNC, gap=gap)
        raw.fill_(255)
        writer.write(cache, torch.tensor([cache.shape[2] + 1]))
        block = raw[BLOCK, : writer.spec.page_size_bytes].view(cache.shape[2], -1)
        assert torch.all(block[1] == 255) == missed
        found = formats.layer_format(None, "layer", layer_of(writer), cache)
        assert (found.unknown is not None) == missed


def listed():
    return {
        (path, cells) for path, kinds in formats.BACKENDS.items() for cells in kinds
    }


def test_every_layout_that_is_covered_has_a_writer():
    beside = [w for w in compressed.WRITERS if w.spec.tokens_per_state == 1]
    seen = {
        (writer.backend, writer.cells)
        for writer in [*WRITERS, *model_writers.WRITERS, *beside]
    }
    inherit = {
        (path, cells)
        for path, cells in listed() - seen
        if path.startswith(MLA) and cells in ("NONE", "FP8_PER_TENSOR", "FP8_DS_MLA")
    }
    assert seen | inherit == listed()
    for path in {path for path, _ in inherit}:
        assert latents_are_written_by_the_base(path), path


def latents_are_written_by_the_base(path):
    """Return whether a backend leaves `do_kv_cache_update` to its base."""
    root = Path(vllm.__file__).parent
    module = path.rpartition(".")[0].removeprefix("vllm.").replace(".", "/")
    tree = ast.parse((root / f"{module}.py").read_text())
    methods = [
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    return "do_kv_cache_update" not in methods
