# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test states of Mamba-like layers: one value for any TP size and conv layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MambaStateSplit,
    UniformTypeKVCacheSpecs,
)

from .rig import caches as u
from .rig import reference
from .rig.states import (
    CALC,
    DRAFTING,
    DTYPES,
    FAMILIES,
    NUM_BLOCKS,
    cache_of,
    local_states,
    page_of,
    unsharded,
)

BLOCKS = KVChecksumBlocks(num_tokens=57, groups={0: (0, [3])})
NUMBERS = (2, 5)


@pytest.fixture(params=["SD", "DS"])
def conv_layout(request, monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: request.param)
    return request.param


def spec_of(family, tp, **changes):
    spec = MambaSpec(
        block_size=64,
        shapes=family.shapes(tp),
        dtypes=DTYPES,
        state_splits=family.splits(tp),
    )
    return replace(spec, **changes)


def workers_of(family, layout, tp, *, extra=0, **changes):
    """Return one worker per TP rank, over the same unsharded states of two layers."""
    workers = []
    for rank in range(tp):
        caches = {}
        for n in NUMBERS:
            states = local_states(family, unsharded(family, n), rank, tp)
            page = page_of(*states, layout, bytes(extra))
            caches[f"model.layers.{n}.mixer"] = cache_of(page, seed=rank)
        spec = spec_of(family, tp, **changes)
        cfg = u.config(NUM_BLOCKS, (caches, spec))
        workers.append(u.worker(cfg, caches, tp_rank=rank, tp_size=tp))
        workers[-1].caches = caches
        assert not workers[-1].skipped
    return workers


def expected(family):
    parts = [reference.state_sum(unsharded(family, n), n) for n in NUMBERS]
    return [sum(parts) % 2**64]


@pytest.mark.parametrize("name", [*FAMILIES, *DRAFTING])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_any_tp_size_and_conv_layout_gives_the_unsharded_value(name, tp, conv_layout):
    family = {**FAMILIES, **DRAFTING}[name]
    workers = workers_of(family, conv_layout, tp)
    replicas = tp if family.replicated else 1
    assert u.whole_sums(workers, BLOCKS) == [expected(family)] * replicas
    assert len({w.groups[0].fingerprint for w in workers}) == 1
    one = workers_of(family, conv_layout, 1)[0]
    assert workers[0].groups[0].fingerprint == one.groups[0].fingerprint
    assert not workers[0].groups[0].equal_tp
    assert workers[0].groups[0].block_size == 1


@pytest.mark.parametrize("split", [True, False])
def test_states_of_another_dtype_have_another_fingerprint(split, conv_layout):
    """Compare dtypes of one width: what differs is what their bits mean."""
    changes = {} if split else dict(state_splits=None)
    seen = set()
    for first in (torch.bfloat16, torch.float16, torch.int16):
        dtypes = (first, DTYPES[1])
        changed = dict(changes, dtypes=dtypes)
        (worker,) = workers_of(FAMILIES["mamba1"], conv_layout, 1, **changed)
        seen.add(worker.groups[0].fingerprint)
    assert len(seen) == 3


def test_conv_layouts_have_one_fingerprint(monkeypatch):
    family, prints = FAMILIES["gated delta net"], set()
    for layout in ("SD", "DS"):
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda x=layout: x)
        prints.add(workers_of(family, layout, 2)[0].groups[0].fingerprint)
    assert len(prints) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_every_covered_byte_counts_and_no_other(name, conv_layout):
    family = FAMILIES[name]
    (w,) = workers_of(family, conv_layout, 1, extra=16)
    (whole,) = u.whole_sums([w], BLOCKS)
    cache = w.caches["model.layers.5.mixer"]
    covered = cache.shape[-1] - 16
    differs = []
    for at in range(cache.shape[-1]):
        cache[3, 0, 0, at] ^= 1 << at % 7
        differs.append(u.whole_sums([w], BLOCKS) != [whole])
        cache[3, 0, 0, at] ^= 1 << at % 7
    assert differs == [True] * covered + [False] * 16


