# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the writers of Qwen4's sparse attention: keys, values, and compressed keys."""

from dataclasses import replace
from importlib import import_module

import torch

from .. import compressed
from ..compressed import integer_masks
from ..writers import ROWS, drawn, full
from .common import GAP, LAYOUTS, QWEN4, ModelWriter, inherited, weight


def as_fp8(cache):
    return cache if cache.dtype.is_floating_point else cache.view(torch.float8_e4m3fn)


def prepare(vendor, tokens, **given):
    """Run Qwen4's fused kernel, which fills the main cache and those of the indexer.

    Args:
        vendor: whose kernel it is.
        tokens: their number.
        given: what differs from one request that fills nothing.

    """
    module = import_module(f"{QWEN4}{vendor}.ops.qsa_prepare")
    size = given.pop("head_size", 32)
    main = given.get("main_kv_cache", torch.zeros(1, 8, 1, 2 * size))
    positions, nowhere = torch.arange(tokens), torch.full((tokens,), -1)
    rows = range(tokens)
    inputs = dict(
        q=drawn(rows, 2 * size),
        k=drawn(rows, size),
        positions=positions,
        cos_sin_cache=weight((64, size // 2)),
        q_norm_weight=weight(size),
        k_norm_weight=weight(size),
        eps=1e-6,
        q_out=torch.empty(tokens, 2, size, dtype=torch.bfloat16),
        state_cache=torch.zeros(1, 8, size, dtype=torch.bfloat16),
        state_slots=nowhere,
        state_block_table=torch.zeros(tokens, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        logical_positions=positions,
        compressed_cache=torch.zeros(1, 8, size, dtype=torch.bfloat16),
        compressed_slots=nowhere,
        k_work_metadata=torch.tensor([[-1, 0]], dtype=torch.int32),
        compress_ratio=4,
        mrope_section=None,
        rope_pos_offset=None,
        main_qkv=drawn(rows, 2 * (2 + main.shape[2]) * size),
        main_q_norm_weight=weight(size),
        main_k_norm_weight=weight(size),
        main_eps=1e-6,
        main_kv_cache=main,
        main_slot_mapping=nowhere,
        main_k_scale=1.0,
        main_v_scale=1.0,
    )
    with integer_masks():
        module.qsa_prepare(**inputs | given)


def qsa_fused(vendor, cells):
    """Return the fused kernel as the writer of Qwen4's keys and values."""

    def write(cache, slots):
        rows = as_fp8(cache.transpose(1, 2))
        prepare(vendor, len(slots), main_kv_cache=rows, main_slot_mapping=slots)

    return ModelWriter(
        f"{QWEN4}{vendor}.qsa.Qwen4ExpQSAFlashAttentionBackend",
        cells,
        full(cells),
        write,
        "interpreter",
        layouts=LAYOUTS,
        extra=f"{vendor}-fused",
        gap=GAP,
    )


def qsa_keys(vendor, dtype):
    """Return the fused kernel as the writer of Qwen4's compressed keys."""
    unfused, ratio = compressed.qsa(dtype), 4

    def write(cache, slots):
        n = len(slots)
        ends = compressed.last_positions(slots, ratio)
        positions = (ends[:, None] + torch.arange(1 - ratio, 1)).flatten()
        states = torch.full((n, ratio), -1)
        states[:, -1] = slots
        prepare(
            vendor,
            n * ratio,
            head_size=128,
            compressed_cache=cache.transpose(1, 2),
            compressed_slots=states.flatten(),
            k_work_metadata=torch.tensor([[i, 0] for i in range(n)], dtype=torch.int32),
            logical_positions=positions,
            positions=positions,
            query_start_loc=torch.arange(0, n * ratio + 1, ratio, dtype=torch.int32),
        )

    extra = f"{vendor}-{unfused.extra}"
    return replace(unfused, write=write, extra=extra, gap=GAP)


def qsa(vendor, *kinds):
    path = f"{QWEN4}{vendor}.qsa.Qwen4ExpQSAFlashAttentionBackend"
    for cells in kinds:
        method = inherited(path, cells, octave_fmt=None)
        yield replace(method, extra=f"{vendor}-{method.extra}")
        yield qsa_fused(vendor, cells)


WRITERS = [*qsa("nvidia", *ROWS), *qsa("amd", "NONE")]

COMPRESSED = [
    qsa_keys(vendor, dtype)
    for vendor in ("nvidia", "amd")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn)
]
