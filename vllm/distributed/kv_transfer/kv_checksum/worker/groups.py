# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the views of KV cache groups: choose and number layers, or skip the group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    MASK64,
    MAX_KV_HEADS_PER_LAYER,
    STATE_BLOCK_SIZE,
    Skipped,
    is_ring_spec,
    unit_size,
)
from vllm.distributed.kv_transfer.kv_checksum.worker import rings, states
from vllm.distributed.kv_transfer.kv_checksum.worker.attention import attention_slices
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import LayerFormat
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    ContextShard,
    GroupView,
    LayerSlices,
    Ring,
    Sharding,
    SkipGroup,
    is_dcp_sharded,
    layer_hash,
    layer_number,
    layer_spec,
    module_of,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
    )

_BY_SPEC = LayerFormat()


def build_group(
    group_id: int,
    group: KVCacheGroupSpec,
    caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    shard: Sharding,
    formats: Mapping[str, LayerFormat],
) -> GroupView | None:
    """Build the views of one KV cache group; return None if no layers of it are here.

    A worker's group names the layers of this worker alone, aliases of shared caches
    included, so each of them must have a cache.

    Several caches of one layer module number their heads one after another in
    layer-name order, the next behind the global heads of the one before.

    Args:
        group_id: the group's id.
        group: the worker's description of the group.
        caches: per layer name, its ``[B, H, N, C]`` cache.
        num_blocks: blocks in each cache.
        shard: this rank's part of the model.
        formats: per layer name, how the layer keeps its cache; a layer that is
            missing is read by its spec alone.

    Raises:
        SkipGroup: the group cannot be summed.

    """
    names = group.layer_names
    if not names:
        return None
    if group.host_resident:
        raise SkipGroup("the group is host-resident", Skipped.HOST_RESIDENT)
    if missing := [name for name in names if name not in caches]:
        raise SkipGroup(f"layer {missing[0]!r} has no cache here", Skipped.NO_CACHE)
    specs = _owner_specs(names, group.kv_cache_spec, caches)
    if len({_kind(spec) for spec in specs.values()}) > 1:
        raise SkipGroup("the group mixes states and tokens", Skipped.STATES_AND_TOKENS)
    context = _context_shard(group.kv_cache_spec, shard)
    next_head: dict[str, int] = {}
    layers: list[LayerSlices] = []
    fingerprint = 0
    for name, spec in specs.items():
        first = next_head.get(module_of(name), 0)
        cache = caches[name]
        if states.is_state_spec(spec):
            state_spec = cast("MambaSpec", spec)
            layer = states.state_slices(
                name, state_spec, cache, num_blocks, shard, first
            )
        else:
            attention_spec = cast("AttentionSpec", spec)
            layout = formats.get(name, _BY_SPEC)
            build = rings.ring_slices if is_ring_spec(spec) else attention_slices
            layer = build(name, attention_spec, cache, num_blocks, shard, first, layout)
        next_head[module_of(name)] = first + layer.heads
        if first + layer.heads > MAX_KV_HEADS_PER_LAYER:
            raise SkipGroup(
                f"more than {MAX_KV_HEADS_PER_LAYER} KV heads or state rows per layer",
                Skipped.TOO_MANY_HEADS,
            )
        layers.append(layer)
        fingerprint += layer_hash(name, spec, layer.identity)
    views = [view for layer in layers for view in layer.views]
    ring = _common_ring(layers)
    return GroupView(
        group_id,
        _block_size(group.kv_cache_spec.block_size, specs.values(), ring),
        views,
        fingerprint & MASK64,
        tuple(sorted({view.replica_key for view in views})),
        equal_tp=any(layer.equal_tp for layer in layers),
        remarks=tuple(sorted({r for layer in layers for r in layer.remarks})),
        ring=ring,
        context=context,
    )


def _context_shard(spec: KVCacheSpec, shard: Sharding) -> ContextShard:
    """Return which tokens of a request a group's blocks hold on this worker.

    Raises:
        SkipGroup: the tokens of a block do not follow one another, or no units of them
            are whole, or it is not known what the ranks hold.

    """
    from vllm.v1.kv_cache_interface import iter_layer_specs

    context, size = shard.context, spec.block_size
    if not is_dcp_sharded(spec) or context.size == 1:
        if shard.over_pcp:
            raise SkipGroup("what PCP ranks hold of it is not known", Skipped.REPLICAS)
        return ContextShard()
    if any(map(is_ring_spec, iter_layer_specs(spec))):
        raise SkipGroup("rings under context parallelism", Skipped.RINGS)
    if context.interleave != size:
        raise SkipGroup(
            f"context parallelism deals out {context.interleave} tokens at a time, "
            f"blocks hold {size}",
        )
    if unit_size(size) != unit_size(size * context.size):
        raise SkipGroup(
            f"units of {unit_size(size * context.size)} tokens do not lie in blocks "
            f"of {size} on one rank"
        )
    return context


def _kind(spec: KVCacheSpec) -> tuple[bool, bool]:
    """Tell states, rings and tokens apart."""
    return states.is_state_spec(spec), is_ring_spec(spec)


def _common_ring(layers: Sequence[LayerSlices]) -> Ring | None:
    """Return the ring that a group's blocks hold, None if they hold none.

    Raises:
        SkipGroup: rings of one group differ, so that they have no common slots.

    """
    found = {layer.ring for layer in layers}
    if len(found) > 1:
        raise SkipGroup("the group's rings differ", Skipped.RINGS)
    return next(iter(found))


def _block_size(
    block_size: int, specs: Iterable[KVCacheSpec], ring: Ring | None
) -> int:
    """Return the tokens that a block of the group counts as."""
    if ring is not None:
        return ring.slots
    if any(states.is_state_spec(spec) for spec in specs):
        return STATE_BLOCK_SIZE
    return block_size


def _owner_specs(
    names: list[str], group_spec: KVCacheSpec, caches: Mapping[str, torch.Tensor]
) -> dict[str, KVCacheSpec]:
    """Return specs by layer name, in (number, name) order, without aliases.

    An alias shares a cache with a layer that comes before it.

    Raises:
        SkipGroup: two modules have one layer number, or a layer has no spec.

    """
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    modules: dict[int, str] = {}
    specs: dict[str, KVCacheSpec] = {}
    for name in sorted(names, key=lambda n: (layer_number(n), n)):
        cache = caches[name]
        place = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
        if place in seen:
            continue
        seen.add(place)
        number, module = layer_number(name), module_of(name)
        if modules.setdefault(number, module) != module:
            raise SkipGroup(
                f"layer number {number} stands in two modules", Skipped.LAYER_NAMES
            )
        spec = layer_spec(group_spec, name)
        if spec is None:
            raise SkipGroup(f"layer {name!r} has no KV cache spec", Skipped.SPEC_CLASS)
        specs[name] = spec
    return specs


def describe_group(group: KVCacheGroupSpec) -> str:
    """Format a group's spec types and number of layers for log lines."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    specs = iter_layer_specs(group.kv_cache_spec)
    kinds = sorted({type(spec).__name__ for spec in specs})
    return f"{'/'.join(kinds)}, {len(group.layer_names)} layers"
