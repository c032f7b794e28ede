# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let the worker's part run from a checkout where vLLM is not installed.

What it imports of vLLM is stood in for: Triton, a logger, and the copy to a device.
"""

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


def vllm_is_installed() -> bool:
    """Return whether `vllm` is more than the folder of that name in this checkout."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def stand_in_for_vllm() -> bool:
    """Put, unless vLLM is installed, small modules in the place of those of vLLM that
    the worker's part imports; return whether that was needed."""
    if vllm_is_installed():
        return False
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    import triton
    import triton.language

    for name, content in {
        "vllm.triton_utils": {
            "triton": triton,
            "tl": triton.language,
            "HAS_TRITON": True,
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": None},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _to_device},
    }.items():
        if name not in sys.modules:
            module = ModuleType(name)
            module.__dict__.update(content)
            sys.modules[name] = module
    sys.modules["vllm.utils"].torch_utils = sys.modules["vllm.utils.torch_utils"]
    return True


def _to_device(data: Any, device: Any) -> Any:
    """Copy a tensor to a device, from pinned memory, so that the host need not wait."""
    if str(device) == "cpu":
        return data.clone()
    return data.pin_memory().to(device, non_blocking=True)
