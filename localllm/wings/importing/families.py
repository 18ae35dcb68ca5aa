"""Rules for each family of models: how its configuration and its tensors are converted to GGUF."""

from collections.abc import Callable

import numpy as np

from localllm.text import shortened
from localllm.wings.importing import delta_nets, encoders, gemmas, remote_code, scans
from localllm.wings.importing import family_keys as stated
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import EXACT_GELU, GELU, XIELU, Change, Family, TensorRule, half
from localllm.wings.importing.matrices import CheckpointMatrix, MatrixRows, Turned, chosen_rows

_LAYER = r"model\.layers\.(\d+)\."
_MIXTRAL = (TensorRule(_LAYER + r"block_sparse_moe\.experts\.(.*)", r"layers.\1.feed_forward.experts.\2"),)


def _every_other(index: int) -> Change:
    return lambda matrix, _config: chosen_rows(matrix, lambda rows: rows[index::2])


def _every_other_value(index: int) -> Change:
    """Every other row of a matrix that is stored transposed."""
    return lambda matrix, config: _every_other(index)(Turned(matrix), config)


def _every_other_bias(index: int) -> Change:
    return lambda matrix, config: Turned(_every_other_value(index)(matrix, config))


def _turned(matrix: CheckpointMatrix, _config: Config) -> CheckpointMatrix:
    return Turned(matrix)


def _split(stored: str, template: str, change: Callable[[int], Change]) -> tuple[TensorRule, TensorRule]:
    """Rules for gate and up projections that are stored in one tensor."""
    gate, up = (template.format(name) for name in ("gate_proj", "up_proj"))
    return TensorRule(stored, gate, change(0)), TensorRule(stored, up, change(1))


