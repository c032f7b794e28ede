# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Damage loaded blocks of a load, and tell what of it the damage changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    KINDS,
    LayerCache,
    LoadedBlocks,
    NotApplicable,
    inflict,
)

from . import damage
from .models import Generator
from .tally import CLEAN

RUN_KINDS = ("other_request", "shift_blocks", "swap_blocks")
"""Kinds that take several blocks at once."""

UNUSED = "limit: slots past the last token"
PADDING = "limit: padding of a state's page"

TOKEN_KINDS = (*KINDS, *damage.DRAWN, UNUSED)
STATE_KINDS = ("zero_block", "stale_block", "roll_layers", *damage.DRAWN, PADDING)
"""What can be done to blocks of tokens and to blocks of states."""


@dataclass
class Worker:
    """One worker's caches of a KV cache group.

    Attributes:
        layers: the layers here, as the fault drill takes them.
        covered: what counts per layer: bytes ``(blocks, kernel blocks, heads,
            tokens, cell)``, views of the caches.
        rank: its TP rank.
        indices: which of the group's layers they are.

    """

    layers: list[LayerCache]
    covered: list[np.ndarray]
    rank: int = 0
    indices: list[int] = field(default_factory=list)


@dataclass
class Chunk:
    """Blocks of one load and group that are told apart from others.

    Attributes:
        start: position of the first.
        block_size: tokens in each; 1 for a state.
        end: tokens of the request that the load covers.
        compared: of which tokens of the request sums are compared.

    """

    req_id: str
    group: int
    ids: list[int]
    start: int
    block_size: int
    end: int
    kind: str = CLEAN
    compared: tuple[int, int] = (0, 2**62)

    def slots(self, at: int, compared: bool) -> slice:
        """Return the token slots of block number `at` that count, or those compared."""
        first = (self.start + at) * self.block_size
        if not compared:
            return slice(0, self.valid(at))
        low, high = (max(0, token - first) for token in self.compared)
        return slice(low, min(high, self.valid(at)))

    def valid(self, at: int) -> int:
        """Return the tokens that count in block number `at`."""
        first = (self.start + at) * self.block_size
        return max(0, min(self.block_size, self.end - first))

    @property
    def is_state(self) -> bool:
        return self.block_size == 1


@dataclass
class Target:
    """An instance's caches.

    Attributes:
        workers: per KV cache group, every worker's.
        others: per group, blocks of no load in `Chunk`s.

    """

    workers: list[list[Worker]]
    others: list[list[int]]


def content(target: Target, chunk: Chunk, compared: bool = False) -> bytes:
    """Return a chunk's bytes that count on all workers, or those compared."""
    parts = []
    for worker in target.workers[chunk.group]:
        for blocks in worker.covered:
            _, heads, _, cell = blocks.shape[1:]
            for at, block in enumerate(chunk.ids):
                tokens = blocks[block].transpose(0, 2, 1, 3)
                tokens = tokens.reshape(-1, heads, cell)
                parts.append(tokens[chunk.slots(at, compared)].tobytes())
    return b"".join(parts)


def strike(
    target: Target, chunks: list[Chunk], at: int, kind: str, random: Generator
) -> int:
    """Damage the chunk at `at`, and for some kinds those behind it.

    Returns how many were; their `kind` is set.

    Raises:
        NotApplicable: nothing was changed.

    """
    chunk = chunks[at]
    workers = [w for w in target.workers[chunk.group] if w.layers]
    worker = workers[random.integers(len(workers))]
    hit = [chunk]
    if kind in damage.DRAWN:
        block = int(random.integers(len(chunk.ids)))
        valid = chunk.valid(block)
        if not valid:
            raise NotApplicable("no token of the block counts")
        layers = [covered[chunk.ids[block]] for covered in worker.covered]
        damage.DRAWN[kind](random, damage.Block(layers, valid))
    elif kind in (UNUSED, PADDING):
        _overwrite_uncovered(worker, chunk, kind)
    else:
        if kind in RUN_KINDS:
            most = int(random.choice([2, 3, 5, len(chunks)]))
            most = 2 if kind == "swap_blocks" else most
            hit = _run_of(chunks, at, most)
        everywhere = random.random() < 0.5
        _inflict(kind, workers if everywhere else [worker], hit, target, random)
    for one in hit:
        one.kind = kind
    return len(hit)


def _run_of(chunks: list[Chunk], at: int, most: int) -> list[Chunk]:
    """Return the chunks of one load and group from `at` on."""
    first = chunks[at]
    return [
        chunk
        for chunk in chunks[at : at + most]
        if (chunk.req_id, chunk.group) == (first.req_id, first.group)
    ]


def _inflict(
    kind: str,
    workers: list[Worker],
    hit: list[Chunk],
    target: Target,
    random: Generator,
) -> None:
    first = hit[0]
    ids = [block for chunk in hit for block in chunk.ids]
    if kind == "swap_blocks" and len(hit) > 1:
        ids = [chunk.ids[0] for chunk in hit]
    others = target.others[first.group]
    turn = int(random.integers(len(others))) if others else 0
    load = (ids, first.start, first.end, others[turn:] + others[:turn])
    if first.is_state:
        load = (ids, 0, 1, load[3])
    reasons = []
    for worker in workers:
        try:
            inflict(kind, LoadedBlocks(worker.layers, *load))
        except NotApplicable as reason:
            reasons.append(reason)
    if len(reasons) == len(workers):
        raise reasons[0]


def _overwrite_uncovered(worker: Worker, chunk: Chunk, kind: str) -> None:
    """Write other bytes wherever nothing counts."""
    at = len(chunk.ids) - 1
    valid = chunk.valid(at)
    if kind == UNUSED and valid == chunk.block_size:
        raise NotApplicable("every token of the block counts")
    for layer, covered in zip(worker.layers, worker.covered, strict=True):
        raw = layer.blocks[chunk.ids[at]].numpy()
        if kind == PADDING:
            raw[..., covered.shape[-1] :] ^= 0x5A
            continue
        tokens = raw.shape[2]
        for slot in range(valid, chunk.block_size):
            raw[slot // tokens, :, slot % tokens] ^= 0x5A
