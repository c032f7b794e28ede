# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backends that sum units; all of them return identical values."""

from collections.abc import Callable, Sequence

import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SumRows
from vllm.logger import init_logger

logger = init_logger(__name__)

Prepare = Callable[[Sequence[LayerView]], SumRows]
"""Build and compile the function that sums some layers."""


def select_backend(device: torch.device) -> Prepare:
    """Select the backend for `device`."""
    if device.type == "cpu":
        from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import numba_kernel

        return numba_kernel.prepare
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
            triton_kernel,
        )

        return triton_kernel.prepare
    from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import torch_reference

    logger.warning("KV checksums are summed by PyTorch, slowly: Triton is missing")
    return torch_reference.prepare