def _of_heads(matrix: CheckpointMatrix, config: Config, keys: bool) -> CheckpointMatrix:
    """Each head's rows that expand latents to keys, or those that expand them to values: heads x rows x rank."""
    heads, plain, values = (config.whole(name) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    if matrix.shape[0] != heads * (plain + values):
        raise CheckpointError(f"{config.where}: kv_b_proj has {matrix.shape[0]} rows; heads are of another size.")
    rows = np.arange(matrix.shape[0]).reshape(heads, plain + values)
    chosen = rows[:, :plain] if keys else rows[:, plain:]
    return MatrixRows(matrix, chosen.reshape(-1), (*chosen.shape, matrix.shape[1]))


_LFM2_EXPERTS = tuple(
    TensorRule(_LAYER + rf"feed_forward\.experts\.{stored}\.weight", rf"model.layers.\1.mlp.experts.{name}_proj.weight")
    for stored, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
)
_GRANITE_EXPERTS = (
    *_split(_LAYER + r"block_sparse_moe\.input_linear\.weight", r"model.layers.\1.mlp.experts.{}.weight", half),
    *_split(_LAYER + r"shared_mlp\.input_linear\.weight", r"model.layers.\1.mlp.shared_experts.{}.weight", half),
    TensorRule(_LAYER + r"shared_mlp\.output_linear\.weight", r"model.layers.\1.mlp.shared_experts.down_proj.weight"),
)
_GRANITE_DENSE = (
    *_split(_LAYER + r"shared_mlp\.input_linear\.weight", r"model.layers.\1.mlp.{}.weight", half),
    TensorRule(_LAYER + r"shared_mlp\.output_linear\.weight", r"model.layers.\1.mlp.down_proj.weight"),
)


def _upright(matrix: CheckpointMatrix, config: Config, width: str) -> CheckpointMatrix:
    """Experts as rows x values of a row; transposed if the file stores them the other way."""
    return matrix if matrix.shape[-1] == config.whole(width) else Turned(matrix)


def _upright_half(index: int) -> Change:
    return lambda matrix, config: half(index)(_upright(matrix, config, "hidden_size"), config)


_FUSED_EXPERTS = (
    *_split(_LAYER + r"mlp\.experts\.gate_up_proj", r"model.layers.\1.mlp.experts.{}.weight", _upright_half),
    TensorRule(_LAYER + r"mlp\.experts\.down_proj", r"model.layers.\1.mlp.experts.down_proj.weight",
         lambda matrix, config: _upright(matrix, config, "moe_intermediate_size")),
)  # fmt: skip
_OSS = _LAYER + r"mlp\.experts\."
_GPT_OSS = (
    *_split(_OSS + "gate_up_proj_bias", r"model.layers.\1.mlp.experts.{}.bias", _every_other_bias),
    *_split(_OSS + r"gate_up_proj\.weight", r"model.layers.\1.mlp.experts.{}.weight", _every_other),
    *_split(_OSS + "gate_up_proj", r"model.layers.\1.mlp.experts.{}.weight", _every_other_value),
    TensorRule(_OSS + "down_proj_bias", r"model.layers.\1.mlp.experts.down_proj.bias"),
    TensorRule(_OSS + "down_proj", r"model.layers.\1.mlp.experts.down_proj.weight", _turned),
)
_LLAMA4 = (
    *_split(_LAYER + r"feed_forward\.experts\.gate_up_proj", r"model.layers.\1.feed_forward.experts.{}.weight",
            lambda index: lambda matrix, config: half(index)(Turned(matrix), config)),
    TensorRule(_LAYER + r"feed_forward\.experts\.down_proj",
               r"model.layers.\1.feed_forward.experts.down_proj.weight", _turned),
)  # fmt: skip
_LATENTS = (
    TensorRule(_LAYER + r"self_attn\.kv_b_proj\.weight", r"model.layers.\1.self_attn.k_b_proj.weight",
         lambda matrix, config: Turned(_of_heads(matrix, config, True))),
    TensorRule(_LAYER + r"self_attn\.kv_b_proj\.weight", r"model.layers.\1.self_attn.v_b_proj.weight",
         lambda matrix, config: _of_heads(matrix, config, False)),
)  # fmt: skip
_LAGUNA = (
    TensorRule(_LAYER + r"mlp\.experts\.e_score_correction_bias", r"model.layers.\1.mlp.gate.e_score_correction.bias"),
)
_DENSE = tuple(TensorRule(rf"dense_{number}\.linear\.weight", f"dense_{number}.weight") for number in (2, 3))

_NO_WINDOWS = {"use_sliding_window": False}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_NO_BIASES = {"use_qkv_bias": False, "use_bias": False}
_SHARED = stated.together(stated.experts, stated.shared_expert)
_NEMOTRON = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "sliding_window": None}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True, window_is_context=True),
    "ministral3": Family("mistral3", stated.ministral3, permuted=True, window_is_context=True, sharpening=1.0),
    "mixtral": Family("llama", stated.experts, permuted=True, rules=_MIXTRAL, window_is_context=True),
    "qwen2": Family("qwen2", expects=_NO_WINDOWS),
    "qwen3": Family("qwen3", expects=_NO_WINDOWS),
    "qwen3_next": Family("qwen3next", stated.together(delta_nets.delta_net, _SHARED), shifted_norms=True,
                         expects={"norm_topk_prob": True, **_ALL_SPARSE}, rules=delta_nets.QWEN3_NEXT, rotary=0.25),
    "qwen3_5_text": Family("qwen35", delta_nets.qwen35, shifted_norms=True, rules=delta_nets.QWEN35, rotary=0.25),
    "qwen3_5_moe_text": Family("qwen35moe", stated.together(delta_nets.qwen35, _SHARED), shifted_norms=True,
                               expects={"norm_topk_prob": True}, rules=(*delta_nets.QWEN35, *_FUSED_EXPERTS),
                               rotary=0.25),
    "qwen2_moe": Family("qwen2moe", _SHARED, expects={"norm_topk_prob": False, **_ALL_SPARSE}),
    "qwen3_moe": Family("qwen3moe", stated.experts, expects={"norm_topk_prob": True, **_ALL_SPARSE}),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
                    Family("qwen2vl", stated.qwen2_vl, expects=_NO_WINDOWS)),
    "qwen3_vl_text": Family("qwen3vl", stated.qwen3_vl),
    "qwen3_vl_moe_text": Family("qwen3vlmoe", stated.together(stated.qwen3_vl, stated.experts), expects=_ALL_SPARSE,
                                rules=_FUSED_EXPERTS),
    "olmoe": Family("olmoe", stated.experts, expects={"norm_topk_prob": False, "clip_qkv": None}),
    "gemma": Family("gemma", shifted_norms=True, activations=GELU, tied=True),
    "gemma2": Family("gemma2", stated.gemma2, shifted_norms=True, activations=GELU, tied=True),
    "gemma3_text": Family("gemma3", stated.gemma3, shifted_norms=True, activations=GELU, rope="full_attention",
                          tied=True),
    "gemma3_text, both ways": Family("gemma-embedding", encoders.gemma_embedding, shifted_norms=True, activations=GELU,
                                     rope="full_attention", tied=True, rules=_DENSE),
    "gemma3n_text": Family("gemma3n", gemmas.gemma3n, activations=GELU, rope="full_attention", tied=True,
                           expects={"attention_bias": False, "altup_correct_scale": True}, rules=gemmas.GEMMA3N),
    "gemma4_text": Family("gemma4", gemmas.gemma4, activations=GELU, rope="full_attention", tied=True,
                          expects={"attention_bias": False, "use_bidirectional_attention": "vision"},
                          rules=gemmas.GEMMA4),
    "phi": Family("phi2", expects={"qk_layernorm": False}, activations=GELU),
    "phi3": Family("phi3", window_is_context=True),
    "starcoder2": Family("starcoder2", activations=GELU, window_is_context=True, tied=True),
    "lfm2": Family("lfm2", stated.lfm2, tied=True),
    "lfm2_moe": Family("lfm2moe", stated.lfm2_moe, rules=_LFM2_EXPERTS, tied=True,
                       expects={"norm_topk_prob": True, "routed_scaling_factor": 1.0}),
    "glm4": Family("glm4", rotary=0.5),
    "glm4_moe": Family("glm4moe", stated.grouped_experts, rotary=0.5),
    "glm4_moe_lite": Family("deepseek2", stated.latents, rules=_LATENTS, sharpening=0.1),
    "deepseek_v2": Family("deepseek2", stated.deepseek_v2, rules=_LATENTS, sharpening=0.1),
    "deepseek_v3": Family("deepseek2", stated.latents, rules=_LATENTS, sharpening=0.1),
    "kimi_linear": Family("kimi-linear", delta_nets.kimi_linear, expects=delta_nets.KIMI_EXPECTS,
                          rules=(*_LATENTS, *delta_nets.KIMI)),
    "granite": Family("granite", stated.granite, permuted=True),
    "granitemoe": Family("granitemoe", stated.granite_moe, permuted=True, rules=_GRANITE_EXPERTS),
    "granitemoehybrid": Family("granitehybrid", scans.granite_hybrid, permuted=True,
                               rules=(*scans.GRANITE_HYBRID, *_GRANITE_EXPERTS)),
    "granitemoehybrid, dense": Family("granitehybrid", scans.granite_hybrid, permuted=True,
                                      rules=(*scans.GRANITE_HYBRID, *_GRANITE_DENSE)),
    "mamba2": Family("mamba2", scans.mamba2, expects={"use_bias": False}, rules=scans.MIXERS, attends=False),
    "falcon_h1": Family("falcon-h1", scans.falcon_h1, rules=scans.FALCON_H1),
    "falcon_h1, tied": Family("falcon-h1", scans.falcon_h1, rules=scans.FALCON_H1_TIED),
    "nemotron_h": Family("nemotron_h", scans.nemotron_h, expects=_NEMOTRON, rules=scans.MIXERS),
    "nemotron_h, experts": Family("nemotron_h_moe", scans.nemotron_h, expects=_NEMOTRON, rules=scans.NEMOTRON_EXPERTS),
    "granitemoeshared": Family("granitemoe", stated.granite_moe, permuted=True, rules=_GRANITE_EXPERTS),
    "gpt_oss": Family("gpt-oss", stated.gpt_oss, rules=_GPT_OSS, truncated=False),
    "olmo2": Family("olmo2", expects={"clip_qkv": None}),
    "olmo3": Family("olmo2", stated.windows, expects={"clip_qkv": None}, rope="full_attention"),
    "smollm3": Family("smollm3", stated.smollm3, expects=_NO_WINDOWS, permuted=True),
    "cohere2": Family("cohere2", stated.cohere2, tied=True),
    "exaone4": Family("exaone4", stated.exaone4),
    "hunyuan_v1_dense": Family("hunyuan-dense"),
    "hunyuan_v1_moe": Family("hunyuan-moe", stated.hunyuan_moe),
    "seed_oss": Family("seed_oss"),
    "ernie4_5": Family("ernie4_5"),
    "ernie4_5_moe": Family("ernie4_5-moe", stated.ernie_moe, expects={"moe_layer_interval": 1}),
    "exaone": Family("exaone", remote_code.exaone, expects={"activation_function": "silu"}),
    "minicpm": Family("minicpm", remote_code.minicpm, permuted=True, tied=True),
    "internlm2": Family("internlm2", expects={"bias": False}, permuted=True, rules=remote_code.INTERNLM2),
    "llama4_text": Family("llama4", stated.llama4, rules=_LLAMA4,
                          expects={"attention_bias": False, "attn_scale": 0.1, "floor_scale": 8192}),
    "apertus": Family("apertus", expects={"post_norm": False, "qk_norm": True}, activations=("xielu",), rules=XIELU),
    "laguna": Family("laguna", stated.laguna, rules=_LAGUNA, rope="full_attention", table="step35",
                     expects={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
                              "attention_bias": False}),
    "bailing_moe": Family("bailingmoe", remote_code.bailing_moe, permuted=True, rules=remote_code.BAILING_MOE,
                          expects={**_NO_BIASES, "norm_head": False, "norm_softmax": False}),
    "bailing_moe_v2": Family("bailingmoe2", remote_code.bailing_moe2, rotary=0.5,
                             expects={**_NO_BIASES, "score_function": "sigmoid"}),
    "smallthinker": Family("smallthinker", remote_code.smallthinker),
    "bert": Family("bert", encoders.unmasked, activations=EXACT_GELU, rules=encoders.BERT,
                   expects=encoders.BERT_OPTIONS),
    "bert, alibi": Family("jina-bert-v2", encoders.jina_bert_v2, activations=EXACT_GELU, rules=encoders.JINA_BERT_V2,
                          expects={"feed_forward_type": "geglu", "is_decoder": False, "emb_pooler": "mean"}),
    "roberta": Family("bert", encoders.roberta, activations=EXACT_GELU, rules=encoders.ROBERTA,
                      expects=encoders.BERT_OPTIONS),
    "xlm-roberta": Family("bert", encoders.roberta, activations=EXACT_GELU, rules=encoders.ROBERTA,
                          expects=encoders.BERT_OPTIONS),
    "xlm-roberta, rotary": Family("jina-bert-v3", encoders.jina_bert_v3, activations=EXACT_GELU,
                                  expects={"is_decoder": False}, rules=encoders.JINA_BERT_V3,
                                  lacks="task adapters are left out"),
    "jina_embeddings_v3": Family("jina-bert-v3", encoders.jina_bert_v3, activations=EXACT_GELU,
                                 expects={"is_decoder": False}, rules=encoders.JINA_BERT_V3),
    "nomic_bert": Family("nomic-bert", encoders.unmasked, rules=encoders.BERT,
                         expects={**encoders.NOMIC_OPTIONS, "activation_function": "swiglu", "qkv_proj_bias": False,
                                  "mlp_fc1_bias": False}),
    "nomic_bert, experts": Family("nomic-bert-moe", encoders.nomic_bert_moe, activations=EXACT_GELU,
                                  expects=encoders.NOMIC_EXPERTS_OPTIONS,
                                  rules=encoders.NOMIC_BERT_MOE,
                                  lacks="expert biases are left out: GGUF has no tensor for them"),
    "modernbert": Family("modern-bert", encoders.modern_bert, activations=EXACT_GELU, rules=encoders.MODERN_BERT,
                         tied=True),
    "eurobert": Family("eurobert", encoders.unmasked, rules=encoders.EUROBERT),
}  # fmt: skip


def find_family(model_type: str, config: Config) -> Family:
    """A family's rules. Raises CheckpointError, which names the known families, for an unknown one."""
    variants = {
        "both ways": config.values.get("use_bidirectional_attention") is True,
        "dense": config.values.get("num_local_experts") == 0,
        "tied": config.values.get("tie_word_embeddings") is True,
        "alibi": config.values.get("position_embedding_type") == "alibi",
        "rotary": config.values.get("position_embedding_type") == "rotary",
        "experts": config.values.get("moe_every_n_layers")
        or (model_type == "nemotron_h" and "moe" in scans.nemotron_layers(config)),
    }
    names = config.values.get("architectures")
    if model_type == "bailing_moe" and isinstance(names, list) and "BailingMoeV2ForCausalLM" in names:
        model_type = "bailing_moe_v2"
    for variant, meant in variants.items():
        if meant and f"{model_type}, {variant}" in FAMILIES:
            model_type = f"{model_type}, {variant}"
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{config.where}: models of the family {shortened(model_type)!r} cannot be imported. There are rules for "
            f"{', '.join(sorted(name for name in FAMILIES if ',' not in name))}. Get the model as GGUF instead."
        )
    return FAMILIES[model_type]
