# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test caches as vLLM makes them: real layers' specs, real planning, real allocation.

Tiny models are built on the meta device; their layers tell their specs, and vLLM
groups, places and allocates the caches. The sums are compared with the definition
over bytes found here from the placement alone. What is fake: at TP 2 the TP group's
size and rank are set by hand, as one process holds one rank.
"""

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import MambaSpec

from .rig import caches as u
from .rig import reference
from .rig.real_caches import MODELS, Rank, number_of, single_rank

__all__ = ["single_rank"]

STATE_SEGMENTS = {
    "granite4_h": ([(256, True), (64, False), (64, False)], [(8, True)]),
    "qwen3_next": ([(128, True), (128, True), (256, True)], [(4, True)]),
    "mamba": ([(256, True)], [(256, True)]),
    "olmo_hybrid": ([(64, True), (64, True), (128, True)], [(4, True)]),
}
"""Global segments of conv and temporal state, and whether TP shards them; from the
models' recipes."""


def attention_sums(ranks, group, blocks, check):
    """Return sums per unit, over the layers; of replicated heads, copy `check`."""
    start, ids = blocks.groups[group]
    totals = []
    for i, block in enumerate(ids):
        total = np.uint64(0)
        for rank, r in enumerate(ranks):
            spec_group = r.cfg.kv_cache_groups[group]
            spec = spec_group.kv_cache_spec
            replicated = spec.head_size_v == 0  # MLA: one latent on every rank
            if replicated and rank != check:
                continue
            cells = {
                number_of(n): r.cells(n, spec, block) for n in spec_group.layer_names
            }
            first_head = 0 if replicated else rank * spec.num_kv_heads
            first = (start + i) * spec.block_size
            sums = reference.unit_sums(cells, first, blocks.num_tokens, first_head)
            total = total + np.array(sums, np.uint64)
        totals += total.tolist()
    return totals


def state_sums(ranks, group, blocks, check, family, conv_layout):
    (block,) = blocks.groups[group][1]
    total = 0
    for rank, r in enumerate(ranks):
        spec_group = r.cfg.kv_cache_groups[group]
        for name in spec_group.layer_names:
            states = r.state_rows(name, spec_group.kv_cache_spec, block, conv_layout)
            base = 0
            for rows, segments in zip(states, STATE_SEGMENTS[family], strict=True):
                at = 0
                for size, sharded in segments:
                    here = size // len(ranks) if sharded else size
                    first = base + (rank * here if sharded else 0)
                    if sharded or rank == check:
                        for k in range(here):
                            cell = np.ascontiguousarray(rows[at + k])
                            total += reference.slice_sum(
                                cell.view(np.uint8)[None],
                                number_of(name),
                                first + k,
                                0,
                                1,
                                cell.dtype.itemsize,
                            )
                    at += here
                    base += size
                assert at == len(rows)
    return [total % 2**64]


def blocks_of(cfg):
    """Return blocks of each group's own, as groups overlay the same bytes."""
    groups = {}
    for i, group in enumerate(cfg.kv_cache_groups):
        ids = [10 * i + 5, 10 * i + 2, 10 * i + 7]
        state = isinstance(group.kv_cache_spec, MambaSpec)
        groups[i] = (0, ids[:1]) if state else (1, ids)
    sizes = [
        g.kv_cache_spec.block_size
        for g in cfg.kv_cache_groups
        if not isinstance(g.kv_cache_spec, MambaSpec)
    ]
    size = max(sizes, default=32)
    assert set(sizes) <= {size}
    return KVChecksumBlocks(3 * size + size // 2 + 1, groups)


CASES = [
    (family, layout, tp, conv)
    for family in MODELS
    for layout in ("LBHNC", "BLHNC")
    for tp in (1, 2)
    for conv in (("DS", "SD") if family in STATE_SEGMENTS else ("DS",))
    if layout == "LBHNC" or tp == 1
]


@pytest.fixture(params=[False, True], ids=["no AMX", "AMX"])
def amx(request, monkeypatch):
    """Let vLLM choose as with AMX and as without; nothing is computed."""
    load_general_plugins()  # the rig hides AMX
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)


@pytest.mark.parametrize(("family", "layout", "tp", "conv_layout"), CASES)
def test_real_caches_have_the_defined_sums(
    family, layout, tp, conv_layout, amx, monkeypatch
):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: conv_layout)
    ranks = [Rank(family, layout, rank, tp) for rank in range(tp)]
    workers = [r.worker for r in ranks]
    cfg = ranks[0].cfg
    assert set(workers[0].groups) == set(range(len(cfg.kv_cache_groups)))
    assert workers[0].skipped == {}
    blocks = blocks_of(cfg)
    for group in workers[0].groups:
        state = isinstance(cfg.kv_cache_groups[group].kv_cache_spec, MambaSpec)
        checks = u.whole_sums(workers, blocks, group)
        for check, found in enumerate(checks):
            expected = (
                state_sums(ranks, group, blocks, check, family, conv_layout)
                if state
                else attention_sums(ranks, group, blocks, check)
            )
            assert found == expected, (group, check)
    prints = {tuple(g.fingerprint for g in w.groups.values()) for w in workers}
    assert len(prints) == 1


def test_fingerprints_do_not_depend_on_the_tp_size(monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    for family in MODELS:
        one, two = (Rank(family, "LBHNC", 0, tp).worker for tp in (1, 2))
        for group, view in one.groups.items():
            assert view.fingerprint == two.groups[group].fingerprint
