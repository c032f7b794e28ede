# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checksums that are stored with offloaded KV and come back with it.

A connector that stores KV asks the worker for one int64 entry per block
(`KVChecksumWorker.init_block_checksums`), has the entries of the blocks it is
about to store filled in (`save_block_checksums`) and moves an entry wherever it
moves its block's KV. An entry is this rank's own sum of a full block, XORed with a
tag of the block's hash and of the group's layers, so that an intact value of
another prefix or of another model's layers fails like a damaged one. A rank checks
what it stored itself: nothing is added up over ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import KVChecksumBlocks

_TAG_BYTES = 8


class BlockRun(NamedTuple):
    """Full blocks of one request that follow one another.

    Attributes:
        group_id: their KV cache group.
        start: position of the first block in the request.
        block_ids: their ids.
        block_hashes: their prefix hashes, one per block, all of one length.

    """

    group_id: int
    start: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]

    def blocks(self, block_size: int) -> KVChecksumBlocks:
        """The run as blocks to sum, all of whose tokens count."""
        num_tokens = (self.start + len(self.block_ids)) * block_size
        return KVChecksumBlocks(
            num_tokens,
            {self.group_id: (self.start, np.asarray(self.block_ids, np.int64))},
        )


def block_checksum_tags(
    block_hashes: Sequence[bytes], fingerprint: int = 0
) -> np.ndarray:
    """What the blocks' entries are XORed with: uint64, shape ``(blocks,)``.

    Args:
        block_hashes: the blocks' prefix hashes, all of one length.
        fingerprint: identifies the layers that the entries sum (uint64).

    Raises:
        ValueError: hashes shorter than 8 bytes, or of unequal length.

    """
    if not len(block_hashes):
        return np.zeros(0, np.uint64)
    length = len(block_hashes[0])
    data = np.frombuffer(b"".join(block_hashes), np.uint8)
    if length < _TAG_BYTES or data.size != length * len(block_hashes):
        raise ValueError("block hashes are too short, or of unequal length")
    first = np.ascontiguousarray(data.reshape(-1, length)[:, :_TAG_BYTES])
    return first.view("<u8")[:, 0] ^ np.uint64(fingerprint)


def hashes_of_blocks(
    block_hashes: Sequence[bytes], scale: int, start: int, stop: int
) -> Sequence[bytes]:
    """The hashes of the blocks at positions ``[start, stop)``.

    Args:
        block_hashes: a request's hashes, one per hash block.
        scale: hash blocks per block; the last one's hash stands for the block,
            because it covers everything before it.
        start: first position.
        stop: position behind the last.

    """
    return block_hashes[(start + 1) * scale - 1 : stop * scale : scale]


def why_not_summed(
    skipped: Mapping[int, str] | None, group_ids: Collection[int]
) -> str | None:
    """Why not all of these groups are summed, or None.

    Args:
        skipped: reasons by KV cache group id; None if they are not known yet.
        group_ids: the KV cache groups that are to be summed.

    """
    for group_id in group_ids:
        if skipped and group_id in skipped:
            return f"KV cache group {group_id}: {skipped[group_id]}"
    return None
