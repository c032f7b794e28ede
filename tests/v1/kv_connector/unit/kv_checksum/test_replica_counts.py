# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test how many TP ranks hold the same heads, as vLLM counts them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.attention import COVERED_SPECS
from vllm.distributed.kv_transfer.kv_checksum.worker.factory import _uniform_kv_heads
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    Sharding,
    SkipGroup,
    head_placement,
)
from vllm.v1 import kv_cache_interface as interface

from .rig import caches as u
from .rig.versions import needs, older_than

if older_than("0.33.0"):
    from vllm.v1.core import kv_cache_utils as planning
else:
    from vllm.v1.core import kv_cache_planning as planning

declares = needs("0.31.0", "spec that declares its shards")

MORE = {
    "ChunkedLocalAttentionSpec": dict(attention_chunk_size=64),
    "RSWASpec": dict(rswa_window=64),
    "SlidingWindowMLASpec": dict(sliding_window=64),
    "SlidingWindowSpec": dict(sliding_window=64),
}


def spec_of(kind, **more):
    common = dict(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    return getattr(interface, kind)(**common, **MORE.get(kind, {}), **more)


@declares
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", sorted(COVERED_SPECS))
def test_declared_shards_are_counted_as_vllm_counts_them(kind, shards):
    spec = spec_of(kind, max_tp_shards=shards)
    for tp in range(1, 9):
        expected = planning._layer_tp_replicas(spec, tp, 1)
        for rank in range(tp):
            (replicas, copy), first = head_placement(spec, Sharding(rank, tp, None))
            assert replicas == expected
            assert (copy, first) == (rank % replicas, rank // replicas)


@pytest.mark.parametrize("kind", ["MLAAttentionSpec", "SlidingWindowMLASpec"])
def test_latents_without_declared_shards_are_on_every_rank(kind):
    """Count all ranks, whatever KV head count the model's configuration names."""
    for heads in (None, 1, 8):
        for rank in range(4):
            key, first = head_placement(spec_of(kind), Sharding(rank, 4, heads))
            assert (key, first) == ((4, rank), 0)


@pytest.mark.parametrize(
    ("local", "uniform", "expected"),
    [
        (2, None, 1),
        (2, 8, 1),
        (1, 4, 1),
        (1, 2, 2),
        (1, 1, 4),
        (1, None, None),
    ],
)
def test_one_head_per_rank_is_settled_by_the_model(local, uniform, expected):
    spec = replace(spec_of("FullAttentionSpec"), num_kv_heads=local)
    if expected is None:
        with pytest.raises(SkipGroup, match="replicas: it is not known how many"):
            head_placement(spec, Sharding(3, 4, uniform))
        return
    (replicas, copy), first = head_placement(spec, Sharding(3, 4, uniform))
    assert (replicas, copy) == (expected, 3 % expected)
    assert first == 3 // expected * local


def model(heads=4, overrides=None, global_heads=None, draft=None):
    def named(count):
        return SimpleNamespace(get_total_num_kv_heads=lambda: count)

    config = named(heads)
    config.model_arch_config = SimpleNamespace(per_layer_overrides=overrides)
    config.hf_text_config = SimpleNamespace()
    if global_heads is not None:
        config.hf_text_config.num_global_key_value_heads = global_heads
    speculative = draft and SimpleNamespace(draft_model_config=named(draft))
    return SimpleNamespace(model_config=config, speculative_config=speculative)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (dict(), 4),
        (dict(overrides={3: "other heads"}), None),
        (dict(overrides={}), 4),
        (dict(global_heads=2), None),
        (dict(global_heads=0), 4),
        (dict(draft=4), 4),
        (dict(draft=2), None),
    ],
)
def test_the_model_s_kv_heads_if_every_layer_shares_them(described, expected):
    assert _uniform_kv_heads(model(**described)) == expected


def test_a_speculator_without_a_model_changes_nothing():
    config = model()
    config.speculative_config = SimpleNamespace(draft_model_config=None)
    assert _uniform_kv_heads(config) == 4


@declares
@pytest.mark.parametrize("shards", [1, None])
def test_an_indexer_beside_attention_is_on_every_rank(shards):
    """MiniMax-M3: index keys are one vector per token, declared as such or not."""
    attention, index = u.full_spec(heads=2), replace(u.INDEXER, max_tp_shards=shards)
    names = ["model.layers.3.self_attn.attn", "model.layers.3.self_attn.indexer"]
    whole = u.random_cache(8, u.full_spec(heads=4), seed=1)
    keys = u.random_cache(8, index, seed=2)
    uniform = interface.UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs=dict(zip(names, (attention, index), strict=True)),
    )
    workers = []
    for rank in range(2):
        caches = dict(
            zip(names, (whole[:, 2 * rank : 2 * rank + 2], keys), strict=True)
        )
        cfg = u.config(8, (names, uniform))
        workers.append(u.worker(cfg, caches, tp_rank=rank, tp_size=2))
        assert workers[-1].groups[0].replica_keys == ((1, 0), (2, rank))
