"""Configurations of tiny models with several parts or kinds of layers: scans, later Gemmas, and Qwen 3 VL."""

from typing import Any

from tests.localllm.wings.importing.tiny_models import HEADS, MIXTURE, USUAL

_SCAN = {"conv_kernel": 4, "n_groups": 2, "expand": 2, "chunk_size": 8}
_FALCON = {**USUAL, **HEADS, "model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16,
           "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8,
           "mamba_rms_norm": False, "mamba_norm_before_gate": False, "lm_head_multiplier": 0.5,
           "embedding_multiplier": 3.0, "mlp_multipliers": [0.75, 1.5], "key_multiplier": 0.625,
           "attention_out_multiplier": 1.25, "attention_in_multiplier": 0.875, "ssm_in_multiplier": 1.5,
           "ssm_out_multiplier": 0.75, "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.875]}  # fmt: skip
_NEMOTRON = {**USUAL, **HEADS, **_SCAN, "model_type": "nemotron_h", "mamba_num_heads": 8, "mamba_head_dim": 16,
             "ssm_state_size": 16, "layer_norm_epsilon": 1e-5}  # fmt: skip
_LAYERS_3N = (["sliding_attention"] * 4 + ["full_attention"]) * 3
_WINDOWED = {"sliding_window": 8, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
             "hidden_size_per_layer_input": 16, "final_logit_softcapping": 30.0}  # fmt: skip
_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
          "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                             "rope_theta": 1_000_000.0}}  # fmt: skip
_GEMMA4 = {**USUAL, **_WINDOWED, "model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64,
           "rope_parameters": _ROPES, "vocab_size_per_layer_input": 320, "num_hidden_layers": 6,
           "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
           "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4],
                               "mrope_interleaved": True}}  # fmt: skip

HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba2": {**_SCAN, "model_type": "mamba2", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2,
               "num_heads": 8, "head_dim": 16, "state_size": 16, "layer_norm_epsilon": 1e-5, "bos_token_id": 1,
               "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    "falcon_h1": _FALCON,
    "falcon_h1-norm": {**_FALCON, "mamba_rms_norm": True, "tie_word_embeddings": True, "embedding_multiplier": 1.0,
                       "lm_head_multiplier": 1.0},
    "nemotron_h": {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "nemotron_h-experts": {**_NEMOTRON, **MIXTURE, "moe_shared_expert_intermediate_size": 48, "n_routed_experts": 4,
                           "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                           "routed_scaling_factor": 2.5},
    "nemotron_h-latents": {**_NEMOTRON, **MIXTURE, "moe_shared_expert_intermediate_size": 48, "n_routed_experts": 4,
                           "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                           "routed_scaling_factor": 2.5, "moe_latent_size": 48},
    "gemma3n": {**USUAL, **_WINDOWED, **HEADS, "model_type": "gemma3n_text", "num_hidden_layers": 15,
                "layer_types": _LAYERS_3N, "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 310,
                "laurel_rank": 8, "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 10},
    "gemma4": {**_GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4-experts": {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                       "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
                       "top_k_experts": 2, "moe_intermediate_size": 32},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": _VISION, "tie_word_embeddings": False,
                 "text_config": {**USUAL, **HEADS, **_M_ROPE}},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "vision_config": _VISION, "tie_word_embeddings": False,
                     "text_config": {**USUAL, **HEADS, **MIXTURE, **_M_ROPE, "num_experts": 4,
                                     "moe_intermediate_size": 48}},
}  # fmt: skip
# Scores are not scaled, so norms of queries near one would make them larger than f16 keys are exact.
SMALLER = {
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4-experts"), ("q_norm", 0.125)),
    "jina_embeddings_v3-nomic": (r"layers\.1\.mlp\.fc\d\.bias", 0.0),  # experts have none
}
