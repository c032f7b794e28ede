# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""View caches as the pieces of slices, in the checksum's order.

A `LayerView` reads a layer's cache in the checksum's order, token by token,
whatever its memory layout. A group with a layer that cannot be read so is
skipped whole, with its reason: never a silently wrong subset. Attention layers
are in `attention`, states in `states`, groups in `groups`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    ReplicaKey,
    Skipped,
    slice_factor,
    unit_size,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

PIECE_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}

_ELEMENT_DTYPES = {**PIECE_DTYPES, 1: torch.uint8}
"""If a piece is not contiguous in memory, the elements that are read are narrower."""


class SkipGroup(Exception):
    """Raised for a group that cannot be summed; the message is category and reason."""

    def __init__(self, reason: str, category: Skipped = Skipped.MEMORY_LAYOUT) -> None:
        super().__init__(f"{category.value}: {reason}")


@dataclass
class LayerView:
    """One layer's cache, or a part of it, read as pieces.

    Attributes:
        name: the layer's name.
        blocks: integer view of shape ``(num_blocks, kernel blocks per block,
            heads, tokens per kernel block, pieces)``, of any strides. If a piece is
            not contiguous in memory, the last dim holds narrower elements; each run
            of `elements_per_piece` of them forms one piece.
        piece_bytes: width of a piece (8, 4 or 2).
        pieces: pieces per token and head, of the whole layer.
        factors: signed int64 tensor ``(heads,)``: the factors ``m`` of
            consecutive slices.
        replica_key: the copy of the layer that this rank holds.
        first_piece: number, within a token, of the first piece that `blocks`
            holds; a token that is not contiguous is read as several views.
        tokens_per_state: tokens that one stored state covers; states then stand in
            `blocks` where tokens do. A fraction stands for several states per token.
        unit_tokens: tokens of a unit; None for `unit_size` of the block's tokens.
        units: `blocks` by units, see `units_of`.

    """

    name: str
    blocks: torch.Tensor
    piece_bytes: int
    pieces: int
    factors: torch.Tensor
    replica_key: ReplicaKey
    first_piece: int = 0
    tokens_per_state: int | Fraction = 1
    unit_tokens: int | None = None
    units: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.units = units_of(self.blocks, self.tokens_per_state, self.unit_tokens)

    @property
    def elements_per_piece(self) -> int:
        """Return the elements of a piece: 1 unless it is not contiguous in memory."""
        return self.piece_bytes // self.blocks.element_size()

    @property
    def units_per_block(self) -> int:
        return self.units.shape[1] * self.units.shape[2]

    @property
    def units_per_state(self) -> int:
        """Return the units that one state spans; 1 if a unit holds whole states."""
        _, ratio, _, states, _ = self.blocks.shape
        return max(1, self.units_per_block // (ratio * states))

    @property
    def state_ratio(self) -> tuple[int, int]:
        """Return numerator and denominator of the tokens per state."""
        return self.tokens_per_state.numerator, self.tokens_per_state.denominator


SumRows = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds sums of some layers' units to `out` (int64 ``(n,)``, of any stride) for `rows`
(int64 ``(3, n)``): the unit (its number in its block, behind those of all blocks
before), position in the request of its first token, number of its tokens that count.
Where a state covers several tokens, it counts with its last one: of tokens ``[a, b)``,
states ``[a // r, b // r)`` do, numbered by the request. Units follow one another by
whole blocks if a state spans several of them."""


def rows_of_states(
    rows: torch.Tensor, out: torch.Tensor, units_per_state: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the arguments of a `SumRows` for the units in which a state ends.

    A state that spans several units ends in the last of them, so the others have none.
    """
    last = slice(units_per_state - 1, None, units_per_state)
    return rows[:, last], out[last]


@dataclass(frozen=True)
class Ring:
    """A block that keeps a request's last tokens, each in slot ``position % slots``.

    Attributes:
        slots: tokens that the block holds.
        group_tokens: tokens that are compressed together; the ring keeps the raw rows
            of the group that is not complete. None if it is not known.

    """

    slots: int
    group_tokens: int | None = None

    def counted(self, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions whose slots count after so many tokens.

        These are of the last token's group, but for the row that completes it: it is
        pooled from the step's input and never read again, so not every writer stores
        it. A consumer that computes the last token once more reads the others. Slots of
        earlier groups may be leftovers of another request if the tokens before them
        were found in the prefix cache. If groups are not known, every slot counts.

        Args:
            num_tokens: int64, per request.

        Returns:
            The first positions, and how many follow one another from there.

        """
        if self.group_tokens is None:
            first = np.maximum(num_tokens - self.slots, 0)
            return first, num_tokens - first
        size = self.group_tokens
        first = np.maximum(num_tokens - 1, 0) // size * size
        return first, np.minimum(num_tokens - first, size - 1)


@dataclass(frozen=True)
class ContextShard:
    """The tokens of every request that a worker holds under context parallelism.

    vLLM deals out a request's tokens to the ranks in turn, `interleave` at a time
    (`cp_kv_cache_interleave_size`). Over NIXL that is one block, so the tokens of a
    block follow one another.

    Attributes:
        size: ranks over which the tokens are dealt out (DCP); 1 for all on each rank.
        rank: which of them this worker is.
        interleave: tokens that one rank gets in a row.

    """

    size: int = 1
    rank: int = 0
    interleave: int = 1


@dataclass
class LayerSlices:
    """One layer's views, and the facts about them that its group needs.

    Attributes:
        views: the views that read the layer.
        heads: KV heads (for states: rows) of the unsharded layer.
        identity: the layer's part of the fingerprint besides its name and spec type.
        equal_tp: whether only parts of one TP size add up to the same value.
        remarks: parts of the layer that are not covered.
        ring: the ring that each block holds, if it does.

    """

    views: list[LayerView]
    heads: int
    identity: str
    equal_tp: bool = False
    remarks: tuple[str, ...] = ()
    ring: Ring | None = None


@dataclass
class GroupView:
    """The layers of one KV cache group on this worker.

    Attributes:
        group_id: the KV cache group's id.
        block_size: tokens per block; 1 where a block holds a state, which counts
            as one token.
        layers: the layers' views; a layer may have several.
        fingerprint: sum mod 2**64 of the layers' hashes.
        replica_keys: the copies of layers that this worker holds, ascending.
        context: the tokens of a request that the group's blocks hold here.
        equal_tp: whether sums compare only between instances of equal TP size.
        remarks: parts of the layers that are not covered.
        ring: where a block holds a ring, its size and use; it has one unit per slot,
            whose sums are added up to one.

    """

    group_id: int
    block_size: int
    layers: list[LayerView]
    fingerprint: int
    replica_keys: tuple[ReplicaKey, ...]
    equal_tp: bool = False
    remarks: tuple[str, ...] = ()
    ring: Ring | None = None
    context: ContextShard = ContextShard()

    @property
    def unit_size(self) -> int:
        return unit_size(self.block_size) if self.ring is None else 1

    @property
    def units_per_block(self) -> int:
        return self.block_size // self.unit_size

    def of_all_ranks(self, sums: np.ndarray) -> np.ndarray:
        """Place a run of blocks' sums among those of all ranks, which here are 0.

        Args:
            sums: uint64, shape ``(units, columns)``, of consecutive blocks.

        Returns:
            The sums, of as many blocks for each rank that tokens are dealt out to.

        """
        if self.context.size == 1:
            return sums
        of_blocks = sums.reshape(-1, self.units_per_block, sums.shape[1])
        shape = (len(of_blocks), self.context.size, *of_blocks.shape[1:])
        spread: np.ndarray = np.zeros(shape, np.uint64)
        spread[:, self.context.rank] = of_blocks
        return spread.reshape(-1, sums.shape[1])


@dataclass(frozen=True)
class Sharding:
    """This worker's part of the model.

    `uniform_kv_heads` is the model's KV head count if every layer shares it. Where
    tokens are dealt out over ranks (`context`), these are the TP ranks, or, with one
    TP rank, the PCP ranks, which then are counted as TP ranks (`over_pcp`).
    """

    tp_rank: int
    tp_size: int
    uniform_kv_heads: int | None
    context: ContextShard = ContextShard()
    over_pcp: bool = False


def layer_number(name: str) -> int:
    """Return the one number in a layer's name.

    Raises:
        SkipGroup: the name has none or several.

    """
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise SkipGroup(
            f"layer name {name!r} does not hold exactly one layer number",
            Skipped.LAYER_NAMES,
        )
    return int(numbers[0])


def module_of(name: str) -> str:
    """Return the module that a cache belongs to: its name up to the layer number."""
    parts = name.split(".")
    at = next(i for i, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: at + 1])


def layer_hash(name: str, spec: KVCacheSpec, identity: str) -> int:
    """Hash a layer for the fingerprint: 64 bits, the same on any machine or version."""
    text = f"{name}|{type(spec).__name__}|{identity}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_dcp_sharded(spec: KVCacheSpec) -> bool:
    """Tell whether decode context parallelism deals a spec's tokens out to the ranks.

    vLLM 0.30.0 does not tell; checksums are off there with context parallelism.
    """
    return getattr(spec, "dcp_sharded", False)


def layer_spec(group_spec: KVCacheSpec, name: str) -> KVCacheSpec | None:
    """Return a layer's own spec; None for an alias that a uniform-type spec lacks."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    if isinstance(group_spec, UniformTypeKVCacheSpecs):
        return group_spec.kv_cache_specs.get(name)
    return group_spec


def head_placement(
    spec: AttentionSpec, shard: Sharding, shards: int | None = None
) -> tuple[ReplicaKey, int]:
    """Return this rank's replica key and its first global head of a layer.

    vLLM splits KV heads over the TP ranks and replicates them where ranks are more
    than heads. `max_tp_shards`, where a spec declares it, is the number of ranks that
    hold different heads; MLA latents are held whole by every rank.

    Args:
        spec: the layer's own KV cache spec.
        shard: this rank's part of the model.
        shards: TP ranks that hold different heads, if the spec does not tell it.

    Raises:
        SkipGroup: the spec does not tell how many ranks hold the same heads.

    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    tp, heads = shard.tp_size, spec.num_kv_heads
    # Before vLLM 0.31.0 no spec declares it.
    declared = getattr(spec, "max_tp_shards", None)
    shards = declared if declared is not None else shards
    if shards is not None:
        replicas = max(1, tp // shards)
    elif isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        replicas = tp
    elif heads > 1 or tp == 1:
        replicas = 1
    elif shard.uniform_kv_heads is None:
        raise SkipGroup(
            "it is not known how many TP ranks hold the same KV head", Skipped.REPLICAS
        )
    else:
        replicas = max(1, tp // shard.uniform_kv_heads)
    first_head = shard.tp_rank // replicas * heads
    parts = shard.context.size if is_dcp_sharded(spec) else 1
    if replicas % parts:
        raise SkipGroup(
            f"{replicas} TP ranks hold the same KV heads, their tokens lie on {parts}",
            Skipped.REPLICAS,
        )
    # Of the ranks that hold the same heads, consecutive ones share out the tokens.
    copy = shard.tp_rank % replicas // parts
    return (replicas // parts, copy), first_head


def piece_width(token_bytes: int) -> int:
    """Return the bytes of a piece, given the bytes of one token and head.

    Raises:
        SkipGroup: the token is no whole number of pieces.

    """
    for width in (8, 4, 2):
        if token_bytes % width == 0:
            return width
    raise SkipGroup(f"a token's {token_bytes} bytes are no whole pieces")


def read_as(
    cache: torch.Tensor,
    width: int,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """View the storage of `cache` as integers of `width` bytes, without a copy.

    Args:
        cache: a KV cache tensor of any dtype.
        width: bytes of an integer.
        offset: where to begin, in bytes behind the cache's first byte.
        shape: the view's shape, in integers.
        strides: the view's strides, in bytes.

    Raises:
        SkipGroup: offset or strides are no whole pieces.

    """
    start = cache.storage_offset() * cache.element_size() + offset
    if any(stride % width for stride in (*strides, start)):
        raise SkipGroup("the cache's strides are not whole pieces")
    view = torch.empty(0, dtype=_ELEMENT_DTYPES[width], device=cache.device)
    view.set_(
        cache.untyped_storage(),
        start // width,
        shape,
        [stride // width for stride in strides],
    )
    return view


def block_ratio(cache: torch.Tensor, num_blocks: int) -> int:
    """Return the kernel blocks per block of a ``[B, H, N, C]`` cache.

    Raises:
        SkipGroup: it does not hold `num_blocks` blocks of contiguous cells.

    """
    if cache.dim() != 4:
        raise SkipGroup(f"the cache has {cache.dim()} dimensions, not 4")
    total, content = cache.shape[0], cache.shape[3]
    if num_blocks <= 0 or total % num_blocks:
        raise SkipGroup(f"the cache holds {total} blocks, not {num_blocks}")
    if content > 1 and cache.stride(3) != 1:
        raise SkipGroup("a token's bytes are not contiguous")
    return total // num_blocks


def integer_view(cache: torch.Tensor, num_blocks: int, width: int) -> torch.Tensor:
    """View a ``[B, H, N, C]`` cache as integers of `width` bytes, without a copy.

    The view has the shape ``(num_blocks, B / num_blocks, H, N, C bytes / width)``.

    Raises:
        SkipGroup: blocks or strides do not fit.

    """
    ratio = block_ratio(cache, num_blocks)
    size = cache.element_size()
    _, heads, tokens, content = cache.shape
    block, head, token, _ = (stride * size for stride in cache.stride())
    shape = (num_blocks, ratio, heads, tokens, content * size // width)
    return read_as(cache, width, 0, shape, (block * ratio, block, head, token, width))


def units_of(
    blocks: torch.Tensor,
    tokens_per_state: int | Fraction = 1,
    unit_tokens: int | None = None,
) -> torch.Tensor:
    """View a `LayerView`'s blocks by units, without a copy.

    The view has the shape ``(num_blocks, kernel blocks, units, parts of a unit, heads,
    tokens, pieces)``: a kernel block holds one or several units, or a unit is made of
    several kernel blocks, its parts. States stand for tokens where one covers several.
    A state of more tokens than a unit is shown in each of its units; it counts in that
    of its last token.

    Args:
        blocks: see `LayerView`.
        tokens_per_state: see `LayerView`.
        unit_tokens: see `LayerView`.

    Raises:
        SkipGroup: units do not nest with states or kernel blocks.

    """
    number, ratio, heads, tokens, pieces = blocks.shape
    block, part, head, token, piece = blocks.stride()
    if part == tokens * token:
        # The tokens of a kernel block follow those of the one before it.
        ratio, tokens = 1, ratio * tokens
    whole = ratio * tokens * tokens_per_state
    in_tokens = unit_tokens or unit_size(int(whole))
    states = Fraction(in_tokens) / tokens_per_state
    if states < 1 and states.numerator == 1 and 1 in (ratio, tokens):
        shape = (number, ratio * tokens, states.denominator, 1, heads, 1, pieces)
        step = part if tokens == 1 else token
        return blocks.as_strided(shape, (block, step, 0, 0, head, 0, piece))
    size = states.numerator
    if states.denominator == 1 and tokens % size == 0:
        shape = (number, ratio, tokens // size, 1, heads, size, pieces)
        return blocks.as_strided(
            shape, (block, part, size * token, 0, head, token, piece)
        )
    if states.denominator == 1 and size % tokens == 0:
        parts = size // tokens
        shape = (number, ratio // parts, 1, parts, heads, tokens, pieces)
        return blocks.as_strided(
            shape, (block, parts * part, 0, part, head, token, piece)
        )
    raise SkipGroup(
        f"kernel blocks of {tokens} tokens and units of {states} do not nest"
    )


def slice_factors(
    layer: int, heads: Iterable[int], device: torch.device
) -> torch.Tensor:
    """Return the factors of a layer's heads, signed int64 ``(heads,)`` on `device`."""
    values = [slice_factor(layer, head) for head in heads]
    signed = [v - 2**64 if v >= 2**63 else v for v in values]
    return torch.tensor(signed, dtype=torch.int64, device=device)
