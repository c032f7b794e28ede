# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read attention layers' caches as slices, in the order of tokens.

Dense keys and values of one dtype are rows: per head, one token's bytes after
another's. A block with any other content is read only if its layout is known to a
table here or in `formats`, by spec class, quantization mode and attention backend;
each was seen written by vLLM's own writer, token by token
(`test_writers.py`, docs/design/kv_checksum_evidence.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import (
    LayerFormat,
    TokenOrder,
    element_format,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerSlices,
    LayerView,
    Sharding,
    SkipGroup,
    block_ratio,
    head_placement,
    integer_view,
    is_dcp_sharded,
    layer_number,
    piece_width,
    read_as,
    slice_factors,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )

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

_MLA = frozenset({"MLAAttentionSpec"})
_KEYS_AND_VALUES = COVERED_SPECS - {
    "HiddenStateCacheSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
}
_SCALES_PER_TOKEN_AND_HEAD = {
    "INT8_PER_TOKEN_HEAD": 1,
    "FP8_PER_TOKEN_HEAD": 1,
    "INT4_PER_TOKEN_HEAD": 2,
}
"""Values per byte; behind the keys and behind the values lies a float32 scale."""

_INDEXER_SEGMENTS = (128, 4)
"""DeepSeek's sparse indexer: a token's fp8 values and its scales, in bytes."""

_FP4_INDEXER_SEGMENTS = (64, 4)
"""Likewise with mxfp4 values."""

_V4_SEGMENTS = (576, 8)
"""DeepSeek-V4's ``fp8_ds_mla``: a token's fp8 and bf16 values, and its scales."""

_V41_LATENTS = {"fp8_ds_mla": 528, "nvfp4_ds_mla": 288}
"""Bytes of DeepSeek-V4.1's latents: values, and right behind them their scales."""

_DS_MLA = frozenset(_V41_LATENTS)
_SEGMENTED = (TokenOrder.INDEXER, TokenOrder.V4_LATENTS)
_BY_SPEC = LayerFormat()


def attention_slices(
    name: str,
    spec: AttentionSpec,
    cache: torch.Tensor,
    num_blocks: int,
    shard: Sharding,
    first_head: int,
    layer: LayerFormat,
) -> LayerSlices:
    """Build the slices of an attention layer.

    Args:
        name: the layer's name.
        spec: the layer's own KV cache spec.
        cache: the layer's ``[B, H, N, C]`` cache.
        num_blocks: blocks in the cache.
        shard: this rank's part of the model.
        first_head: number of the layer's first global head.
        layer: how the layer keeps its cache.

    Raises:
        SkipGroup: the layer cannot be summed.

    """
    order = token_order(spec, layer)
    key, head_offset = head_placement(spec, shard, layer.shards)
    heads = range(
        first_head + head_offset, first_head + head_offset + spec.num_kv_heads
    )
    factors = slice_factors(layer_number(name), heads, cache.device)
    width, pieces, parts = _parts(spec, cache, num_blocks, order, layer.page_states)
    _check_shape(spec, cache, num_blocks)
    views = [
        LayerView(
            name,
            part,
            width,
            pieces,
            factors,
            key,
            first,
            spec.tokens_per_state,
        )
        for part, first in parts
    ]
    same_heads = key[0] * (shard.context.size if is_dcp_sharded(spec) else 1)
    total_heads = spec.num_kv_heads * (shard.tp_size // same_heads)
    return LayerSlices(
        views,
        total_heads,
        _identity(spec, layer, total_heads),
        remarks=_quantization_remarks(spec, layer),
    )


def _identity(spec: AttentionSpec, layer: LayerFormat, heads: int) -> str:
    """Describe how an unsharded layer's bytes are read, for the fingerprint.

    The text is the same whatever the TP size and memory layout.
    """
    stored_as = getattr(spec, "cache_dtype_str", None)
    elements = layer.cache_dtype or element_format(stored_as) or str(spec.dtype)
    sizes = f"{heads}x{spec.head_size}+{spec.head_size_v}"
    per_state = spec.tokens_per_state
    states = "" if per_state == 1 else f"|{per_state} tokens per state"
    return f"{elements}|{kind_of_cells(spec, layer)}|{sizes}{states}"


# ---- what is known of a layer's blocks


def token_order(spec: AttentionSpec, layer: LayerFormat) -> TokenOrder:
    """Return the order in which a layer's blocks hold its tokens' bytes.

    Raises:
        SkipGroup: they hold no tokens by position, or the order is not known.

    """
    kind = type(spec).__name__
    if kind not in COVERED_SPECS:
        raise SkipGroup(
            f"{kind} blocks are not numbered by token position", Skipped.SPEC_CLASS
        )
    if spec.num_head_slots is not None and layer.order is not TokenOrder.KV_PLANES:
        raise SkipGroup(_head_slots_problem(layer), Skipped.PACKED_HEADS)
    if layer.unknown is not None:
        raise SkipGroup(layer.unknown, Skipped.BACKEND)
    cells = kind_of_cells(spec, layer)
    _check_seen(spec, layer, cells)
    order = _cell_order(spec, cells)
    if order is None:
        raise SkipGroup(
            f"{spec.state_content_size_bytes} bytes of {spec.dtype} per token and "
            f"head, {cells}, in a format that is not known",
            Skipped.PACKED_CELLS,
        )
    if layer.page_states is not None and order in _SEGMENTED:
        _check_pages(spec, layer.page_states)
    if layer.order is None or layer.order is order:
        return order
    if order is not TokenOrder.ROWS or spec.state_content_bytes is not None:
        raise SkipGroup(f"{layer.backend} with packed cells", Skipped.BACKEND)
    if layer.order is TokenOrder.KV_PLANES:
        raise SkipGroup(f"{layer.backend} without its head slots", Skipped.BACKEND)
    return layer.order


def _head_slots_problem(layer: LayerFormat) -> str:
    """Return why KV heads that are packed into head slots are not read."""
    problem = "KV heads are packed into head slots"
    if layer.head_slots is None:
        return problem
    return f"{problem}; of {layer.backend}: {layer.head_slots}"


def _check_pages(spec: AttentionSpec, page_states: int) -> None:
    """Raise `SkipGroup` unless kernel blocks fill a block, in which segments lie."""
    # vLLM splits packed blocks of compressed caches alone.
    if spec.tokens_per_state == 1 or spec.num_states % page_states:
        raise SkipGroup(
            f"kernel blocks of {page_states} are not those of the cache",
            Skipped.BACKEND,
        )


def _check_seen(spec: AttentionSpec, layer: LayerFormat, cells: str) -> None:
    """Raise `SkipGroup` unless the backend was seen writing cells and states alike."""
    per_state = spec.tokens_per_state
    if per_state != 1 and spec.block_size % per_state:
        raise SkipGroup(
            f"{per_state} tokens per state do not divide a block", Skipped.COMPRESSED
        )
    if layer.cells is None or cells in (
        layer.cells if per_state == 1 else layer.compressed
    ):
        return
    what = f"{layer.backend} was not seen writing {cells} cells"
    if per_state == 1:
        raise SkipGroup(what, Skipped.BACKEND)
    raise SkipGroup(f"{what} of {per_state} tokens each", Skipped.COMPRESSED)


def kind_of_cells(spec: AttentionSpec, layer: LayerFormat = _BY_SPEC) -> str:
    """Return how a token's bytes are quantized: a mode's name, or a special format."""
    from vllm.v1 import kv_cache_interface as interface

    if layer.kind is not None:
        return layer.kind
    role = getattr(spec, "cache_role", None)
    if role is interface.SparseCacheRole.INDEXER and spec.dtype == torch.uint8:
        return "INDEXER"
    stored_as = getattr(spec, "cache_dtype_str", None)
    if stored_as is None:
        return spec.kv_quant_mode.name
    if stored_as in _DS_MLA:
        return stored_as.upper()
    # A merged SlidingWindowMLASpec has lost its mode.
    return interface.get_kv_quant_mode(stored_as).name


def _cell_order(spec: AttentionSpec, cells: str) -> TokenOrder | None:
    """Return the order of a spec's cells of a kind; None if it is not known."""
    kind, content = type(spec).__name__, spec.state_content_bytes
    if spec.num_head_slots is not None:
        return _plane_order(spec, cells)
    if cells.lower() in _DS_MLA:
        return _ds_mla_order(cast("MLAAttentionSpec | SlidingWindowMLASpec", spec))
    if cells == "INDEXER" and content is None and kind in _MLA:
        return TokenOrder.INDEXER
    if cells == "SUMMARY" and content is None and spec.dtype == torch.uint8:
        return TokenOrder.ROWS
    if cells == "NONE" and content is None and spec.dtype.is_floating_point:
        return TokenOrder.ROWS
    if cells == "FP8_PER_TENSOR" and content is None and spec.dtype.itemsize == 1:
        return TokenOrder.ROWS
    if cells in _SCALES_PER_TOKEN_AND_HEAD and kind in _KEYS_AND_VALUES:
        values = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        if content == values // _SCALES_PER_TOKEN_AND_HEAD[cells] + 8:
            return TokenOrder.ROWS
    return None


def _plane_order(spec: AttentionSpec, cells: str) -> TokenOrder | None:
    """Return the order of a plane of keys and one of values; None if it is not known.

    A plane's row is all heads of a token, keys or values.
    """
    row = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    dense = cells == "NONE" and spec.dtype.is_floating_point
    fp8 = cells == "FP8_PER_TENSOR" and spec.dtype.itemsize == 1
    if (
        (dense or fp8)
        and spec.num_head_slots == 2
        and spec.state_content_bytes == row
        and spec.head_size == spec.head_size_v
        and type(spec).__name__ in _KEYS_AND_VALUES
    ):
        return TokenOrder.KV_PLANES
    return None


def _ds_mla_order(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> TokenOrder | None:
    """Return the order of DeepSeek's packed latents; None if it is not known.

    V3.2's and V4.1's are rows, V4's are stored apart from their scales.
    """
    kind, version = type(spec).__name__, spec.model_version
    content = spec.state_content_bytes if spec.dtype == torch.uint8 else None
    if version is None and content == 656 and kind in _MLA:
        return TokenOrder.ROWS
    if version == "deepseek_v4" and content == sum(_V4_SEGMENTS):
        return TokenOrder.V4_LATENTS
    if version == "deepseek_v4" and content == _V41_LATENTS[str(spec.cache_dtype_str)]:
        return TokenOrder.ROWS
    return None


def _quantization_remarks(spec: AttentionSpec, layer: LayerFormat) -> tuple[str, ...]:
    """Name what a quantized layer keeps outside its cells: scales of whole tensors."""
    if kind_of_cells(spec, layer) == "FP8_PER_TENSOR":
        return ("per-tensor KV scales (model weights, outside the cache)",)
    return ()


# ---- how it is read

_Parts = list[tuple[torch.Tensor, int]]
"""Views of blocks, each with the number of its first piece within a token."""


def _parts(
    spec: AttentionSpec,
    cache: torch.Tensor,
    num_blocks: int,
    order: TokenOrder,
    page_states: int | None,
) -> tuple[int, int, _Parts]:
    """Return the bytes of a piece, the pieces of a token, and the views of them.

    Args:
        spec: the layer's own KV cache spec.
        cache: the layer's ``[B, H, N, C]`` cache.
        num_blocks: blocks in the cache.
        order: the order in which a block holds its tokens' bytes.
        page_states: see `LayerFormat`.

    Raises:
        SkipGroup: the cache is not laid out as the order needs it.

    """
    ratio = block_ratio(cache, num_blocks)
    if order is TokenOrder.INDEXER:
        fp4 = spec.head_size == sum(_FP4_INDEXER_SEGMENTS)
        sizes = _FP4_INDEXER_SEGMENTS if fp4 else _INDEXER_SEGMENTS
        return _segments(cache, ratio, sizes, page_states)
    if order is TokenOrder.V4_LATENTS:
        return _segments(cache, ratio, _V4_SEGMENTS, page_states)
    if order is TokenOrder.KV_PLANES:
        return _planes(spec, cache, ratio)
    token_bytes = cache.shape[-1] * cache.element_size()
    width = piece_width(token_bytes)
    blocks = integer_view(cache, num_blocks, width)
    if order is TokenOrder.ROWS:
        return width, token_bytes // width, [(blocks, 0)]
    if spec.head_size != spec.head_size_v or blocks.stride(3) != blocks.shape[4]:
        raise SkipGroup("CPU attention's blocks are not dense")
    if blocks.shape[4] % 2:
        raise SkipGroup("a piece holds both keys and values, which lie apart")
    if order is TokenOrder.CPU_VECTORS:
        return width, token_bytes // width, _cpu_vectors(cache, num_blocks, blocks)
    return width, token_bytes // width, _cpu_tiles(cache, ratio, width)


def _check_shape(spec: AttentionSpec, cache: torch.Tensor, num_blocks: int) -> None:
    """Raise `SkipGroup` unless the cache has the spec's heads and block size."""
    total, heads, tokens, _ = cache.shape
    if total // num_blocks * tokens * spec.tokens_per_state != spec.block_size:
        raise SkipGroup(
            f"{total // num_blocks} kernel blocks of {tokens} tokens do not tile a "
            f"block of {spec.block_size}"
        )
    if heads != spec.num_heads:
        raise SkipGroup(f"the cache holds {heads} heads, not {spec.num_heads}")


def _cpu_vectors(cache: torch.Tensor, num_blocks: int, blocks: torch.Tensor) -> _Parts:
    """View CPU attention's ``vec`` and ``vec16``: keys transposed, values in rows.

    The first half of a kernel block and head holds its keys as
    ``[head_size, tokens]``, the second half its values token by token.
    """
    _, ratio, heads, tokens, pieces = blocks.shape
    half = pieces // 2
    elements = integer_view(cache, num_blocks, cache.element_size())
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


_TILE = 16
"""Tokens of a tile of keys, and elements of one of values."""


def _cpu_tiles(cache: torch.Tensor, ratio: int, width: int) -> _Parts:
    """View CPU attention's ``amx``: tiles of pairs, as the matrix unit takes them.

    Keys lie as ``[tokens / 16, head_size / 2, 16 tokens, 2 elements]``, values
    behind them as ``[head_size / 16, tokens / 2, 16 elements, 2 tokens]``. A tile of
    16 or 2 tokens stands where kernel blocks do; values take a view per 16 elements.

    Raises:
        SkipGroup: tiles do not fill the block, or a block is several kernel blocks.

    """
    total, heads, tokens, content = cache.shape
    size, head_size = cache.element_size(), content // 2
    if ratio != 1 or tokens % 32 or head_size % 32:
        raise SkipGroup("CPU attention's tiles do not fill a block", Skipped.BACKEND)
    block, head = (stride * size for stride in cache.stride()[:2])
    pair = 2 * size
    keys = read_as(
        cache,
        pair,
        0,
        (total, tokens // _TILE, heads, _TILE, head_size // 2),
        (block, _TILE * head_size * size, head, pair, _TILE * pair),
    )
    parts = [(keys, 0)]
    for first in range(0, head_size, _TILE):
        values = read_as(
            cache,
            size,
            (tokens * head_size + first * tokens) * size,
            (total, tokens // 2, heads, 2, _TILE),
            (block, _TILE * pair, head, size, pair),
        )
        parts.append((values, (head_size + first) * size // width))
    return parts


def _segments(
    cache: torch.Tensor, ratio: int, sizes: Sequence[int], page_tokens: int | None
) -> tuple[int, int, _Parts]:
    """View blocks that hold a segment of every token, then the next of every token.

    Args:
        cache: the layer's ``[B, H, N, C]`` cache.
        ratio: kernel blocks per block.
        sizes: bytes of a token's segments, in order.
        page_tokens: tokens of a part of the block that is laid out so, one part
            behind the other; None for the whole.

    Raises:
        SkipGroup: another format, or blocks that are not dense.

    """
    total, heads, tokens, content = cache.shape
    cell, size = sum(sizes), cache.element_size()
    if heads != 1 or content * size != cell:
        raise SkipGroup(f"{heads} heads of {content * size} bytes, not {cell}")
    block, _, token, _ = (stride * size for stride in cache.stride())
    if tokens > 1 and token != cell:
        raise SkipGroup("a token's bytes lie apart in blocks that are not dense")
    width = min(piece_width(part) for part in sizes)
    page, number = block, ratio
    if page_tokens is not None:
        if ratio != 1:
            raise SkipGroup("kernel blocks are split once more")
        page, number = page_tokens * cell, tokens // page_tokens
        tokens = page_tokens
    parts, before = [], 0
    for part in sizes:
        read = read_as(
            cache,
            width,
            before * tokens,
            (total // ratio, number, 1, tokens, part // width),
            (block * ratio, page, page, part, width),
        )
        parts.append((read, before // width))
        before += part
    return width, cell // width, parts


def _planes(
    spec: AttentionSpec, cache: torch.Tensor, ratio: int
) -> tuple[int, int, _Parts]:
    """View a head slot of keys and one of values, each head of them as one slice.

    Pieces are numbered as in a dense cell, a head's keys before its values, so the
    sums equal those of any backend that stores such cells.

    Raises:
        SkipGroup: a piece holds both keys and values.

    """
    total, _, tokens, _ = cache.shape
    size, heads = cache.element_size(), spec.num_kv_heads
    half = spec.head_size * size
    width = piece_width(2 * half)
    if half % width:
        raise SkipGroup("a piece holds both keys and values, which lie apart")
    block, plane, token, _ = (stride * size for stride in cache.stride())
    parts = []
    for slot, first in enumerate((0, half // width)):
        rows = read_as(
            cache,
            width,
            slot * plane,
            (total // ratio, ratio, heads, tokens, half // width),
            (block * ratio, block, half, token, width),
        )
        parts.append((rows, first))
    return width, 2 * half // width, parts
