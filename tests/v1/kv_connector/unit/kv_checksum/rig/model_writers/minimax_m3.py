# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the writers of MiniMax-M3's sparse attention: keys, values, an indexer's keys."""

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch

from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from ..compressed import integer_masks
from ..versions import ON_EVERY_RANK
from ..writers import CACHE_DTYPES, HEADS, ROWS, SCALE, drawn, full, like_a_gpu, twin
from .common import GAP, ModelWriter, Written, model_module, norm, weight

MINIMAX = "vllm.models.minimax_m3."
MINIMAX_DIM = 128
OPERATOR = "fused_minimax_m3_qknorm_rope_kv_insert"


def store_minimax(signature, *args, **kwargs):
    """Stand in for the operator that stores keys, values and the indexer's keys."""
    given = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
    rows = given.qkv.view(len(given.qkv), -1, MINIMAX_DIM)[:, given.num_heads :]
    sizes = (given.num_kv_heads, given.num_kv_heads, given.num_index_heads, 1)
    key, value, _, index = (x.contiguous() for x in rows.split(sizes, dim=1))
    blocks = given.kv_cache.transpose(1, 2).split(MINIMAX_DIM, dim=-1)
    assert given.block_size == blocks[0].shape[1]
    twin(key, value, *blocks, given.slot_mapping, given.kv_cache_dtype, SCALE, SCALE)
    # The operator takes the indexer's blocks for dense ones, whatever the strides.
    slots, cache = given.index_slot_mapping, given.index_cache
    rows = cache.as_strided((cache[..., 0].numel(), MINIMAX_DIM), (MINIMAX_DIM, 1))
    kept = slots >= 0
    index = index[kept].squeeze(1).to(rows.dtype)
    if rows.itemsize == 1:
        rows, index = rows.view(torch.uint8), index.view(torch.uint8)
    rows[slots[kept]] = index
    raise Written


def minimax_forward(cells, cache, slots, index_cache, index_slots):
    """Write tokens through the forward of MiniMax-M3's sparse attention layer."""
    model = model_module(MINIMAX + "nvidia.model")
    tokens = len(slots)
    projected = drawn(slots, (2 + 2 * HEADS + HEADS + 1) * MINIMAX_DIM)
    owner = SimpleNamespace(
        hidden_size=MINIMAX_DIM,
        index_k_norm=norm(MINIMAX_DIM),
        index_q_norm=norm(MINIMAX_DIM),
        index_q_size=HEADS * MINIMAX_DIM,
        indexer=SimpleNamespace(
            index_cache=SimpleNamespace(
                prefix="index", dtype=index_cache.dtype, kv_cache=index_cache
            )
        ),
        k_norm=norm(MINIMAX_DIM),
        kv_cache=cache,
        kv_cache_dtype=CACHE_DTYPES[cells],
        layer_name="main",
        num_heads=2,
        num_idx_heads=HEADS,
        num_kv_heads=HEADS,
        q_norm=norm(MINIMAX_DIM),
        q_size=2 * MINIMAX_DIM,
        qkv_proj=lambda hidden: (projected, None),
        rotary_emb=SimpleNamespace(cos_sin_cache=weight((tokens, 64)), rotary_dim=64),
        use_nvfp4_kv=False,
        _allocate_query_fp8=lambda qkv: None,
        _q_scale_float=1.0,
    )
    context = SimpleNamespace(slot_mapping=dict(main=slots, index=index_slots))
    signature = inspect.signature(getattr(ops, OPERATOR))
    with (
        like_a_gpu(),
        patch.object(ops, OPERATOR, partial(store_minimax, signature)),
        patch.object(model, "get_forward_context", lambda: context),
    ):
        try:
            model.MiniMaxM3SparseAttention.forward(
                owner, torch.arange(tokens), projected
            )
        except Written:
            return
    raise AssertionError("nothing was written")


def minimax_index_spec(dtype=torch.bfloat16, block_size=8):
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=MINIMAX_DIM,
        dtype=dtype,
        cache_role=SparseCacheRole.INDEXER,
        **ON_EVERY_RANK,
    )


def minimax(cells):
    """Return MiniMax-M3's writer of keys and values."""

    def write(cache, slots):
        nowhere = torch.full_like(slots, -1)
        index = torch.zeros(1, cache.shape[2], MINIMAX_DIM, dtype=torch.bfloat16)
        minimax_forward(cells, cache, slots, index, nowhere)

    return ModelWriter(
        MINIMAX + "common.sparse_attention.MiniMaxM3SparseBackend",
        cells,
        replace(full(cells, head_size=MINIMAX_DIM), block_size=4),
        write,
        "pinned",
        gap=GAP,
    )


def minimax_index(dtype=torch.bfloat16):
    """Return the operator of NVIDIA's model as the writer of the indexer's keys."""

    def write(cache, slots):
        main = torch.zeros(1, HEADS, 8, 2 * MINIMAX_DIM, dtype=torch.bfloat16)
        nowhere = torch.full_like(slots, -1)
        minimax_forward("NONE", main, nowhere, cache.squeeze(1), slots)

    return ModelWriter(
        MINIMAX + "common.indexer.MiniMaxM3IndexerBackend",
        "NONE",
        minimax_index_spec(dtype),
        write,
        "pinned",
        extra=f"forward-{dtype}".replace("torch.", ""),
    )


def minimax_amd_index(dtype=torch.bfloat16):
    """Return the kernel of AMD's model as the writer of the indexer's keys."""

    def write(cache, slots):
        module = model_module(MINIMAX + "amd.ops.sparse_pa")
        keys = drawn(slots, MINIMAX_DIM)
        with integer_masks():
            module.minimax_m3_insert_index_cache(keys, cache.squeeze(1), slots)

    return replace(
        minimax_index(dtype),
        write=write,
        seen="interpreter",
        extra=f"kernel-{dtype}".replace("torch.", ""),
    )


WRITERS = [
    *(minimax(cells) for cells in ROWS),
    *(minimax_index(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)),
    *(minimax_amd_index(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)),
]
