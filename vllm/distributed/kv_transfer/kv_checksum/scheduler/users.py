# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find every request whose KV rests on blocks that turned out to be bad.

A synchronous load is judged with the output of the step that used it. By then its
blocks stand in the prefix cache, and other requests may have found them there, in the
same step or in one that is already scheduled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HOLD_BLOCKS = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
"""Statuses of requests that hold blocks: they compute, or wait for a load."""


@dataclass(frozen=True)
class User:
    """A request that holds bad blocks.

    Attributes:
        request: the scheduler's request.
        first_token: the first token whose KV is bad, or rests on bad KV.
        block_ids: the request's blocks from that token on, of all groups.

    """

    request: Request
    first_token: int
    block_ids: set[int]


def users_of(
    bad: Mapping[int, Collection[int]],
    requests: Iterable[Request],
    kv_cache_manager: KVCacheManager,
    kv_cache_config: KVCacheConfig,
) -> Iterator[User]:
    """Yield the requests that hold bad blocks.

    Args:
        bad: ids of bad blocks, by KV cache group.
        requests: all requests of the scheduler.
        kv_cache_manager: the manager that knows a request's blocks.
        kv_cache_config: the KV cache groups.

    """
    sizes = [g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups]
    for request in requests:
        if request.status not in HOLD_BLOCKS:
            continue
        rows = kv_cache_manager.get_block_ids(request.request_id)
        first = min(
            (
                at * sizes[group_id]
                for group_id, ids in bad.items()
                for at, block_id in enumerate(rows[group_id])
                if block_id in ids
            ),
            default=None,
        )
        if first is None:
            continue
        resting = {
            block_id
            for row, size in zip(rows, sizes, strict=True)
            for block_id in row[first // size :]
        }
        yield User(request, first, resting - {0})
