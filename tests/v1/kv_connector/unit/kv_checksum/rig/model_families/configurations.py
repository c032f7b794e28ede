# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configure a tiny model of each family.

Sizes that decide how a cache is kept (head sizes, windows, compression) are those of
the released models, or the smallest that vLLM takes; layers are as few as show every
kind of cache.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        module: where vLLM's model class is.
        architecture: its name.
        values: of the model's `config.json`, beside `COMMON`.
        settings: engine arguments.
        not_run: why vLLM loads none of its KV, or nothing.
        draft: how tokens are drafted, as vLLM's speculative configuration; a "config"
            in it stands for the draft model's folder.

    """

    module: str
    architecture: str
    values: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""
    draft: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {**COMMON, "architectures": [self.architecture], **self.values}


COMMON: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
)
_DEEPSEEK_MOE = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=128,
)
_QWEN_MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_DELTA_NETS = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    linear_conv_kernel_dim=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
_DEEPSEEK_V4 = dict(
    **_DEEPSEEK_MOE,
    num_attention_heads=64,
    num_key_value_heads=1,
    head_dim=512,
    q_lora_rank=128,
    qk_rope_head_dim=64,
    o_groups=2,
    o_lora_rank=64,
    index_head_dim=128,
    index_topk=512,
    sliding_window=128,
    hc_mult=4,
    num_hash_layers=0,
)
_MODELS = "vllm.model_executor.models."

FAMILIES: dict[str, Family] = {
    "deepseek_v32": Family(
        "vllm.models.deepseek_v32",
        "DeepseekV32ForCausalLM",
        dict(
            **_DEEPSEEK_MOE,
            model_type="deepseek_v32",
            num_hidden_layers=2,
            num_attention_heads=64,
            num_key_value_heads=64,
            kv_lora_rank=512,
            q_lora_rank=128,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            index_topk=2048,
            index_head_dim=128,
            index_n_heads=64,
            rope_theta=10000.0,
            hidden_act="silu",
        ),
        dict(kv_cache_dtype="fp8_ds_mla"),
    ),
    "deepseek_v4": Family(
        "vllm.models.deepseek_v4",
        "DeepseekV4ForCausalLM",
        dict(
            **_DEEPSEEK_V4,
            model_type="deepseek_v4",
            num_hidden_layers=3,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            index_n_heads=64,
            compress_rope_theta=160000,
            quantization_config=dict(
                quant_method="fp8",
                activation_scheme="dynamic",
                fmt="e4m3",
                weight_block_size=[128, 128],
                scale_fmt="ue8m0",
            ),
        ),
        dict(kv_cache_dtype="fp8"),
    ),
    "deepseek_v41": Family(
        "vllm.models.deepseek_v41",
        "DeepseekV41ForCausalLM",
        dict(
            model_type="deepseek_v41",
            text_config=dict(
                **COMMON
                | _DEEPSEEK_V4
                | dict(
                    num_hidden_layers=4,
                    compress_ratios=[0, 2, 1, 1],
                    kv_source_layer_ids=[1, 2],
                    index_source_layer_ids=[1, 2],
                    index_n_heads=32,
                    hc_eps=1e-6,
                    hc_sinkhorn_iters=4,
                    rope_theta=10000.0,
                    compress_rope_theta=160000.0,
                    swiglu_limit=10.0,
                    scoring_func="sqrtsoftplus",
                    routed_scaling_factor=1.5,
                    norm_topk_prob=True,
                    hidden_act="silu",
                )
            ),
        ),
        dict(kv_cache_dtype="fp8"),
    ),
    "qwen4_exp": Family(
        "vllm.models.qwen4_exp",
        "Qwen4ExpForCausalLM",
        dict(
            **_QWEN_MOE,
            **_DELTA_NETS,
            model_type="qwen4_exp_text",
            num_attention_heads=16,
            head_dim=256,
            output_gate_type="sigmoid",
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25
            ),
            hc_count=4,
            hc_lowrank=64,
            ple_layer_ids=[1],
            ple_embed_dim=64,
            ple_conv_kernel_size=4,
            ngram_size=3,
            heads_per_ngram=8,
            ngram_vocab_size_base=512,
            split_ngram_parts=8,
            indexer_n_heads=16,
            indexer_kv_heads=1,
            indexer_head_dim=128,
            indexer_budget=2048,
            indexer_compress_ratio=8,
        ),
        dict(engram_config=dict(cpu_offload=False)),
    ),
    "glm5next": Family(
        "vllm.models.glm5next",
        "Glm5NextForCausalLM",
        dict(
            **_DEEPSEEK_MOE,
            model_type="glm5_next_text",
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            num_attention_heads=64,
            num_key_value_heads=64,
            kv_lora_rank=512,
            q_lora_rank=128,
            qk_nope_head_dim=256,
            qk_rope_head_dim=0,
            v_head_dim=256,
            mla_use_nope=True,
            index_topk=2048,
            index_head_dim=128,
            index_n_heads=32,
            index_kpool=16,
            indexer_rope_interleave=False,
            linear_head_dim=64,
            linear_num_heads=4,
            linear_conv_kernel_dim=4,
            mhc=True,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
        ),
    ),
    "step5": Family(
        "vllm.models.step5",
        "Step5ForCausalLM",
        dict(
            model_type="step5",
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=128,
            num_attention_heads=16,
            num_attention_groups=4,
            head_dim=192,
            use_head_wise_attn_gate=True,
            use_moe_router_bias=True,
            need_fp32_gate=True,
            sparse_config=dict(enabled=True, index_tp_size=4),
            max_seq_len=4096,
            moe_intermediate_size=128,
            moe_num_experts=4,
            moe_top_k=2,
        ),
    ),
    "minimax_m3": Family(
        "vllm.models.minimax_m3",
        "MiniMaxM3SparseForConditionalGeneration",
        dict(
            model_type="minimax_m3_vl",
            projector_hidden_size=256,
            vision_config=dict(
                hidden_size=256,
                intermediate_size=256,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_channels=3,
                image_size=56,
                patch_size=14,
                temporal_patch_size=2,
                spatial_merge_size=2,
                hidden_act="gelu",
                layer_norm_eps=1e-5,
                rope_theta=10000.0,
                img_token_compression_config={},
            ),
            text_config=dict(
                **COMMON
                | dict(
                    model_type="minimax_m3_text",
                    architectures=["MiniMaxM3SparseForCausalLM"],
                    num_hidden_layers=2,
                    num_attention_heads=64,
                    num_key_value_heads=4,
                    head_dim=128,
                    num_local_experts=4,
                    num_experts_per_tok=2,
                    moe_layer_freq=[0, 1],
                    intermediate_size=128,
                    dense_intermediate_size=128,
                    shared_intermediate_size=128,
                    sparse_attention_config=dict(
                        use_sparse_attention=True,
                        sparse_attention_freq=[0, 1],
                        sparse_index_dim=128,
                        sparse_num_index_heads=4,
                        sparse_topk_blocks=16,
                        sparse_block_size=128,
                        sparse_init_block=0,
                        sparse_local_block=1,
                        sparse_score_type="max",
                    ),
                )
            ),
        ),
    ),
    "gpt_oss": Family(
        _MODELS + "gpt_oss",
        "GptOssForCausalLM",
        dict(
            model_type="gpt_oss",
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "gemma3": Family(
        _MODELS + "gemma3",
        "Gemma3ForCausalLM",
        dict(
            model_type="gemma3_text",
            num_hidden_layers=3,
            layer_types=["sliding_attention"] * 2 + ["full_attention"],
            sliding_window=64,
            head_dim=64,
            query_pre_attn_scalar=64,
        ),
    ),
    "granite4_h": Family(
        _MODELS + "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        dict(
            model_type="granitemoehybrid",
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=256,
            position_embedding_type="nope",
        ),
    ),
    "qwen3_next": Family(
        _MODELS + "qwen3_next",
        "Qwen3NextForCausalLM",
        dict(**_QWEN_MOE, **_DELTA_NETS, model_type="qwen3_next", head_dim=64),
    ),
    "qwen3_5": Family(
        _MODELS + "qwen3_5",
        "Qwen3_5ForCausalLM",
        dict(**_DELTA_NETS, model_type="qwen3_5_text", head_dim=64),
    ),
    "kimi_linear": Family(
        "vllm.models.kimi_k3",
        "KimiLinearForCausalLM",
        dict(
            model_type="kimi_linear",
            num_hidden_layers=4,
            num_key_value_heads=4,
            head_dim=64,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            mla_use_nope=True,
            linear_attn_config=dict(
                kda_layers=[1, 2, 3],
                full_attn_layers=[4],
                head_dim=64,
                num_heads=4,
                short_conv_kernel_size=4,
            ),
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=128,
            first_k_dense_replace=1,
        ),
    ),
    "nemotron_h": Family(
        _MODELS + "nemotron_h",
        "NemotronHForCausalLM",
        dict(
            model_type="nemotron_h",
            layers_block_type=[
                "linear_attention",
                "full_attention",
                "mlp",
                "full_attention",
                "linear_attention",
            ],
            head_dim=64,
            ssm_state_size=64,
            mamba_num_heads=8,
            mamba_head_dim=64,
            n_groups=1,
            conv_kernel=4,
            chunk_size=64,
        ),
    ),
    "whisper": Family(
        _MODELS + "whisper",
        "WhisperForConditionalGeneration",
        dict(
            model_type="whisper",
            d_model=256,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=256,
            decoder_ffn_dim=256,
            max_target_positions=448,
            num_mel_bins=80,
            decoder_start_token_id=1,
            pad_token_id=0,
        ),
        dict(max_model_len=448),
        not_run="vLLM runs no connector with it",
    ),
}

_QWEN3 = dict(model_type="qwen3", num_hidden_layers=2, head_dim=64)
_EAGLE3 = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    num_hidden_layers=1,
    num_key_value_heads=4,
    head_dim=64,
    draft_vocab_size=512,
)
_DEEPSEEK_V3 = dict(
    **_DEEPSEEK_MOE,
    model_type="deepseek_v3",
    num_hidden_layers=2,
    num_key_value_heads=4,
    kv_lora_rank=512,
    q_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    num_nextn_predict_layers=1,
)

KINDS: dict[str, Family] = {
    "llama4 (chunked-local attention)": Family(
        _MODELS + "llama4",
        "Llama4ForCausalLM",
        dict(
            model_type="llama4_text",
            num_hidden_layers=4,
            head_dim=64,
            attention_chunk_size=64,
            no_rope_layers=[1, 1, 1, 0],
            intermediate_size_mlp=256,
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
        ),
    ),
    "openpangu (static sinks)": Family(
        _MODELS + "openpangu",
        "PanguEmbeddedForCausalLM",
        dict(
            model_type="llama",
            num_hidden_layers=2,
            head_dim=64,
            qk_nope_dim=64,
            qk_rope_dim=32,
            v_channels=64,
            param_sink_number=64,
            param_sink_with_value=True,
            bias=False,
        ),
        not_run="vLLM 0.33.0 cannot schedule it",
    ),
    "llama with EAGLE-3": Family(
        _MODELS + "llama",
        "LlamaForCausalLM",
        dict(model_type="llama", num_hidden_layers=2, head_dim=64),
        draft=dict(
            method="eagle3",
            num_speculative_tokens=2,
            config=_EAGLE3,
        ),
    ),
    "gpt_oss with EAGLE-3": Family(
        _MODELS + "gpt_oss",
        "GptOssForCausalLM",
        FAMILIES["gpt_oss"].values,
        draft=dict(method="eagle3", num_speculative_tokens=2, config=_EAGLE3),
    ),
    "deepseek_v3 with MTP": Family(
        _MODELS + "deepseek_v2",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_V3,
        draft=dict(method="mtp", num_speculative_tokens=1),
    ),
    "qwen3 with DFlash": Family(
        _MODELS + "qwen3",
        "Qwen3ForCausalLM",
        _QWEN3,
        draft=dict(
            method="dflash",
            num_speculative_tokens=4,
            config=dict(
                architectures=["DFlashDraftModel"],
                model_type="qwen3",
                num_hidden_layers=2,
                num_key_value_heads=4,
                head_dim=64,
                dflash_config=dict(mask_token_id=3, target_layer_ids=[0, 1]),
            ),
        ),
    ),
}
"""Models that show a kind of attention, or a drafter's KV, which the families lack."""

MODELS = {**FAMILIES, **KINDS}
