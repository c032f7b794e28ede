# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configure instances that run without a model's weights and without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

LAYERS = 4
HEADS = 4
HEAD_SIZE = 8
VOCABULARY = 512
MAX_MODEL_LEN = 2048


def write_model(folder: Path) -> str:
    """Return a model folder that holds a config alone (weights are never loaded)."""
    folder.mkdir(exist_ok=True)
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=4096,
        torch_dtype="bfloat16",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def vllm_config(
    model: str,
    role: str,
    *,
    block_size: int = 16,
    num_blocks: int = 200,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    policy: str = "fail",
    async_scheduling: bool = False,
    tracing: bool = False,
    **transfer: Any,
) -> VllmConfig:
    """Return the configuration of an instance with KV checksums, on CPUs.

    Args:
        model: a folder that holds the model's config.
        role: the ``kv_role``.
        block_size: tokens per block.
        num_blocks: blocks of the KV cache.
        tp: size of tensor parallelism.
        pp: size of pipeline parallelism.
        dcp: size of decode context parallelism.
        policy: the ``kv_load_failure_policy``.
        async_scheduling: whether a step is scheduled before another has ended.
        tracing: whether requests have OpenTelemetry spans.
        transfer: further settings of ``--kv-transfer-config``.

    """
    model_config = ModelConfig(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
    )
    cache = CacheConfig(
        block_size=block_size,  # type: ignore[arg-type]
        enable_prefix_caching=True,
        gpu_memory_utilization=0.5,
    )
    cache.num_gpu_blocks = num_blocks
    cache.kv_cache_layout = "LBHNC"  # type: ignore[assignment]
    settings = dict(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_buffer_device="cpu",
        kv_load_failure_policy=policy,
        enable_kv_checksum=True,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(**{**settings, **transfer}),
    )
    # vLLM switches it off on CPU.
    config.scheduler_config.async_scheduling = async_scheduling
    if tracing:
        config.observability_config.otlp_traces_endpoint = "http://localhost:4317"
    # Set behind the checks that count this machine's accelerators.
    config.parallel_config = ParallelConfig()
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.pipeline_parallel_size = pp
    config.parallel_config.world_size = tp * pp
    config.parallel_config.decode_context_parallel_size = dcp
    # What vLLM chooses for NIXL.
    config.parallel_config.cp_kv_cache_interleave_size = block_size if dcp > 1 else 1
    config.cache_config.block_size = block_size  # type: ignore[assignment]
    return config
