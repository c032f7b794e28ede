# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the blocks of a request that a connector transfers: those are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    STATE_BLOCK_SIZE,
    KVChecksumBlocks,
    is_ring_spec,
    unit_size,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_NULL_BLOCK = 0

_WINDOWED_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Specs whose requests give up blocks that have left their window."""


@dataclass
class TransferredBlocks:
    """The blocks of one request that a transfer covers.

    Attributes:
        blocks: the blocks that workers sum.
        left_out: groups whose blocks do not follow one another.
        empty: groups of which the transfer brings nothing.

    """

    blocks: KVChecksumBlocks
    left_out: set[int] = field(default_factory=set)
    empty: set[int] = field(default_factory=set)


def sent_blocks(
    kv_cache_config: KVCacheConfig, rows: Sequence[Sequence[int]], num_tokens: int
) -> TransferredBlocks:
    """Find the blocks that a producer transfers of tokens ``[0, num_tokens)``.

    Leading null blocks are left out, and windows are clipped.

    Args:
        kv_cache_config: the KV cache groups.
        rows: the request's block ids, per group.
        num_tokens: tokens of the request whose KV is computed.

    """
    found = TransferredBlocks(KVChecksumBlocks(num_tokens, {}))
    for group_id in kv_cache_config.transfer_group_ids:
        spec, row = group_spec(kv_cache_config, group_id), rows[group_id]
        if _is_state(spec):
            states = [block for block in row if block != _NULL_BLOCK]
            _add_state(found, group_id, spec, states)
            continue
        row = row[: -(-num_tokens // spec.block_size)]
        start = max(0, len(row) - _window_blocks(spec, len(row)))
        ids = np.array(row[start:], np.int64)
        live = (ids != _NULL_BLOCK).nonzero()[0]
        if not live.size:
            found.empty.add(group_id)
        elif live.size != ids.size - live[0]:
            found.left_out.add(group_id)
        else:
            found.blocks.groups[group_id] = (start + int(live[0]), ids[live[0] :])
    return found


def loaded_blocks(
    kv_cache_config: KVCacheConfig, blocks: KVCacheBlocks, num_tokens: int
) -> TransferredBlocks:
    """Find the blocks that a consumer loads of a request up to `num_tokens`.

    A block that has a hash was found in the local prefix cache; a connector loads
    those that have none and are not null. So every group begins at its own first
    block: vLLM counts the tokens that full attention holds as local while a window,
    a draft model's layers or a state may lag behind them.

    Args:
        kv_cache_config: the KV cache groups.
        blocks: the request's `KVCacheBlocks` when the load starts.
        num_tokens: tokens of the request that are local or loaded.

    """
    found = TransferredBlocks(KVChecksumBlocks(num_tokens, {}))
    for group_id in kv_cache_config.transfer_group_ids:
        spec, row = group_spec(kv_cache_config, group_id), blocks.blocks[group_id]
        if _is_state(spec):
            _add_state(found, group_id, spec, _unhashed_ids(row))
            continue
        row = row[: -(-num_tokens // spec.block_size)]
        start = _first_unhashed(row)
        if start is None:
            found.left_out.add(group_id)
            continue
        start = max(start, len(row) - _window_blocks(spec, len(row)))
        ids = [block.block_id for block in row[start:]]
        if ids:
            found.blocks.groups[group_id] = (start, np.array(ids, np.int64))
        else:
            found.empty.add(group_id)
    return found


def tier_blocks(
    kv_cache_config: KVCacheConfig,
    blocks: KVCacheBlocks,
    first_token: int,
    num_tokens: int,
    is_sync: bool,
) -> TransferredBlocks:
    """Find the blocks that a request loads from a cache tier, by block hashes.

    A window is not clipped: the blocks that have left it are null. Blocks that a
    synchronous load brings have their hashes from the moment they are allocated, so
    there their position tells. Groups that hold states are left out. Of others that are
    never cached by prefix (windows that vLLM computes again), a tier brings nothing.

    Args:
        kv_cache_config: the KV cache groups.
        blocks: the request's `KVCacheBlocks` when the load starts.
        first_token: the first token that is not local.
        num_tokens: tokens of the request that are local or loaded.
        is_sync: whether the load ends in the step that starts it.

    """
    found = TransferredBlocks(KVChecksumBlocks(num_tokens, {}))
    for group_id in kv_cache_config.transfer_group_ids:
        spec, row = group_spec(kv_cache_config, group_id), blocks.blocks[group_id]
        row = row[: -(-num_tokens // spec.block_size)]
        start: int | None
        if _is_state(spec):
            start = None
        elif group_id not in kv_cache_config.prefix_cacheable_group_ids:
            start = len(row)
        elif is_sync:
            start = _first_not_null(row, first_token // spec.block_size)
        else:
            start = _first_unhashed(row)
        if start is None:
            found.left_out.add(group_id)
            continue
        ids = [block.block_id for block in row[start:]]
        if ids:
            found.blocks.groups[group_id] = (start, np.array(ids, np.int64))
        else:
            found.empty.add(group_id)
    return found


def _first_not_null(row: Sequence[KVCacheBlock], start: int) -> int | None:
    """Return where in a row, from `start` on, the null blocks end.

    Return None if others follow.
    """
    nulls = [block.is_null for block in row[start:]]
    leading = nulls.index(False) if False in nulls else len(nulls)
    return None if any(nulls[leading:]) else start + leading


def _unhashed_ids(row: Sequence[KVCacheBlock]) -> list[int]:
    """Return the ids of a row's blocks that are neither null nor hashed."""
    return [b.block_id for b in row if b.block_hash is None and not b.is_null]


