# SPDX-License-Identifier: Apache-2.0
"""From KV cache specs and tensors to slices, replicas and reasons to skip.

A `LayerView` reads a layer's cache in the checksum's order, token by token,
whatever its memory layout. A group with a layer that cannot be read so is
skipped whole, with its reason: never a silently wrong subset.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checksum import MASK64, MAX_KV_HEADS_PER_LAYER, ReplicaKey, slice_factor

PIECE_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class SkipGroup(Exception):
    """A group cannot be checksummed; the message is the reason."""


@dataclass
class LayerView:
    """One layer's cache, or a part of it, read as pieces.

    Attributes:
        blocks: integer view of shape ``(num_blocks, kernel blocks per block,
            heads, tokens per kernel block, pieces)``, of any strides. Where a
            piece's bytes lie apart, the last dim counts narrower elements, and
            consecutive ones make a piece.
        piece_bytes: width of a piece (8, 4 or 2).
        pieces: pieces per token and head, of the whole layer.
        factors: signed int64 tensor ``(heads,)``: the factors ``m`` of
            consecutive slices.
        replica_key: which copy of the layer this rank holds.
        first_piece: number, within a token, of the first piece that `blocks`
            holds; a token whose bytes lie apart is read as several views.
    """

    name: str
    blocks: torch.Tensor
    piece_bytes: int
    pieces: int
    factors: torch.Tensor
    replica_key: ReplicaKey
    first_piece: int = 0

    @property
    def elements_per_piece(self) -> int:
        """1 unless a piece's bytes lie apart."""
        return self.piece_bytes // self.blocks.element_size()


@dataclass
class GroupView:
    """The layers of one KV cache group on this worker.

    `fingerprint` is the sum mod 2**64 of the layers' hashes.
    """

    group_id: int
    block_size: int
    layers: list[LayerView]
    fingerprint: int
    replica_keys: tuple[ReplicaKey, ...]


@dataclass(frozen=True)
class Sharding:
    """Where this worker stands.

    `uniform_kv_heads` is the model's KV head count if every layer shares it.
    """

    tp_rank: int
    tp_size: int
    uniform_kv_heads: int | None


@dataclass(frozen=True)
class TokenOrder:
    """What is known of caches whose rows are not one token's bytes, by layer name.

    `unreadable` gives the reason why a layer's order is not known.
    """

    transposed_keys: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] | None = None


def layer_number(name: str) -> int:
    """The one number in a layer's name.

    Raises:
        SkipGroup: the name has none or several.
    """
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise SkipGroup(f"layer name {name!r} does not hold exactly one layer number")
    return int(numbers[0])


def module_of(name: str) -> str:
    """The layer module a cache belongs to: its name up to the layer number."""
    parts = name.split(".")
    at = next(i for i, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: at + 1])


def layer_hash(name: str, spec: Any) -> int:
    """A layer's share of the fingerprint; stable across machines and versions."""
    text = f"{name}|{type(spec).__name__}|{getattr(spec, 'dtype', None)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def layer_spec(group_spec: Any, name: str) -> Any:
    """A layer's own spec, or None for an alias that a uniform-type spec lacks."""
    specs = getattr(group_spec, "kv_cache_specs", None)
    return group_spec if specs is None else specs.get(name)


def check_spec(spec: Any) -> None:
    """Raise `SkipGroup` unless the spec's blocks hold one state per token."""
    from vllm.v1 import kv_cache_interface as interface

    kind = type(spec).__name__
    if not isinstance(spec, interface.AttentionSpec):
        raise SkipGroup(f"{kind} has no per-token blocks")
    if isinstance(
        spec,
        interface.CircularBufferSpec
        | interface.CrossAttentionSpec
        | interface.EncoderOnlyAttentionSpec,
    ):
        raise SkipGroup(f"{kind} blocks are not numbered by token position")
    if spec.tokens_per_state != 1:
        raise SkipGroup(f"compressed cache ({spec.tokens_per_state} tokens per state)")
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        raise SkipGroup("KV heads are packed into head slots")
    if getattr(spec, "cache_role", None) is interface.SparseCacheRole.INDEXER:
        raise SkipGroup("a sparse indexer's block holds its values before its scales")


