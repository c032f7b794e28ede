# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, Triton's kernels run in its interpreter; it asks at import time."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
