# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request a connector transfers, and so which are summed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from .checksum import STATE_BLOCK_SIZE, KVChecksumBlocks

_NULL_BLOCK = 0

_WINDOWED_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Specs whose requests give up blocks that they have passed."""


@dataclass
class TransferredBlocks:
    """The blocks of one request that a transfer covers.

    Attributes:
        blocks: what workers sum.
        unaligned: groups whose first block also holds tokens before the range.
        left_out: groups in which a block inside the range is missing.
    """

    blocks: KVChecksumBlocks
    unaligned: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)


def transferred_blocks(
    kv_cache_config: Any,
    rows: Sequence[Sequence[int]],
    first_token: int,
    num_tokens: int,
) -> TransferredBlocks:
    """The blocks that hold tokens ``[first_token, num_tokens)``, per transfer group.

    Leading null blocks are left out, and sliding-window groups are clipped to
    the last ``cdiv(window, block_size) + 1`` blocks, as NIXL and Mooncake do. Of a
    group that holds states it is the block of the running state, at position 0:
    connectors transfer it whatever prefix was found locally.

    Args:
        kv_cache_config: the KV cache groups.
        rows: the request's block ids, per group.
    """
    found = TransferredBlocks(KVChecksumBlocks(num_tokens, {}))
    for group_id in kv_cache_config.transfer_group_ids:
        spec = group_spec(kv_cache_config, group_id)
        if isinstance(spec, MambaSpec):
            state = running_state(rows[group_id], spec.num_speculative_blocks)
            if state:
                found.blocks.groups[group_id] = (0, state)
            continue
        size = spec.block_size
        end = min(len(rows[group_id]), -(-num_tokens // size))
        start = first_token // size
        if isinstance(spec, SlidingWindowSpec):
            start = max(start, end - -(-spec.sliding_window // size) - 1)
        ids = np.array(rows[group_id][start:end], np.int64)
        live = np.flatnonzero(ids != _NULL_BLOCK)
        if not live.size:
            continue
        start += int(live[0])
        ids = ids[live[0] :]
        if live.size != ids.size:
            found.left_out.add(group_id)
            continue
        found.blocks.groups[group_id] = (start, ids)
        if start * size < first_token:
            found.unaligned.add(group_id)
    return found


def blocks_given_up(
    kv_cache_config: Any,
    rows: Callable[[], Sequence[Sequence[int]]],
    blocks: KVChecksumBlocks,
) -> dict[int, int]:
    """How many of the first summed blocks a request has given up since, per group.

    vLLM frees what has left a window just before it hands a finished request's
    blocks to the connector, so these blocks are not transferred.

    Args:
        rows: gives the request's block ids now, per group.
    """
    windows = [
        group_id
        for group_id in blocks.groups
        if isinstance(group_spec(kv_cache_config, group_id), _WINDOWED_SPECS)
    ]
    given_up: dict[int, int] = {}
    if not windows:
        return given_up
    held = rows()
    for group_id in windows:
        start, ids = blocks.groups[group_id]
        now = np.array(held[group_id][start : start + len(ids)], np.int64)
        live = np.flatnonzero(now != _NULL_BLOCK)
        given_up[group_id] = int(live[0]) if live.size else len(ids)
    return given_up


def running_state(row: Sequence[int], num_scratch: int) -> list[int]:
    """The id of the block that holds a request's running state, or nothing.

    Where states of earlier positions were kept, the row is indexed by position and
    holds nulls; behind the running state lie up to `num_scratch` blocks for
    speculative tokens. NIXL transfers what this leaves; Mooncake pairs the two
    sides' blocks from the end, scratch included, so the running states meet.
    """
    live = [block for block in row if block != _NULL_BLOCK]
    return clip_ssm_state_blocks(live, num_scratch)


def group_spec(kv_cache_config: Any, group_id: int) -> Any:
    """A group's spec; of a group of several, the first (all are of one kind)."""
    spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    return getattr(spec, "first_spec", spec)


def summed_block_size(kv_cache_config: Any, group_id: int) -> int:
    """Tokens that one block counts for; a state counts as one, whatever its block.

    So states are compared at any block sizes, and without the rule for the last
    block's tokens.
    """
    spec = group_spec(kv_cache_config, group_id)
    return STATE_BLOCK_SIZE if isinstance(spec, MambaSpec) else spec.block_size
