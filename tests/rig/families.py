"""Write tiny models of other families than Qwen3, with real random weights, as ``rig.model`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rig.model import CACHE, VOCABULARY, write_once

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}

RECIPES: dict[str, dict[str, Any]] = {
    # Sliding windows of two 32-token blocks beside full attention.
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "config": "Gemma3TextConfig",
        "num_hidden_layers": 3,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
    },
    # Gated delta nets beside full attention.
    "qwen3_next": {
        "architecture": "Qwen3NextForCausalLM",
        "config": "Qwen3NextConfig",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # Mamba2 beside full attention; one group, so that TP replicates B and C.
    "granite4_h": {
        "architecture": "GraniteMoeHybridForCausalLM",
        "config": "GraniteMoeHybridConfig",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.125,
    },
    # Mamba2, a sliding window of two 32-token blocks, and full attention.
    "nemotron_h": {
        "architecture": "NemotronHForCausalLM",
        "config": "NemotronHConfig",
        "layers_block_type": [
            "linear_attention",
            "full_attention",
            "mlp",
            "full_attention",
            "linear_attention",
        ],
        "windows": {"1": 64},
        "head_dim": 64,
        "ssm_state_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 64,
    },
    # Mamba1 alone.
    "mamba": {
        "architecture": "MambaForCausalLM",
        "config": "MambaConfig",
        "num_hidden_layers": 2,
        "expand": 2,
        "state_size": 16,
        "time_step_rank": 8,
        "conv_kernel": 4,
    },
    # OLMo's gated delta nets beside full attention.
    "olmo_hybrid": {
        "architecture": "OlmoHybridForCausalLM",
        "config": "OlmoHybridConfig",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    # Multi-head latent attention.
    "deepseek_v2": {
        "architecture": "DeepseekV2ForCausalLM",
        "config": "DeepseekV2Config",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}

# With several groups TP 2 shards B and C as well.
RECIPES["granite4_h_8_groups"] = RECIPES["granite4_h"] | {"mamba_n_groups": 8}


def tiny(family: str, dtype: str = "bfloat16", *, cache: Path = CACHE) -> Path:
    """Return the folder of a tiny model of a family in ``RECIPES``, writing it first if it is not there."""
    recipe = {**_COMMON, **RECIPES[family]}
    name = f"tiny-{family.replace('_', '-')}-{dtype}"
    return write_once(name, recipe, lambda f: _write(f, dtype, dict(recipe)), cache)


def _write(folder: Path, dtype: str, recipe: dict[str, Any]) -> None:
    """Write weights drawn with a fixed seed."""
    import torch
    import transformers

    model_class = getattr(transformers, recipe.pop("architecture"))
    config = getattr(transformers, recipe.pop("config"))(**recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
