# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run vLLM's writers of compressed caches and of the caches beside them.

As in `writers`, but a slot is that of a state, which may cover several tokens: the
state is written by its last token, at position ``(slot + 1) * tokens_per_state - 1``.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from triton.runtime import interpreter

import vllm
from vllm.triton_utils import tl, triton
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    get_kv_quant_mode,
)

from .versions import ON_EVERY_RANK
from .writers import MLA, Writer, drawn

V4, V41 = "vllm.models.deepseek_v4.", "vllm.models.deepseek_v41."
QSA = "vllm.models.qwen4_exp.common.qsa_cache.QSAStateBackend"
STEP5 = "vllm.models.step5.nvidia."
PLAIN = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}
STATES = 4
"""States of a block."""


@triton.jit
def packed_pairs(low, high):
    """Stand in for the instruction that packs two fp4 values: any byte of both."""
    return (low.to(tl.int8) + high.to(tl.int8)).to(tl.uint8, bitcast=True)


@contextmanager
def bare(*packages):
    """Let modules of packages be imported without what their ``__init__`` needs."""
    root, made = Path(vllm.__file__).parent, {}
    for name in packages:
        parts = name.split(".")
        for i in range(3, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                made[path] = ModuleType(path)
                made[path].__path__ = [str(root.joinpath(*parts[1:i]))]
    sys.modules.update(made)
    try:
        yield
    finally:
        for path in made:
            sys.modules.pop(path, None)


def bare_module(path):
    """Import a module of a model whose package needs what is not installed here."""
    if path in sys.modules:
        return sys.modules[path]
    with bare(path.rpartition(".")[0]):
        return import_module(path)


@dataclass
class BareWriter(Writer):
    """A writer whose backend's package needs what is not installed here."""

    @property
    def backend_class(self):
        module, _, name = self.backend.rpartition(".")
        return getattr(bare_module(module), name)


@triton.jit
def exponential(x):
    """Stand in for CUDA's library, which the interpreter does not have."""
    return tl.exp(x)


@contextmanager
def integer_masks():
    """Let the interpreter take masks that it has itself widened to integers."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def narrowed(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    with (
        patch.object(
            builder,
            "create_masked_load",
            lambda self, at, mask, *more: load(self, at, narrowed(mask), *more),
        ),
        patch.object(
            builder,
            "create_masked_store",
            lambda self, at, value, mask, *more: store(
                self, at, value, narrowed(mask), *more
            ),
        ),
    ):
        yield


class OnGPU(torch.Tensor):
    """A tensor that wrappers of kernels take for one on a GPU."""

    is_cuda = True


def last_positions(slots, ratio):
    return (slots % STATES + 1) * ratio - 1


def angles(number):
    return torch.ones(number, 64)


# ---- DeepSeek-V4


def latents(ratio, content=584, dtype="fp8_ds_mla", alignment=576):
    return MLAAttentionSpec(
        block_size=STATES * ratio,
        num_kv_heads=1,
        head_size=512,
        **ON_EVERY_RANK,
        dtype=PLAIN.get(dtype, torch.uint8),
        tokens_per_state=ratio,
        cache_dtype_str=dtype,
        alignment=alignment,
        model_version="deepseek_v4",
        kv_quant_mode=get_kv_quant_mode(dtype),
        state_content_bytes=content,
    )


def indexer(ratio, width=132):
    return MLAAttentionSpec(
        block_size=STATES * ratio,
        num_kv_heads=1,
        head_size=width,
        **ON_EVERY_RANK,
        dtype=torch.uint8,
        tokens_per_state=ratio,
        alignment=576,
    )


def v4_compressor(cache, slots, ratio, head, fp4=False, mx=False):
    """Close groups of `ratio` tokens with DeepSeek-V4's fused kernels."""
    ops = import_module(V4 + "common.ops.fused_compress_quant_cache")
    overlap, n = ratio == 4, len(slots)
    width = head * (1 + overlap)
    size = 4 if overlap else 8
    positions = last_positions(slots, ratio)
    blocks = -(-int(positions.max() + 1) // size)
    generator = torch.Generator().manual_seed(n)
    states = torch.randn(blocks, size, 2 * width, generator=generator)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    with (
        patch.object(ops, "_fp32x2_to_fp4x2", packed_pairs),
        patch.object(ops, "mqa_logits_use_mx_scales", lambda: mx),
    ):
        ops.compress_norm_rope_store_triton(
            states,
            n,
            torch.zeros(n, dtype=torch.int32),
            positions,
            torch.zeros(n, dtype=torch.int64),
            table,
            size,
            width,
            angles(STATES * ratio),
            cache.squeeze(1),
            SimpleNamespace(slot_mapping=slots),
            {},
            head,
            64,
            ratio,
            overlap,
            fp4,
            torch.ones(head),
            1e-6,
            64 if head == 512 else 32 if fp4 else 128,
            576 if head == 512 else 64 if fp4 else 128,
            8 if head == 512 else 4,
        )


def v4(name, ratio):
    write = functools.partial(v4_compressor, ratio=ratio, head=512)
    return Writer(
        V4 + name,
        "FP8_DS_MLA",
        latents(ratio),
        lambda cache, slots: write(cache, slots),
        # On NVIDIA's GPUs a kernel in another language does what this one does.
        "pinned",
        extra=f"{ratio}",
    )


def v4_indexer(fp4, mx=False):
    def write(cache, slots):
        v4_compressor(cache, slots, 4, 128, fp4, mx)

    return Writer(
        MLA + "indexer.DeepseekV4IndexerBackend",
        "INDEXER",
        indexer(4, 68 if fp4 else 132),
        write,
        "pinned" if fp4 else "interpreter",
        extra="mxfp4" if fp4 else "ue8m0" if mx else "float32",
    )


def v4_states(ratio):
    """Return the writer of the raw rows that a compressor keeps, in a window."""
    head = 512 * (1 + (ratio == 4))
    spec = SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        **ON_EVERY_RANK,
        head_size=2 * head,
        dtype=torch.float32,
        sliding_window=8 if ratio == 4 else 128,
        alignment=576,
    )

    def write(cache, slots):
        ops = import_module(V4 + "common.ops.save_partial_states")
        rows = cache.squeeze(1)
        ops._SAVE_PARTIAL_STATES_KERNEL(
            kv=drawn(slots, head, dtype=torch.float32),
            score=drawn(slots, head, dtype=torch.float32),
            ape=torch.ones(ratio, head),
            positions=slots % spec.block_size,
            state_cache=rows,
            slot_mapping=slots,
            block_size=spec.block_size,
            state_width=head,
            compress_ratio=ratio,
        )

    return Writer(
        V4 + "compressor.CompressorBackend",
        "NONE",
        spec,
        write,
        "interpreter",
        extra=f"{ratio}",
    )


def window(module, content, path="nvidia.flashmla.DeepseekSparseSWAFlashMLABackend"):
    """Return the writer of DeepSeek's window beside the compressed latents."""
    spec = SlidingWindowMLASpec(
        block_size=4,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        cache_dtype_str="fp8_ds_mla",
        alignment=576 if content == 584 else 512,
        model_version="deepseek_v4",
        state_content_bytes=content,
        **ON_EVERY_RANK,
        kv_quant_mode=get_kv_quant_mode("fp8_ds_mla"),
    )

    def write(cache, slots):
        ops = import_module(module + "common.ops.cache_utils")
        rows = cache.squeeze(1)
        more = {} if content == 584 else {"bytes_per_token": content}
        ops.quantize_and_insert_k_cache(
            drawn(slots, 512), rows, slots, block_size=rows.shape[1], **more
        )

    return Writer(
        module + path, "FP8_DS_MLA", spec, write, "pinned", extra=f"{content}"
    )


# ---- DeepSeek-V4.1


def v41(name, ratio, content, dtype="fp8_ds_mla", cells="FP8_DS_MLA"):
    alignment = 576 if content == 584 else 512

    def write(cache, slots):
        ops = import_module(V41 + "common.ops.fused_compress_quant_cache")
        rows = cache.squeeze(1)
        if dtype == "fp8":
            rows = rows.view(torch.float8_e4m3fn)
        with patch.object(ops, "_fp32x2_to_fp4x2", packed_pairs):
            ops.rope_quant_insert(
                drawn(slots, 512),
                last_positions(slots, ratio),
                angles(STATES * ratio),
                rows,
                slots,
                ratio,
                fp8_scale=torch.ones(1) if dtype == "fp8" else None,
            )

    spec = latents(ratio, content, dtype, alignment)
    return Writer(
        V41 + name,
        cells,
        spec,
        write,
        "pinned" if cells.startswith("NVFP4") else "interpreter",
        extra=f"{content}x{ratio}",
    )


def v41_indexer(ratio, fp4, mx=False):
    def write(cache, slots):
        ops = import_module(V41 + "common.ops.indexer_k_store")
        with (
            patch.object(ops, "_fp32x2_to_fp4x2", packed_pairs),
            patch.object(ops, "mqa_logits_use_mx_scales", lambda: mx),
        ):
            ops.indexer_k_norm_rope_store(
                drawn(slots, 128),
                last_positions(slots, ratio),
                angles(STATES * ratio),
                torch.ones(128),
                1e-6,
                cache.squeeze(1),
                slots,
                ratio,
                fp4,
            )

    return Writer(
        MLA + "indexer.DeepseekV41IndexerBackend",
        "INDEXER",
        indexer(ratio, 68 if fp4 else 132),
        write,
        "pinned" if fp4 else "interpreter",
        extra=f"{'mxfp4' if fp4 else 'ue8m0' if mx else 'float32'}x{ratio}",
    )


# ---- others


def qsa(dtype=torch.bfloat16, ratio=4):
    spec = MLAAttentionSpec(
        block_size=STATES * ratio,
        num_kv_heads=1,
        head_size=128,
        dtype=dtype,
        tokens_per_state=ratio,
    )

    def write(cache, slots):
        ops = import_module("vllm.models.qwen4_exp.nvidia.ops.qsa")
        rows, keys = cache.transpose(1, 2), drawn(slots, 1, 128).to(dtype)
        if dtype.itemsize == 1:
            # The kernel moves elements; the interpreter has no zero of this dtype.
            rows, keys = rows.view(torch.int8), keys.view(torch.int8)
        with integer_masks():
            ops.qsa_store_cache_rows(rows.as_subclass(OnGPU), slots, keys)

    return Writer(
        QSA,
        "NONE",
        spec,
        write,
        "interpreter",
        layouts=(KVCacheLayout.BLNHC, KVCacheLayout.BLHNC),
        extra=str(dtype).removeprefix("torch."),
    )


def kpool(mx, ratio=4):
    def write(cache, slots):
        ops = bare_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
        keys = drawn(slots, ratio, 128)
        with patch.object(ops, "mqa_logits_use_mx_scales", lambda: mx):
            ops.kpool_compress_and_write_cache(
                cache.squeeze(1), keys, -keys, torch.zeros(ratio, 128), slots, ratio
            )

    return Writer(
        MLA + "indexer.Glm5NextIndexerBackend",
        "INDEXER",
        MLAAttentionSpec(
            block_size=STATES * ratio,
            num_kv_heads=1,
            head_size=132,
            dtype=torch.uint8,
            **ON_EVERY_RANK,
            cache_role=SparseCacheRole.INDEXER,
            tokens_per_state=ratio,
        ),
        write,
        "interpreter",
        extra="ue8m0" if mx else "float32",
    )


def summaries():
    """Return the writer of Step5's region summaries: one byte of 256 per region."""
    spec = FullAttentionSpec(
        block_size=STATES * 8,
        num_kv_heads=1,
        head_size=256,
        head_size_v=0,
        dtype=torch.uint8,
        tokens_per_state=8,
    )

    def write(cache, slots):
        ops = bare_module(STEP5 + "ops.summary_update")
        n, ring = len(slots), torch.zeros(8, 512, dtype=torch.bfloat16)
        keys = drawn(slots, 256)
        with patch.object(ops, "libdevice", SimpleNamespace(exp=exponential)):
            ops.update_decode(
                keys,
                -keys,
                slots * 8 + 7,
                torch.full((n,), 7),
                torch.zeros(n, dtype=torch.int64),
                cache[:, 0],
                ring,
                8,
            )

    return BareWriter(
        STEP5 + "sparse_summary_cache.Step5SparseSummaryBackend",
        "SUMMARY",
        spec,
        write,
        "interpreter",
    )


FLASHMLA = "sparse_mla.DeepseekV4FlashMLABackend"
MEGA = "sparse_mla.FlashMLAMegaAttnBackend"
FLASHINFER = "nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend"

WRITERS = [
    *(v4(name, ratio) for name in (FLASHMLA, FLASHINFER) for ratio in (4, 128)),
    v4_indexer(False),
    v4_indexer(False, mx=True),
    v4_indexer(True),
    v4_states(4),
    v4_states(128),
    window(V4, 584),
    window(V41, 584),
    window(V41, 528),
    *(v41(FLASHMLA, ratio, size) for ratio in (1, 2) for size in (584, 528)),
    *(v41(MEGA, ratio, 528) for ratio in (1, 2)),
    *(v41(MEGA, ratio, 288, "nvfp4_ds_mla", "NVFP4_DS_MLA") for ratio in (1, 2)),
    *(v41(FLASHINFER, ratio, None, "auto", "NONE") for ratio in (1, 2)),
    *(v41(FLASHINFER, ratio, None, "fp8", "FP8_PER_TENSOR") for ratio in (1, 2)),
    *(v41_indexer(ratio, fp4) for ratio in (1, 2) for fp4 in (False, True)),
    v41_indexer(2, False, mx=True),
    qsa(),
    qsa(torch.float8_e4m3fn),
    kpool(False),
    kpool(True),
    summaries(),
]
"""One for every backend and kind of cells that `formats.COMPRESSED` lists, and for what
these models keep beside them."""


# ---- rings


@dataclass
class RingWriter:
    """A layer that keeps a ring, and what its next step reads of it.

    Attributes:
        backend: the class that the layer names.
        layer: what else the feature asks the layer.
        spec: of the layer.
        group: tokens that are compressed together.
        write: writes tokens at positions into a block's ring, as one chunk of a
            prefill: of a cache, a block and positions.
        read: returns what a step over positions makes of the ring: of the same.
        bare: whether the backend's package needs what is not installed here.

    """

    backend: str
    layer: dict
    spec: CircularBufferSpec
    group: int
    write: Callable
    read: Callable
    bare: bool = False

    @property
    def backend_class(self):
        module, _, name = self.backend.rpartition(".")
        load = bare_module if self.bare else import_module
        return getattr(load(module), name)


def chunk(block, positions):
    """Return the metadata of one request's chunk: table, starts, owners, positions."""
    n = len(positions)
    return (
        torch.tensor([[block]], dtype=torch.int32),
        torch.tensor([0, n], dtype=torch.int32),
        torch.zeros(n, dtype=torch.int32),
        torch.tensor(positions),
    )


def ring(slots, **more):
    return CircularBufferSpec(
        **{"block_size": slots, "num_kv_heads": 1, "head_size_v": 0, **more}
    )


def v41_ring(slots=8):
    """Return DeepSeek-V4.1's compressor, which pools two tokens."""

    def step(cache, block, positions):
        ops = import_module(V41 + "common.ops.fused_compress_quant_cache")
        compressor = import_module(V41 + "compressor")
        table, starts, owners, at = chunk(block, positions)
        n = len(positions)
        mapping = torch.empty(n, dtype=torch.int64)
        compressor._ring_slot_mapping_kernel[(1,)](
            mapping, table, 1, owners, at, n, n, CAPACITY=slots, BLOCK=256
        )
        latent = torch.zeros(n, 512, dtype=torch.bfloat16)
        with patch.object(ops, "_JOIN_ROW_PTRS", False):
            ops.fused_save_compress_norm(
                drawn(positions, 1024, dtype=torch.float32),
                at,
                cache.squeeze(1),
                mapping,
                starts,
                owners,
                torch.ones(512, dtype=torch.bfloat16),
                1e-6,
                2,
                latent,
            )
        return latent

    spec = ring(slots, head_size=1024, dtype=torch.float32)
    return RingWriter(V41 + "compressor.CompressorBackend", {}, spec, 2, step, step)


def qsa_ring(slots=8, ratio=4):
    """Return Qwen4's raw keys and, behind each, its position of three axes."""
    width = 128 + 12

    @integer_masks()
    def write(cache, block, positions):
        caches = import_module("vllm.models.qwen4_exp.common.qsa_cache")
        ops = import_module("vllm.models.qwen4_exp.nvidia.ops.qsa")
        table, starts, owners, at = chunk(block, positions)
        mapping = caches.circular_qsa_slot_mapping(table, owners, at, slots, starts)
        rows = cache.transpose(1, 2)
        keys = drawn(positions, 1, 128)
        axes = caches.canonical_qsa_rope_positions(at)
        ops.qsa_store_cache_rows(rows[..., :128].as_subclass(OnGPU), mapping, keys)
        ops.qsa_store_cache_rows(
            rows[..., 128:].view(torch.int64).as_subclass(OnGPU), mapping, axes
        )

    @integer_masks()
    def read(cache, block, positions):
        caches = import_module("vllm.models.qwen4_exp.common.qsa_cache")
        ops = import_module("vllm.models.qwen4_exp.nvidia.ops.qsa")
        table, starts, owners, at = chunk(block, positions)
        rows = cache.transpose(1, 2)
        done = torch.where((at + 1) % ratio == 0, at // ratio, -1)
        pooled, first = ops.qsa_compress_groups_with_ratio(
            drawn(positions, 1, 128).as_subclass(OnGPU),
            caches.canonical_qsa_rope_positions(at),
            rows[..., :128],
            table,
            owners,
            starts,
            at,
            done,
            ratio,
            rows[..., 128:].view(torch.int64),
        )
        closed = done >= 0
        return torch.cat([pooled.squeeze(1)[closed].float(), first[closed]], dim=1)

    spec = ring(slots, head_size=width, dtype=torch.bfloat16)
    return RingWriter(QSA, {"compress_ratio": ratio}, spec, ratio, write, read)


def kpool_ring(slots=8, pool=4):
    """Return GLM-5's keys and gates: two heads of a token's row."""

    def mapping(block, positions):
        indexer = import_module(MLA + "indexer")
        table, starts, _, at = chunk(block, positions)
        n = len(positions)
        return indexer.compute_kpool_tail_slot_mapping(
            torch.arange(n), table, starts, at, n, 1, slots
        )

    def write(cache, block, positions):
        ops = bare_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
        keys = drawn(positions, 128)
        ops.kpool_seed_tail_cache(
            cache, keys, -keys, mapping(block, positions).long(), pool
        )

    @integer_masks()
    def read(cache, block, positions):
        ops = bare_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
        pools = torch.zeros(1, 64, 132, dtype=torch.uint8)
        at = torch.tensor(positions, dtype=torch.int32)
        keys = drawn(positions, 128)[None]
        ops.kpool_decode_update_and_maybe_write_cache_batched(
            pools,
            cache,
            mapping(block, positions).int()[None],
            keys,
            -keys,
            torch.zeros(pool, 128),
            (at // pool)[None],
            at[None],
            pool,
        )
        return pools

    spec = ring(slots, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    return RingWriter(
        MLA + "indexer.KpoolTailBackend",
        {"_index_kpool": pool},
        spec,
        pool,
        write,
        read,
    )


def summary_ring(slots=11):
    """Return Step5's raw rows; their number need not be a multiple of eight."""

    @integer_masks()
    def step(cache, block, positions):
        ops = bare_module(STEP5 + "ops.summary_update")
        rings = bare_module(STEP5 + "csa_tail_ring")
        table, starts, owners, at = chunk(block, positions)
        n = len(positions)
        base, mapping = (torch.empty(n, dtype=torch.int64) for _ in range(2))
        rings._ring_metadata_kernel[(1,)](
            base,
            mapping,
            table,
            1,
            owners,
            at,
            at[-1:] + 1,
            starts,
            1,
            n,
            n,
            CAPACITY=slots,
            ROWS_PER_BLOCK=slots,
            BLOCK=256,
        )
        summaries = torch.zeros(1, 32, 256, dtype=torch.uint8)
        groups = ops.build_prefill_groups(at, at, owners, starts)
        keys = drawn(positions, 1, 256)
        with patch.object(ops, "libdevice", SimpleNamespace(exp=exponential)):
            ops.update_prefill(
                keys,
                -keys,
                groups,
                at,
                base,
                mapping,
                summaries,
                cache.view(-1, 512),
                slots,
            )
        return summaries

    # The page is the main cache's: 16 tokens of 704 bytes, which hold 11 rows of 1024.
    spec = ring(16, head_size=352, dtype=torch.bfloat16)
    path = STEP5 + "csa_tail_ring.Step5CSATailRingBackend"
    return RingWriter(path, {}, spec, 8, step, step, bare=True)


RINGS = {
    "deepseek_v41": v41_ring(),
    "qwen4_exp": qsa_ring(),
    "glm5next": kpool_ring(),
    "step5": summary_ring(),
}
"""By model, one for every backend that `formats.RINGS` lists."""
