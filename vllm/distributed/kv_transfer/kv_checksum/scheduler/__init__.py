# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ask for sums, compare them, and handle the consequences: the scheduler's part."""

from vllm.distributed.kv_transfer.kv_checksum.payload import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_checksum.scheduler.scheduler import (
    KVChecksumScheduler,
)

__all__ = ["KV_TRANSFER_PARAMS_KEY", "KVChecksumScheduler"]
