# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drive the real worker on the fake device, as a model runner and connectors do.

The runner's part is what vLLM promises the worker: work before the first step has
ended, a new current stream waits for the one before, a connector reports a load once
its event has passed, stores wait for what the step issued, and blocks are given to
another request after the scheduler has the records of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumOutput,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun

from .. import caches as u
from .fake_cuda import FakeCUDA, Stream
from .order import Clock, Memory

KINDS = {
    "send": {"send"},
    "send, behind the drafter": {"send", "drafter"},
    "receive": {"receive"},
    "send and receive": {"send", "receive"},
    "send behind the drafter and receive": {"send", "drafter", "receive"},
    "load from a tier": {"stored"},
    "full blocks": {"full"},
    "save": {"save"},
    "receive, send and save": {"receive", "send", "save"},
}
"""What a step does."""

NUM_BLOCKS = 24


@dataclass
class Output:
    """What a step gave, which blocks its requests hold, and who knows of it."""

    step: int
    found: KVChecksumOutput | None
    blocks: list[int]
    known: Clock


class Runner:
    """A runner of one worker with two groups, of one layer each."""

    def __init__(self, cuda: FakeCUDA) -> None:
        self.cuda = cuda
        # The streams of the runner, and those on which a connector loads and stores.
        self.streams = [cuda.stream, Stream(name="another stream")]
        self._load, self._store = Stream(name="loads"), Stream(name="stores")
        spec = u.full_spec()
        caches = {
            name: cuda.on_device(u.random_cache(NUM_BLOCKS, spec, seed=n), name)
            for n, name in enumerate(u.names(0, 1))
        }
        self._caches: list[Memory] = []
        for cache in caches.values():
            memory = cuda.memory_of(cache)
            assert memory is not None
            self._caches.append(memory)
        config = u.config(NUM_BLOCKS, *(([name], spec) for name in caches))
        self.worker = u.worker(config, caches)
        self._sums = self.worker.init_block_checksums([0, 1])
        # As vLLM does once everything is warmed up.
        cuda.synchronize()
        cuda.waits.clear()
        self._free = list(range(NUM_BLOCKS))
        self._held: list[int] = []
        self._number = 0

    def step(self, kind: str, stream: Stream) -> Output:
        """Run a step on a stream."""
        cuda, parts = self.cuda, KINDS[kind]
        if stream is not cuda.stream:
            stream.wait_stream(cuda.stream)
            cuda.stream = stream
        self._number += 1
        number, scheduled = self._number, KVChecksumScheduled()
        written, loaded = self._take(3), self._take(2)
        sent = KVChecksumBlocks(41, {0: (0, written), 1: (1, written[:2])})
        taken = KVChecksumBlocks(32, {0: (0, loaded), 1: (0, loaded[:1])})
        if "send" in parts:
            scheduled.reqs_to_send[f"sent {number}"] = sent
        if "full" in parts:
            scheduled.full_blocks[f"full {number}"] = sent
        if "receive" in parts:
            scheduled.reqs_to_recv[f"taken {number}"] = taken
        if "stored" in parts:
            taken.stored = True
            scheduled.reqs_to_load[f"taken {number}"] = taken
        self.worker.bind(scheduled)
        if parts & {"receive", "stored"}:
            self._load_blocks(loaded, "stored" in parts)
        self._write("the forward", self._held + written)
        defer = "drafter" in parts
        finished = {*scheduled.reqs_to_recv, *scheduled.reqs_to_load}
        found = self.worker.post_forward(finished, set(), set(), defer_sends=defer)
        if defer:
            self._write("the drafter", self._held + written)
            found = self.worker.finalize_step(found)
        if "save" in parts:
            # They are full, and stay until they are stored.
            full, written = written[:2], written[2:]
            self._save(full)
        # Decoding goes on in all others.
        blocks = written + loaded
        self._held += blocks
        cuda.collect()
        return Output(number, found, blocks, cuda.order.now("runner"))

    def finalize(self, output: Output) -> None:
        """Complete a step's records on another thread, and tell the runner."""
        cuda = self.cuda
        with cuda.on_thread("finalizer", output.known):
            if output.found is not None:
                output.found.finalize()
            known = cuda.order.now("finalizer")
        cuda.order.join("runner", known)
        self._held = [block for block in self._held if block not in output.blocks]
        # The next request gets the blocks, unless a step may still decode in them.
        if output.step == self._number:
            self._free = output.blocks + self._free

    def _take(self, number: int) -> list[int]:
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def _write(self, what: str, blocks: Sequence[int]) -> None:
        cells = frozenset(blocks)
        self.cuda.launch(what, writes=[(cache, cells) for cache in self._caches])

    def _block_checksums(self) -> Memory:
        memory = self.cuda.memory_of(self._sums)
        assert memory is not None
        return memory

    def _load_blocks(self, blocks: Sequence[int], with_checksums: bool) -> None:
        """Load blocks on the connector's stream, and wait for that as a connector."""
        into, cells = [*self._caches], frozenset(blocks)
        if with_checksums:
            into.append(self._block_checksums())
        with self.cuda.use(self._load):
            self.cuda.launch("the load", writes=[(m, cells) for m in into])
        event = self._load.record_event()
        self.cuda.order.join("runner", event.clock)

    def _save(self, blocks: Sequence[int]) -> None:
        hashes = [bytes([block]) * 32 for block in blocks]
        self.worker.save_block_checksums([BlockRun(0, 0, blocks, hashes)])
        event = self.cuda.stream.record_event()
        self._store.wait_event(event)
        out_of = [*self._caches, self._block_checksums()]
        cells = frozenset(blocks)
        with self.cuda.use(self._store):
            self.cuda.launch("the store", reads=[(m, cells) for m in out_of])
