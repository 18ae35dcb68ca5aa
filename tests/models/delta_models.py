"""Small models with gated delta networks, to be written by tests.models.synthetic."""

from dataclasses import replace

from tests.models.synthetic import CHOICE_BIAS, SHARED_EXPERT, Synthetic

_DELTA_NET = {
    "attn_qkv.weight": "convolved, width",
    "attn_gate.weight": "delta values, width",
    "ssm_conv1d.weight": "convolved, delta reach",
    "ssm_dt.bias": "delta heads",
    "ssm_a": "delta heads",
    "ssm_beta.weight": "delta heads, width",
    "ssm_alpha.weight": "delta heads, width",
    "ssm_norm.weight": "state",
    "ssm_out.weight": "width, delta values",
    "attn_q.weight": "both queries, width",
    "post_attention_norm.weight": "width",
}
_QWEN35 = Synthetic(
    "qwen35",
    layers=5,
    head_norms=True,
    extra={
        "rope.dimension_count": 16,
        "rope.dimension_sections": [3, 3, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.group_count": 4,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
    },
    added=_DELTA_NET,
    dropped=("ffn_norm.weight",),
)
DELTA_NETS: dict[str, Synthetic] = {"qwen35": _QWEN35}
# A layer after the others, which drafts tokens and changes nothing else.
DELTA_NETS["qwen35-mtp"] = replace(
    _QWEN35,
    layers=6,
    extra={**_QWEN35.extra, "nextn_predict_layers": 1},
    beside={
        "blk.5.nextn.eh_proj.weight": "256, 512",
        "blk.5.nextn.enorm.weight": "width",
        "blk.5.nextn.hnorm.weight": "width",
        "blk.5.nextn.shared_head_norm.weight": "width",
    },
)
DELTA_NETS["qwen35-odd"] = replace(
    _QWEN35,
    layers=4,
    embedding=328,
    feed_forward=200,
    heads=6,
    head=36,
    tied=False,
    extra={
        **_QWEN35.extra,
        "attention.recurrent_layers": [False, True, True, False],
        "rope.dimension_count": 12,
        "rope.dimension_sections": [2, 2, 2, 0],
        "ssm.conv_kernel": 3,
        "ssm.state_size": 40,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 240,
    },
)
_DELTA_EXPERTS = {
    "expert_used_count": 2,
    "expert_feed_forward_length": 96,
    "expert_shared_feed_forward_length": 160,
}
DELTA_NETS["qwen35moe"] = replace(
    _QWEN35,
    architecture="qwen35moe",
    experts=8,
    extra={**_QWEN35.extra, **_DELTA_EXPERTS, "ssm.time_step_rank": 8, "ssm.inner_size": 256},
    added={**_DELTA_NET, **SHARED_EXPERT, "ffn_gate_inp_shexp.weight": "width"},
)
DELTA_NETS["qwen3next"] = replace(
    DELTA_NETS["qwen35moe"],
    architecture="qwen3next",
    added={**DELTA_NETS["qwen35moe"].added, "ssm_ba.weight": "both of delta heads, width"},
    dropped=("ffn_norm.weight", "ssm_beta.weight", "ssm_alpha.weight"),
    extra={key: value for key, value in DELTA_NETS["qwen35moe"].extra.items() if key != "rope.dimension_sections"},
)
DELTA_NETS["qwen3next-fused"] = replace(
    DELTA_NETS["qwen3next"],
    added={**DELTA_NETS["qwen3next"].added, "ssm_in.weight": "all of delta, width"},
    dropped=(*DELTA_NETS["qwen3next"].dropped, "attn_qkv.weight", "attn_gate.weight"),
)
# Kimi delta attention, and attention on latents without positions in some layers. Heads of both have the same size: 32
# values, of which 16 are the part of a key that all heads share.
_KIMI = {
    "attn_k.weight": "queries, width",
    "attn_v.weight": "queries, width",
    **{f"ssm_conv1d_{part}.weight": "1, queries, 1, delta reach" for part in "qkv"},
    **{f"ssm_{name}_a.weight": "head, width" for name in "fg"},
    **{f"ssm_{name}_b.weight": "queries, head" for name in "fg"},
    "ssm_beta.weight": "heads, width",
    "ssm_a": "1, 1, heads, 1",
    "ssm_dt.bias": "queries",
    "ssm_norm.weight": "head",
    "attn_kv_a_mqa.weight": "stored, width",
    "attn_kv_a_norm.weight": "rank",
    "attn_k_b.weight": "heads, rank, 16",
    "attn_v_b.weight": "heads, head, rank",
}
DELTA_NETS["kimi-linear"] = Synthetic(
    "kimi-linear",
    layers=5,
    tied=False,
    head=32,
    experts=8,
    extra={
        "attention.head_count_kv": [0, 0, 0, 1, 0],
        "attention.kv_lora_rank": 64,
        "attention.key_length": 80,
        "attention.value_length": 64,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 16,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 32,
        "leading_dense_block_count": 1,
        "expert_used_count": 3,
        "expert_feed_forward_length": 96,
        "expert_shared_feed_forward_length": 96,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.446,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, **_KIMI},
)
DELTA_NETS["kimi-linear-odd"] = replace(
    DELTA_NETS["kimi-linear"],
    layers=4,
    embedding=328,
    feed_forward=200,
    heads=3,
    head=40,
    extra={
        **DELTA_NETS["kimi-linear"].extra,
        "attention.head_count_kv": [1, 0, 0, 1],
        "attention.key_length_mla": 40,
        "attention.value_length_mla": 40,
        "rope.dimension_count": 8,
        "attention.key_length": 72,
        "ssm.conv_kernel": 3,
        "kda.head_dim": 40,
    },
    added={**SHARED_EXPERT, **CHOICE_BIAS, **_KIMI, "attn_k_b.weight": "heads, rank, 32"},
)