def test_each_copy_of_replicated_rows_is_a_check_of_its_own(conv_layout):
    family = FAMILIES["mamba2, 1 group"]
    workers = workers_of(family, conv_layout, 4)
    conv_rows = sum(family.conv) - 12 + 0
    b_row = 16 // 4  # behind the rank's share of x
    at = b_row * 2 if conv_layout == "SD" else b_row * 3 * 2
    assert conv_rows == 16
    workers[2].caches["model.layers.2.mixer"][3, 0, 0, at] ^= 1
    same = [check == expected(family) for check in u.whole_sums(workers, BLOCKS)]
    assert same == [True, True, False, True]


def test_further_states_are_not_covered_and_said(conv_layout, caplog):
    family = FAMILIES["mamba1"]
    shapes = (*family.shapes(2), (4, 2))
    workers = workers_of(
        family, conv_layout, 2, extra=16, shapes=shapes, dtypes=(*DTYPES, DTYPES[0])
    )
    assert u.whole_sums(workers, BLOCKS) == [expected(family)]
    assert workers[0].groups[0].remarks == ("states beyond the first 2 of a layer",)


def test_exchanged_rows_states_and_layers_are_seen(conv_layout):
    family = FAMILIES["gated delta net"]
    (w,) = workers_of(family, conv_layout, 1)
    a, b = (w.caches[f"model.layers.{n}.mixer"] for n in NUMBERS)
    keep = a.clone(), b.clone()
    a[3], b[3] = keep[1][3], keep[0][3]
    assert u.whole_sums([w], BLOCKS) != [expected(family)]
    a[3], b[3] = keep[0][3], keep[1][3]
    conv = 40 * 3 * 2
    rows = a[3, 0, 0, conv:].view(8, 24)
    rows[[0, 1]] = rows[[1, 0]]
    assert u.whole_sums([w], BLOCKS) != [expected(family)]


# ---- layers that do not tell their split


def whole_value(parts):
    """Sum one slice per shard over the covered bytes."""
    total = 0
    for n, shards in parts.items():
        for rank, page in enumerate(shards):
            cell = np.frombuffer(page, np.uint8)[None]
            total += reference.slice_sum(cell, n, rank, 0, 1)
    return [total % 2**64]


@pytest.mark.parametrize("tp", [1, 2])
def test_unknown_splits_are_summed_per_shard_and_bound_to_the_tp_size(tp, conv_layout):
    family = FAMILIES["gated delta net"]
    workers = workers_of(family, conv_layout, tp, state_splits=None)
    parts = {
        n: [
            page_of(*local_states(family, unsharded(family, n), r, tp), conv_layout)
            for r in range(tp)
        ]
        for n in NUMBERS
    }
    assert u.whole_sums(workers, BLOCKS) == [whole_value(parts)]
    assert u.send_record(workers[0], BLOCKS).equal_tp_groups == {0}


def test_a_replicated_state_without_split_has_one_shard(conv_layout):
    family = replace(FAMILIES["mamba1"])
    page = page_of(*unsharded(family, 2), conv_layout)
    workers = []
    for rank in range(2):
        caches = {"model.layers.2.mixer": cache_of(page)}
        spec = spec_of(family, 1, state_splits=None, tp_replicated=True)
        cfg = u.config(NUM_BLOCKS, (caches, spec))
        workers.append(u.worker(cfg, caches, tp_rank=rank, tp_size=2))
    assert u.whole_sums(workers, BLOCKS) == [whole_value({2: [page]})] * 2
    assert not workers[0].groups[0].equal_tp


# ---- what is skipped, and when a layer does not tell


def test_splits_that_tp_does_not_divide_are_not_told():
    assert CALC.mamba1_state_splits(3, 16) is None
    assert CALC.mamba2_state_splits(4, 16, 2, 8, 6) is None
    assert CALC.mamba2_state_splits(3, 18, 1, 8, 6) is None
    assert CALC.gated_delta_net_state_splits(8, 4, 8, 3, 2) is None
    assert CALC.kda_state_splits(3, 8, 3) is None
    assert CALC.short_conv_state_splits(3, 16) is None
    assert CALC.linear_attention_state_splits(3, 8) is None


