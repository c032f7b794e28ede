# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what vLLM's layers are asked: backend, CPU attention's variant, cache dtype."""

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

CACHE = torch.empty(8, 2, 32, 64, dtype=torch.bfloat16)


class OnlyABuilder(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls():
        return None


class AWriterOfItsOwn(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return None


class BehindIt(AWriterOfItsOwn):
    pass


def asked(backend, cache=CACHE, config=None, **attributes):
    layer = SimpleNamespace(get_attn_backend=lambda: backend, **attributes)
    return formats.layer_format(config, "model.layers.0.attn", layer, cache)


def test_a_subclass_with_a_builder_alone_is_its_base():
    chunked = create_chunked_local_attention_backend(FlashAttentionBackend, 64)
    for backend in (FlashAttentionBackend, OnlyABuilder, chunked):
        found = asked(backend)
        assert found.unknown is None
        assert found.backend.endswith("flash_attn.FlashAttentionBackend")


@pytest.mark.parametrize("backend", [AWriterOfItsOwn, BehindIt])
def test_any_other_subclass_is_not_known(backend):
    assert "AWriterOfItsOwn was not seen" in asked(backend).unknown


def test_two_backends_of_one_name_are_told_apart():
    """The AITER backend calls itself FLASH_ATTN, too."""
    from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend

    assert AiterFlashAttentionBackend.get_name() == FlashAttentionBackend.get_name()
    found = {asked(b).backend for b in (AiterFlashAttentionBackend, OnlyABuilder)}
    assert len(found) == 2


@pytest.mark.parametrize("layer", [None, SimpleNamespace(kv_cache_dtype="auto")])
def test_a_layer_that_names_no_backend_is_not_known(layer):
    found = formats.layer_format(None, "model.layers.0.attn", layer, CACHE)
    assert "names its backend" in found.unknown


def test_a_cache_dtype_that_a_platform_registers_is_not_known():
    assert asked(FlashAttentionBackend, kv_cache_dtype="fp8_e4m3").unknown is None
    found = asked(FlashAttentionBackend, kv_cache_dtype="vendor_fp8")
    assert "'vendor_fp8' is not known" in found.unknown


@pytest.mark.parametrize(
    ("isa", "dtype", "order"),
    [
        ("vec", torch.float32, formats.TokenOrder.CPU_VECTORS),
        ("vec16", torch.bfloat16, formats.TokenOrder.CPU_VECTORS),
        ("vec16", torch.uint8, None),
        ("amx", torch.bfloat16, formats.TokenOrder.CPU_TILES),
        ("amx", torch.uint8, formats.TokenOrder.CPU_TILES),
        ("amx", torch.float32, None),
        ("neon", torch.bfloat16, None),
    ],
)
def test_cpu_attention_is_read_as_its_variant_was_seen(isa, dtype, order):
    found = asked(CPUAttentionBackend, CACHE.to(dtype), isa=isa)
    assert found.order is order
    assert (found.unknown is None) == (order is not None)
    assert order is not None or repr(isa) in found.unknown


def test_the_variant_is_asked_with_the_models_dtype(monkeypatch):
    """An fp8 cache of a bf16 model is written by what bf16 takes, as vLLM asks it."""
    calls = []
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *a: calls.append(a) or "amx")
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
    )
    found = asked(CPUAttentionBackend, CACHE.to(torch.uint8), config)
    assert found.order is formats.TokenOrder.CPU_TILES
    assert calls == [(torch.bfloat16, 32, 32, "fp8")]
