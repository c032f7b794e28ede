# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the writers of Whisper's causal encoder: a token stands for several states."""

from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

import torch

from ..writers import HEADS, ROWS, V1, Writer, drawn, full, loaded, write_attention

POOL = 4
"""States of a token."""


@dataclass
class PooledWriter(Writer):
    """A writer whose backend vLLM derives from the one that is named."""

    @property
    def backend_class(self):
        module = import_module("vllm.model_executor.models.whisper_causal")
        derive = module.create_whisper_attention_backend_with_block_pooling
        return derive(loaded(self.backend), POOL)


def expanded(backend, base, slots):
    """Return the slots of states that vLLM's builder makes of those of tokens."""
    tokens = len(slots)
    builder = object.__new__(backend.get_builder_cls())
    builder._pool_buffers_ready = False
    limits = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
    builder.vllm_config = SimpleNamespace(scheduler_config=limits)
    common = SimpleNamespace(
        max_query_len=tokens,
        max_seq_len=tokens,
        num_actual_tokens=tokens,
        query_start_loc=torch.tensor([0, tokens]),
        query_start_loc_cpu=torch.tensor([0, tokens]),
        replace=lambda **changed: SimpleNamespace(**changed),
        seq_lens=torch.tensor([tokens]),
        seq_lens_cpu_upper_bound=None,
        slot_mapping=slots,
    )
    stock = patch.object(
        base.get_builder_cls(), "build", lambda self, prefix, changed, fast: changed
    )
    with stock:
        return builder.build(0, common).slot_mapping


def pooled(name, cells, seen):
    path = V1 + name
    spec = replace(full(cells), block_size=4, tokens_per_state=Fraction(1, POOL))

    def write(cache, slots):
        """Write tokens; their slots are told by blocks of as many states."""
        states = cache.shape[2]
        tokens = slots // states * spec.block_size + slots % states
        at = expanded(writer.backend_class, loaded(path), tokens)
        key = drawn(at, HEADS, 32)
        write_attention(writer.backend_class, cells, cache, at, key, -key)

    writer = PooledWriter(path, cells, spec, write, seen, extra="pooled")
    return writer


WRITERS = [
    *(
        pooled("triton_attn.TritonAttentionBackend", cells, "interpreter")
        for cells in ROWS
    ),
    *(pooled("flash_attn.FlashAttentionBackend", cells, "pinned") for cells in ROWS),
]
