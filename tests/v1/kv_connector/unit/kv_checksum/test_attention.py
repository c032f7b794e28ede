# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test attention caches that are not plain rows of sharded heads."""

import logging
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import vllm.models
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.worker import formats, worker
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.kv_cache_interface import (
    HiddenStateCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from .rig import caches as u
from .rig import reference
from .rig.versions import needs, older_than

BLOCKS = KVChecksumBlocks(num_tokens=57, groups={0: (1, [5, 2, 7])})
IDS, START, TOKENS = [5, 2, 7], 1, 57


def uniform(specs):
    size = next(iter(specs.values())).block_size
    return UniformTypeKVCacheSpecs(block_size=size, kv_cache_specs=specs)


# ---- DeepSeek's sparse indexer: a block's values, then its scales


def indexer_cells(cache):
    """Return token-major ``(B, N, 132)`` cells of values-then-scales blocks."""
    blocks, _, tokens, content = cache.shape
    flat = cache.reshape(blocks, tokens * content).numpy()
    values = flat[:, : tokens * 128].reshape(blocks, tokens, 128)
    scales = flat[:, tokens * 128 :].reshape(blocks, tokens, 4)
    return np.concatenate([values, scales], axis=-1)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_indexer_beside_mla_layers_is_read_token_by_token(ratio, tp):
    """Read DeepSeek-V3.2's group, also with blocks cut into kernel blocks."""
    mla = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    names = ["model.layers.3.self_attn.attn", "model.layers.3.self_attn.indexer.k"]
    latent = u.random_cache(8, mla, seed=1)
    kernel = replace(u.INDEXER, block_size=16 // ratio)
    cache = u.random_cache(8 * ratio, kernel, seed=2)
    caches = dict(zip(names, (latent, cache), strict=True))
    group = uniform(dict(zip(names, (mla, u.INDEXER), strict=True)))
    workers = [
        u.worker(u.config(8, (names, group)), caches, tp_rank=r, tp_size=tp)
        for r in range(tp)
    ]
    cells = indexer_cells(cache).reshape(8, 16, 132)
    expected = [
        (
            u.expected_sums({3: latent}, [block], START + i, TOKENS)[0]
            + reference.slice_sum(cells[block], 3, 1, (START + i) * 16, TOKENS)
        )
        % 2**64
        for i, block in enumerate(IDS)
    ]
    assert u.whole_sums(workers, BLOCKS) == [expected] * tp


@pytest.mark.parametrize(
    "shape", [(8, 1, 16, 68), (8, 1, 16, 136), (8, 2, 16, 132), (8, 1, 8, 132)]
)
def test_other_indexer_formats_are_skipped(shape):
    caches = {"model.layers.0.indexer.k": torch.zeros(shape, dtype=torch.uint8)}
    w = u.worker(u.config(8, (caches, u.INDEXER)), caches)
    assert set(w.skipped) == {0}


def test_an_indexer_whose_blocks_are_not_dense_is_skipped():
    wide = torch.zeros(8, 1, 16, 136, dtype=torch.uint8)[..., :132]
    caches = {"model.layers.0.indexer.k": wide}
    w = u.worker(u.config(8, (caches, u.INDEXER)), caches)
    assert "not dense" in w.skipped[0]


@pytest.mark.parametrize(
    ("shuffled", "bound", "rocm", "reason"),
    [
        (False, (8, 16, 132), False, None),
        (True, (8, 16, 132), False, "shuffled"),
        (False, (8, 16, 132), True, "shuffled"),
        (False, (16, 8, 132), False, "kernel blocks"),
    ],
)
def test_indexers_in_another_order_are_known_by_their_layer(
    shuffled, bound, rocm, reason, monkeypatch
):
    """A packed layout shows whole blocks here, while writers fill kernel blocks.

    ROCm's writers shuffle without saying so.
    """
    monkeypatch.setattr(type(formats.current_platform), "is_rocm", lambda self: rocm)
    layer = SimpleNamespace(
        uses_shuffled_layout=shuffled,
        kv_cache=torch.empty(bound),
        get_attn_backend=lambda: DeepseekV32IndexerBackend,
    )
    name, cache = "model.layers.0.k", torch.zeros(8, 1, 16, 132, dtype=torch.uint8)
    found = formats.layer_format(None, name, layer, cache)
    cfg = u.config(8, ([name], u.INDEXER))
    w = u.worker(cfg, {name: cache}, formats={name: found})
    assert (reason is None) == (w.skipped == {})
    assert reason is None or reason in w.skipped[0]


# ---- MiniMax-M3: attention KV and an index key per token, in one module


@pytest.fixture
def m3_index_cache(monkeypatch):
    """Return the class of vLLM; the package around it would import torchvision."""
    name = "vllm.models.minimax_m3"
    package = ModuleType(name)
    package.__path__ = [str(Path(vllm.models.__path__[0]) / "minimax_m3")]
    monkeypatch.setitem(sys.modules, name, package)
    return import_module(f"{name}.common.indexer").MiniMaxM3IndexerCache


def m3_specs(tp, index_cache):
    """Return the specs of MiniMax-M3's layers; vLLM's class gives the index cache's."""
    index = index_cache.get_kv_cache_spec(
        SimpleNamespace(head_dim=16, dtype=torch.bfloat16),
        SimpleNamespace(cache_config=SimpleNamespace(block_size=16)),
    )
    assert older_than("0.31.0") or index.max_tp_shards == 1
    return u.full_spec(heads=max(1, 4 // tp)), index


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_minimax_m3s_two_caches_per_layer(tp, m3_index_cache):
    attention, index = m3_specs(tp, m3_index_cache)
    numbers = (3, 7)
    heads = {n: u.random_cache(8, u.full_spec(heads=4), seed=n) for n in numbers}
    keys = {n: u.random_cache(8, index, seed=20 + n) for n in numbers}
    workers, held = [], attention.num_kv_heads
    for rank in range(tp):
        first = rank * 4 // tp
        caches, specs = {}, {}
        for n in numbers:
            module = f"model.layers.{n}.self_attn"
            caches[f"{module}.attn"] = heads[n][:, first : first + held].clone()
            caches[f"{module}.indexer.index_cache"] = keys[n].clone()
            specs[f"{module}.attn"] = attention
            specs[f"{module}.indexer.index_cache"] = index
        cfg = u.config(8, (caches, uniform(specs)))
        workers.append(u.worker(cfg, caches, tp_rank=rank, tp_size=tp, uniform=4))
        workers[-1].caches = caches
    plain = u.expected_sums(heads, IDS, START, TOKENS)
    data = {n: reference.logical_bytes(k) for n, k in keys.items()}
    index_sums = [
        reference.block_sum(
            {n: d[block] for n, d in data.items()}, (START + i) * 16, TOKENS, 4
        )
        for i, block in enumerate(IDS)
    ]
    expected = [(a + b) % 2**64 for a, b in zip(plain, index_sums, strict=True)]
    assert u.whole_sums(workers, BLOCKS) == [expected] * tp
    name = "model.layers.7.self_attn.indexer.index_cache"
    workers[-1].caches[name].view(torch.uint8)[5, 0, 0, 0] ^= 1
    checks = u.whole_sums(workers, BLOCKS)
    assert checks[:-1] == [expected] * (tp - 1) and checks[-1] != expected


# ---- replicas, drafts, quantized cells

CELL = dict(block_size=16, num_kv_heads=1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "more", "shards"),
    [
        (HiddenStateCacheSpec, {}, 1),
        (SlidingWindowMLASpec, dict(sliding_window=64), 1),
        pytest.param(
            *(MLAAttentionSpec, dict(max_tp_shards=2), 2),
            marks=needs("0.31.0", "spec that declares its shards"),
        ),
    ],
)
def test_replicated_latents(kind, more, shards):
    """Without `max_tp_shards`, every rank holds an MLA-type cache whole."""
    tp, spec = 4, kind(head_size=16, **CELL, **more)
    whole = u.random_cache(8, spec, heads=shards)
    workers = []
    for rank in range(tp):
        part = {u.names(0)[0]: whole[:, rank * shards // tp][:, None].clone()}
        cfg = u.config(8, (part, spec))
        workers.append(u.worker(cfg, part, tp_rank=rank, tp_size=tp))
    expected = u.expected_sums({0: whole}, IDS, START, TOKENS)
    assert u.whole_sums(workers, BLOCKS) == [expected] * (tp // shards)


def test_a_drafts_layers_behind_the_models_are_summed():
    spec, draft = u.full_spec(), u.full_spec(heads=1)
    a, b = u.random_cache(8, spec, seed=1), u.random_cache(8, draft, seed=2)
    caches = {"model.layers.1.self_attn.attn": a, "model.layers.2.mtp_block.attn": b}
    group = uniform(dict(zip(caches, (spec, draft), strict=True)))
    w = u.worker(u.config(8, (caches, group)), caches)
    expected = [
        sum(pair) % 2**64
        for pair in zip(
            u.expected_sums({1: a}, IDS, START, TOKENS),
            u.expected_sums({2: b}, IDS, START, TOKENS),
            strict=True,
        )
    ]
    assert u.values_of(u.send_record(w, BLOCKS)) == expected


@pytest.mark.parametrize(
    "mode", [KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD]
)
def test_scales_inside_the_cells_are_covered(mode):
    spec = u.full_spec(
        dtype=torch.uint8, state_content_bytes=2 * 8 + 8, kv_quant_mode=mode
    )
    cache = u.random_cache(8, spec)
    caches = {u.names(0)[0]: cache}
    w = u.worker(u.config(8, (caches, spec)), caches)
    expected = u.expected_sums({0: cache}, IDS, START, TOKENS)
    assert u.values_of(u.send_record(w, BLOCKS)) == expected
    cache[2, 1, 3, 2 * 8 + 5] ^= 1  # a scale
    assert u.values_of(u.send_record(w, BLOCKS)) != expected
    assert not w.groups[0].remarks


def test_scales_of_whole_tensors_are_said_to_be_outside(log):
    spec = u.full_spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    mla = MLAAttentionSpec(
        **{**CELL, "dtype": torch.uint8},
        head_size=576,
        state_content_bytes=656,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )
    a, b = u.random_cache(8, spec), u.random_cache(8, mla)
    caches = {u.names(0)[0]: a, u.names(1)[0]: b}
    w = u.worker(u.config(8, (u.names(0), spec), (u.names(1), mla)), caches)
    assert u.values_of(u.send_record(w, BLOCKS))
    (line,) = [x for x in log if "do not cover" in x]
    assert "of group 0: per-tensor KV scales" in line and "group 1" not in line


def test_startup_says_what_is_covered_and_what_is_not(log, caplog):
    caplog.set_level(logging.INFO, worker.logger.name)
    caches = {n: u.random_cache(8, u.full_spec()) for n in u.names(0, 1, 2)}
    cfg = u.config(8, (u.names(0, 1), u.full_spec()), (u.names(2), u.full_spec()))
    unseen = {u.names(2)[0]: formats.LayerFormat("Backend", frozenset())}
    u.worker(cfg, caches, tp_rank=0, tp_size=1, formats=unseen)
    (covered,) = [x for x in log if "KV checksums cover" in x]
    assert covered.startswith("INFO") and "0 (FullAttentionSpec, 2 layers)" in covered
    (missing,) = [x for x in log if "KV checksums do not cover" in x]
    assert missing.startswith("WARNING")
    assert "group 1 (FullAttentionSpec, 1 layers): backend: Backend was" in missing
