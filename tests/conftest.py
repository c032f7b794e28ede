# SPDX-License-Identifier: Apache-2.0
"""Select Triton's interpreter if there is no GPU: Triton asks when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
