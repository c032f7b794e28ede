# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request a connector transfers, and so which are summed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .checksum import KVChecksumBlocks

_NULL_BLOCK = 0


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
    the last ``cdiv(window, block_size) + 1`` blocks, as NIXL and Mooncake do.

    Args:
        kv_cache_config: the KV cache groups.
        rows: the request's block ids, per group.
    """
    found = TransferredBlocks(KVChecksumBlocks(num_tokens, {}))
    for group_id in kv_cache_config.transfer_group_ids:
        spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
        size = spec.block_size
        row = rows[group_id][: -(-num_tokens // size)]
        start = first_token // size
        window = getattr(spec, "sliding_window", None)
        if window is not None and not hasattr(spec, "attention_chunk_size"):
            start = max(start, len(row) - -(-window // size) - 1)
        while start < len(row) and row[start] == _NULL_BLOCK:
            start += 1
        ids = list(row[start:])
        if _NULL_BLOCK in ids:
            found.left_out.add(group_id)
        elif ids:
            found.blocks.groups[group_id] = (start, ids)
            if start * size < first_token:
                found.unaligned.add(group_id)
    return found
