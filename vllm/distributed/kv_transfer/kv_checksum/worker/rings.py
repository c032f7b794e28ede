# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read rings as slices: blocks that keep a request's last tokens, by position.

A layer that compresses groups of tokens keeps the raw rows of the group that is not
complete in one block per request (`CircularBufferSpec`), each token's row in slot
``position % slots``. A token is read as in other caches; `Ring.counted` tells which
of them count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import LayerFormat
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerSlices,
    LayerView,
    Ring,
    Sharding,
    SkipGroup,
    block_ratio,
    head_placement,
    integer_view,
    layer_number,
    piece_width,
    read_as,
    slice_factors,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


def ring_slices(
    name: str,
    spec: AttentionSpec,
    cache: torch.Tensor,
    num_blocks: int,
    shard: Sharding,
    first_head: int,
    layer: LayerFormat,
) -> LayerSlices:
    """Build the slices of a layer's rings.

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
    _check_cells(spec, layer)
    blocks = _slots(spec, cache, num_blocks, layer)
    width = piece_width(blocks.shape[4] * blocks.element_size())
    blocks = blocks.view(_INTEGERS[width])
    key, head_offset = head_placement(spec, shard, layer.shards)
    first = first_head + head_offset
    heads = range(first, first + spec.num_kv_heads)
    factors = slice_factors(layer_number(name), heads, cache.device)
    view = LayerView(name, blocks, width, blocks.shape[4], factors, key, unit_tokens=1)
    total_heads = spec.num_kv_heads * (shard.tp_size // key[0])
    row = blocks.shape[4] * width
    return LayerSlices(
        [view],
        total_heads,
        # The number of slots is compared as the block size is.
        f"{spec.dtype}|RING of {layer.ring_group}|{total_heads}x{row} bytes",
        ring=Ring(blocks.shape[3], layer.ring_group),
    )


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _check_cells(spec: AttentionSpec, layer: LayerFormat) -> None:
    """Raise `SkipGroup` unless the ring's rows are dense and were seen written."""
    if layer.unknown is not None:
        raise SkipGroup(layer.unknown, Skipped.BACKEND)
    if layer.cells is not None and layer.ring_group is None:
        raise SkipGroup(f"{layer.backend} was not seen writing rings", Skipped.BACKEND)
    packed = (spec.num_head_slots, spec.state_content_bytes)
    quantized = spec.kv_quant_mode.value or not spec.dtype.is_floating_point
    if packed != (None, None) or quantized or spec.tokens_per_state != 1:
        raise SkipGroup("a ring of packed or quantized rows", Skipped.PACKED_CELLS)


def _slots(
    spec: AttentionSpec, cache: torch.Tensor, num_blocks: int, layer: LayerFormat
) -> torch.Tensor:
    """View a cache as int16 ``(blocks, 1, heads, slots, row)``.

    Raises:
        SkipGroup: a block is no whole ring.

    """
    if block_ratio(cache, num_blocks) != 1:
        raise SkipGroup("a ring is split into kernel blocks")
    _, heads, tokens, content = cache.shape
    if (heads, tokens) != (spec.num_kv_heads, spec.block_size):
        raise SkipGroup(
            f"a ring of {tokens} tokens and {heads} heads, not {spec.block_size} "
            f"and {spec.num_kv_heads}"
        )
    if layer.ring_row is None:
        return integer_view(cache, num_blocks, 2)
    size = cache.element_size()
    page = math.prod(cache.shape[1:]) * size
    if page % layer.ring_row or not cache[0].is_contiguous():
        raise SkipGroup("a ring's page is no whole number of rows")
    block, row = cache.stride(0) * size, layer.ring_row
    shape = (num_blocks, 1, 1, page // row, row // 2)
    return read_as(cache, 2, 0, shape, (block, page, page, row, 2))
