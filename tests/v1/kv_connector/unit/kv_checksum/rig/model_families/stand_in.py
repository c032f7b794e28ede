# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let vLLM build models as on an H100, in a process without a GPU.

Layers, backends, their choice and the plan of the caches are vLLM's. What is not here
is stood in for: the device's name and capability, compiled kernels and the packages
that hold some (every name of them can be imported; none is called), and memory:
whatever is made on the GPU is made on the meta device.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch._ops
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)

_COMPILED = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._vllm_fa2_C",
    "vllm._vllm_fa3_C",
    "vllm.vllm_flash_attn",
)
_PACKAGES = ("cutlass", "deep_gemm", "flash_mla", "flashinfer", "quack", "tilelang")
_PACKAGES_ASKED_FOR = ("cuda", "torchvision")
"""Packages whose presence others ask for when they are imported."""


class _Anything(ModuleType):
    """A module of which every name can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *roots: str) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _OnMeta(TorchFunctionMode):
    """Make on the meta device what is asked for on the GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (
            device is not None and torch.device(device).type == "cuda"
        ):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _always(answer: Any) -> Any:
    """Return a class method that gives one answer to everything."""
    return classmethod(lambda *args, **kwargs: answer)


def stand_in_for_an_h100() -> None:
    """Set this process up. Call it before anything of vLLM is imported."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # or vLLM asks a server for them
    sys.meta_path.insert(0, _Finder(*_COMPILED, *_PACKAGES))
    for name in (
        "cutlass_group_gemm_supported",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_scaled_mm_supports_fp4",
        "cutlass_scaled_mm_supports_fp8",
    ):
        setattr(torch.ops._C, name, lambda *args: True)
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class H100(cuda.NonNvmlCudaPlatform):
        get_device_capability = _always(DeviceCapability(*CAPABILITY))
        get_device_name = _always("NVIDIA H100")
        get_device_total_memory = _always(80 << 30)
        import_kernels = _always(None)
        is_fully_connected = _always(True)
        is_pin_memory_available = _always(False)
        num_compute_units = _always(132)

    platforms.current_platform = platforms._current_platform = H100()
    _set_devices()
    # These ask others which packages there are, so they come before the last ones.
    import tvm_ffi  # noqa: F401

    import vllm.config  # noqa: F401

    sys.meta_path.insert(0, _Finder(*_PACKAGES_ASKED_FOR))


def _set_devices() -> None:
    """Answer what is asked of the device."""
    properties = SimpleNamespace(
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
        name="NVIDIA H100",
        shared_memory_per_block_optin=232448,
        total_memory=80 << 30,
    )
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = MagicMock
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: CAPABILITY
    cuda.get_device_properties = lambda *_: properties
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.current_device_index = lambda: 0
    accelerator.empty_cache = accelerator.synchronize = lambda *_: None
    accelerator.is_available = lambda: True


@contextmanager
def building() -> Iterator[None]:
    """Build a model: it names operators that are built for GPUs alone, and memory."""
    stock = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return stock(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return MagicMock(name=name)

    with (
        patch.object(torch._ops._OpNamespace, "__getattr__", operator),
        torch.device("meta"),
        _OnMeta(),
    ):
        yield
