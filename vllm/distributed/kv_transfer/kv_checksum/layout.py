# SPDX-License-Identifier: Apache-2.0
"""From attention layers' specs and tensors to slices and reasons to skip.

A `LayerView` reads a layer's cache in the checksum's order, token by token,
whatever its memory layout. A group with a layer that cannot be read so is
skipped whole, with its reason: never a silently wrong subset. States are in
`mamba`, groups in `groups`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checksum import ReplicaKey, Skipped, slice_factor

PIECE_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class SkipGroup(Exception):
    """A group cannot be checksummed; the message is the category and the reason."""

    def __init__(self, reason: str, category: Skipped = Skipped.MEMORY_LAYOUT) -> None:
        super().__init__(f"{category.value}: {reason}")


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


SumRows = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds block sums of some layers to `out` (int64 ``(n,)``, of any stride) for `rows`
(int64 ``(3, n)``): block id, position in the request of the block's first token,
number of its tokens that count."""


@dataclass
class LayerSlices:
    """One layer's views and what its group needs to know of them.

    Attributes:
        views: how its bytes are read.
        heads: KV heads (for states: rows) of the unsharded layer.
        identity: what the fingerprint says of it besides its name and spec type.
        equal_tp: parts of other TP sizes do not add up to the same value.
        remarks: parts of the layer that are not covered.
    """

    views: list[LayerView]
    heads: int
    identity: str
    equal_tp: bool = False
    remarks: tuple[str, ...] = ()


@dataclass
class GroupView:
    """The layers of one KV cache group on this worker.

    Attributes:
        block_size: tokens per block; 1 where a block holds a state, which counts
            as one token.
        layers: their views; a layer may have several.
        fingerprint: sum mod 2**64 of the layers' hashes.
        replica_keys: which copies of layers this worker holds.
        equal_tp: comparable only between instances of equal TP size.
        remarks: what of the layers is not covered.
    """

    group_id: int
    block_size: int
    layers: list[LayerView]
    fingerprint: int
    replica_keys: tuple[ReplicaKey, ...]
    equal_tp: bool = False
    remarks: tuple[str, ...] = ()


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
        raise SkipGroup(
            f"layer name {name!r} does not hold exactly one layer number",
            Skipped.LAYER_NAMES,
        )
    return int(numbers[0])


def module_of(name: str) -> str:
    """The layer module a cache belongs to: its name up to the layer number."""
    parts = name.split(".")
    at = next(i for i, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: at + 1])


def layer_hash(name: str, spec: Any, identity: str) -> int:
    """A layer's share of the fingerprint; stable across machines and versions."""
    text = f"{name}|{type(spec).__name__}|{identity}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def layer_spec(group_spec: Any, name: str) -> Any:
    """A layer's own spec, or None for an alias that a uniform-type spec lacks."""
    specs = getattr(group_spec, "kv_cache_specs", None)
    return group_spec if specs is None else specs.get(name)


COVERED_SPECS = frozenset(
    {
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "HiddenStateCacheSpec",
        "MLAAttentionSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
    }
)
"""Spec classes whose blocks hold a request's tokens by position. Of others it is not
known, so they are skipped; docs/design/kv_checksum.md has a row for each."""


def check_spec(spec: Any) -> None:
    """Raise `SkipGroup` unless the spec's blocks hold one state per token."""
    kind = type(spec).__name__
    if kind not in COVERED_SPECS:
        raise SkipGroup(
            f"{kind} blocks are not numbered by token position", Skipped.SPEC_CLASS
        )
    if spec.tokens_per_state != 1:
        raise SkipGroup(f"{spec.tokens_per_state} tokens per state", Skipped.COMPRESSED)
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        raise SkipGroup("KV heads are packed into head slots", Skipped.PACKED_HEADS)


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
        raise SkipGroup(
            "it is not known how many TP ranks hold the same KV head", Skipped.REPLICAS
        )
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


