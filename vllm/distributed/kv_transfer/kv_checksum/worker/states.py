# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read the states of Mamba-like layers as slices.

A block of such a layer holds no tokens but one int8 page that packs the layer's
states from the page's start. Covered: the first two states, or the only one. Not
covered: further ones (the ring of ReplaySSM) and padding.

Where the layer says how TP splits its states (`MambaSpec.state_splits`), slices
are the states' rows along the split axis (conv channels, then heads or channels of
the temporal state), numbered across the states as one unsharded layer would have
them; `row` takes the place of `head` in a factor, and within a row elements are
numbered in the order of the other dims. So the parts of all ranks add up to one
value, whatever the TP size and the conv state's layout. Where it does not say, the
covered bytes are one slice per TP shard, comparable at equal TP sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import ReplicaKey, Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerSlices,
    LayerView,
    Sharding,
    SkipGroup,
    block_ratio,
    layer_number,
    piece_width,
    read_as,
    slice_factors,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MambaStateSplit

COVERED_STATES = 2


def is_state_spec(spec: KVCacheSpec) -> bool:
    """Tell whether blocks of this spec hold states instead of tokens."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


@dataclass
class _Rows:
    """Neighbouring rows with consecutive numbers and one replica key.

    `first_local` is the first row's index along the split axis on this rank.
    """

    first_local: int
    numbers: range
    key: ReplicaKey


def state_slices(
    name: str,
    spec: MambaSpec,
    cache: torch.Tensor,
    num_blocks: int,
    shard: Sharding,
    first_row: int,
) -> LayerSlices:
    """Build the slices of a layer's states.

    Args:
        name: the layer's name.
        spec: the layer's own KV cache spec.
        cache: the layer's ``[B, 1, 1, page bytes]`` cache.
        num_blocks: blocks in the cache.
        shard: this rank's part of the model.
        first_row: number of the layer's first global row.

    Raises:
        SkipGroup: the layer cannot be summed.

    """
    states = list(zip(spec.shapes, spec.dtypes, strict=True))
    covered = states[:COVERED_STATES]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in covered)
    ratio, (heads, tokens, content) = block_ratio(cache, num_blocks), cache.shape[1:]
    if (ratio, heads, tokens) != (1, 1, 1) or content * cache.element_size() < size:
        raise SkipGroup("a block is no page that holds the layer's states")
    if spec.state_splits is None:
        slices = _whole_slices(name, spec, cache, covered, size, shard, first_row)
    else:
        slices = _split_slices(name, spec, cache, covered, shard, first_row)
    if len(states) > COVERED_STATES:
        slices.remarks = (f"states beyond the first {COVERED_STATES} of a layer",)
    return slices


def _whole_slices(
    name: str,
    spec: MambaSpec,
    cache: torch.Tensor,
    covered: Sequence[tuple[tuple[int, ...], torch.dtype]],
    size: int,
    shard: Sharding,
    first_row: int,
) -> LayerSlices:
    """Build one slice per TP shard, of all `size` covered bytes."""
    width = piece_width(size)
    replicas = shard.tp_size if spec.tp_replicated else 1
    page = cache.stride(0) * cache.element_size()
    shape = (cache.shape[0], 1, 1, 1, size // width)
    blocks = read_as(cache, width, 0, shape, (page, page, page, page, width))
    row = first_row + shard.tp_rank // replicas
    factors = slice_factors(layer_number(name), [row], cache.device)
    key = (replicas, shard.tp_rank % replicas)
    view = LayerView(name, blocks, width, size // width, factors, key)
    return LayerSlices(
        [view],
        shard.tp_size // replicas,
        "".join(f"{[*map(int, shape)]}{dtype};" for shape, dtype in covered),
        equal_tp=not spec.tp_replicated,
    )


def _split_slices(
    name: str,
    spec: MambaSpec,
    cache: torch.Tensor,
    covered: Sequence[tuple[tuple[int, ...], torch.dtype]],
    shard: Sharding,
    first_row: int,
) -> LayerSlices:
    """Build slices by global rows, as the layer's state splits tell."""
    splits = spec.state_splits
    assert splits is not None
    if len(splits) != len(covered):
        raise SkipGroup(
            f"{len(splits)} splits for {len(covered)} states",
            Skipped.STATE_SPLIT,
        )
    slices = LayerSlices([], 0, "")
    page, offset = cache.stride(0) * cache.element_size(), 0
    for (shape, dtype), split in zip(covered, splits, strict=True):
        width, elements = dtype.itemsize, math.prod(shape)
        if width not in (2, 4, 8):
            raise SkipGroup(f"states of {dtype} elements")
        row_step, step = _steps(shape, split)
        per_row = elements // shape[split.axis]
        runs, rows = _global_rows(split.segments, shard, first_row + slices.heads)
        for run in runs:
            blocks = read_as(
                cache,
                width,
                offset + run.first_local * row_step * width,
                (cache.shape[0], 1, len(run.numbers), 1, per_row),
                (page, page, row_step * width, width, step * width),
            )
            factors = slice_factors(layer_number(name), run.numbers, cache.device)
            slices.views.append(
                LayerView(name, blocks, width, per_row, factors, run.key)
            )
        slices.heads += rows
        slices.identity += _identity(shape, dtype, split, shard)
        offset += elements * width
    return slices


def _steps(shape: tuple[int, ...], split: MambaStateSplit) -> tuple[int, int]:
    """Return the steps between rows and between a row's elements, in elements.

    Raises:
        SkipGroup: the split does not match the shape, or no stride reads a row.

    """
    if not 0 <= split.axis < len(shape) or shape[split.axis] != sum(
        size for size, _ in split.segments
    ):
        raise SkipGroup(
            f"state split {split} does not match the shape {shape}", Skipped.STATE_SPLIT
        )
    if split.axis == 0:
        return math.prod(shape[1:]), 1
    if split.axis == len(shape) - 1:
        return 1, shape[-1]
    raise SkipGroup(
        f"a state split along axis {split.axis} of {shape}", Skipped.STATE_SPLIT
    )


def _global_rows(
    segments: Sequence[tuple[int, int]], shard: Sharding, first_row: int
) -> tuple[list[_Rows], int]:
    """Return this rank's rows in runs, and the number of rows of all ranks.

    Args:
        segments: (local size, ranks that hold the same rows) along the split axis.
        shard: this rank's part of the model.
        first_row: number of the first row, over all states of the layer.

    Raises:
        SkipGroup: replicas do not divide the TP ranks.

    """
    runs: list[_Rows] = []
    local = total = 0
    for size, replicas in segments:
        if replicas < 1 or shard.tp_size % replicas:
            raise SkipGroup(
                f"{replicas} replicas of rows on {shard.tp_size} TP ranks",
                Skipped.STATE_SPLIT,
            )
        first = first_row + total + shard.tp_rank // replicas * size
        key = (replicas, shard.tp_rank % replicas)
        if runs and runs[-1].key == key and runs[-1].numbers.stop == first:
            runs[-1].numbers = range(runs[-1].numbers.start, first + size)
        else:
            runs.append(_Rows(local, range(first, first + size), key))
        local += size
        total += size * (shard.tp_size // replicas)
    return runs, total


def _identity(
    shape: tuple[int, ...], dtype: torch.dtype, split: MambaStateSplit, shard: Sharding
) -> str:
    """Describe a state as an unsharded layer has it: segments, other dims, dtype."""
    segments = [size * shard.tp_size // replicas for size, replicas in split.segments]
    others = [dim for axis, dim in enumerate(shape) if axis != split.axis]
    return f"{segments}{others}{dtype};"
