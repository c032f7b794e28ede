"""Make pytest run tests that need a CUDA card on the fake of one, as a plugin (``-p gpu.fake_card``).

The fake is the one of the stream-order tests: everything runs when it is issued, on the CPU, and an access that nothing
orders is an error. The kernel is summed by Triton's interpreter, and a CUDA graph notes operators and repeats them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when it is imported.

import pytest
import torch
from kv_checksum.rig.streams.fake_cuda import FakeCUDA, Stream, _Kernel
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel

torch.cuda.is_available = lambda: True


class Interpreted(_Kernel):
    """Notes what a launch reads and writes, and computes it."""

    def __init__(self, cuda: FakeCUDA, kernel: Any) -> None:
        super().__init__(cuda)
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self._launch(*args, **constants)
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                self._kernel[grid](*args, **constants)

        return launch


class Graph(TorchDispatchMode):
    """A fake of `torch.cuda.CUDAGraph`: operators while it is captured are noted, and not run."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name == "aten::copy_", (
            "an operator that returns something new"
        )
        self._noted.append((func, args, kwargs or {}))
        return args[0]

    def replay(self) -> None:
        """Run what was noted, on the current stream."""
        for func, args, kwargs in self._noted:
            func(*args, **kwargs)


@contextmanager
def card() -> Iterator[None]:
    """Put the fake card in the place of one."""
    kernels = {
        name: getattr(triton_kernel, name)
        for name in ("_layer_checksum_kernel", "_small_units_kernel")
    }
    with ExitStack() as stack:
        cuda = stack.enter_context(FakeCUDA().installed())

        def set_stream(stream: Stream) -> None:
            cuda.stream = stream

        for owner, name, fake in (
            (torch.cuda, "set_stream", set_stream),
            (torch.cuda, "_sleep", lambda cycles: None),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", lambda graph: graph),
            (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (
                torch.Tensor,
                "cuda",
                lambda tensor: cuda.on_device(tensor.clone(), "a tensor of the test"),
            ),
            *(
                (triton_kernel, name, Interpreted(cuda, kernel))
                for name, kernel in kernels.items()
            ),
        ):
            stack.enter_context(patch.object(owner, name, fake))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run each test with a card of its own."""
    with card():
        return (yield)
