# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request are summed: windows, nulls, running states.

Where a connector clips blocks, NIXL's own scheduler-side method says which remain.
"""

from types import SimpleNamespace

import kv_checksum_utils as u
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (
    NixlBaseConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm.distributed.kv_transfer.kv_checksum.blocks import (
    blocks_given_up,
    summed_block_size,
    transferred_blocks,
)

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


def chosen(specs, rows, first, tokens):
    return transferred_blocks(config_of(*specs), rows, first, tokens)


def nixl_clip(specs, rows):
    """What NIXL keeps of a finished request's blocks."""
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
@pytest.mark.parametrize("first", [0, 64])
def test_the_running_state_is_summed_at_position_0(case, first):
    row, scratch, running = STATE_ROWS[case]
    specs = (u.full_spec(), state_spec(scratch, case.split(",")[0]))
    rows = (list(range(10, 30)), row)
    found = chosen(specs, rows, first, 200)
    assert u.groups_of(found.blocks)[1] == (0, [running])
    assert found.blocks.groups[0][0] == first // 16
    assert not found.unaligned and not found.left_out
    assert nixl_clip(specs, rows)[1][-1:] == [running]


def test_a_request_without_a_state_block_sums_none():
    assert u.groups_of(chosen((state_spec(),), ([0, 0],), 0, 200).blocks) == {}


def test_states_count_as_one_token_whatever_their_block_size():
    cfg = config_of(u.full_spec(block_size=32), state_spec(block_size=512))
    wrapped = UniformTypeKVCacheSpecs(
        block_size=512, kv_cache_specs={"model.layers.9.mixer": state_spec()}
    )
    cfg.kv_cache_groups[0].kv_cache_spec = wrapped
    assert summed_block_size(cfg, 0) == summed_block_size(cfg, 1) == 1
    assert summed_block_size(config_of(u.full_spec(block_size=32)), 0) == 32
    assert u.groups_of(transferred_blocks(cfg, ([3], [4]), 0, 9).blocks)[0] == (0, [3])


@pytest.mark.parametrize("window", [15, 16, 17, 40])
@pytest.mark.parametrize("block_size", [8, 16])
def test_windows_are_clipped_as_nixl_clips_them(window, block_size):
    specs = (window_spec(window, block_size), u.full_spec(block_size=16))
    tokens = 203
    number = -(-tokens // block_size)
    rows = (list(range(1, number + 1)), list(range(50, 63)))
    start, ids = u.groups_of(chosen(specs, rows, 0, tokens).blocks)[0]
    assert ids == list(nixl_clip(specs, rows)[0])
    assert start == number - len(ids)
    # Blocks behind the last token are no part of the transfer.
    longer = (rows[0] + [90, 91], rows[1])
    assert u.groups_of(chosen(specs, longer, 0, tokens).blocks)[0] == (start, ids)


def test_leading_nulls_are_left_out_of_windows_and_chunks():
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **CELL)
    rows = ([0, 0, 0, 5, 6], [0, 0, 3, 4, 7])
    found = chosen((window_spec(64), chunked), rows, 0, 80)
    assert u.groups_of(found.blocks) == {0: (3, [5, 6]), 1: (2, [3, 4, 7])}
    assert not found.left_out


def test_blocks_given_up_since_they_were_summed():
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **CELL)
    specs = (window_spec(64), chunked, u.full_spec(), state_spec())
    summed = chosen(specs, ([0, 0, 3, 5, 6], [1, 2, 3, 4], [7, 8], [9]), 0, 80).blocks
    now = ([0, 0, 0, 5, 6], [0, 0, 0, 0], [7, 8], [0])
    given_up = blocks_given_up(config_of(*specs), lambda: now, summed)
    assert given_up == {0: 1, 1: 4}


def test_full_attention_with_a_recorded_window_is_not_clipped():
    """Without the hybrid allocator, window layers keep and transfer every block."""
    spec = u.full_spec(sliding_window=16)
    rows = (list(range(1, 9)),)
    assert u.groups_of(chosen((spec,), rows, 0, 128).blocks) == {0: (0, rows[0])}


@pytest.mark.parametrize(
    "spec",
    [
        window_spec(160),
        RSWASpec(block_size=16, rswa_window=32, **CELL),
    ],
)
def test_a_group_with_a_null_inside_is_left_out(spec):
    found = chosen((spec, u.full_spec()), ([3, 0, 5, 6], [1, 2, 8, 9]), 0, 64)
    assert found.left_out == {0} and set(found.blocks.groups) == {1}


def test_groups_of_different_block_sizes_start_at_their_own_positions():
    specs = (u.full_spec(block_size=16), u.full_spec(block_size=64))
    found = chosen(specs, ([1, 2, 3, 4, 5, 6], [7, 8]), 48, 90)
    assert u.groups_of(found.blocks) == {0: (3, [4, 5, 6]), 1: (0, [7, 8])}
    assert found.unaligned == {1}


def test_rings_are_chosen_but_no_worker_sums_them():
    ring = CircularBufferSpec(block_size=16, **CELL)
    cfg = config_of(u.full_spec(), ring)
    caches = {u.names(i)[0]: u.random_cache(100, u.full_spec()) for i in range(2)}
    w = u.worker(cfg, caches)
    found = transferred_blocks(cfg, ([1, 2], [9]), 0, 20)
    record = u.send_record(w, found.blocks)
    assert set(record.checksums["r"]) == {0} and set(record.skipped_groups) == {1}
