# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Choose blocks of the local prefix cache that are summed again when they are hit.

KV that merely lies in GPU memory may be damaged too. Each hit has a share of its blocks
compared with the ledger, so a damaged block is found the sooner the more often it is
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    group_spec,
    holds_states,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LOCAL_HIT = "\0local hit "
"""Begins the names under which workers report such blocks; no request has them."""


class LocalHits:
    """Chooses a share of the blocks that requests find in the local prefix cache.

    Args:
        kv_cache_config: the KV cache groups; those that hold states are left out.
        share: the share of blocks, 0 to 1.

    """

    def __init__(self, kv_cache_config: KVCacheConfig, share: float) -> None:
        self.share = share
        self._rng = np.random.default_rng()
        self._sizes = {
            i: group_spec(kv_cache_config, i).block_size
            for i in kv_cache_config.prefix_cacheable_group_ids
            if not holds_states(kv_cache_config, i)
        }

    def choose(
        self, req_id: str, blocks: KVCacheBlocks, num_tokens: int, seq: int
    ) -> PendingLoad | None:
        """Choose blocks of a request's local hit, as a load that ends in this step.

        Return None if the draw leaves none.

        Args:
            req_id: the request.
            blocks: its blocks.
            num_tokens: the number of its tokens that were found.
            seq: the number under which workers report.

        """
        hit = PendingLoad(
            f"{_LOCAL_HIT}{req_id}",
            KVChecksumBlocks(num_tokens, {}, seq),
            carrier=KVChecksumCarrier.LOCAL,
            connector="local prefix cache",
            is_sync=True,
            num_tokens=num_tokens,
        )
        for group_id, size in self._sizes.items():
            row = blocks.blocks[group_id][: num_tokens // size]
            drawn = np.flatnonzero(self._rng.random(len(row)) < self.share)
            drawn = np.array([at for at in drawn if not row[at].is_null], np.int64)
            if drawn.size:
                ids = np.array([row[at].block_id for at in drawn], np.int64)
                hit.blocks.groups[group_id] = (0, ids)
                hit.blocks.positions[group_id] = drawn
        return hit if hit.blocks.groups else None

    @staticmethod
    def request_of(hit: PendingLoad) -> str:
        """Return the id of the request that a hit belongs to."""
        return hit.req_id.removeprefix(_LOCAL_HIT)
