# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Define block checksums: checksums that are stored with offloaded KV.

A connector that stores KV asks the worker for one int64 block checksum per block
(`KVChecksumWorker.init_block_checksums`), has those of the blocks that it is about to
store filled in (`save_block_checksums`), and moves a block checksum wherever it moves
the block's KV. A block checksum is this rank's own sum of a full block, XORed with a
tag of the block's hash and of the group's layers, so that an intact value of another
prefix or of another model's layers fails like a damaged one. Each rank checks the KV
that it stored itself: nothing is added up over ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import KVChecksumBlocks

_TAG_BYTES = 8


class BlockRun(NamedTuple):
    """Full blocks of one request that follow one another.

    Attributes:
        group_id: the blocks' KV cache group.
        start: position of the first block in the request.
        block_ids: the blocks' ids.
        block_hashes: the blocks' prefix hashes, one per block, all of one length.

    """

    group_id: int
    start: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]

    def blocks(self, block_size: int) -> KVChecksumBlocks:
        """Return the run as blocks to sum, all of whose tokens count."""
        num_tokens = (self.start + len(self.block_ids)) * block_size
        return KVChecksumBlocks(
            num_tokens,
            {self.group_id: (self.start, np.asarray(self.block_ids, np.int64))},
        )


def block_checksum_tags(
    block_hashes: Sequence[bytes], fingerprint: int = 0
) -> np.ndarray:
    """Compute the tags with which block checksums are XORed.

    A tag is the first 8 bytes of the block's hash, little-endian, XORed with the
    fingerprint.

    Args:
        block_hashes: the blocks' prefix hashes, all of one length.
        fingerprint: identifies the layers that the block checksums sum (uint64).

    Returns:
        uint64, shape ``(blocks,)``.

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
    """Return the hashes of the blocks at positions ``[start, stop)``.

    Fewer are returned where `block_hashes` ends before.

    Args:
        block_hashes: a request's hashes, one per hash block.
        scale: hash blocks per block.
        start: first position.
        stop: position behind the last.

    """
    return block_hashes[_index_of_hash(start, scale) : stop * scale : scale]


def hash_of_block(block_hashes: Sequence[bytes], scale: int, position: int) -> bytes:
    """Return the hash of the block at one position; see `hashes_of_blocks`.

    Raises:
        IndexError: the block has no hash yet.

    """
    return block_hashes[_index_of_hash(position, scale)]


def _index_of_hash(position: int, scale: int) -> int:
    """Return which of a request's hashes stands for the block at a position.

    It is that of the block's last hash block, which covers everything before it.
    """
    return (position + 1) * scale - 1


def why_not_summed(
    skipped: Mapping[int, str] | None, group_ids: Collection[int]
) -> str | None:
    """Return why not all of these groups are summed, or None if they all are.

    Args:
        skipped: reasons by KV cache group id; None if they are not known yet.
        group_ids: the KV cache groups that are to be summed.

    """
    for group_id in group_ids:
        if skipped and group_id in skipped:
            return f"KV cache group {group_id}: {skipped[group_id]}"
    return None
