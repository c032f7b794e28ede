# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hold what the writers of models' own attention layers share."""

from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import torch

from vllm.v1.kv_cache_interface import KVCacheLayout

from ..compressed import bare_module
from ..writers import HEADS, Writer, drawn, full, installed, write_attention

QWEN4 = "vllm.models.qwen4_exp."
GAP = 256
"""Bytes between blocks: these models' layers share each block with others."""

LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)


class Written(Exception):
    """Raised by a stand-in once it has stored, to leave a model's forward."""


_MISSING = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.v2",
)
"""Packages that models import for their images."""


def model_module(path):
    """Return a module of a model, without what its package or its images need."""
    with installed(*_MISSING):
        if path.startswith(QWEN4):
            # These modules import one another, and this one comes first.
            import_module(path.rpartition(".")[0] + ".model")
        return bare_module(path)


def model_class(path):
    """Return a class of a model."""
    module, _, name = path.rpartition(".")
    return getattr(model_module(module), name)


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
        path,
        cells,
        full(cells),
        write,
        "pinned",
        layouts=LAYOUTS,
        extra="inherited",
        gap=GAP,
    )
