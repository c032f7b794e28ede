# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Judge loads that bring stored block checksums back, in the scheduler.

The stored block checksums are compared with the workers' sums here, because their tags
are made of the request's block hashes. Only blocks that were compared and differ are
reported to the connector: a load that failed on its way says nothing about the stored
KV. A request whose load failed is kept from the caches, where it would find the same
blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumRecord,
    unit_size,
)
from vllm.distributed.kv_transfer.kv_checksum.naming import blocks_named, request_name
from vllm.distributed.kv_transfer.kv_checksum.stored import (
    block_checksum_tags,
    hashes_of_blocks,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    MAX_SAMPLES,
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)


class StoredLoads:
    """Judges loads of stored KV and handles the consequences in caches and stores.

    Args:
        connector: the scheduler-side KV connector.
        kv_cache_config: the KV cache groups.
        hash_block_size: tokens per block hash of a request.

    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv_cache_config: KVCacheConfig,
        hash_block_size: int,
    ) -> None:
        self._connector = connector
        self._groups = kv_cache_config.kv_cache_groups
        self._hash_block_size = hash_block_size

    def covers(self, request: Request, num_tokens: int) -> bool:
        """Tell whether a load of `num_tokens` that starts brings block checksums back.

        All cache tiers that it loads from must bring them.
        """
        sources = self._connector.get_kv_checksum_sources(request)
        if not sources:
            return False
        tiers = self._connector.get_external_cache_hit_sources(request, num_tokens)
        return bool(tiers) and set(tiers) <= set(sources)

    def judge(
        self,
        request: Request,
        blocks: KVChecksumBlocks,
        records: list[KVChecksumRecord],
    ) -> LoadVerdict:
        """Compare every worker's sums with the block checksums that it had stored.

        A group of which no worker has stored checksums stays out of the verdict: that
        is fixed, and logged, when the workers start.
        """
        verdict, req_id = LoadVerdict(), request.request_id
        for group_id, (start, ids) in blocks.groups.items():
            if not any(group_id in r.stored.get(req_id, {}) for r in records):
                continue
            size = self._groups[group_id].kv_cache_spec.block_size
            # Block checksums are stored for full blocks only.
            stop = min(start + len(ids), blocks.num_tokens // size)
            hashes = hashes_of_blocks(
                request.block_hashes, size // self._hash_block_size, start, stop
            )
            if len(hashes) != len(ids):
                outcome = GroupVerdict(unverified=Unverified.NUM_TOKENS)
            else:
                per_block = size // unit_size(size)
                outcome = compare_stored(
                    records, req_id, group_id, start, hashes, per_block
                )
            verdict.groups[group_id] = outcome
        if not verdict.groups:
            verdict.unverified = Unverified.NO_PAYLOAD
        return verdict

    def drop_mismatched(self, request: Request, verdict: LoadVerdict) -> int:
        """Have the connector drop the blocks that differ; return their number."""
        bad = {i: g.positions for i, g in verdict.groups.items() if g.positions}
        if bad:
            logger.warning(
                "Removing stored KV that differs from its KV checksums: request %s, %s",
                request_name(request.request_id),
                blocks_named(bad),
            )
            self._connector.on_kv_checksum_failure(request, bad)
        return sum(map(len, bad.values()))

    def give_up(self, request: Request) -> None:
        """Keep a request whose load failed from all caches; stored blocks stay.

        Neither the prefix cache nor the connector is asked again for this request, so
        the recompute does not load the same blocks a second time.
        """
        request.skip_reading_prefix_cache = True


def compare_stored(
    records: list[KVChecksumRecord],
    req_id: str,
    group_id: int,
    start: int,
    hashes: Sequence[bytes],
    units_per_block: int,
) -> GroupVerdict:
    """Compare one group, every worker on its own.

    Args:
        records: each worker's sums and stored block checksums.
        req_id: the request that loaded.
        group_id: the KV cache group.
        start: position of the first block that was loaded.
        hashes: the prefix hashes of all loaded blocks.
        units_per_block: sums per block, which add up to the stored sum.

    """
    result = GroupVerdict(first=start)
    bad: np.ndarray = np.zeros(len(hashes), bool)
    for record in records:
        sums = record.checksums[req_id].get(group_id)
        if sums is None and group_id not in record.fingerprints:
            if group_id in record.skipped_groups:
                return GroupVerdict(unverified=Unverified.ONE_SIDE_ONLY)
            continue  # no layers of the group on this worker
        stored = record.stored.get(req_id, {}).get(group_id)
        if stored is None:
            return GroupVerdict(unverified=Unverified.ONE_SIDE_ONLY)
        if sums is None or group_id not in record.fingerprints:
            return GroupVerdict(unverified=Unverified.OTHER_BLOCKS)
        units = sums.values.sum(axis=1, dtype=np.uint64)
        if (
            sums.start != start * units_per_block
            or len(units) != len(hashes) * units_per_block
            or len(stored) != len(hashes)
        ):
            return GroupVerdict(unverified=Unverified.OTHER_BLOCKS)
        found = units.reshape(-1, units_per_block).sum(axis=1, dtype=np.uint64)
        tags = block_checksum_tags(hashes, record.fingerprints[group_id])
        expected = stored ^ tags
        differ = expected != found
        bad |= differ
        if differ.any() and len(records) > 1:
            result.ranks += ((record.pp_rank, record.tp_rank),)
        for at in np.flatnonzero(differ)[: MAX_SAMPLES - len(result.samples)]:
            result.samples.append(
                Difference(start + int(at), int(expected[at]), int(found[at]))
            )
    result.compared = len(hashes)
    result.positions = (start + np.flatnonzero(bad)).tolist()
    return result
