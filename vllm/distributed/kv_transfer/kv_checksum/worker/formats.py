# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ask vLLM's attention layers how their caches are kept and read.

A layer's backend decides how it fills a block, and its ``kv_cache_dtype`` what the
bytes mean; neither is in its spec. `BACKENDS` lists the backends whose blocks were
seen written (`test_writers.py`); others are not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

import torch

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


class TokenOrder(Enum):
    """Orders in which a block holds the bytes of its tokens."""

    ROWS = "a token's bytes in a row, per head"
    CPU_VECTORS = "keys as [head_size, tokens], values in rows"
    CPU_TILES = "keys and values in tiles of pairs"
    INDEXER = "fp8 values of all tokens, then their scales"
    V4_LATENTS = "latents of all tokens, then their scales"
    KV_PLANES = "keys of all tokens in one head slot, values in another, in rows"


@dataclass(frozen=True)
class LayerFormat:
    """The way in which one layer keeps its cache; the defaults leave it to the spec.

    Attributes:
        backend: name of the class that reads and writes the cache, for messages.
        cells: the kinds of cells that the backend was seen writing (`BACKENDS`).
        order: the backend's own order of tokens, if it has one.
        cache_dtype: format of the cache's elements, unless the spec's dtype tells it.
        unknown: why the order is not known, or None.
        compressed: likewise `cells`, where a state covers several tokens
            (`COMPRESSED`).
        kind: the kind of cells, unless the spec tells it.
        shards: TP ranks that hold different heads, where it is known and the spec does
            not tell it.
        ring_group: tokens that are compressed together, of a layer of rings (`RINGS`).
        ring_row: bytes of a token in a ring, unless the spec's shape tells them.
        page_states: states of a kernel block, where vLLM shows the cache by whole
            blocks and the layer by kernel blocks. None if they are the same.
        head_slots: why head slots of the backend are not read, if that is known.

    """

    backend: str = ""
    cells: frozenset[str] | None = None
    order: TokenOrder | None = None
    cache_dtype: str | None = None
    unknown: str | None = None
    compressed: frozenset[str] = frozenset()
    kind: str | None = None
    shards: int | None = None
    ring_group: int | None = None
    ring_row: int | None = None
    page_states: int | None = None
    head_slots: str | None = None


_PLAIN = frozenset({"NONE"})
_ROWS = _PLAIN | {"FP8_PER_TENSOR"}
_SCALED_ROWS = _ROWS | {
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
}
_LATENTS = _ROWS | {"FP8_DS_MLA"}

_V1 = "vllm.v1.attention.backends."
_MLA = _V1 + "mla."
_V4, _V41 = "vllm.models.deepseek_v4.", "vllm.models.deepseek_v41."
_MINIMAX, _QWEN4 = "vllm.models.minimax_m3.", "vllm.models.qwen4_exp."
_STEP5 = "vllm.models.step5.nvidia."
_INDEX_KEYS = _MINIMAX + "common.indexer.MiniMaxM3IndexerBackend"

