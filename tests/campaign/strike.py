# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Damage loaded blocks of a load, and tell what of it the damage changed."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    KINDS,
    LayerCache,
    LoadedBlocks,
    NotApplicable,
    inflict,
)

from . import copies, damage
from .models import Generator, Kept, Part
from .tally import CLEAN

RUN_KINDS = ("other_request", "shift_blocks", "swap_blocks")
"""Kinds that take several blocks at once."""

UNUSED = "limit: slots past the last token"
PADDING = "limit: padding of a state's page"
OPEN = "limit: open groups, and other slots of rings"

HALF_WRITTEN = "half of a block is not written"
OTHER_GROUP = "a block of another group"
OTHER_LOAD = "a block of another load"
_COPIES = (HALF_WRITTEN, OTHER_GROUP, OTHER_LOAD)

TOKEN_KINDS = (*KINDS, *damage.DRAWN, UNUSED)
STATE_KINDS = ("zero_block", "stale_block", "roll_layers", *damage.DRAWN, PADDING)
"""What can be done to blocks of tokens and to blocks of states."""

RING_KINDS = ("zero_block", "stale_block", *_COPIES, *damage.DRAWN, *3 * (OPEN,))
LATENT_KINDS = ("other_request", "shift_blocks", "swap_blocks", *RING_KINDS)
"""Likewise to rings, and to blocks of states that each cover several tokens."""

KINDS_OF = {
    "tokens": TOKEN_KINDS,
    "state": STATE_KINDS,
    "latents": LATENT_KINDS,
    "ring": RING_KINDS,
}
"""By what blocks hold."""


@dataclass(eq=False)
class Worker:
    """One worker's caches of a KV cache group.

    Attributes:
        layers: the layers here, as the fault drill takes them.
        parts: what counts of them.
        rank: its TP rank.

    """

    layers: list[LayerCache]
    parts: list[Part]
    rank: int = 0


@dataclass
class Chunk:
    """Blocks of one load and group that are told apart from others.

    Attributes:
        start: position of the first.
        block_size: tokens in each; 1 for a state or a ring.
        end: tokens of the request that the load covers.
        compared: of which tokens of the request sums are compared.
        holds: what they hold, a key of `KINDS_OF`.

    """

    req_id: str
    group: int
    ids: list[int]
    start: int
    block_size: int
    end: int
    kind: str = CLEAN
    compared: tuple[int, int] = (0, 2**62)
    holds: str = "tokens"

    def slots(self, at: int, kept: Kept, compared: bool = False) -> range:
        """Return the slots of block number `at` that count, or those compared.

        A state of several tokens counts if all of them do, with the last one. Of a ring
        these are the positions, whose slots are their remainders.
        """
        low, high = self.compared if compared else (0, self.end)
        high = min(high, self.end)
        if kept.ring is not None:
            # The last token's group, but for the token that completes it.
            together = kept.ring[1]
            first = (self.end - 1) // together * together
            whole = high == self.end
            return range(first, min(self.end, first + together - 1) if whole else first)
        first = (self.start + at) * self.block_size
        begin = -(-(low - first + 1) // kept.ratio) - 1
        stop = min(self.block_size, max(0, high - first)) // kept.ratio
        return range(max(0, begin), stop)

    def counted(self, at: int, kept: Kept, compared: bool = False) -> slice | list[int]:
        """Return `slots` as an index into a block's slots."""
        slots = self.slots(at, kept, compared)
        if kept.ring is not None:
            return [position % kept.ring[0] for position in slots]
        return slice(slots.start, max(slots.start, slots.stop))

    def valid(self, at: int) -> int:
        """Return the tokens that count in block number `at`."""
        return len(self.slots(at, Kept()))


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
        for blocks, kept, _ in worker.parts:
            _, heads, _, cell = blocks.shape[1:]
            for at, block in enumerate(chunk.ids):
                tokens = blocks[block].transpose(0, 2, 1, 3)
                tokens = tokens.reshape(-1, heads, cell)
                parts.append(tokens[chunk.counted(at, kept, compared)].tobytes())
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
        damage.DRAWN[kind](random, _block(worker, chunk, random))
    elif kind == OPEN:
        _overwrite_uncounted(worker, chunk)
    elif kind in _COPIES:
        at = target.workers[chunk.group].index(worker)
        copies.inflict(kind, target, chunks, chunk, at, random)
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


def _block(worker: Worker, chunk: Chunk, random: Generator) -> damage.Block:
    """Return a block of a chunk: layers that are kept alike, and what counts."""
    at = int(random.integers(len(chunk.ids)))
    alike: dict[object, list[Part]] = {}
    for part in worker.parts:
        if chunk.slots(at, part.kept):
            alike.setdefault((part.kept, part.covered.shape), []).append(part)
    if not alike:
        raise NotApplicable("no token of the block counts")
    chosen = list(alike.values())
    parts = chosen[random.integers(len(chosen))] if len(chosen) > 1 else chosen[0]
    slots = chunk.counted(at, parts[0].kept)
    if isinstance(slots, slice):
        slots = list(range(slots.start, slots.stop))
    return damage.Block([part.covered[chunk.ids[at]] for part in parts], slots)


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
    if first.block_size == 1:
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
    for layer, part in zip(worker.layers, worker.parts, strict=True):
        raw = layer.blocks[chunk.ids[at]].numpy()
        if kind == PADDING:
            raw[..., part.covered.shape[-1] :] ^= 0x5A
            continue
        tokens = raw.shape[2]
        for slot in range(valid, chunk.block_size):
            raw[slot // tokens, :, slot % tokens] ^= 0x5A


def _overwrite_uncounted(worker: Worker, chunk: Chunk) -> None:
    """Write other bytes wherever nothing counts: all are changed, and some back."""
    for at, block in enumerate(chunk.ids):
        for layer in worker.layers:
            layer.blocks[block].bitwise_xor_(0x5A)
        for covered, kept, _ in worker.parts:
            covered[block][:, :, chunk.counted(at, kept)] ^= 0x5A