def head_placement(spec: Any, shard: Sharding) -> tuple[ReplicaKey, int]:
    """This rank's replica key and its first global head of a layer.

    Raises:
        SkipGroup: the spec does not tell how many ranks hold the same heads.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    tp, heads = shard.tp_size, spec.num_kv_heads
    if spec.max_tp_shards is not None:
        replicas = max(1, tp // spec.max_tp_shards)
    elif isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        replicas = tp
    elif heads > 1 or tp == 1:
        replicas = 1
    elif shard.uniform_kv_heads is None:
        raise SkipGroup("it is not known how many TP ranks hold the same KV head")
    else:
        replicas = max(1, tp // shard.uniform_kv_heads)
    key = (replicas, shard.tp_rank % replicas)
    return key, shard.tp_rank // replicas * heads


def piece_width(token_bytes: int) -> int:
    """Bytes of a piece, given the bytes of one token and head.

    Raises:
        SkipGroup: the token is no whole number of pieces.
    """
    for width in (8, 4, 2):
        if token_bytes % width == 0:
            return width
    raise SkipGroup(f"a token's {token_bytes} bytes are no whole pieces")


def integer_view(cache: torch.Tensor, num_blocks: int, width: int) -> torch.Tensor:
    """View a ``[B, H, N, C]`` cache as integers of `width` bytes, without a copy.

    Returns shape ``(num_blocks, B / num_blocks, H, N, C bytes / width)``.

    Raises:
        SkipGroup: blocks or strides do not fit.
    """
    size = cache.element_size()
    if cache.dim() != 4:
        raise SkipGroup(f"the cache has {cache.dim()} dimensions, not 4")
    total, heads, tokens, content = cache.shape
    if num_blocks <= 0 or total % num_blocks:
        raise SkipGroup(f"the cache holds {total} blocks, not {num_blocks}")
    if content > 1 and cache.stride(3) != 1:
        raise SkipGroup("a token's bytes are not contiguous")
    ratio = total // num_blocks
    block, head, token, _ = (stride * size for stride in cache.stride())
    strides = [block * ratio, block, head, token]
    offset = cache.storage_offset() * size
    if any(stride % width for stride in (*strides, offset)):
        raise SkipGroup("the cache's strides are not whole pieces")
    storage = torch.empty(0, dtype=PIECE_DTYPES[width], device=cache.device)
    storage.set_(
        cache.untyped_storage(),
        offset // width,
        (num_blocks, ratio, heads, tokens, content * size // width),
        [*(stride // width for stride in strides), 1],
    )
    return storage


def _layer_views(
    name: str,
    spec: Any,
    cache: torch.Tensor,
    num_blocks: int,
    placement: tuple[ReplicaKey, int],
    first_head: int,
    order: TokenOrder,
) -> list[LayerView]:
    reason = (order.unreadable or {}).get(name)
    if reason is not None:
        raise SkipGroup(reason)
    check_spec(spec)
    token_bytes = cache.shape[-1] * cache.element_size() if cache.dim() == 4 else 0
    width = piece_width(token_bytes)
    blocks = integer_view(cache, num_blocks, width)
    _, ratio, heads, tokens, _ = blocks.shape
    if ratio * tokens != spec.block_size:
        raise SkipGroup(
            f"{ratio} kernel blocks of {tokens} tokens do not tile a block of "
            f"{spec.block_size}"
        )
    if heads != spec.num_kv_heads:
        raise SkipGroup(f"the cache holds {heads} heads, not {spec.num_kv_heads}")
    key, head_offset = placement
    number, head = layer_number(name), first_head + head_offset
    factors = torch.tensor(
        [_signed(slice_factor(number, head + h)) for h in range(heads)],
        dtype=torch.int64,
        device=cache.device,
    )
    parts = [(blocks, 0)]
    if name in order.transposed_keys:
        parts = _transposed_key_parts(cache, num_blocks, spec, blocks)
    return [
        LayerView(name, part, width, token_bytes // width, factors, key, first)
        for part, first in parts
    ]


def _transposed_key_parts(
    cache: torch.Tensor, num_blocks: int, spec: Any, blocks: torch.Tensor
) -> list[tuple[torch.Tensor, int]]:
    """Views of blocks whose keys are transposed, and their first pieces.

    The first half of a kernel block and head holds its keys as
    ``[head_size, tokens]``, the second half its values token by token (vLLM's
    CPU attention).
    """
    _, ratio, heads, tokens, pieces = blocks.shape
    size, half = cache.element_size(), pieces // 2
    if spec.head_size != spec.head_size_v or blocks.stride(3) != pieces:
        raise SkipGroup("keys are transposed in blocks that are not dense")
    if pieces % 2:
        raise SkipGroup("a piece holds both keys and values, which lie apart")
    elements = integer_view(cache, num_blocks, size)
    keys = elements.as_strided(
        (num_blocks, ratio, heads, tokens, elements.shape[4] // 2),
        (*elements.stride()[:3], 1, tokens),
    )
    values = blocks.as_strided(
        (num_blocks, ratio, heads, tokens, half),
        (*blocks.stride()[:3], half, 1),
        blocks.storage_offset() + tokens * half,
    )
    return [(keys, 0), (values, half)]


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _owners(names: list[str], caches: Mapping[str, torch.Tensor]) -> list[str]:
    """Layer names in (number, name) order, aliases of one cache left out."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    owners = []
    for name in sorted(names, key=lambda n: (layer_number(n), n)):
        cache = caches[name]
        place = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
        if place not in seen:
            seen.add(place)
            owners.append(name)
    return owners


def build_group(
    group_id: int,
    group: Any,
    caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    shard: Sharding,
    order: TokenOrder,
) -> GroupView | None:
    """The views of one KV cache group; None if none of its layers are here.

    Raises:
        SkipGroup: the group cannot be checksummed.
    """
    names = [n for n in group.layer_names if n in caches]
    if not names:
        return None
    if group.host_resident:
        raise SkipGroup("the group is host-resident")
    modules: dict[int, str] = {}
    next_head: dict[str, int] = {}
    layers, fingerprint = [], 0
    for name in _owners(names, caches):
        spec = layer_spec(group.kv_cache_spec, name)
        if spec is None:
            raise SkipGroup(f"layer {name!r} has no KV cache spec")
        number, module = layer_number(name), module_of(name)
        if modules.setdefault(number, module) != module:
            raise SkipGroup(f"layer number {number} stands in two modules")
        check_spec(spec)
        placement = head_placement(spec, shard)
        first = next_head.get(module, 0)
        global_heads = spec.num_kv_heads * (shard.tp_size // placement[0][0])
        next_head[module] = first + global_heads
        if next_head[module] > MAX_KV_HEADS_PER_LAYER:
            raise SkipGroup(f"more than {MAX_KV_HEADS_PER_LAYER} KV heads per layer")
        layers += _layer_views(
            name, spec, caches[name], num_blocks, placement, first, order
        )
        fingerprint += layer_hash(name, spec)
    keys = tuple(sorted({layer.replica_key for layer in layers}))
    block_size = group.kv_cache_spec.block_size
    return GroupView(group_id, block_size, layers, fingerprint & MASK64, keys)
