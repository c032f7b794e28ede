# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hold what the writers of models' own attention layers share."""

from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import torch

from vllm.v1.kv_cache_interface import KVCacheLayout

from ..compressed import bare_module
from ..writers import HEADS, Writer, drawn, full, write_attention

QWEN4 = "vllm.models.qwen4_exp."
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)


class Written(Exception):
    """Raised by a stand-in once it has stored, to leave a model's forward."""


def model_class(path):
    """Return a class of a model whose modules import one another."""
    module, _, name = path.rpartition(".")
    if path.startswith(QWEN4):
        import_module(module.rpartition(".")[0] + ".model")
    return getattr(bare_module(module), name)


@dataclass
class ModelWriter(Writer):
    """A writer whose backend is a part of a model."""

    @property
    def backend_class(self):
        return model_class(self.backend)


def weight(size):
    return torch.ones(size, dtype=torch.bfloat16)


def norm(size):
    """Return a normalization layer's parameters."""
    return SimpleNamespace(
        weight=weight(size), bias=weight(size), variance_epsilon=1e-6
    )


def inherited(path, cells, **attributes):
    """Return the method that a model's backend leaves to FlashAttention's."""

    def write(cache, slots):
        key = drawn(slots, HEADS, 32)
        write_attention(model_class(path), cells, cache, slots, key, -key, **attributes)

    return ModelWriter(
        path, cells, full(cells), write, "pinned", layouts=LAYOUTS, extra="inherited"
    )
