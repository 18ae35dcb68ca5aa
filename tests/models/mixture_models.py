"""Small mixtures of experts, to be written by tests.models.synthetic."""

from dataclasses import replace

from tests.models.synthetic import CHOICE_BIAS, SHARED_EXPERT, Synthetic

_BEHIND_DENSE = {
    "expert_used_count": 3,
    "expert_feed_forward_length": 128,
    "expert_shared_feed_forward_length": 256,
    "leading_dense_block_count": 1,
}
MIXTURES: dict[str, Synthetic] = {}
MIXTURES["glm4moe"] = Synthetic(
    "glm4moe",
    layers=3,
    bias=True,
    experts=6,
    extra={
        **_BEHIND_DENSE,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "rope.dimension_count": 32,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, "post_attention_norm.weight": "width"},
    dropped=("ffn_norm.weight",),
)
MIXTURES["glm4moe-355b"] = replace(MIXTURES["glm4moe"], experts=8, head_norms=True, bias=False)
MIXTURES["ernie4_5-moe"] = Synthetic(
    "ernie4_5-moe",
    layers=3,
    experts=8,
    extra={**_BEHIND_DENSE, "interleave_moe_layer_step": 1},
    added={**SHARED_EXPERT, **CHOICE_BIAS},
)
MIXTURES["hunyuan-moe"] = Synthetic(
    "hunyuan-moe",
    feed_forward=128,
    head_norms=True,
    experts=8,
    extra={"expert_used_count": 3, "expert_feed_forward_length": 128, "expert_shared_feed_forward_length": 384},
    added=SHARED_EXPERT,
)
MIXTURES["bailingmoe2"] = Synthetic(
    "bailingmoe2",
    layers=3,
    tied=False,
    head_norms=True,
    experts=8,
    extra={
        **_BEHIND_DENSE,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "rope.dimension_count": 32,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, "attn_qkv.weight": "fused, width"},
    dropped=("attn_q.weight", "attn_k.weight", "attn_v.weight"),
)
MIXTURES["bailingmoe"] = Synthetic(
    "bailingmoe",
    tied=False,
    experts=8,
    extra={
        "expert_used_count": 4,
        "expert_feed_forward_length": 128,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 256,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "rope.dimension_count": 64,
    },
    added=SHARED_EXPERT,
)
# As Laguna XS 2: the first of four layers has full attention and fewer heads, and rotates half of each.
MIXTURES["laguna"] = Synthetic(
    "laguna",
    layers=5,
    tied=False,
    head_norms=True,
    experts=8,
    extra={
        **_BEHIND_DENSE,
        "leading_dense_block_count": 3,
        "attention.head_count": [4, 6, 6, 6, 4],
        "attention.sliding_window": 40,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 64,
        "rope.freq_base": 500_000.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 128,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, "attn_gate.weight": "heads, width"},
)
# As Laguna M 1: no window, a gate for each value, and heads of an odd size.
MIXTURES["laguna-odd"] = replace(
    MIXTURES["laguna"],
    layers=3,
    embedding=200,
    feed_forward=136,
    heads=6,
    kv_heads=3,
    head=40,
    extra={
        **_BEHIND_DENSE,
        "leading_dense_block_count": 2,
        "expert_feed_forward_length": 72,
        "expert_weights_norm": True,
        "rope.dimension_count": 20,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, "attn_gate.weight": "queries, width"},
)
# As Llama 4 Scout, with a chunk of 8,192 tokens, and as Maverick, with experts in every other layer and no head norms.
MIXTURES["llama4"] = Synthetic(
    "llama4",
    layers=5,
    tied=False,
    experts=16,
    extra={
        "expert_used_count": 1,
        "interleave_moe_layer_step": 1,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 128,
        "rope.dimension_count": 64,
        "rope.freq_base": 500_000.0,
    },
    factors={"rope_freqs.weight": 8.0},
    added=SHARED_EXPERT,
)
MIXTURES["llama4-every-other"] = replace(
    MIXTURES["llama4"],
    experts=128,
    embedding=128,
    extra={**MIXTURES["llama4"].extra, "interleave_moe_layer_step": 2, "expert_feed_forward_length": 64,
           "expert_shared_feed_forward_length": 64},
)  # fmt: skip
# With chunks of another size, which llama.cpp does not read.
CHUNKED = {
    name: replace(MIXTURES["llama4"], extra={**MIXTURES["llama4"].extra, "attention.chunk_size": size})
    for name, size in (("llama4-chunks", 32), ("llama4-chunks-of-40", 40))
}
MIXTURES["smallthinker"] = Synthetic(
    "smallthinker",
    layers=5,
    experts=8,
    extra={
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_gating_func": 2,
        "attention.sliding_window": 4096,
    },
)
