"""Small models of Gemma 4 and 3n, whose layers differ in many ways, to be written by tests.models.synthetic."""

from dataclasses import replace

from tests.models.synthetic import STILL, Synthetic

_GEMMA4 = Synthetic(
    "gemma4",
    layers=10,
    heads=4,
    kv_heads=1,
    head=128,
    window_head=64,
    per_layer=32,
    query_norm=0.1,
    head_norms=True,
    post_norms=True,
    extra={
        "feed_forward_length": [256] * 5 + [512] * 5,
        "attention.sliding_window": 40,
        "attention.sliding_window_pattern": [True, True, True, True, False] * 2,
        "attention.shared_kv_layers": 5,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.dimension_count_swa": 64,
        "final_logit_softcapping": 30.0,
    },
    factors={"rope_freqs.weight": STILL},
    added={"layer_output_scale.weight": "1"},
)
GEMMA_MODELS: dict[str, Synthetic] = {"gemma4": _GEMMA4}
# Like the largest: no second embedding, more key heads in layers with a window, values made from keys in the others.
GEMMA_MODELS["gemma4-odd"] = replace(
    _GEMMA4,
    layers=6,
    embedding=360,
    feed_forward=200,
    heads=8,
    head=96,
    window_head=40,
    per_layer=0,
    tied=False,
    extra={
        **{
            key: value
            for key, value in _GEMMA4.extra.items()
            if not key.endswith(("shared_kv_layers", "forward_length"))
        },
        "attention.head_count_kv": [4, 4, 2, 4, 4, 2],
        "attention.sliding_window_pattern": [True, True, False] * 2,
        "rope.dimension_count_swa": 20,
    },
    dropped=("blk.2.attn_v.weight", "blk.5.attn_v.weight"),
)
GEMMA_MODELS["gemma4-moe"] = replace(
    GEMMA_MODELS["gemma4-odd"],
    layers=3,
    embedding=256,
    feed_forward=320,
    head=128,
    window_head=64,
    experts=4,
    extra={
        **GEMMA_MODELS["gemma4-odd"].extra,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "rope.dimension_count_swa": 64,
        "attention.head_count_kv": [4, 4, 2],
        "attention.sliding_window_pattern": [True, True, False],
    },
    added={
        **_GEMMA4.added,
        "ffn_gate.weight": "dense, width",
        "ffn_up.weight": "dense, width",
        "ffn_down.weight": "width, dense",
        "ffn_gate_inp.scale": "width",
        "pre_ffw_norm_2.weight": "width",
        "post_ffw_norm_1.weight": "width",
        "post_ffw_norm_2.weight": "width",
        "ffn_gate_up_exps.weight": "experts, both inner, width",
        "ffn_down_exps.scale": "experts",
    },
    dropped=(*GEMMA_MODELS["gemma4-odd"].dropped, "ffn_gate_exps.weight", "ffn_up_exps.weight"),
)

_STREAMS = {
    "altup_correct_coef.weight": "4, 4",
    "altup_correct_scale.weight": "width",
    "altup_predict_coef.weight": "16, 4",
    "altup_router.weight": "4, width",
    "altup_router_norm.weight": "width",
    "laurel_l.weight": "64, width",
    "laurel_r.weight": "width, 64",
    "laurel_post_norm.weight": "width",
}
GEMMA_MODELS["gemma3n"] = Synthetic(
    "gemma3n",
    layers=25,
    embedding=256,
    feed_forward=1024,
    heads=4,
    kv_heads=2,
    head=32,
    per_layer=256,
    query_norm=0.05,
    head_norms=True,
    post_norms=True,
    extra={
        "attention.sliding_window": 40,
        "attention.sliding_window_pattern": [layer % 5 < 4 for layer in range(25)],
        "attention.shared_kv_layers": 5,
        "rope.freq_base": 1_000_000.0,
    },
    added=_STREAMS,
    beside={"altup_proj.weight": "3, width, width", "altup_unembd_proj.weight": "3, width, width"},
)
# No layer shares keys and values, and the file does not say which layers have a window.
GEMMA_MODELS["gemma3n-short"] = replace(
    GEMMA_MODELS["gemma3n"],
    layers=12,
    embedding=232,
    feed_forward=600,
    heads=3,
    kv_heads=1,
    head=40,
    extra={"attention.sliding_window": 24, "attention.shared_kv_layers": 0, "rope.freq_base": 1_000_000.0},
)
