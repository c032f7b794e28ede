# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How tensor parallelism splits the states of Mamba-like layers.

Each function ending in ``_state_splits`` tells it for the states that the shape
function of the same name in `MambaStateShapeCalculator` describes, or returns None
where TP does not divide the sizes. Nothing here depends on the rank.
"""

from typing import Any

from vllm.v1.kv_cache_interface import MambaStateSplit

StateSplits = tuple[MambaStateSplit, ...]


def of_layer(layer: Any) -> StateSplits | None:
    """What a layer tells of its states; None if it tells nothing."""
    tell = getattr(layer, "get_state_splits", None)
    return None if tell is None else tell()


def mamba1_state_splits(tp_size: int, intermediate_size: int) -> StateSplits | None:
    """The conv state is [x], the temporal state [channels]."""
    channels = _share(intermediate_size, tp_size)
    if channels is None:
        return None
    return _split(((channels, 1),), channels)


def mamba2_state_splits(
    tp_size: int,
    intermediate_size: int,
    n_groups: int | None,
    num_heads: int,
    state_size: int,
) -> StateSplits | None:
    """The conv state is [x, B, C], the temporal state [heads].

    A single group's B and C are on every rank.

    Args:
        tp_size: number of tensor-parallel ranks.
        intermediate_size: channels of all ranks.
        n_groups: groups of the model, before any are added for TP; None: not known.
        num_heads: heads of all ranks.
        state_size: size of a head's state, per group.

    """
    if n_groups is None:
        return None
    inner, heads = _share(intermediate_size, tp_size), _share(num_heads, tp_size)
    groups, replicas = _share(n_groups, tp_size), 1
    if n_groups == 1:
        groups, replicas = 1, tp_size
    if inner is None or heads is None or groups is None:
        return None
    bc = (groups * state_size, replicas)
    return _split(((inner, 1), bc, bc), heads)


def gated_delta_net_state_splits(
    tp_size: int, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> StateSplits | None:
    """The conv state is [Q, K, V], the temporal state [value heads]."""
    k_heads, v_heads = _share(num_k_heads, tp_size), _share(num_v_heads, tp_size)
    if k_heads is None or v_heads is None:
        return None
    keys, values = (k_heads * head_k_dim, 1), (v_heads * head_v_dim, 1)
    return _split((keys, keys, values), v_heads)


def _share(size: int, tp_size: int) -> int | None:
    return None if size % tp_size else size // tp_size


def _split(conv: tuple[tuple[int, int], ...], temporal: int) -> StateSplits:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    axis = 0 if is_conv_state_dim_first() else 1
    return MambaStateSplit(axis, conv), MambaStateSplit(0, ((temporal, 1),))
