"""Small models with attention on latents, to be written by tests.models.synthetic."""

from dataclasses import replace

from tests.models.synthetic import CHOICE_BIAS, SHARED_EXPERT, Synthetic

LATENT_MODELS: dict[str, Synthetic] = {}
# Heads of 64 and 32 values, of which 32 are rotated; values of 32. Stored are a latent of 128 and the 32 rotated
# values.
_LATENTS = {
    "attn_kv_a_mqa.weight": "stored, width",
    "attn_kv_a_norm.weight": "rank",
    "attn_k_b.weight": "heads, rank, 64",
    "attn_v_b.weight": "heads, head, rank",
}
_OWN_QUERIES = {"attn_q.weight": "latent queries, width"}
_SHORT_QUERIES = {
    "attn_q_a.weight": "query rank, width",
    "attn_q_a_norm.weight": "query rank",
    "attn_q_b.weight": "latent queries, query rank",
}
_NO_HEADS = ("attn_k.weight", "attn_v.weight")
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
LATENT_MODELS["deepseek2"] = Synthetic(
    "deepseek2",
    layers=3,
    tied=False,
    kv_heads=1,
    head=32,
    experts=8,
    extra={
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "expert_shared_feed_forward_length": 128,
        "leading_dense_block_count": 2,
        **_YARN,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.0,
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": 128,
        "attention.key_length": 160,
        "attention.value_length": 128,
        "attention.key_length_mla": 96,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 32,
    },
    added={**SHARED_EXPERT, **_LATENTS, **_OWN_QUERIES},
    dropped=_NO_HEADS,
)
LATENT_MODELS["deepseek2-old"] = replace(
    LATENT_MODELS["deepseek2"],
    kv_heads=4,
    extra={
        **{key: value for key, value in LATENT_MODELS["deepseek2"].extra.items() if not key.endswith("_mla")},
        "attention.key_length": 96,
        "attention.value_length": 32,
    },
    added={
        **SHARED_EXPERT,
        **_OWN_QUERIES,
        "attn_kv_a_mqa.weight": "stored, width",
        "attn_kv_a_norm.weight": "rank",
        "attn_kv_b.weight": "384, rank",
    },
)
LATENT_MODELS["deepseek2-dense"] = replace(
    LATENT_MODELS["deepseek2"],
    layers=2,
    heads=16,
    experts=0,
    extra={
        **{key: value for key, value in LATENT_MODELS["deepseek2"].extra.items() if key not in ("expert_used_count",)},
        "leading_dense_block_count": 2,
    },
    added={**_LATENTS, **_OWN_QUERIES},
)
LATENT_MODELS["deepseek2-groups"] = replace(
    LATENT_MODELS["deepseek2"],
    heads=20,
    experts=16,
    extra={
        **{key: value for key, value in LATENT_MODELS["deepseek2"].extra.items() if not key.startswith("rope.scaling")},
        "attention.q_lora_rank": 96,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.8,
    },
    added={**SHARED_EXPERT, **_LATENTS, **_SHORT_QUERIES, **CHOICE_BIAS},
    dropped=(*_NO_HEADS, "attn_q.weight"),
)
# The experts that its metadata describes are in no layer.
LATENT_MODELS["deepseek2-no-experts"] = replace(
    LATENT_MODELS["deepseek2-groups"],
    extra={**LATENT_MODELS["deepseek2-groups"].extra, "leading_dense_block_count": 3},
)
# No size is a multiple of its padding.
LATENT_MODELS["deepseek2-odd"] = replace(
    LATENT_MODELS["deepseek2-groups"],
    embedding=200,
    feed_forward=88,
    heads=5,
    head=20,
    extra={
        **LATENT_MODELS["deepseek2-groups"].extra,
        "attention.q_lora_rank": 42,
        "attention.kv_lora_rank": 40,
        "attention.key_length": 50,
        "attention.value_length": 40,
        "attention.key_length_mla": 30,
        "attention.value_length_mla": 20,
        "rope.dimension_count": 10,
    },
    added={**SHARED_EXPERT, **_LATENTS, **_SHORT_QUERIES, **CHOICE_BIAS, "attn_k_b.weight": "heads, rank, 20"},
)
# As wide as real ones: what a token stores is longer than any other head may be.
LATENT_MODELS["deepseek2-wide"] = replace(
    LATENT_MODELS["deepseek2-dense"],
    heads=4,
    extra={
        **LATENT_MODELS["deepseek2-dense"].extra,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 128,
        "rope.dimension_count": 64,
    },
)
