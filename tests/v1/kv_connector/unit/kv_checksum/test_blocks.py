# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test which blocks of a request are summed: windows, nulls, running states.

Where a connector clips blocks, NIXL's own scheduler-side method says which remain.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    Units,
    blocks_given_up,
    holds_states,
    loaded_blocks,
    sent_blocks,
    tier_blocks,
    units_of_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (
    NixlBaseConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .rig import caches as u

CELL = dict(num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def window_spec(window, block_size=16):
    return SlidingWindowSpec(block_size=block_size, sliding_window=window, **CELL)


def state_spec(scratch=0, mode="none", block_size=64):
    return MambaSpec(
        block_size=block_size,
        shapes=((3, 4), (4, 2)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode=mode,
        num_speculative_blocks=scratch,
    )


def config_of(*specs):
    return u.config(100, *((u.names(i), spec) for i, spec in enumerate(specs)))


def sent(specs, rows, tokens):
    return sent_blocks(config_of(*specs), rows, tokens)


def held(rows, hashed=()):
    """Return a request's blocks as vLLM holds them; `hashed` ids are local hits."""
    groups = []
    for row in rows:
        blocks = [KVCacheBlock(i, is_null=i == 0) for i in row]
        for block in blocks:
            if block.block_id in hashed:
                block.set_block_hash(BlockHashWithGroupId(b"local"))
        groups.append(blocks)
    return KVCacheBlocks(tuple(groups))


def loaded(specs, rows, hashed, tokens):
    """Return what D sums, and what NIXL is told to load."""
    blocks = held(rows, hashed)
    found = loaded_blocks(config_of(*specs), blocks, tokens)
    return found, nixl_clip(specs, blocks.get_unhashed_block_ids_all_groups())


def nixl_clip(specs, rows):
    """Return what NIXL keeps of a finished request's blocks."""
    scheduler = SimpleNamespace(
        kv_cache_config=config_of(*specs),
        _is_hma_required=True,
        blocks_per_sw=[
            -(-s.sliding_window // s.block_size) + 1
            if isinstance(s, SlidingWindowSpec)
            else 0
            for s in specs
        ],
        _ssm_spec_blocks=[
            s.num_speculative_blocks if isinstance(s, MambaSpec) else None
            for s in specs
        ],
        # vLLM before 0.32.0: a running state alone, as in any mode but "all".
        _ssm_state_slots_are_positional=False,
    )
    clip = NixlBaseConnectorScheduler.get_exchange_clipped_blocks
    return clip(scheduler, [list(row) for row in rows])


STATE_ROWS = {
    "none": ([7], 0, 7),
    "none, scratch": ([7, 8, 9], 2, 7),
    "none, scratch not there yet": ([7], 2, 7),
    "none, some scratch": ([7, 8], 2, 7),
    "align": ([0, 0, 5, 7], 0, 7),
    "align, scratch": ([0, 0, 5, 7, 8, 9], 2, 7),
    "align, first block": ([7], 0, 7),
    "align, earlier state kept": ([4, 0, 0, 7, 8], 1, 7),
}


@pytest.mark.parametrize("case", STATE_ROWS)
def test_the_running_state_is_summed_at_position_0(case):
    row, scratch, running = STATE_ROWS[case]
    specs = (u.full_spec(), state_spec(scratch, case.split(",")[0]))
    rows = (list(range(10, 23)), row)
    found = sent(specs, rows, 200)
    assert u.groups_of(found.blocks) == {0: (0, rows[0]), 1: (0, [running])}
    assert not found.left_out and not found.empty
    assert nixl_clip(specs, rows)[1][-1:] == [running]
    found, nixl = loaded(specs, rows, {10, 11}, 200)
    assert u.groups_of(found.blocks) == {0: (2, nixl[0]), 1: (0, nixl[1])}
    assert nixl[1] == [running]


def test_a_request_without_a_state_block_sums_none():
    found = sent((state_spec(),), ([0, 0],), 200)
    assert u.groups_of(found.blocks) == {} and found.empty == {0}
    found, nixl = loaded((state_spec(),), ([0, 7],), {7}, 200)
    assert u.groups_of(found.blocks) == {} and found.empty == {0} and not nixl[0]


LAGGING = {
    "all hit alike": ({1, 2, 3, 11, 12, 13}, (3, 3)),
    "the window lags": ({1, 2, 3, 11}, (3, 1)),
    "nothing of the window": ({1, 2, 3}, (3, 0)),
    "full attention lags": ({1, 11, 12}, (1, 2)),
    "nothing local": (set(), (0, 0)),
}


@pytest.mark.parametrize("case", LAGGING)
@pytest.mark.parametrize("window", [40, 1000])
def test_every_group_begins_at_its_own_first_loaded_block(case, window):
    """Case 1: vLLM's one count of local tokens is that of the furthest group."""
    hashed, starts = LAGGING[case]
    specs = (u.full_spec(), window_spec(window))
    rows = (list(range(1, 8)), list(range(11, 18)))
    found, nixl = loaded(specs, rows, hashed, 100)
    in_window = -(-window // 16) + 1
    starts = (starts[0], max(starts[1], 7 - in_window))
    assert u.groups_of(found.blocks) == {
        g: (starts[g], rows[g][starts[g] :]) for g in (0, 1)
    }
    assert [ids for _, ids in u.groups_of(found.blocks).values()] == list(nixl)


def test_a_group_of_which_nothing_is_loaded_is_empty():
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **CELL)
    rows = ([1, 2, 3, 4], [0, 0, 0, 0])
    found, nixl = loaded((u.full_spec(), chunked), rows, (), 64)
    assert set(found.blocks.groups) == {0} and found.empty == {1} and not nixl[1]
    found = sent((u.full_spec(), chunked), rows, 64)
    assert set(found.blocks.groups) == {0} and found.empty == {1}


def test_a_local_block_behind_a_loaded_one_leaves_the_group_out():
    found, nixl = loaded((u.full_spec(),), ([1, 2, 3, 4],), {2}, 64)
    assert found.left_out == {0} and not found.blocks.groups
    assert nixl == ([1, 3, 4],), "NIXL's pairs are off then"


def test_states_count_as_one_token_whatever_their_block_size():
    cfg = config_of(u.full_spec(block_size=32), state_spec(block_size=512))
    wrapped = UniformTypeKVCacheSpecs(
        block_size=512, kv_cache_specs={"model.layers.9.mixer": state_spec()}
    )
    cfg.kv_cache_groups[0].kv_cache_spec = wrapped
    assert units_of_group(cfg, 0) == units_of_group(cfg, 1) == Units(1, 1)
    sizes = {16: (16, 1), 64: (16, 4), 48: (16, 3), 24: (24, 1), 8: (8, 1)}
    for size, expected in sizes.items():
        units = units_of_group(config_of(u.full_spec(block_size=size)), 0)
        assert units == Units(*expected) and units.block_size == size
    assert u.groups_of(sent_blocks(cfg, ([3], [4]), 9).blocks)[0] == (0, [3])


@pytest.mark.parametrize("window", [15, 16, 17, 40])
@pytest.mark.parametrize("block_size", [8, 16])
def test_windows_are_clipped_as_nixl_clips_them(window, block_size):
    specs = (window_spec(window, block_size), u.full_spec(block_size=16))
    tokens = 203
    number = -(-tokens // block_size)
    rows = (list(range(1, number + 1)), list(range(50, 63)))
    start, ids = u.groups_of(sent(specs, rows, tokens).blocks)[0]
    assert ids == list(nixl_clip(specs, rows)[0])
    assert start == number - len(ids)
    # Blocks behind the last token are no part of the transfer.
    longer = (rows[0] + [90, 91], rows[1])
    assert u.groups_of(sent(specs, longer, tokens).blocks)[0] == (start, ids)
    found, nixl = loaded(specs, rows, (), tokens)
    assert u.groups_of(found.blocks)[0] == (start, ids) == (start, list(nixl[0]))
    found, _ = loaded(specs, longer, (), tokens)
    assert u.groups_of(found.blocks)[0] == (start, ids)


def test_leading_nulls_are_left_out_of_windows_and_chunks():
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **CELL)
    rows = ([0, 0, 0, 5, 6], [0, 0, 3, 4, 7])
    found = sent((window_spec(64), chunked), rows, 80)
    assert u.groups_of(found.blocks) == {0: (3, [5, 6]), 1: (2, [3, 4, 7])}
    assert not found.left_out


def test_blocks_given_up_since_they_were_summed():
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **CELL)
    specs = (window_spec(64), chunked, u.full_spec(), state_spec())
    summed = sent(specs, ([0, 0, 3, 5, 6], [1, 2, 3, 4], [7, 8], [9]), 80).blocks
    now = ([0, 0, 0, 5, 6], [0, 0, 0, 0], [7, 8], [0])
    given_up = blocks_given_up(config_of(*specs), lambda: now, summed)
    assert given_up == {0: 1, 1: 4}


def test_full_attention_with_a_recorded_window_is_not_clipped():
    """Without the hybrid allocator, window layers keep and transfer every block."""
    spec = u.full_spec(sliding_window=16)
    rows = (list(range(1, 9)),)
    assert u.groups_of(sent((spec,), rows, 128).blocks) == {0: (0, rows[0])}


@pytest.mark.parametrize(
    "spec",
    [
        window_spec(160),
        RSWASpec(block_size=16, rswa_window=32, **CELL),
    ],
)
def test_a_group_with_a_null_inside_is_left_out(spec):
    rows = ([3, 0, 5, 6], [1, 2, 8, 9])
    found = sent((spec, u.full_spec()), rows, 64)
    assert found.left_out == {0} and set(found.blocks.groups) == {1}
    found, _ = loaded((spec, u.full_spec()), rows, (), 64)
    assert found.left_out == {0} and set(found.blocks.groups) == {1}


def test_groups_of_different_block_sizes_start_at_their_own_positions():
    specs = (u.full_spec(block_size=16), u.full_spec(block_size=64))
    rows = ([1, 2, 3, 4, 5, 6], [7, 8])
    found, nixl = loaded(specs, rows, {1, 2, 3, 4, 7}, 90)
    assert u.groups_of(found.blocks) == {0: (4, [5, 6]), 1: (1, [8])}
    assert list(nixl) == [[5, 6], [8]]


def test_a_ring_is_one_block_whatever_was_found_locally():
    ring = CircularBufferSpec(block_size=8, **CELL)
    specs, rows = (u.full_spec(), ring), ([1, 2, 3, 4], [9])
    cfg = config_of(*specs)
    sent = sent_blocks(cfg, rows, 60)
    assert u.groups_of(sent.blocks) == {0: (0, [1, 2, 3, 4]), 1: (0, [9])}
    found, nixl = loaded(specs, rows, {1, 2}, 60)
    assert u.groups_of(found.blocks) == {0: (2, [3, 4]), 1: (0, [9])}
    assert list(nixl) == [[3, 4], [9]]
    assert units_of_group(cfg, 1) == Units(8, 1) and holds_states(cfg, 1)


def test_rings_stay_out_of_what_tiers_load():
    """No tier keeps them, and no block hash names them."""
    cfg = config_of(u.full_spec(), CircularBufferSpec(block_size=8, **CELL))
    blocks = KVCacheBlocks(([KVCacheBlock(1)], [KVCacheBlock(2)]))
    found = tier_blocks(cfg, blocks, 0, 16, False)
    assert set(found.blocks.groups) == {0} and found.left_out == {1}


@settings(max_examples=500, deadline=None)
@given(kinds=st.lists(st.sampled_from("0hu"), max_size=9))
def test_any_row_is_loaded_as_nixl_is_told_or_left_out(kinds):
    """Draw nulls, local and loaded blocks in any order."""
    row = [0 if kind == "0" else i for i, kind in enumerate(kinds, 1)]
    hashed = {i for i, kind in enumerate(kinds, 1) if kind == "h"}
    found, nixl = loaded((u.full_spec(),), (row,), hashed, 16 * len(row))
    if nixl[0] and nixl[0] != row[len(row) - len(nixl[0]) :]:
        assert found.left_out == {0} and not found.blocks.groups
    elif nixl[0]:
        start = len(row) - len(nixl[0])
        assert u.groups_of(found.blocks) == {0: (start, nixl[0])}
    else:
        assert found.empty == {0} and not found.blocks.groups
