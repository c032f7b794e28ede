# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum units on a device. All backends return identical values."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView, SumRows
from vllm.logger import init_logger

logger = init_logger(__name__)

Prepare = Callable[[Sequence[LayerView]], SumRows]
"""Build and compile the function that sums some layers. The caches must stay where
they are."""


def select_backend(
    device: torch.device, max_gather_bytes: int | None = None
) -> Prepare:
    """Select the backend for `device`. All backends return identical values.

    Args:
        device: where the caches are.
        max_gather_bytes: bound on the transient memory of the PyTorch backend; None
            for its own. The other backends read the cache in place.

    """
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
    return partial(torch_reference.prepare, max_gather_bytes=max_gather_bytes)
