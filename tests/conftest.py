# SPDX-License-Identifier: Apache-2.0
"""Select Triton's interpreter if there is no GPU: Triton asks when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter
    from kv_checksum_rig.interpreter import keep_language_patched

    keep_language_patched(triton.runtime.interpreter)
