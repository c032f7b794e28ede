# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make instances that keep a family's caches as vLLM planned them.

Bytes lie where vLLM's placement says. The fake forward fills whole pages, and the fake
transfer copies whole pages between the blocks that the real connector's scheduler side
chose, as connectors do: nothing here knows what lies in a page.
"""

import copy
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.views import layer_spec
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, iter_layer_specs

from .. import instances as rig
from .plans import Plan

COVERED_STATES = 2

STEP5_ROW_BYTES = 1024
"""As vLLM's `csa_tail_ring` has it: rows fill a page whose spec tells another shape."""


@dataclass(frozen=True)
class LoadedBlock:
    """A block of a load: its group, its position in the request, and its id."""

    group_id: int
    position: int
    block_id: int


class FamilyInstance(rig.Instance):
    """One rank of a family's model.

    Args:
        plan: the caches.

    """

    def __init__(self, model, role, *, plan: Plan, **settings):
        self.plan, self.role = plan, role
        self.first_specs = [
            next(iter(iter_layer_specs(group.kv_cache_spec)))
            for group in plan.config.kv_cache_groups
        ]
        hashed = [s.block_size for s in self.first_specs if s.prefix_cacheable]
        self.caches = plan.allocate()
        storage = next(iter(self.caches.values())).untyped_storage()
        self.raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        # Fresh caches hold the previous owner's bytes.
        self.raw.random_(generator=torch.Generator().manual_seed(len(role)))
        # What happens to a load's pages before they are summed.
        self.strike = lambda instance, blocks: None
        super().__init__(
            model,
            role,
            block_size=gcd(*hashed),
            num_blocks=plan.config.num_blocks,
            **settings,
        )

    def token_specs(self, window):
        return []

    def make_kv_config(self, groups):
        cache = self.config.cache_config
        modes = {getattr(s, "mamba_cache_mode", None) for s in self.first_specs}
        modes.discard(None)
        assert len(modes) <= 1
        if modes:
            (cache.mamba_cache_mode,) = modes
        cache.block_size = max(s.block_size for s in self.first_specs)
        self.config.scheduler_config.max_num_batched_tokens = 2048
        return copy.deepcopy(self.plan.config)

    def worker_kv_config(self, kv_config, stage, rank):
        return kv_config

    def make_worker(self, kv_config, stage, rank):
        return self.plan.worker(self.caches)

    def specs_of(self, group_id):
        """Return the specs of a group's layers, by layer name."""
        group = self.plan.config.kv_cache_groups[group_id]
        return {n: layer_spec(group.kv_cache_spec, n) for n in group.layer_names}

    def holds_one_block(self, group_id) -> bool:
        """Return whether blocks of a group are not numbered by token position."""
        spec = self.first_specs[group_id]
        return isinstance(spec, MambaSpec | CircularBufferSpec)

    def page(self, name, block_id, size) -> torch.Tensor:
        """Return a layer's bytes in one block, by vLLM's placement."""
        (tensor,) = (t for t in self.plan.config.kv_cache_tensors if name in t.layers)
        start = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
        start += block_id * tensor.block_stride
        return self.raw[start : start + size]

    def write(self, request, first, last):
        """Fill the pages of all blocks that hold tokens ``[first, last)``."""
        if self.role == "kv_consumer":
            return  # what it loads is judged before it computes anything
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group_id, row in enumerate(rows):
            for at in self.written(group_id, first, last):
                if at < len(row) and row[at]:
                    self.fill(group_id, row[at], request, last)

    def written(self, group_id, first, last) -> Iterable[int]:
        """Return where in a row the blocks are that a forward writes into."""
        spec = self.first_specs[group_id]
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            return [(last - 1) // spec.block_size]
        if self.holds_one_block(group_id):
            return [0]
        return range(first // spec.block_size, -(-last // spec.block_size))

    def fill(self, group_id, block_id, request, last):
        for name, spec in self.specs_of(group_id).items():
            seed = zlib.crc32(f"{name} {request.request_id} {block_id} {last}".encode())
            page = self.page(name, block_id, spec.page_size_bytes)
            data = np.random.default_rng(seed).bytes(len(page))
            page[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def copy_states(self, producer, ours, theirs):
        """Copy a load's pages, token groups by position, others from the end."""
        request = next(
            r for r in self.scheduler.requests.values() if r.num_computed_tokens
        )
        (their_request,) = producer.scheduler.requests.values()
        blocks: list[LoadedBlock] = []
        for index, group_id in enumerate(self.plan.config.transfer_group_ids):
            size = self.first_specs[group_id].block_size
            to, source = list(ours[index]), list(theirs[index])
            if self.holds_one_block(group_id):
                to, source = ([b for b in x if b] for x in (to, source))
                pairs = list(zip(to, source[-len(to) :], strict=True)) if to else []
                first = 0
            else:
                first = -(-request.num_computed_tokens // size) - len(to)
                their_tokens = their_request.num_computed_tokens
                skipped = first - (-(-their_tokens // size) - len(source))
                pairs = list(zip(to, source[skipped:], strict=False))
            for at, (block_id, their_id) in enumerate(pairs):
                blocks.append(LoadedBlock(group_id, first + at, block_id))
                for name, spec in self.specs_of(group_id).items():
                    page = self.page(name, block_id, spec.page_size_bytes)
                    page[:] = producer.page(name, their_id, spec.page_size_bytes)
        self.loaded_tokens = request.num_computed_tokens
        self.strike(self, blocks)

    def content_bytes(self, spec) -> int:
        """Return how many bytes of a page hold what is covered, from its start."""
        if not isinstance(spec, MambaSpec):
            return spec.unpadded_page_size_bytes
        states = list(zip(spec.shapes, spec.dtypes, strict=True))[:COVERED_STATES]
        return sum(prod(shape) * dtype.itemsize for shape, dtype in states)

    def open_row(self, name, spec) -> tuple[int, int]:
        """Return where a ring keeps the first row that is not compressed, in bytes.

        Also return the row's size. How many tokens are compressed together, other
        layers of the model tell.
        """
        (together,) = {
            one.tokens_per_state
            for group_id in range(len(self.first_specs))
            for one in self.specs_of(group_id).values()
            if one.tokens_per_state > 1
        }
        position = (self.loaded_tokens - 1) // together * together
        content, slots = self.content_bytes(spec), spec.block_size
        if self.plan.backends[name] == "Step5CSATailRingBackend":
            slots = content // STEP5_ROW_BYTES
        row = content // slots
        return position % slots * row, row

    def layers_of(self, group_id) -> list[str]:
        """Return the first layer of each backend and kind of spec in a group."""
        specs = self.specs_of(group_id)
        kinds = {
            name: (self.plan.backends[name], type(spec), spec.tokens_per_state)
            for name, spec in reversed(specs.items())
            if not isinstance(spec, MambaSpec)
        }
        by_kind = {kind: name for name, kind in kinds.items()}
        return list(by_kind.values()) or [list(specs)[-1]]

    def flip(
        self,
        block: LoadedBlock,
        at: float,
        layer: str | None = None,
        *,
        padding: bool = False,
    ) -> bool:
        """Flip a bit of one layer in a block; return whether there is such a byte.

        Args:
            block: the block.
            at: where in the page's content, from 0 to 1.
            layer: the layer's name; None for the last one.
            padding: whether it is the first byte behind the content instead.

        """
        specs = self.specs_of(block.group_id)
        name = layer or list(specs)[-1]
        spec = specs[name]
        content = self.content_bytes(spec)
        if padding and content == spec.page_size_bytes:
            return False
        first, size = 0, content
        if isinstance(spec, CircularBufferSpec):
            first, size = self.open_row(name, spec)
        byte = content if padding else first + int(at * (size - 1))
        self.page(name, block.block_id, spec.page_size_bytes)[byte] ^= 4
        return True
