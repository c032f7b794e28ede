# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load vLLM's own modules beside the patched ones, for benchmarks of both."""

import importlib.util
from pathlib import Path
from types import ModuleType


def original_module(patched: ModuleType) -> ModuleType:
    """Load a module of vLLM's as `vllm-kv-checksum apply` kept it.

    Args:
        patched: the module that is installed.

    """
    path = Path(str(patched.__file__))
    package = path.parents[len(patched.__name__.split(".")) - 2]
    kept = path.relative_to(package)
    original = package / ".kv_checksum_manifest" / "originals" / kept
    if not original.exists():
        raise SystemExit(f"no stock module at {original}: vllm-kv-checksum apply")
    name = f"stock_{patched.__name__.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, original)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