def _first_unhashed(row: Sequence[KVCacheBlock]) -> int | None:
    """Return where in a row the blocks begin that are neither null nor hashed.

    Return None unless all of them follow one another and end the row.
    """
    # The attribute, because the property of the same name takes four times as long.
    hashes = [block._block_hash for block in row]
    leading = next((i for i, block in enumerate(row) if not block.is_null), len(row))
    start = leading + len(row) - hashes.count(None)
    nulls = [block.is_null for block in row[start:]]
    if hashes[start:].count(None) == len(row) - start and not any(nulls):
        return start
    # Hashed or null blocks stand between: the loaded ones may still end the row.
    ids = _unhashed_ids(row)
    start = len(row) - len(ids)
    return start if [block.block_id for block in row[start:]] == ids else None


def _window_blocks(spec: KVCacheSpec, number: int) -> int:
    """Return how many of a group's last `number` blocks NIXL and Mooncake transfer."""
    if not isinstance(spec, SlidingWindowSpec):
        return number
    return min(number, -(-spec.sliding_window // spec.block_size) + 1)


def _add_state(
    found: TransferredBlocks, group_id: int, spec: KVCacheSpec, ids: list[int]
) -> None:
    """Add the running-state block of a state group, or its ring, at position 0.

    Connectors transfer it even after a local prefix hit. Where states of earlier
    positions were kept, they come before it; behind it are up to
    `num_speculative_blocks` blocks for speculative tokens. NIXL clips to the running
    state's; Mooncake pairs the two sides' blocks from the end, those for speculative
    tokens included, so the running states meet. A ring is the only block that a
    request has of its group, and is never found locally.
    """
    state = ids
    if isinstance(spec, MambaSpec):
        # The first block is the state's even before those behind it are allocated.
        stop = max(len(ids) - spec.num_speculative_blocks, 1)
        state = ids[stop - 1 : stop]
    if state:
        found.blocks.groups[group_id] = (0, state)
    else:
        found.empty.add(group_id)


def blocks_given_up(
    kv_cache_config: KVCacheConfig,
    rows: Callable[[], Sequence[Sequence[int]]],
    blocks: KVChecksumBlocks,
) -> dict[int, int]:
    """Count the first summed blocks that a request has given up since, per group.

    vLLM frees blocks that have left a window just before it hands a finished request's
    blocks to the connector, so these blocks are not transferred.

    Args:
        kv_cache_config: the KV cache groups.
        rows: returns the request's present block ids, per group.
        blocks: the blocks that were summed.

    """
    windows = [g for g in blocks.groups if gives_up_blocks(kv_cache_config, g)]
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


def group_spec(kv_cache_config: KVCacheConfig, group_id: int) -> KVCacheSpec:
    """Return a group's spec; of a group of several, the first (all are of one kind)."""
    spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    return next(iter(iter_layer_specs(spec)))


def gives_up_blocks(kv_cache_config: KVCacheConfig, group_id: int) -> bool:
    """Tell whether requests give up blocks of the group that have left their window."""
    return isinstance(group_spec(kv_cache_config, group_id), _WINDOWED_SPECS)


def _is_state(spec: KVCacheSpec) -> bool:
    return isinstance(spec, MambaSpec) or is_ring_spec(spec)


def holds_states(kv_cache_config: KVCacheConfig, group_id: int) -> bool:
    """Tell whether the group's blocks hold states, or rings, instead of tokens.

    Both are valid for one number of tokens alone.
    """
    return _is_state(group_spec(kv_cache_config, group_id))


def holds_running_states(kv_cache_config: KVCacheConfig, group_id: int) -> bool:
    """Tell whether the group's blocks hold states that all tokens go into.

    Of a ring, tokens can be left out at the end: each has a row of its own.
    """
    return isinstance(group_spec(kv_cache_config, group_id), MambaSpec)


@dataclass(frozen=True)
class Units:
    """The division of a group's blocks into units.

    Attributes:
        size: tokens per unit.
        per_block: units per block.

    """

    size: int
    per_block: int

    @property
    def block_size(self) -> int:
        return self.size * self.per_block


def units_of_group(kv_cache_config: KVCacheConfig, group_id: int) -> Units:
    """Return the division of a group's blocks into units.

    A block that holds a state counts as one token, whatever its block size. So states
    are compared at any block sizes, and without the rule for the last unit's tokens.
    A ring is one unit of as many tokens as its block: rings compare at equal sizes.
    """
    spec = group_spec(kv_cache_config, group_id)
    size: int = spec.block_size
    if is_ring_spec(spec):
        return Units(size, 1)
    if holds_states(kv_cache_config, group_id):
        size = STATE_BLOCK_SIZE
    return Units(unit_size(size), size // unit_size(size))
