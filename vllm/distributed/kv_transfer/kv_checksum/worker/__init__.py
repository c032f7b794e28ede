# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The workers' part: how caches are read, and what sums their blocks."""

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels.torch_reference import (
    _MAX_GATHER_BYTES,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.worker import (
    KVChecksumOutput,
    KVChecksumWorker,
)

__all__ = ["_MAX_GATHER_BYTES", "KVChecksumOutput", "KVChecksumWorker"]
