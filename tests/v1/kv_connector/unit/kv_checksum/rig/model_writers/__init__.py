# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run vLLM's writers of attention layers that models bring themselves.

Beside the method that other backends have (`do_kv_cache_update`), these models hand
their caches to fused kernels. Triton's run in the interpreter. Where a model's forward
calls an operator that is built for GPUs alone, the forward runs here and a stand-in
stores through vLLM's Triton twin of such operators (`pinned`): what is shown are the
caches and slots that the model hands over.
"""

from . import deepseek_v4, minimax_m3, qwen4, step5, whisper

WRITERS = [
    *deepseek_v4.WRITERS,
    *minimax_m3.WRITERS,
    *qwen4.WRITERS,
    *step5.WRITERS,
]
"""Every way in which these models fill the caches of `formats.BACKENDS`."""

COMPRESSED = qwen4.COMPRESSED
"""Likewise, of `formats.COMPRESSED`."""

POOLED = whisper.WRITERS
"""Likewise, of `formats.POOLED`."""