BACKENDS: Mapping[str, frozenset[str]] = {
    _V1 + "b12x.B12xPagedAttentionBackend": _ROWS,
    _V1 + "cpu_attn.CPUAttentionBackend": _ROWS,
    _V1 + "flash_attn.FlashAttentionBackend": _ROWS,
    _V1 + "flash_attn_diffkv.FlashAttentionDiffKVBackend": _ROWS,
    _V1 + "flashinfer.FlashInferBackend": _ROWS,
    _V1 + "flex_attention.FlexAttentionBackend": _PLAIN,
    _V1 + "hpc_attn.HpcAttentionBackend": _PLAIN,
    _V1 + "rocm_aiter_fa.AiterFlashAttentionBackend": _ROWS,
    _V1 + "triton_attn.TritonAttentionBackend": _SCALED_ROWS,
    _V1 + "triton_attn_diffkv.TritonAttentionDiffKVBackend": _ROWS,
    _V1 + "triton_flash_attn.TritonFlashAttentionBackend": _ROWS,
    _V1 + "triton_flashinfer.TritonFlashInferBackend": _ROWS,
    "vllm.model_executor.models.extract_hidden_states."
    "CacheOnlyAttentionBackend": _PLAIN,
    _MLA + "aiter_triton_mla.AiterTritonMLABackend": _ROWS,
    _MLA + "amx_mla.AMXMLABackend": _PLAIN,
    _MLA + "cpu_mla.CPUMLABackend": _PLAIN,
    _MLA + "cutlass_mla.CutlassMLABackend": _ROWS,
    _MLA + "flashattn_mla.FlashAttnMLABackend": _ROWS,
    _MLA + "flashattn_mla_sparse.FlashAttnMLASparseBackend": _PLAIN,
    _MLA + "flashattn_mla_sparse.FlashAttnMLASparseFA4Backend": _PLAIN,
    _MLA + "flashinfer_mla.FlashInferMLABackend": _ROWS,
    _MLA + "flashinfer_mla_sparse.FlashInferMLASparseSM120Backend": _LATENTS,
    _MLA + "flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend": _ROWS,
    _MLA + "flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend": _ROWS,
    _MLA + "flashmla.FlashMLABackend": _ROWS,
    _MLA + "flashmla_sparse.FlashMLASparseBackend": _LATENTS,
    _MLA + "rocm_aiter_mla.AiterMLABackend": _ROWS,
    _MLA + "rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend": _ROWS,
    _MLA + "tokenspeed_mla.TokenspeedMLABackend": _ROWS,
    _MLA + "triton_mla.TritonMLABackend": _ROWS,
    _MLA + "xpu_mla_sparse.XPUMLASparseBackend": _PLAIN,
    _MLA + "indexer.DeepseekV32IndexerBackend": frozenset({"INDEXER"}),
    _MLA + "sparse_swa.DeepseekSparseSWABackend": _LATENTS,
    _MLA + "indexer.DeepseekV41IndexerBackend": frozenset({"INDEXER"}),
    _V4 + "compressor.CompressorBackend": _PLAIN,
    _V4 + "nvidia.flashmla.DeepseekSparseSWAFlashMLABackend": frozenset({"FP8_DS_MLA"}),
    _V41 + "nvidia.flashmla.DeepseekSparseSWAFlashMLABackend": frozenset(
        {"FP8_DS_MLA"}
    ),
    _V41 + "sparse_mla.DeepseekV4FlashMLABackend": frozenset({"FP8_DS_MLA"}),
    _V41 + "sparse_mla.FlashMLAMegaAttnBackend": frozenset(
        {"FP8_DS_MLA", "NVFP4_DS_MLA"}
    ),
    _V41 + "nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": _ROWS,
    _INDEX_KEYS: _PLAIN,
    _MINIMAX + "common.sparse_attention.MiniMaxM3SparseBackend": _ROWS,
    _QWEN4 + "amd.qsa.Qwen4ExpQSAFlashAttentionBackend": _PLAIN,
    _QWEN4 + "nvidia.qsa.Qwen4ExpQSAFlashAttentionBackend": _ROWS,
    _STEP5 + "sparse_attention.Step5DSAAttentionBackend": _ROWS,
    _STEP5 + "sparse_attention.Step5SplitKVFlashAttentionBackend": _ROWS,
}
"""By the class of the backend, the kinds of cells (`attention.kind_of_cells`) that were
seen written. Packed cells of a kind have one format, whatever the backend."""

_KV_PLANES = frozenset({_V1 + "b12x.B12xPagedAttentionBackend"})
"""Backends with two head slots, a plane of keys and one of values, that were seen
writing a token's heads in a row into each."""

