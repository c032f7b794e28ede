# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let the kernel and its reference run from a checkout where vLLM is not installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[2]


def vllm_is_installed() -> bool:
    """Return whether `vllm` is more than the folder of that name in this checkout."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def stand_in_for_vllm() -> bool:
    """Put, unless vLLM is installed, a module of three names in the place of
    `vllm.triton_utils`; whether that was needed."""
    if vllm_is_installed():
        return False
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    if "vllm.triton_utils" not in sys.modules:
        import triton
        import triton.language

        module = ModuleType("vllm.triton_utils")
        module.__dict__.update(triton=triton, tl=triton.language, HAS_TRITON=True)
        sys.modules["vllm.triton_utils"] = module
    return True
