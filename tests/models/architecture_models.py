"""A small model of every native architecture and its variants, to be written by tests.models.synthetic."""

from dataclasses import replace
from typing import Any

from tests.models.delta_models import DELTA_NETS
from tests.models.gemma_models import GEMMA_MODELS
from tests.models.latent_models import LATENT_MODELS
from tests.models.mixture_models import MIXTURES
from tests.models.scan_models import SCAN_MODELS
from tests.models.synthetic import SHARED_EXPERT, Synthetic

_GEMMA = Synthetic("gemma2", layers=4, post_norms=True, extra={"attention.sliding_window": 40})
_GRANITE: dict[str, Any] = {
    "embedding_scale": 1.5,
    "residual_scale": 0.7,
    "attention.scale": 0.03,
    "logit_scale": 8.0,
}
_NORMS_OF_ALL_HEADS = {"attn_q_norm.weight": "queries", "attn_k_norm.weight": "keys"}
_OUTPUT_BIASES = {"attn_output.bias": "width", "ffn_up.bias": "inner", "ffn_down.bias": "width"}
_NORMS_BEFORE = ("attn_norm.weight", "ffn_norm.weight")

MODELS: dict[str, Synthetic] = {
    "llama": Synthetic("llama", tied=False, extra={"rope.dimension_count": 64}),
    "llama-multi-query": Synthetic("llama", heads=8, kv_heads=1, head=32, extra={"rope.dimension_count": 32}),
    "llama3-rope": Synthetic("llama", extra={"rope.dimension_count": 64}, factors={"rope_freqs.weight": 8.0}),
    "mixtral": Synthetic("llama", experts=6, extra={"rope.dimension_count": 64, "expert_used_count": 2}),
    "qwen2": Synthetic("qwen2", bias=True, embedding=448, heads=7, kv_heads=1, head=64),
    "qwen3": Synthetic("qwen3", head_norms=True, head=128, heads=4),
    "qwen3moe": Synthetic(
        "qwen3moe",
        head_norms=True,
        experts=16,
        extra={"expert_used_count": 4, "expert_feed_forward_length": 256},
    ),
    "phi3": Synthetic("phi3", fused=True, kv_heads=4, extra={"rope.dimension_count": 64}),
    "phi3-longrope": Synthetic(
        "phi3",
        fused=True,
        extra={
            "rope.dimension_count": 64,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.19,
        },
        factors={"rope_factors_short.weight": 1.5, "rope_factors_long.weight": 6.0},
    ),
    "gemma2": replace(_GEMMA, extra={**_GEMMA.extra, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": replace(
        _GEMMA,
        architecture="gemma3",
        layers=7,
        head_norms=True,
        head=256,
        heads=2,
        kv_heads=1,
        extra={**_GEMMA.extra, "rope.freq_base": 1_000_000.0},
    ),
    "gemma3-rope-swa": replace(
        _GEMMA, architecture="gemma3", head_norms=True, extra={**_GEMMA.extra, "attention.sliding_window_pattern": 3}
    ),
    **{name: Synthetic(name) for name in ("gemma", "ernie4_5")},
    "internlm2": Synthetic("internlm2", tied=False),
    "exaone": Synthetic("exaone", factors={"rope_freqs.weight": 8.0}),
    "seed_oss": Synthetic(
        "seed_oss", bias=True, added={"post_attention_norm.weight": "width"}, dropped=("ffn_norm.weight",)
    ),
    "smollm3": Synthetic("smollm3", layers=4),
    "mistral3": Synthetic(
        "mistral3",
        extra={
            "attention.temperature_scale": 0.5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
    ),
    "granite": Synthetic("granite", extra=_GRANITE),
    "granitemoe": Synthetic(
        "granitemoe",
        experts=8,
        extra={**_GRANITE, "expert_used_count": 3, "expert_shared_feed_forward_length": 384},
        added=SHARED_EXPERT,
    ),
    "minicpm": Synthetic("minicpm", layers=4, extra={key: _GRANITE[key] for key in ("embedding_scale", "logit_scale")}),
    "qwen2moe": Synthetic(
        "qwen2moe",
        tied=False,
        bias=True,
        experts=8,
        extra={
            "expert_used_count": 3,
            "expert_feed_forward_length": 128,
            "expert_shared_feed_forward_length": 384,
        },
        added={**SHARED_EXPERT, "ffn_gate_inp_shexp.weight": "width"},
    ),
    "olmoe": Synthetic(
        "olmoe", tied=False, kv_heads=4, experts=6, extra={"expert_used_count": 3}, added=_NORMS_OF_ALL_HEADS
    ),
    "olmo2": Synthetic("olmo2", tied=False, post_norms=True, added=_NORMS_OF_ALL_HEADS, dropped=_NORMS_BEFORE),
    "olmo3": Synthetic(
        "olmo2",
        layers=4,
        tied=False,
        post_norms=True,
        extra={
            "attention.sliding_window": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.attn_factor": 1.2,
            "rope.scaling.original_context_length": 128,
        },
        added=_NORMS_OF_ALL_HEADS,
        dropped=_NORMS_BEFORE,
    ),
    "exaone4": Synthetic("exaone4", head_norms=True, post_norms=True, dropped=_NORMS_BEFORE),
    "exaone4-32b": Synthetic(
        "exaone4",
        layers=64,
        embedding=64,
        feed_forward=64,
        heads=2,
        kv_heads=1,
        head=32,
        head_norms=True,
        post_norms=True,
        extra={"attention.sliding_window": 40},
        dropped=_NORMS_BEFORE,
    ),
    "glm4": Synthetic(
        "glm4",
        bias=True,
        post_norms=True,
        extra={"rope.dimension_count": 32},
        added={"ffn_up.weight": "both inner, width"},
        dropped=("ffn_gate.weight",),
    ),
    "hunyuan-dense": Synthetic(
        "hunyuan-dense",
        head_norms=True,
        extra={"rope.scaling.alpha": 1000.0, "rope.scaling.type": "none"},
    ),
    "cohere2": Synthetic(
        "cohere2",
        layers=4,
        layer_norm=True,
        extra={"attention.sliding_window": 40, "logit_scale": 0.25, "rope.dimension_count": 64},
        dropped=("ffn_norm.weight",),
    ),
    "starcoder2": Synthetic(
        "starcoder2",
        bias=True,
        layer_norm=True,
        added={**_OUTPUT_BIASES, "ffn_norm.bias": "width", "attn_norm.bias": "width"},
        dropped=("ffn_gate.weight",),
        beside={"output_norm.bias": "width"},
    ),
    "phi2": Synthetic(
        "phi2",
        tied=False,
        layer_norm=True,
        kv_heads=4,
        extra={"rope.dimension_count": 32},
        added={
            **_OUTPUT_BIASES,
            "attn_norm.bias": "width",
            "attn_qkv.weight": "fused, width",
            "attn_qkv.bias": "fused",
        },
        dropped=("ffn_gate.weight", "ffn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"),
        beside={"output_norm.bias": "width", "output.bias": "vocabulary"},
    ),
    "gpt-oss": Synthetic(
        "gpt-oss",
        layers=4,
        tied=False,
        bias=True,
        heads=8,
        head=32,
        experts=8,
        extra={
            "expert_used_count": 4,
            "expert_feed_forward_length": 288,
            "attention.sliding_window": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 256,
        },
        added={
            "post_attention_norm.weight": "width",
            "attn_output.bias": "width",
            "attn_sinks.weight": "heads",
            "ffn_gate_inp.bias": "experts",
            "ffn_gate_exps.bias": "experts, inner",
            "ffn_up_exps.bias": "experts, inner",
            "ffn_down_exps.bias": "experts, width",
        },
        dropped=("ffn_norm.weight",),
    ),
}

_XIELU: dict[str, Any] = {f"xielu.{name}": value for name, value in (("beta", 0.5), ("eps", -1e-6))}
_XIELU |= {"xielu.alpha_n": [0.8, -0.3], "xielu.alpha_p": [0.2, 0.9]}
MODELS["apertus"] = Synthetic(
    "apertus",
    tied=False,
    head_norms=True,
    extra={"rope.dimension_count": 64},
    shared=_XIELU,
    factors={"rope_freqs.weight": 8.0},
    dropped=("ffn_gate.weight",),
)
MODELS["apertus-odd"] = replace(
    MODELS["apertus"],
    layers=3,
    embedding=200,
    feed_forward=424,
    heads=6,
    kv_heads=3,
    head=40,
    extra={"rope.dimension_count": 40},
    shared={**_XIELU, "xielu.alpha_n": 0.6, "xielu.alpha_p": [0.2, 0.9, -2.0]},
)

_CONVOLUTIONS = {
    "shortconv.in_proj.weight": "all parts, width",
    "shortconv.conv.weight": "width, reach",
    "shortconv.out_proj.weight": "width, width",
}
_LFM2 = Synthetic(
    "lfm2",
    layers=5,
    head_norms=True,
    extra={"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2, 0, 2]},
    added=_CONVOLUTIONS,
    output_norm="token_embd_norm.weight",
)
MODELS["lfm2"] = _LFM2
MODELS["lfm2-odd"] = replace(
    _LFM2,
    layers=4,
    embedding=360,
    feed_forward=200,
    heads=6,
    head=60,
    tied=False,
    extra={"shortconv.l_cache": 4, "attention.head_count_kv": [2, 0, 3, 0], "attention.sliding_window": 40},
)
MODELS["lfm2moe"] = replace(
    _LFM2,
    architecture="lfm2moe",
    experts=8,
    extra={
        **_LFM2.extra,
        "expert_used_count": 3,
        "expert_feed_forward_length": 192,
        "expert_gating_func": 2,
        "leading_dense_block_count": 2,
    },
    added={**_CONVOLUTIONS, "exp_probs_b.bias": "experts"},
)

# llama.cpp (build 0.3.36 of its Python package) does not read this architecture's epsilon, and takes 0.
MODELS["qwen2vl"] = replace(
    MODELS["qwen2"],
    architecture="qwen2vl",
    extra={"rope.dimension_sections": [8, 12, 12, 0], "attention.layer_norm_rms_epsilon": 1e-9},
)
# Sections that cover all pairs: llama.cpp does not rotate those beyond three times a section.
MODELS["qwen3vl"] = replace(
    MODELS["qwen3"], architecture="qwen3vl", extra={"rope.dimension_sections": [22, 21, 21, 0], "n_deepstack_layers": 2}
)
MODELS["qwen3vlmoe"] = replace(
    MODELS["qwen3moe"],
    architecture="qwen3vlmoe",
    extra={**MODELS["qwen3moe"].extra, "rope.dimension_sections": [11, 11, 10, 0]},
)
MODELS |= MIXTURES | GEMMA_MODELS | LATENT_MODELS | DELTA_NETS | SCAN_MODELS


def _varied(name: str, *, without: tuple[str, ...] = (), expert_width: int = 0, **extra: Any) -> Synthetic:
    """One of the models with other metadata; "__" in a key is a dot."""
    model = MODELS[name]
    changed = {key: value for key, value in model.extra.items() if key not in without}
    changed |= {key.replace("__", "."): value for key, value in extra.items()}
    return replace(model, extra=changed, expert_width=expert_width)


_WIDTH = ("expert_feed_forward_length",)
MODELS["bailingmoe2-groups"] = replace(
    _varied("bailingmoe2", expert_group_count=4, expert_group_used_count=2), experts=16
)
MODELS["bailingmoe2-softmax"] = replace(
    _varied("bailingmoe2", expert_gating_func=1, expert_weights_norm=True, rope__dimension_count=64),
    added={**SHARED_EXPERT, "attn_qkv.weight": "fused, width"},
)
MODELS["smallthinker-sees-all"] = replace(
    _varied("smallthinker", without=("attention.sliding_window",), expert_gating_func=1, expert_used_count=4), layers=2
)
MODELS["llama-linear-rope"] = _varied("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
MODELS["llama-yarn"] = _varied(
    "llama", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=256
)
MODELS["granite-unturned"] = _varied("granite", rope__scaling__finetuned=False)
MODELS["gemma2-rope-swa"] = _varied("gemma2", rope__freq_base_swa=500.0)
MODELS["gemma3-attention-factor"] = _varied("gemma3-rope-swa", rope__scaling__attn_factor=1.3)
MODELS["gemma3-rope-swa"] = _varied("gemma3-rope-swa", rope__freq_base_swa=500.0)
MODELS["gpt-oss-rope-swa"] = _varied("gpt-oss", rope__freq_base_swa=300.0)
MODELS["qwen2moe-unstated"] = _varied("qwen2moe", without=_WIDTH, expert_width=256, expert_used_count=2)
MODELS["qwen3moe-unstated"] = replace(_varied("qwen3moe", without=_WIDTH, expert_width=128), experts=8)
MODELS["qwen3moe-listed"] = _varied(
    "qwen3moe", expert_width=192, expert_used_count=[4, 4], expert_feed_forward_length=[192, 192]
)