def read_as(
    cache: torch.Tensor,
    width: int,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """View the storage of `cache` as integers of `width` bytes, without a copy.

    Args:
        offset: where to begin, in bytes behind the cache's first byte.
        strides: in bytes.

    Raises:
        SkipGroup: offset or strides are no whole pieces.
    """
    start = cache.storage_offset() * cache.element_size() + offset
    if any(stride % width for stride in (*strides, start)):
        raise SkipGroup("the cache's strides are not whole pieces")
    view = torch.empty(0, dtype=PIECE_DTYPES[width], device=cache.device)
    view.set_(
        cache.untyped_storage(),
        start // width,
        shape,
        [stride // width for stride in strides],
    )
    return view


def block_ratio(cache: torch.Tensor, num_blocks: int) -> int:
    """Kernel blocks per block of a ``[B, H, N, C]`` cache.

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

    Returns shape ``(num_blocks, B / num_blocks, H, N, C bytes / width)``.

    Raises:
        SkipGroup: blocks or strides do not fit.
    """
    ratio = block_ratio(cache, num_blocks)
    size = cache.element_size()
    _, heads, tokens, content = cache.shape
    block, head, token, _ = (stride * size for stride in cache.stride())
    shape = (num_blocks, ratio, heads, tokens, content * size // width)
    return read_as(cache, width, 0, shape, (block * ratio, block, head, token, width))


def slice_factors(layer: int, heads: Iterable[int], device: Any) -> torch.Tensor:
    """The factors of a layer's heads, as signed int64 on `device`."""
    values = [slice_factor(layer, head) for head in heads]
    signed = [v - 2**64 if v >= 2**63 else v for v in values]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def attention_slices(
    name: str,
    spec: Any,
    cache: torch.Tensor,
    num_blocks: int,
    shard: Sharding,
    first_head: int,
    order: TokenOrder,
) -> LayerSlices:
    """Slices of an attention layer; `first_head` numbers its first global head.

    Raises:
        SkipGroup: the layer cannot be checksummed.
    """
    check_spec(spec)
    reason = (order.unreadable or {}).get(name)
    if reason is not None:
        raise SkipGroup(reason, Skipped.BACKEND)
    key, head_offset = head_placement(spec, shard)
    heads = range(
        first_head + head_offset, first_head + head_offset + spec.num_kv_heads
    )
    factors = slice_factors(layer_number(name), heads, cache.device)
    read = _indexer_views if is_quantized_indexer(spec) else _cell_views
    views = read(name, spec, cache, num_blocks, factors, key, order)
    for view in views:
        _, ratio, cache_heads, tokens, _ = view.blocks.shape
        if ratio * tokens != spec.block_size:
            raise SkipGroup(
                f"{ratio} kernel blocks of {tokens} tokens do not tile a block of "
                f"{spec.block_size}"
            )
        if cache_heads != spec.num_kv_heads:
            raise SkipGroup(
                f"the cache holds {cache_heads} heads, not {spec.num_kv_heads}"
            )
    return LayerSlices(
        views,
        spec.num_kv_heads * (shard.tp_size // key[0]),
        str(spec.dtype),
        remarks=_quantization_remarks(spec),
    )


def _cell_views(
    name: str,
    spec: Any,
    cache: torch.Tensor,
    num_blocks: int,
    factors: torch.Tensor,
    key: ReplicaKey,
    order: TokenOrder,
) -> list[LayerView]:
    """A cache whose rows are one token's bytes, or CPU attention's."""
    token_bytes = cache.shape[-1] * cache.element_size() if cache.dim() == 4 else 0
    width = piece_width(token_bytes)
    blocks = integer_view(cache, num_blocks, width)
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


INDEXER_VALUE_BYTES, INDEXER_SCALE_BYTES = 128, 4
"""Per token, in the sparse indexer cache that `_indexer_views` reads."""


def is_quantized_indexer(spec: Any) -> bool:
    """Whether a sparse indexer's blocks hold fp8 values before their scales."""
    from vllm.v1 import kv_cache_interface as interface

    return (
        getattr(spec, "cache_role", None) is interface.SparseCacheRole.INDEXER
        and spec.dtype == torch.uint8
    )


def _indexer_views(
    name: str,
    spec: Any,
    cache: torch.Tensor,
    num_blocks: int,
    factors: torch.Tensor,
    key: ReplicaKey,
    order: TokenOrder,
) -> list[LayerView]:
    """DeepSeek's sparse indexer: a block's fp8 values, then its float32 scales.

    Checked against what vLLM's own Triton writer (`_fp8_quant_and_cache_write` of
    deepseek_v32) leaves in a block, with float32 and with packed ue8m0 scales. A
    token is read as its 128 value bytes, then its 4 scale bytes.

    Raises:
        SkipGroup: another format, or blocks that are not dense.
    """
    ratio = block_ratio(cache, num_blocks)
    cell = INDEXER_VALUE_BYTES + INDEXER_SCALE_BYTES
    _, heads, tokens, content = cache.shape
    if heads != 1 or content != cell:
        raise SkipGroup(f"a sparse indexer cache of {content} bytes per token")
    block, _, token, _ = cache.stride()
    if tokens > 1 and token != cell:
        raise SkipGroup("a sparse indexer cache whose blocks are not dense")
    width, pieces = INDEXER_SCALE_BYTES, cell // INDEXER_SCALE_BYTES
    views = []
    for offset, size in ((0, INDEXER_VALUE_BYTES), (INDEXER_VALUE_BYTES, width)):
        read = read_as(
            cache,
            width,
            offset * tokens,
            (num_blocks, ratio, 1, tokens, size // width),
            (block * ratio, block, block, size, width),
        )
        first = offset // width
        views.append(
            LayerView(name, read, width, pieces, factors, key, first_piece=first)
        )
    return views


def _quantization_remarks(spec: Any) -> tuple[str, ...]:
    """What stays outside a quantized layer's cells: the scales of whole tensors."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    if spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR and "ds_mla" not in (
        getattr(spec, "cache_dtype_str", None) or ""
    ):
        return ("per-tensor KV scales (model weights, outside the cache)",)
    return ()
