# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the writer of DeepSeek-V4's windows of plain rows, which FlashInfer reads."""

from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

import torch

from vllm.v1.kv_cache_interface import SlidingWindowMLASpec, get_kv_quant_mode

from ..compressed import PLAIN, V4, V41
from ..versions import ON_EVERY_RANK
from ..writers import MLA, Writer, drawn
from .common import GAP

OPERATOR = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_{}_insert"


def store(kv, cache, slots, positions, angles):
    """Store rows by V4.1's Triton kernel, which writes such rows, too."""
    ops = import_module(V41 + "common.ops.fused_compress_quant_cache")
    scale = torch.ones(1)
    ops.rope_quant_insert(kv, positions, angles, cache, slots, 1, fp8_scale=scale)


STAND_INS = {
    "auto": ("bf16", lambda q, kv, *more: store(kv, *more[:4])),
    "fp8": ("fp8", lambda q, kv, q_fp8, *more: store(kv, *more[:4])),
}
"""By cache dtype, the operator's format, and what stands in for the operator."""


def window(dtype, cells):
    """Return the model's method that hands the window over to an operator."""
    spec = SlidingWindowMLASpec(
        block_size=4,
        num_kv_heads=1,
        head_size=512,
        dtype=PLAIN[dtype],
        sliding_window=128,
        cache_dtype_str=dtype,
        alignment=512,
        model_version="deepseek_v4",
        **ON_EVERY_RANK,
        kv_quant_mode=get_kv_quant_mode(dtype),
    )

    def write(cache, slots):
        model = import_module(V4 + "attention")
        rows = cache.squeeze(1)
        layer = SimpleNamespace(
            eps=1e-6,
            head_dim=512,
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.ones(len(slots), 64)),
            swa_cache_layer=SimpleNamespace(kv_cache=rows, prefix="window"),
            _flashinfer_fp8_kv_scale=torch.ones(1),
            _flashinfer_fp8_q_scale_inv=torch.ones(1),
        )
        found = SimpleNamespace(slot_mapping=slots, block_size=rows.shape[1])
        name, stand_in = STAND_INS[dtype]
        operator = OPERATOR.format(name)
        with patch.object(torch.ops._C, operator, stand_in, create=True):
            model.DeepseekV4Attention._fused_qnorm_rope_kv_insert(
                layer,
                drawn(slots, 8, 512),
                drawn(slots, 512),
                torch.arange(len(slots)),
                {"window": found},
            )

    return Writer(
        MLA + "sparse_swa.DeepseekSparseSWABackend",
        cells,
        spec,
        write,
        "pinned",
        gap=GAP,
    )


WRITERS = [window("auto", "NONE"), window("fp8", "FP8_PER_TENSOR")]
