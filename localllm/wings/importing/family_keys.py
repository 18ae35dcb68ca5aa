"""The keys that families of models have beyond the common ones, from their configurations.

Values that the engine does not support are refused.
"""

from collections.abc import Callable

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.rotation import Keys

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_EXAONE_32B_LAYERS = 64
_EXPERTS_OF_MAVERICK = 128  # whose heads are not normalised


def together(*makers: Callable[[Config], Keys]) -> Callable[[Config], Keys]:
    """The keys of several functions; later ones replace those of earlier ones."""
    return lambda config: {key: value for maker in makers for key, value in maker(config).items()}


def experts(config: Config) -> Keys:
    count = config.whole("num_experts", config.whole("num_local_experts", 0))
    keys: Keys = {"expert_count": count, "expert_used_count": config.whole("num_experts_per_tok")}
    if "moe_intermediate_size" in config.values:
        keys["expert_feed_forward_length"] = config.whole("moe_intermediate_size")
    return keys


def shared_expert(config: Config) -> Keys:
    return {"expert_shared_feed_forward_length": config.whole("shared_expert_intermediate_size")}


def windows(config: Config) -> Keys:
    """The window, and which layers have it."""
    kinds = config.texts("layer_types")
    return {
        "attention.sliding_window": config.whole("sliding_window"),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }


def qwen3_vl(config: Config) -> Keys:
    """For text, all sections of a position are equal; the other keys are for images."""
    deep = config.table("vision_config").numbers("deepstack_visual_indexes", [])
    sections = config.rope().numbers("mrope_section", [24, 20, 20])
    return {"rope.dimension_sections": [*map(int, sections), 0], "n_deepstack_layers": len(deep)}


def qwen2_vl(config: Config) -> Keys:
    """As for Qwen 3 VL."""
    sections = config.rope().numbers("mrope_section", [16, 24, 24])
    return {"rope.dimension_sections": [*map(int, sections), 0]}


def gemma2(config: Config) -> Keys:
    _check_scale(config)
    return {
        "attn_logit_softcapping": config.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
        "attention.sliding_window": config.whole("sliding_window", 4096),
    }


def gemma3(config: Config) -> Keys:
    _check_scale(config)
    config.expect_all(attn_logit_softcapping=None, final_logit_softcapping=None)
    kinds = config.texts("layer_types", [])
    pattern = config.whole("sliding_window_pattern", 6)
    windowed = [kind == "sliding_attention" for kind in kinds] or [(i + 1) % pattern > 0 for i in range(config.layers)]
    if windowed != [(i + 1) % 6 > 0 for i in range(config.layers)]:
        raise CheckpointError(f"{config.where}: only every sixth layer may have full attention.")
    local = config.rope("sliding_attention").number("rope_theta", 10_000.0)
    base = config.number("rope_local_base_freq", local)
    return {"attention.sliding_window": config.whole("sliding_window"), "rope.freq_base_swa": base}


def _check_scale(config: Config) -> None:
    """Raise CheckpointError unless scores are scaled by the head size, except in Gemma's largest models."""
    usual = config.head_size
    if (config.values.get("model_type"), config.layers) in (("gemma2", 46), ("gemma3_text", 62)):
        usual = config.whole("hidden_size") // config.whole("num_attention_heads")
    config.expect_all(query_pre_attn_scalar=usual, use_bidirectional_attention=False)


def granite(config: Config) -> Keys:
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }


def smollm3(config: Config) -> Keys:
    layers = config.values.get("no_rope_layers")
    if layers is not None and layers != [int((i + 1) % 4 != 0) for i in range(config.layers)]:
        raise CheckpointError(f"{config.where}: no_rope_layers: only every fourth layer may go without rotation.")
    return {}


def lfm2(config: Config) -> Keys:
    kinds = config.texts("layer_types")
    heads = config.whole("num_key_value_heads")
    width = config.whole("intermediate_size", config.whole("block_ff_dim", 0))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.whole("block_multiple_of", 256)
        width = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = multiple * -(-width // max(multiple, 1))
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "shortconv.l_cache": config.whole("conv_L_cache"),
        "attention.layer_norm_rms_epsilon": config.number("norm_eps", 1e-5),
        "feed_forward_length": width,
    }


def cohere2(config: Config) -> Keys:
    _windows_on(config, lambda layer: layer % 4 < 3, "only every fourth layer may have full attention")
    return {
        "attention.sliding_window": config.whole("sliding_window"),
        "logit_scale": config.number("logit_scale", 1.0),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps", 1e-5),
    }


def llama4(config: Config) -> Keys:
    layers, step = range(config.layers), config.whole("interleave_moe_layer_step", 1)
    turns = [int((layer + 1) % 4 != 0) for layer in layers]
    keys: Keys = {
        **experts(config),
        "feed_forward_length": config.whole("intermediate_size_mlp"),
        "expert_feed_forward_length": config.whole("intermediate_size"),
        "interleave_moe_layer_step": step,
        "attention.chunk_size": config.whole("attention_chunk_size"),
    }
    config.expect_all(
        layer_types=["chunked_attention" if turned else "full_attention" for turned in turns],
        moe_layers=[layer for layer in layers if step and (layer + 1) % step == 0],
        use_qk_norm=keys["expert_count"] != _EXPERTS_OF_MAVERICK,
    )
    config.expect("no_rope_layers", turns, [])
    config.expect("attn_temperature_tuning", True, 4)
    return keys


def ministral3(config: Config) -> Keys:
    return {"attention.temperature_scale": config.rope().number("llama_4_scaling_beta", 0.0)}


