# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store block checksums with vLLM's own offload to host memory: 8 bytes per block.

They are one more region of the cache to copy. The manager knows blocks by id and hash
alone, so the scheduler side notes, where the manager picks a block to store, the
position and the hash that the worker needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm.distributed.kv_transfer.kv_checksum.stored import (
    BlockRun,
    hash_of_block,
    why_not_summed,
)
from vllm.distributed.kv_transfer.kv_checksum.support import (
    transfer_config,
    why_groups_not_stored,
    why_not_on,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_checksum.worker.worker import KVChecksumWorker
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

logger = init_logger(__name__)


def why_not_stored(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> str | None:
    """Return why this instance stores no checksums, or None if it does.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: the KV cache groups, or None if they are not planned yet.

    """
    if (reason := why_not_on(vllm_config)) is not None:
        return reason
    options = transfer_config(vllm_config).kv_connector_extra_config
    if options.get("lazy_offload"):
        return "lazy_offload stores blocks whose positions are no longer known"
    if options.get("kv_offload_backend", "cpu") != "cpu":
        return "the disk backend takes regions of whole disk blocks alone"
    if kv_cache_config is None:
        return None
    groups = kv_cache_config.prefix_cacheable_groups
    if len({group.kv_cache_spec.block_size for group in groups}) > 1:
        return "KV cache groups have blocks of several sizes"
    return why_groups_not_stored(kv_cache_config)


class StoredRuns:
    """Collects in the scheduler the blocks that were picked for storing in a step."""

    def __init__(self) -> None:
        self._runs: list[BlockRun] = []

    def add(self, group_id: int, position: int, block: KVCacheBlock) -> None:
        """Add a block; join it to the run of the block before if it follows that.

        Args:
            group_id: the block's KV cache group.
            position: the block's position in the request.
            block: the block, which has a hash.

        """
        from vllm.v1.core.kv_cache_utils import get_block_hash

        last = self._runs[-1] if self._runs else None
        if (
            last is None
            or last.group_id != group_id
            or last.start + len(last.block_ids) != position
        ):
            last = BlockRun(group_id, position, [], [])
            self._runs.append(last)
        last.block_ids.append(block.block_id)  # type: ignore[attr-defined]
        last.block_hashes.append(get_block_hash(block.block_hash))  # type: ignore[arg-type, attr-defined]

    def take(self) -> list[BlockRun]:
        """Return the blocks that were added, and start anew."""
        runs, self._runs = self._runs, []
        return runs


def create_stored_runs(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> StoredRuns | None:
    """Create the `StoredRuns` of a manager, or None if no checksums are stored."""
    if why_not_stored(vllm_config, kv_cache_config) is not None:
        return None
    return StoredRuns()


def drop_blocks(
    manager: SimpleCPUOffloadScheduler,
    block_hashes: Sequence[bytes],
    bad: dict[int, list[int]],
) -> None:
    """Evict host blocks, so that none of them is found again.

    Args:
        manager: the scheduler side of the connector.
        block_hashes: the request's hashes, one per hash block.
        bad: per KV cache group id, positions of blocks in the request.

    """
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool = manager.cpu_block_pool
    for group_id, positions in bad.items():
        scale = manager.group_block_sizes[group_id] // manager.hash_block_size
        for position in positions:
            block_hash = hash_of_block(block_hashes, scale, position)
            key = make_block_hash_with_group_id(BlockHash(block_hash), group_id)
            block = pool.cached_block_hash_to_block.get_one_block(key)
            if block is not None:
                pool.evict_blocks({block.block_id})


class BlockRegion:
    """Presents the block checksums on a worker as one more region of its cache."""

    def __init__(self, checksums: KVChecksumWorker, group_ids: Sequence[int]) -> None:
        self._checksums = checksums
        self._block_checksums = checksums.init_block_checksums(group_ids)

    def region(self) -> torch.Tensor:
        """Return the block checksums as int8, shape ``(num_blocks, 8)``, a view."""
        bytes_ = self._block_checksums.view(torch.int8)
        return bytes_.view(len(self._block_checksums), -1)

    def save(self, metadata: SimpleCPUOffloadMetadata | None) -> None:
        """Fill in the block checksums of the blocks that this step stores."""
        if metadata is not None and metadata.kv_checksum_runs:
            self._checksums.save_block_checksums(metadata.kv_checksum_runs)


def create_block_region(
    checksums: KVChecksumWorker, kv_cache_config: KVCacheConfig, reason: str | None
) -> BlockRegion | None:
    """Create the worker's region of block checksums.

    Log the reason and return None if it cannot have one.

    Args:
        checksums: this rank's `KVChecksumWorker`.
        kv_cache_config: the KV cache groups.
        reason: the result of `why_not_stored`.

    """
    group_ids = kv_cache_config.prefix_cacheable_group_ids
    reason = reason or why_not_summed(checksums.skipped_anywhere, group_ids)
    if reason is not None:
        logger.warning("Loads of offloaded KV are not checked: %s", reason)
        return None
    logger.info("Loads of offloaded KV are checked: every block has its KV checksum")
    return BlockRegion(checksums, group_ids)