_TILED_PLANES = "its planes hold tiles of tokens instead of rows"
_NVFP4_SLOTS = "NVFP4 data and block scales share a slot, written by CUDA operators"

_HEAD_SLOTS: Mapping[str, str] = {
    _V1 + "flashinfer.FlashInferBackend": _NVFP4_SLOTS,
    _V1 + "rocm_aiter_fa.AiterFlashAttentionBackend": _TILED_PLANES,
    _V1 + "rocm_attn.RocmAttentionBackend": _TILED_PLANES,
    _MINIMAX + "amd.sparse_attention_msa.MiniMaxM3SparseAiterPABackend": _TILED_PLANES,
    _MINIMAX
    + "nvidia.sparse_attention_msa.MiniMaxM3SparseMSANvfp4Backend": _NVFP4_SLOTS,
}
"""By the class of the backend, why its head slots are not read."""

_QSA = _QWEN4 + "common.qsa_cache.QSAStateBackend"
_SUMMARIES = _STEP5 + "sparse_summary_cache.Step5SparseSummaryBackend"

COMPRESSED: Mapping[str, frozenset[str]] = {
    _V4 + "nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": frozenset(
        {"FP8_DS_MLA"}
    ),
    _V4 + "sparse_mla.DeepseekV4FlashMLABackend": frozenset({"FP8_DS_MLA"}),
    _V41 + "sparse_mla.DeepseekV4FlashMLABackend": frozenset({"FP8_DS_MLA"}),
    _V41 + "sparse_mla.FlashMLAMegaAttnBackend": frozenset(
        {"FP8_DS_MLA", "NVFP4_DS_MLA"}
    ),
    _V41 + "nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": _ROWS,
    _MLA + "indexer.DeepseekV4IndexerBackend": frozenset({"INDEXER"}),
    _MLA + "indexer.DeepseekV41IndexerBackend": frozenset({"INDEXER"}),
    _MLA + "indexer.Glm5NextIndexerBackend": frozenset({"INDEXER"}),
    _QSA: _PLAIN,
    _SUMMARIES: frozenset({"SUMMARY"}),
}
"""Likewise `BACKENDS`, for caches whose states cover several tokens each."""


POOLED: Mapping[str, frozenset[str]] = {
    _V1 + "flash_attn.FlashAttentionBackend": _ROWS,
    _V1 + "triton_attn.TritonAttentionBackend": _ROWS,
}
"""Likewise `BACKENDS`, of what vLLM derives for Whisper's causal encoder, where each
token stands for several states."""


@dataclass(frozen=True)
class RingFormat:
    """How a backend keeps rings.

    Attributes:
        group: tokens that are compressed together, or the attribute of the layer that
            holds their number.
        row: bytes of a token, unless the spec's shape tells them.

    """

    group: int | str
    row: int | None = None


RINGS: Mapping[str, RingFormat] = {
    _V41 + "compressor.CompressorBackend": RingFormat(2),
    _MLA + "indexer.KpoolTailBackend": RingFormat("_index_kpool"),
    _QSA: RingFormat("compress_ratio"),
    _STEP5 + "csa_tail_ring.Step5CSATailRingBackend": RingFormat(8, row=1024),
}
"""By the class of the backend, the rings that were seen written. Every TP rank computes
all of a ring, whatever its heads are."""

_KINDS = {
    _MLA + "indexer.DeepseekV4IndexerBackend": "INDEXER",
    _MLA + "indexer.DeepseekV41IndexerBackend": "INDEXER",
    _SUMMARIES: "SUMMARY",
}
"""The kind of cells, of backends whose specs do not tell it."""

_SUBCLASS_MAY_SET = {"get_builder_cls"}
"""A subclass that sets nothing else writes what its base writes: vLLM makes such for
chunked-local attention and for attention sinks."""

_POOLING = "WhisperCausalAttentionWithBlockPooling_"


