# SPDX-License-Identifier: Apache-2.0
"""Choose Triton's interpreter if there is no GPU; stand in for a missing vLLM.

Triton asks when it is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter
    from kv_checksum_rig.interpreter import keep_language_patched

    keep_language_patched(triton.runtime.interpreter)

from without_vllm import stand_in_for_vllm  # noqa: E402

stand_in_for_vllm()
