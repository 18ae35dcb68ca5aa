"""Configurations of further tiny models: mixtures of experts, other norms and rotations, and models of embeddings."""

from typing import Any

from tests.localllm.importing.tiny_models import HEADS, MIXTURE, TOKENS, USUAL, VOCABULARY

WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GROUPS = {**MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
           "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}  # fmt: skip
_LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
            "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip
_SCAN = {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16,
         "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_d_conv": 4}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "starcoder2": {**USUAL, "model_type": "starcoder2", "use_bias": True, "sliding_window": None, "norm_epsilon": 1e-5,
                   "tie_word_embeddings": True},
    "phi": {**USUAL, "model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5,
            "layer_norm_eps": 1e-5},
    "granitemoe": {**USUAL, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2,
                   "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
                   "logits_scaling": 2.0},
    "granitemoeshared": {**USUAL, "model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 64},
    "gpt_oss": {**USUAL, **HEADS, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
                                    "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": True}},
    "glm4_moe": {**USUAL, **HEADS, **_GROUPS, "model_type": "glm4_moe", "partial_rotary_factor": 0.5,
                 "attention_bias": True, "use_qk_norm": True},
    "exaone4": {**USUAL, **HEADS, "model_type": "exaone4", "sliding_window": None,
                "layer_types": ["full_attention"] * 2},
    "hunyuan_v1_dense": {**USUAL, **HEADS, "model_type": "hunyuan_v1_dense"},
    "hunyuan_v1_dense-rope": {**USUAL, **HEADS, "model_type": "hunyuan_v1_dense",
                              "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                                                  "rope_theta": 10000.0}},
    "hunyuan_v1_moe": {**USUAL, **HEADS, "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2},
    "olmo3": {**USUAL, "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 8, "layer_types": WINDOWS},
    "ernie4_5_moe": {**USUAL, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2,
                     "moe_intermediate_size": 32, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
                     "moe_layer_end_index": 1, "moe_layer_interval": 1},
    "lfm2_moe": {**USUAL, **MIXTURE, "model_type": "lfm2_moe", "num_hidden_layers": 3, "num_experts": 4,
                 "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_dense_layers": 1,
                 "use_expert_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
    "ministral3": {**USUAL, **HEADS, "model_type": "ministral3", "sliding_window": None,
                   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0,
                                       "beta_slow": 1.0, "original_max_position_embeddings": 8, "mscale": 1.0,
                                       "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "deepseek_v2": {**USUAL, **_GROUPS, **_LATENTS, "model_type": "deepseek_v2", "norm_topk_prob": False,
                    "topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v3": {**USUAL, **_GROUPS, **_LATENTS, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**USUAL, **_GROUPS, **_LATENTS, "model_type": "glm4_moe_lite"},
    "granitemoehybrid": {**USUAL, **_SCAN, "model_type": "granitemoehybrid", "num_local_experts": 4,
                         "num_experts_per_tok": 2, "position_embedding_type": "nope"},
    "granitemoehybrid-dense": {**USUAL, **_SCAN, "model_type": "granitemoehybrid", "num_local_experts": 0,
                               "num_experts_per_tok": 0, "position_embedding_type": "rope", "logits_scaling": 2.0},
    "qwen3_next": {**USUAL, **HEADS, **MIXTURE, "model_type": "qwen3_next", "num_experts": 4, "norm_topk_prob": True,
                   "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5},
    "qwen3_5_text": {**USUAL, **HEADS, "model_type": "qwen3_5_text",
                     "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                     "linear_conv_kernel_dim": 4},
    "qwen3_5_moe_text": {**USUAL, **HEADS, **MIXTURE, "model_type": "qwen3_5_moe_text", "num_experts": 4,
                         "shared_expert_intermediate_size": 32,
                         "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                         "linear_conv_kernel_dim": 4},
}  # fmt: skip
_ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 256, "vocab_size": VOCABULARY}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**_ENCODER, "model_type": "bert", "hidden_act": "gelu"},
    "modernbert": {**_ENCODER, "model_type": "modernbert", "local_attention": 8, "pad_token_id": 0,
                   "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
                   "global_attn_every_n_layers": 3, "num_hidden_layers": 3},
    "xlm-roberta": {**_ENCODER, "model_type": "xlm-roberta", "hidden_act": "gelu", "max_position_embeddings": 66,
                    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 4, "type_vocab_size": 1},
    "nomic_bert": {**_ENCODER, "model_type": "nomic_bert"},
    "embedding_gemma": {**USUAL, **HEADS, "model_type": "gemma3_text", "use_bidirectional_attention": True,
                        "query_pre_attn_scalar": 32, "sliding_window": 9, "num_hidden_layers": 6},
}  # fmt: skip
# Scores of these texts are compared.
RERANKED = [TOKENS[first : first + 6] for first in range(10)]
RERANKER = {**ENCODERS["xlm-roberta"], "num_labels": 1, "classifier_dropout": 0.0}