def pools_tokens(backend: type) -> bool:
    """Return whether vLLM derived a backend for Whisper's causal encoder.

    Such a class expands a token's slot to those of its states, and leaves the writing
    to its base.
    """
    if not backend.__name__.startswith(_POOLING):
        return False
    impl = backend.get_impl_cls()  # type: ignore[attr-defined]
    return impl.__module__ == "vllm.model_executor.models.whisper_causal"


def backend_class(backend: type) -> type:
    """Return the class that decides how `backend` fills blocks: itself, or a base."""
    while True:
        own = {key for key in vars(backend) if not key.startswith(("__", "_abc_"))}
        same = own <= _SUBCLASS_MAY_SET or pools_tokens(backend)
        if not same or backend.__base__ in (None, object):
            return backend
        backend = backend.__base__  # type: ignore[assignment]


def _path(backend: type) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"


def layer_formats(
    vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, LayerFormat]:
    """Return how each layer keeps its cache, by layer name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layer_format(vllm_config, name, layers.get(name), cache)
        for name, cache in kv_caches.items()
    }


def layer_format(
    vllm_config: VllmConfig,
    name: str,
    layer: AttentionLayerBase | None,
    cache: torch.Tensor,
) -> LayerFormat:
    """Return how one layer keeps its cache.

    Args:
        vllm_config: vLLM's configuration.
        name: the layer's name.
        layer: vLLM's layer, or None if there is none of that name.
        cache: the layer's ``[B, H, N, C]`` cache.

    """
    if layer is None or not hasattr(layer, "get_attn_backend"):
        return LayerFormat(unknown=f"{name!r} is no layer that names its backend")
    named = layer.get_attn_backend()
    backend = _path(backend_class(named))
    slots = _HEAD_SLOTS.get(_path(named)) or _HEAD_SLOTS.get(backend)
    if backend not in {*BACKENDS, *COMPRESSED, *RINGS}:
        reason = f"{backend} was not seen writing its cache"
        return LayerFormat(backend, unknown=reason, head_slots=slots)
    kind, ring = _KINDS.get(backend), RINGS.get(backend)
    order, unknown = None, indexer_problem(layer, kind)
    if backend in _KV_PLANES:
        order = TokenOrder.KV_PLANES
    if backend.endswith(".CPUAttentionBackend"):
        order, unknown = cpu_order(vllm_config, layer, cache)
    if backend == _INDEX_KEYS and cache.stride(0) != cache[0].numel():
        # NVIDIA's writer takes a slot's place to be its number times a key's size.
        unknown = f"{backend} was not seen writing blocks that lie apart"
    asked = getattr(layer, "kv_cache_dtype", None)
    if asked is not None and asked not in _CACHE_DTYPES:
        unknown = f"cache dtype {asked!r} is not known"
    return LayerFormat(
        backend,
        BACKENDS.get(backend, frozenset()),
        order,
        cache_dtype_of(layer, asked, kind),
        unknown,
        (POOLED if pools_tokens(named) else COMPRESSED).get(backend, frozenset()),
        kind,
        1 if ring is not None or backend == _SUMMARIES else None,
        None if ring is None else _ring_group(layer, ring),
        None if ring is None else ring.row,
        _page_states(layer, cache),
        slots,
    )


def _page_states(layer: AttentionLayerBase, cache: torch.Tensor) -> int | None:
    """Return the states of a kernel block if the cache is shown by larger blocks.

    Caches of packed layouts are; their layers are bound to views by kernel blocks, in
    which writers count.
    """
    bound = getattr(layer, "kv_cache", None)
    if not isinstance(bound, torch.Tensor) or bound.dim() != 3:
        return None
    if bound.shape[1] == cache.shape[2]:
        return None
    return int(bound.shape[1])


def _ring_group(layer: AttentionLayerBase, ring: RingFormat) -> int | None:
    """Return the tokens that a layer compresses together; None if it does not tell."""
    if isinstance(ring.group, int):
        return ring.group
    return getattr(layer, ring.group, None)


_CACHE_DTYPES = frozenset(
    {
        "auto",
        "bfloat16",
        "float",
        "float16",
        "float32",
        "fp8",
        "fp8_ds_mla",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_per_token_head",
        "half",
        "int4_per_token_head",
        "int8_per_token_head",
        "nvfp4_ds_mla",
    }
)
"""The known cache dtypes. Platforms register others (`KVCacheDTypeHandler`), which
look like one of these modes and need not be stored like it."""


def element_format(cache_dtype: str | None) -> str | None:
    """Return the format of a cache's elements, or None if the spec tells it.

    "auto" and a dtype that was asked for by name are the spec's dtype; "fp8" is the
    platform's own fp8 format.
    """
    if cache_dtype is None or not cache_dtype.startswith("fp8"):
        return None
    e4m3 = current_platform.fp8_dtype()
    if cache_dtype == "fp8_e5m2":
        fnuz = e4m3 is torch.float8_e4m3fnuz
        return str(torch.float8_e5m2fnuz if fnuz else torch.float8_e5m2)
    float8 = str(e4m3)
    return float8 if cache_dtype in ("fp8", "fp8_e4m3") else f"{cache_dtype} {float8}"


def cache_dtype_of(
    layer: AttentionLayerBase, asked: str | None, kind: str | None = None
) -> str | None:
    """Return the element format of a layer's cache; an indexer's names its scales too.

    Args:
        layer: vLLM's layer.
        asked: the layer's ``kv_cache_dtype``, or None if it has none.
        kind: the kind of cells, unless the spec tells it.

    """
    if not hasattr(layer, "uses_shuffled_layout") and kind != "INDEXER":
        return element_format(asked)
    try:
        from vllm.utils.deep_gemm import mqa_logits_use_mx_scales
    except ImportError:  # vLLM 0.32.0: float32 scales alone
        return element_format("fp8")
    scales = "ue8m0" if mqa_logits_use_mx_scales() else "float32"
    return f"{element_format('fp8')} and {scales} scales"


# ---- CPU attention

_CPU_ORDERS = {
    "vec": (TokenOrder.CPU_VECTORS, (1, 2, 4)),
    "vec16": (TokenOrder.CPU_VECTORS, (2, 4)),
    "amx": (TokenOrder.CPU_TILES, (1, 2)),
}
"""By variant of vLLM's CPU attention, the order that was seen written, and the widths
of an element, in bytes, for which it was."""


def cpu_order(
    vllm_config: VllmConfig, layer: AttentionLayerBase, cache: torch.Tensor
) -> tuple[TokenOrder | None, str | None]:
    """Return CPU attention's order of tokens, or else why it is not known."""
    isa = getattr(layer, "isa", None)
    if isa is None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # vLLM's metadata builder calls this alike, before it sets the layers' `isa`.
        isa = _get_attn_isa(
            cast(torch.dtype, vllm_config.model_config.dtype),
            cache.shape[2],
            cache.shape[3] // 2,
            vllm_config.cache_config.cache_dtype,
        )
    order, widths = _CPU_ORDERS.get(isa, (None, ()))
    if cache.element_size() in widths:
        return order, None
    return None, (
        f"CPU attention variant {isa!r} was not seen writing {cache.dtype} caches"
    )


# ---- sparse indexers


def indexer_problem(layer: AttentionLayerBase, kind: str | None = None) -> str | None:
    """Return why a sparse indexer's blocks are not values, then scales, or None.

    None stands for blocks that are, and for layers that are no sparse indexer.
    """
    shuffled = getattr(layer, "uses_shuffled_layout", None)
    if shuffled is None and kind != "INDEXER":
        return None
    # ROCm's writers shuffle the values also where the layer does not say so.
    if shuffled or current_platform.is_rocm():
        return "a sparse indexer whose values are shuffled"
    return None
