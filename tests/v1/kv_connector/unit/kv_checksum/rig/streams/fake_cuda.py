# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fake the part of CUDA's API that orders work, over tensors of the CPU.

This is a fake: nothing runs later than it is issued, and no GPU is there. It notes, for
`order`, what is issued to which stream, what waits for what, and which memory is read
and written: every operator that PyTorch dispatches, every launch of the Triton kernels
(by the addresses and rows that they are given), and what host threads read. Tensors
that are asked for on "cuda" say that they are there.

What it takes for granted of PyTorch and CUDA:

- work of one stream runs in the order in which it was issued, after its issuing;
- an event that was not recorded is passed;
- memory of a device goes, once freed, to the next one who asks on the stream on which
  it was allocated; `record_stream` makes that wait for one more stream;
- pinned memory is not given away before copies that were issued from or to it ended;
- a copy between a device and memory that is not pinned, or one that is not
  ``non_blocking``, makes the host wait; so does reading a device's value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm import triton_utils
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel
from vllm.utils import torch_utils

from .order import Cells, Clock, Memory, Order

DEVICE = torch.device("cuda", 0)


class Stream:
    """A fake of `torch.cuda.Stream`."""

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        self._cuda = FakeCUDA.current()
        self.name = self._cuda.new_stream(name)
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        self._cuda.order.join(self.name, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self._cuda.order.join(self.name, self._cuda.order.now(stream.name))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.host_waits(self._cuda.order.now(self.name))

    def query(self) -> bool:
        return False


class Event:
    """A fake of `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cuda = FakeCUDA.current()
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.stream
        self._cuda.order.join(stream.name, self._cuda.order.now(self._cuda.thread))
        self.clock = self._cuda.order.now(stream.name)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.stream).wait_event(self)

    def synchronize(self) -> None:
        self._cuda.host_waits(self.clock)

    def query(self) -> bool:
        return False


class FakeCUDA:
    """The fake device: its streams, its memory, and the host threads that use it.

    Attributes:
        order: what was accessed, and in which order.
        thread: the host thread whose calls follow.
        stream: the current stream of all threads.
        waits: how often each thread waited for the device.

    """

    _current: FakeCUDA | None = None

    def __init__(self) -> None:
        self.order = Order()
        self.thread = "runner"
        self.waits: dict[str, int] = {}
        self._streams: list[str] = []
        self._memories: dict[int, tuple[StorageWeakRef, Memory]] = {}
        # Addresses of memory that kernels are given as numbers.
        self._addresses: dict[int, tuple[StorageWeakRef, torch.Tensor, Memory]] = {}
        self._making: tuple[bool, bool] = (False, False)

    @classmethod
    def current(cls) -> FakeCUDA:
        assert cls._current is not None, "no fake device is installed"
        return cls._current

    @contextmanager
    def installed(self, *, has_triton: bool = True) -> Iterator[FakeCUDA]:
        """Put the fake in the place of CUDA."""
        with ExitStack() as stack:
            for owner, name, fake in (
                (FakeCUDA, "_current", self),
                (torch.cuda, "Stream", Stream),
                (torch.cuda, "Event", Event),
                (torch.cuda, "current_stream", lambda *_: self.stream),
                (torch.cuda, "default_stream", lambda *_: self._default),
                (torch.cuda, "stream", self.use),
                (torch.cuda, "synchronize", lambda *_: self.synchronize()),
                (torch.Tensor, "record_stream", _record_stream),
                (triton_utils, "HAS_TRITON", has_triton),
                (torch_utils, "PIN_MEMORY", True),
                # What vLLM 0.32.0 asks in its place.
                (torch_utils, "is_pin_memory_available", lambda: True),
                (triton_kernel, "_layer_checksum_kernel", _Kernel(self)),
                (triton_kernel, "_small_units_kernel", _Kernel(self)),
            ):
                stack.enter_context(patch.object(owner, name, fake))
            self._default = self.stream = Stream(name="default stream")
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operators(self))
            yield self

    # ---- streams and threads

    def new_stream(self, name: str | None) -> str:
        self._streams.append(name or f"stream {len(self._streams)}")
        return self._streams[-1]

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Make `stream` the current one, as `torch.cuda.stream` does."""
        before = self.stream
        self.stream = stream or before
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def on_thread(self, thread: str, after: Clock) -> Iterator[None]:
        """Make the calls of another host thread, to which `after` is known."""
        self.collect()
        before, self.thread = self.thread, thread
        self.order.join(thread, after)
        try:
            yield
            self.collect()
        finally:
            self.thread = before

    def host_waits(self, clock: Clock) -> None:
        self.waits[self.thread] = self.waits.get(self.thread, 0) + 1
        self.order.join(self.thread, clock)

    def synchronize(self) -> None:
        for name in self._streams:
            self.host_waits(self.order.now(name))

    # ---- memory

    def on_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Declare a tensor of the CPU to be on the device, by blocks; return it."""
        memory = Memory(name, self.stream.name, device=True)
        self._keep(tensor, memory)
        self._addresses[tensor.untyped_storage().data_ptr()] = (
            StorageWeakRef(tensor.untyped_storage()),
            tensor,
            memory,
        )
        return tensor

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Return the memory of a tensor, or None for the host's that nobody shares."""
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None or found[0].expired():
            return None
        return found[1]

    def collect(self) -> None:
        """Give away what no tensor holds any more."""
        gone = [key for key, (ref, _) in self._memories.items() if ref.expired()]
        for key in gone:
            _, memory = self._memories.pop(key)
            self.order.free(memory, self.thread)

    def _keep(self, tensor: torch.Tensor, memory: Memory) -> None:
        storage = tensor.untyped_storage()
        self._memories[storage._cdata] = (StorageWeakRef(storage), memory)

    def made(self, tensor: torch.Tensor, what: str, *, device: bool) -> None:
        """Note a tensor that an operator made."""
        pinned = self._making[1]
        if (device or pinned) and self.memory_of(tensor) is None:
            owner = self.stream.name if device else self.thread
            name = f"{'device' if device else 'pinned'} memory of {what}"
            self._keep(tensor, Memory(name, owner, device, pinned))

    def copied_in(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Note a tensor that was made of values of the host, which waits for that."""
        self.made(tensor, "tensor", device=on_device)
        memory = self.memory_of(tensor)
        assert memory is not None
        if on_device:
            self.launch("tensor", writes=[(memory, None)])
            self.host_waits(self.order.now(self.stream.name))
        else:
            self.host_access(memory, "tensor", writes=True)

    @contextmanager
    def making(self, *, device: bool, pinned: bool) -> Iterator[None]:
        before, self._making = self._making, (device, pinned)
        try:
            yield
        finally:
            self._making = before

    @property
    def makes_on_device(self) -> bool:
        return self._making[0]

    # ---- accesses

    def launch(
        self,
        what: str,
        reads: Sequence[tuple[Memory, Cells]] = (),
        writes: Sequence[tuple[Memory, Cells]] = (),
    ) -> None:
        """Issue work to the current stream."""
        self.collect()
        actor = self.stream.name
        self.order.join(actor, self.order.now(self.thread))
        for found, written in ((reads, False), (writes, True)):
            for memory, cells in found:
                self.order.access(actor, memory, writes=written, cells=cells, what=what)

    def host_access(self, memory: Memory, what: str, *, writes: bool) -> None:
        self.collect()
        self.order.access(self.thread, memory, writes=writes, what=what)

    def at(self, address: int) -> tuple[torch.Tensor, Memory]:
        """Return the tensor and the memory that an address lies in."""
        for begin, (ref, tensor, memory) in self._addresses.items():
            if begin <= address < begin + tensor.untyped_storage().nbytes():
                assert not ref.expired()
                return tensor, memory
        raise AssertionError("a kernel was given an address of no cache")


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    memory = FakeCUDA.current().memory_of(tensor)
    assert memory is not None and memory.device, "record_stream on the host's memory"
    memory.guarded.add(stream.name)


class _Kernel:
    """Stands for a Triton kernel: notes what a launch reads and writes."""

    def __init__(self, cuda: FakeCUDA) -> None:
        self._cuda = cuda

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, addresses: Any, rows: Any, *args: Any, **constants: Any) -> None:
        _, _, _, factors, out, _ = args
        cuda = self._cuda
        reads = [(cuda.memory_of(t), None) for t in (addresses, rows, factors)]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            table, starts = rows.numpy(), addresses.numpy().tolist()
        blocks = table[0][table[2] > 0] // constants["UNITS"]
        cells = frozenset(blocks.tolist())
        reads += [(cuda.at(start)[1], cells) for start in starts]
        assert all(memory is not None for memory, _ in reads), "memory of the host"
        cuda.launch("the kernel", reads, [(cuda.memory_of(out), None)])


class _Functions(TorchFunctionMode):
    """Take "cuda" out of what is asked of PyTorch, and answer what asks for it."""

    def __init__(self, cuda: FakeCUDA) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        cuda, name = self._cuda, getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            memory = cuda.memory_of(args[0])
            return DEVICE if memory is not None and memory.device else func(*args)
        if name == "is_pinned":
            memory = cuda.memory_of(args[0])
            return memory is not None and memory.pinned
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if name in ("cpu", "tolist"):
            return self._to_host(func, args[0])
        if name == "to":
            if on_device or args[1:] == (DEVICE,):
                return self._to_device(args[0], kwargs)
            if args[1:] == ("cpu",):
                return self._to_host(torch.Tensor.cpu, args[0])
            return func(*args, **kwargs)
        if name == "numpy":
            memory = cuda.memory_of(args[0])
            if memory is not None:
                assert not memory.device, "numpy() of memory of the device"
                cuda.host_access(memory, "numpy()", writes=False)
            return func(*args, **kwargs)
        if on_device:
            kwargs["device"] = "cpu"
        pinned = bool(kwargs.pop("pin_memory", False))
        with cuda.making(device=on_device, pinned=pinned):
            made = func(*args, **kwargs)
            if func is torch.tensor and (on_device or pinned):
                cuda.copied_in(made, on_device=on_device)
            return made

    def _to_host(self, func: Any, source: torch.Tensor) -> Any:
        cuda = self._cuda
        memory = cuda.memory_of(source)
        if memory is not None and memory.device:
            cuda.launch("the host", [(memory, None)])
            cuda.host_waits(cuda.order.now(cuda.stream.name))
        with torch._C._DisableTorchDispatch():
            return func(source.clone())

    def _to_device(self, source: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        dtype = how.get("dtype") or source.dtype
        with self._cuda.making(device=True, pinned=False):
            target = torch.empty(source.shape, dtype=dtype)
        target.copy_(source, non_blocking=how.get("non_blocking", False))
        return target


class _Operators(TorchDispatchMode):
    """Note what every operator reads and writes."""

    def __init__(self, cuda: FakeCUDA) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, cuda = kwargs or {}, self._cuda
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            self._copy(*args, **kwargs)
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        schema = func._schema
        if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return found  # a view
        read, written = [], []
        for number, argument in enumerate(schema.arguments):
            given = number < len(args)
            value = args[number] if given else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                memory = (
                    cuda.memory_of(tensor) if isinstance(tensor, torch.Tensor) else None
                )
                if memory is None:
                    continue
                writes = (
                    argument.alias_info is not None and argument.alias_info.is_write
                )
                cells = self._cells(name, args) if number == 0 else None
                (written if writes else read).append((memory, cells))
        on_device = any(m.device for m, _ in read + written) or cuda.makes_on_device
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and cuda.memory_of(tensor) is None:
                cuda.made(tensor, name, device=on_device)
                memory = cuda.memory_of(tensor)
                if memory is not None and not name.startswith("empty"):
                    written.append((memory, None))
        if not read and not written:
            return found
        if on_device:
            cuda.launch(name, read, written)
            if name in ("_local_scalar_dense", "nonzero", "equal", "masked_select"):
                cuda.host_waits(cuda.order.now(cuda.stream.name))
        else:
            for accesses, writes in ((read, False), (written, True)):
                for memory, _ in accesses:
                    cuda.host_access(memory, name, writes=writes)
        return found

    @staticmethod
    def _cells(name: str, args: tuple[Any, ...]) -> Cells:
        """Return which elements of the first dim an operator's indices name."""
        if name not in ("index", "index_put_", "_index_put_impl_"):
            return None
        first = args[1][0]
        if first is None or first.dtype == torch.bool:
            return None
        with torch._C._DisableTorchDispatch():
            return frozenset(first.flatten().tolist())

    def _copy(self, target, source, non_blocking=False) -> None:
        cuda = self._cuda
        into, out_of = cuda.memory_of(target), cuda.memory_of(source)
        known = [m for m in (into, out_of) if m is not None]
        if not any(m.device for m in known):
            for memory in known:
                cuda.host_access(memory, "copy_", writes=memory is into)
            return
        reads = [(out_of, None)] if out_of is not None else []
        writes = [(into, None)] if into is not None else []
        cuda.launch("copy_", reads, writes)
        for memory in known:
            if memory.pinned:
                memory.guarded.add(cuda.stream.name)
        both = into is not None and out_of is not None
        asynchronous = both and all(m.device or m.pinned for m in known)
        if not (asynchronous and (non_blocking or into.device and out_of.device)):
            cuda.host_waits(cuda.order.now(cuda.stream.name))