def granite_moe(config: Config) -> Keys:
    keys = {**granite(config), **experts(config)}
    if config.values.get("shared_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.whole("shared_intermediate_size")
    return keys


def gpt_oss(config: Config) -> Keys:
    config.expect_all(swiglu_alpha=1.702, swiglu_limit=7.0)
    _windows_on(config, lambda layer: layer % 2 == 0, "every other layer, from the first on, has a window")
    return {**experts(config), "attention.sliding_window": config.whole("sliding_window"),
            "expert_feed_forward_length": config.whole("intermediate_size")}  # fmt: skip


def grouped_experts(config: Config) -> Keys:
    """Experts of GLM 4.5 and DeepSeek V3: sigmoid routing with a bias, groups, dense first layers, shared experts."""
    kinds = config.texts("mlp_layer_types", [])
    first = kinds.count("dense") if kinds else config.whole("first_k_dense_replace", 0)
    if kinds and kinds != ["dense"] * first + ["sparse"] * (len(kinds) - first):
        raise CheckpointError(f"{config.where}: mlp_layer_types: only the first layers may be dense.")
    keys: Keys = {
        "expert_count": config.whole("n_routed_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
        "expert_feed_forward_length": config.whole("moe_intermediate_size"),
        "expert_shared_count": config.whole("n_shared_experts", 0),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_gating_func": _SIGMOID,
        "leading_dense_block_count": first,
    }
    if (groups := config.whole("n_group", 1)) > 1:
        keys |= {"expert_group_count": groups, "expert_group_used_count": config.whole("topk_group")}
    return keys


def latents(config: Config) -> Keys:
    """DeepSeek V3's attention: a token stores one latent and one rotated part for all heads."""
    config.expect("rope_interleave", True)
    rank, turned = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    keys: Keys = {
        **grouped_experts(config),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config.whole("qk_nope_head_dim") + turned,
        "attention.value_length_mla": config.whole("v_head_dim"),
        "rope.dimension_count": turned,
    }
    if config.values.get("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = config.whole("q_lora_rank")
    return keys


def deepseek_v2(config: Config) -> Keys:
    """DeepSeek V2 weights experts by a softmax. Choosing groups by their best expert is not supported."""
    config.expect_all(topk_method="greedy", norm_topk_prob=False, n_group=1)
    return {**latents(config), "expert_gating_func": _SOFTMAX}


def exaone4(config: Config) -> Keys:
    """Only the 32B model has windows; it is recognised by its number of layers."""
    if config.values.get("sliding_window") is None:
        return {}
    if config.layers != _EXAONE_32B_LAYERS:
        raise CheckpointError(f"{config.where}: windows are supported only in models of {_EXAONE_32B_LAYERS} layers.")
    _windows_on(config, lambda layer: layer % 4 < 3, "only every fourth layer may have full attention")
    return {"attention.sliding_window": config.whole("sliding_window")}


def hunyuan_moe(config: Config) -> Keys:
    width = "moe_intermediate_size" if config.values.get("moe_intermediate_size") else "intermediate_size"
    return {
        "expert_count": config.alike("num_experts"),
        "expert_used_count": config.alike("moe_topk"),
        "expert_feed_forward_length": config.alike(width),
        "expert_shared_feed_forward_length": config.whole("intermediate_size") * config.alike("num_shared_expert", 1),
    }


def ernie_moe(config: Config) -> Keys:
    config.expect("moe_layer_end_index", -1, config.layers - 1)
    width, shared = config.whole("moe_intermediate_size"), config.whole("moe_num_shared_experts", 0)
    return {
        "expert_count": config.whole("moe_num_experts"),
        "expert_used_count": config.whole("moe_k"),
        "expert_feed_forward_length": width,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": width * shared,
        "leading_dense_block_count": config.whole("moe_layer_start_index", 0),
        "interleave_moe_layer_step": 1,
    }


def lfm2_moe(config: Config) -> Keys:
    return {
        **lfm2(config),
        **experts(config),
        "feed_forward_length": config.whole("intermediate_size"),
        "leading_dense_block_count": config.whole("num_dense_layers"),
        "expert_gating_func": _SIGMOID,
    }


def laguna(config: Config) -> Keys:
    """GLM 4.5's experts under names of its own; layers with a window have other heads and another rotation."""
    config.expect("gating", True, "per-head", "per-element")
    full, local = (config.rope(f"{kind}_attention") for kind in ("full", "sliding"))
    scale = config.number("moe_routed_scaling_factor", 1.0)
    named = {"n_routed_experts": config.whole("num_experts"), "n_shared_experts": 1, "routed_scaling_factor": scale}
    keys: Keys = {
        **grouped_experts(Config({**config.values, **named}, config.where)),
        **shared_expert(config),
        "rope.dimension_count": int(config.head_size * full.number("partial_rotary_factor", 1.0)),
    }
    if counts := config.numbers("num_attention_heads_per_layer", []):
        keys["attention.head_count"] = [int(count) for count in counts]
    if "sliding_attention" in config.texts("layer_types", []):
        local.expect("rope_type", "default")
        keys |= {
            **windows(config),
            "rope.dimension_count_swa": int(config.head_size * local.number("partial_rotary_factor", 1.0)),
            "rope.freq_base_swa": local.number("rope_theta"),
        }
    return keys


def _windows_on(config: Config, slides: Callable[[int], bool], rule: str) -> None:
    """Raise CheckpointError, which states the rule, unless exactly the layers that `slides` selects have windows."""
    kinds = config.texts("layer_types", [])
    if kinds and [kind == "sliding_attention" for kind in kinds] != [slides(layer) for layer in range(config.layers)]:
        raise CheckpointError(f"{config.where}: layer_types: {rule}.")