def skip_cases():
    family = FAMILIES["mamba1"]
    conv, temporal = (
        MambaStateSplit(1, ((16, 1),)),
        MambaStateSplit(0, ((16, 1),)),
    )
    fp8 = torch.float8_e4m3fn
    return {
        "size": (dict(state_splits=(replace(conv, segments=((8, 1),)), temporal)), 1),
        "axis": (dict(state_splits=(replace(conv, axis=2), temporal)), 1),
        "inner axis": (
            dict(
                shapes=((3, 16), (2, 16, 5)),
                state_splits=(conv, MambaStateSplit(1, ((16, 1),))),
            ),
            1,
        ),
        "states": (dict(state_splits=(conv,)), 1),
        "replicas": (
            dict(state_splits=(replace(conv, segments=((16, 3),)), temporal)),
            2,
        ),
        "width": (dict(dtypes=(DTYPES[0], fp8)), 1),
        "page too small": (dict(shapes=((3, 16), (16, 500)), state_splits=None), 1),
        "odd bytes": (
            dict(shapes=((3, 5), (1, 4)), dtypes=(fp8, fp8), state_splits=None),
            1,
        ),
        "rows": (
            dict(
                shapes=((1, 2**16), (1, 1)),
                state_splits=(
                    MambaStateSplit(1, ((2**16, 1),)),
                    MambaStateSplit(0, ((1, 1),)),
                ),
            ),
            1,
        ),
    }, family


@pytest.mark.parametrize("case", skip_cases()[0])
def test_states_that_cannot_be_read_are_skipped(case, monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "SD")
    cases, family = skip_cases()
    changes, tp = cases[case]
    spec = spec_of(family, 1, **changes)
    size = 2**18 if case == "rows" else 16 * 3 * 2 + 16 * 5 * 4
    caches = {"model.layers.2.mixer": cache_of(bytes(size))}
    w = u.worker(u.config(NUM_BLOCKS, (caches, spec)), caches, tp_size=tp)
    assert set(w.skipped) == {0} and not w.groups


def test_rows_of_all_caches_of_a_module_share_its_numbers():
    """A layer's numbers end where the next one's begin, be they of one cache or two."""
    rows = 2**15

    def worker_of(second):
        caches, specs = {}, {}
        for name, number in (("a", rows), ("b", second)):
            name = f"model.layers.2.{name}"
            specs[name] = MambaSpec(
                block_size=64,
                shapes=((number, 1),),
                dtypes=(torch.bfloat16,),
                state_splits=(MambaStateSplit(0, ((number, 1),)),),
            )
            caches[name] = cache_of(bytes(2 * number))
        group = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
        return u.worker(u.config(NUM_BLOCKS, (caches, group)), caches)

    assert not worker_of(2**16 - rows).skipped
    assert worker_of(2**16 - rows + 1).skipped[0].startswith("too_many_heads")


def test_unaligned_pages_are_skipped(monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "SD")
    family = FAMILIES["mamba1"]
    page = page_of(*unsharded(family, 2), "SD")
    raw = torch.zeros(NUM_BLOCKS, len(page) + 2, dtype=torch.int8)
    caches = {"model.layers.2.mixer": raw[:, None, None, : len(page)]}
    w = u.worker(u.config(NUM_BLOCKS, (caches, spec_of(family, 1))), caches)
    assert "whole pieces" in w.skipped[0]


def test_a_group_of_states_and_tokens_is_skipped(conv_layout):
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    family = FAMILIES["mamba1"]
    specs = {
        "model.layers.2.mixer": spec_of(family, 1),
        "model.layers.3.attn": u.full_spec(block_size=64),
    }
    caches = {
        "model.layers.2.mixer": cache_of(page_of(*unsharded(family, 2), conv_layout)),
        "model.layers.3.attn": u.random_cache(NUM_BLOCKS, specs["model.layers.3.attn"]),
    }
    group = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    w = u.worker(u.config(NUM_BLOCKS, (caches, group)), caches)
    assert "mixes" in w.skipped[0]
