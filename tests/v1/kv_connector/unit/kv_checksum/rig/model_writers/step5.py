# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the writers of Step5's attention layers, through the model's own forward.

A decode step with drafts takes a Triton kernel, all others an operator.
"""

from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from unittest.mock import patch

import torch

from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..compressed import STEP5, integer_masks
from ..writers import CACHE_DTYPES, HEADS, ROWS, drawn, full, layer, like_a_gpu, twin
from .common import (
    GAP,
    LAYOUTS,
    ModelWriter,
    Written,
    inherited,
    model_class,
    model_module,
    norm,
    weight,
)

DIM = 192
"""Step5's kernels take heads of this size alone."""


def attend(self, *args, **kwargs):
    """Stand in for what a model does once its cache is written."""
    raise Written


def store_step5(
    q, k, v, qkv, qw, kw, cos, sin, at, slots, keys, values, dim, heads, kv_heads, *more
):
    """Stand in for the operator that normalizes, rotates and stores keys and values."""
    rows = qkv.view(len(qkv), heads + 2 * kv_heads, dim)[:, heads:]
    key, value = (x.contiguous() for x in rows.split(kv_heads, dim=1))
    cache_dtype, k_scale, v_scale = more[-3:]
    twin(key, value, keys, values, slots, cache_dtype, k_scale, v_scale)


@dataclass
class Projection:
    """The projection of a DSA layer, which knows its outputs already."""

    qkv: torch.Tensor

    def __call__(self, hidden):
        return self.qkv, None

    def split_indexer(self, qkzg):
        return (*(drawn(self.qkv, n) for n in (HEADS * 256, 256, 256)), None)


class Attending(SimpleNamespace):
    """A layer whose attention is not computed."""

    __call__ = attend


def step5_owner(model, impl, qkv, cells):
    """Return what Step5's attention layer reads of itself."""
    tokens = len(qkv)
    owner = SimpleNamespace(
        attn=Attending(
            **vars(layer()),
            impl=impl,
            kv_cache_dtype=CACHE_DTYPES[cells],
            layer_name="attn",
        ),
        fuse_qkv_gate=False,
        fuse_swa_gate=False,
        head_dim=DIM,
        k_norm=norm(DIM),
        num_heads=2,
        num_kv_heads=HEADS,
        q_norm=norm(DIM),
        qkv_indexer_proj=Projection(qkv),
        qkv_proj=lambda hidden: (qkv, None),
        rotary_dim=64,
        rotary_emb=SimpleNamespace(cos_sin_cache=weight((tokens, 64))),
        sparse_indexer_k_norm=norm(256),
        sparse_indexer_q_norm=norm(256),
        sparse_indexer_w=lambda hidden: (drawn(qkv, HEADS), None),
        use_rope=True,
        zero_centered=False,
    )
    sparse = SimpleNamespace(
        owner=owner,
        fuse_qkv_preparation=True,
        forward=attend,
        sparse_rotary_emb=SimpleNamespace(cos_sin_cache=weight((tokens, 64))),
        _indexer_native_rope=False,
    )
    sparse.prepare_qkv = MethodType(model.Step5SparseAttention.prepare_qkv, sparse)
    owner.sparse_attn = sparse
    return owner


def step5_forward(impl_class, cells, cache, slots, verify):
    """Write tokens through the forward of Step5's attention layer.

    Args:
        impl_class: the implementation's class.
        cells: the kind of cells.
        cache: the layer's cache.
        slots: one for each token.
        verify: whether the step is one of decoding with drafts, for which a Triton
            kernel prepares everything.

    """
    model = model_module(STEP5 + "model")
    impl = object.__new__(impl_class)
    impl.head_size, impl.num_speculative_tokens, impl.summary_cache = DIM, 1, None
    tokens = len(slots)
    qkv = drawn(slots, (2 + 2 * HEADS) * DIM)
    owner = step5_owner(model, impl, qkv, cells)
    owner.use_dsa_backend = impl_class.__name__ == "Step5DSAAttentionImpl"
    if not owner.use_dsa_backend:
        owner.sparse_attn = None
    metadata = SimpleNamespace(
        num_actual_tokens=tokens,
        num_actual_reqs=tokens if verify else 1,
        max_query_len=1 if verify else tokens + 9,
        slot_mapping=slots,
    )
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE)
    found = (metadata, None, cache, slots)
    name = "fused_qknorm_rope_cache"
    with (
        like_a_gpu(),
        integer_masks(),
        patch.object(torch.ops._C, name, store_step5, create=True),
        patch.object(model, "get_attention_context", lambda name: found),
        patch.object(model, "get_forward_context", lambda: context),
    ):
        try:
            model.Step5Attention.forward(owner, torch.arange(tokens), qkv)
        except Written:
            return
    raise AssertionError("nothing was written")


def step5(name, cells, verify=None):
    """Return a writer of Step5's: the inherited method, or its layer's forward."""
    path = f"{STEP5}sparse_attention.{name}"
    dsa = name == "Step5DSAAttentionBackend"
    layouts = (KVCacheLayout.BLNHC,) if dsa else LAYOUTS
    if verify is None:
        writer = inherited(path, cells)
        return replace(writer, layouts=layouts)

    def write(cache, slots):
        impl_class = model_class(path).get_impl_cls()
        step5_forward(impl_class, cells, cache, slots, verify)

    return ModelWriter(
        path,
        cells,
        replace(full(cells, head_size=DIM, head_size_v=DIM), block_size=4),
        write,
        "interpreter" if verify else "pinned",
        layouts=layouts,
        extra="verify" if verify else "forward",
        gap=GAP,
    )


SPLIT, DSA = "Step5SplitKVFlashAttentionBackend", "Step5DSAAttentionBackend"

WRITERS = [
    *(step5(SPLIT, cells, verify) for cells in ROWS for verify in (None, False)),
    *(step5(DSA, cells, verify) for cells in ROWS for verify in (None, False, True)),
]
