# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep bad KV that is served all the same out of prefix caches and stores.

They find KV by the hashes of a request's blocks. From the first bad block on, the
request gets hashes that no other request can have. So no other request finds what is
cached or stored of it from then on, in any group and by any connector.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SALT_BYTES = 16


def disown(request: Request, first_bad_token: int, hash_block_size: int) -> None:
    """Give a request's blocks from `first_bad_token` on hashes of their own.

    Call this before the blocks are cached. Hashes are chained, so those of blocks
    that become full later differ as well.

    Args:
        request: the scheduler's request.
        first_bad_token: the first token whose KV is bad.
        hash_block_size: tokens per block hash of a request.

    """
    hasher = request._block_hasher
    if hasher is None:
        return  # Nothing is cached.
    salt = os.urandom(_SALT_BYTES)

    def salted(request: Request) -> list[BlockHash]:
        return [
            BlockHash(blake2b(h, digest_size=len(h), key=salt).digest())
            for h in hasher(request)
        ]

    request._block_hasher = salted
    del request.block_hashes[first_bad_token // hash_block_size :]
    request.update_block_hashes()
