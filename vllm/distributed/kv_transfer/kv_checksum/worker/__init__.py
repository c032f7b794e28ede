# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read caches and sum their blocks: the part of KV checksums that workers hold.

`_MAX_GATHER_BYTES` bounds the transient memory of the PyTorch backend, in bytes, for
every `KVChecksumWorker` that is built after it was set here.
"""

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels.torch_reference import (
    _MAX_GATHER_BYTES,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.worker import (
    KVChecksumOutput,
    KVChecksumWorker,
)

__all__ = ["_MAX_GATHER_BYTES", "KVChecksumOutput", "KVChecksumWorker"]
