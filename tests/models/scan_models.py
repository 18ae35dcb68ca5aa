"""Small models with selective scans (Mamba-2), to be written by tests.models.synthetic."""

from dataclasses import replace
from typing import Any

from tests.models.synthetic import CHOICE_BIAS, SHARED_EXPERT, Synthetic

_SCAN = {
    "ssm_in.weight": "all of scan, width",
    "ssm_conv1d.weight": "scan convolved, delta reach",
    "ssm_conv1d.bias": "scan convolved",
    "ssm_dt.bias": "delta heads",
    "ssm_a": "delta heads, 1",
    "ssm_d": "delta heads, 1",
    "ssm_norm.weight": "groups, of a group",
    "ssm_out.weight": "width, scanned",
}


def _sizes(heads: int, head: int, groups: int, state: int, reach: int = 4) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": reach,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head,
    }


_FALCON_NORM = {"ffn_norm": "width"}  # its files call it so
_GRANITE = {
    **_sizes(16, 32, 1, 64),
    "attention.head_count_kv": [0, 0, 2, 0, 2],
    "embedding_scale": 1.5,
    "residual_scale": 0.7,
    "attention.scale": 0.03,
    "logit_scale": 8.0,
    "rope.scaling.finetuned": False,
}
SCAN_MODELS: dict[str, Synthetic] = {
    "granitehybrid": Synthetic("granitehybrid", layers=5, extra=_GRANITE, added=_SCAN),
    # llama.cpp requires a scan twice as wide as the embedding.
    "granitehybrid-odd": Synthetic(
        "granitehybrid",
        layers=4,
        embedding=300,
        feed_forward=200,
        heads=6,
        head=36,
        tied=False,
        extra={
            **_sizes(15, 40, 3, 24, 3),
            "attention.head_count_kv": [3, 0, 0, 2],
            "attention.scale": 0.1,
            "rope.dimension_count": 36,
        },
        added=_SCAN,
    ),
    "granitehybrid-moe": Synthetic(
        "granitehybrid",
        layers=4,
        experts=8,
        extra={
            **_GRANITE,
            "attention.head_count_kv": [0, 2, 0, 0],
            "expert_used_count": 3,
            "expert_shared_feed_forward_length": 384,
        },
        added={**_SCAN, **SHARED_EXPERT},
    ),
    "falcon-h1": Synthetic(
        "falcon-h1",
        layers=3,
        tied=False,
        extra={**_sizes(8, 64, 1, 96), "rope.freq_base": 1e8},
        added=_SCAN | _FALCON_NORM,
        dropped=("ssm_norm.weight", "ffn_norm.weight"),
    ),
    "falcon-h1-odd": Synthetic(
        "falcon-h1",
        layers=2,
        embedding=328,
        feed_forward=200,
        heads=6,
        head=36,
        extra=_sizes(6, 20, 2, 40, 2),
        added=_SCAN | _FALCON_NORM,
        dropped=("ffn_norm.weight",),
    ),
    "nemotron_h": Synthetic(
        "nemotron_h",
        layers=6,
        tied=False,
        extra={
            **_sizes(32, 16, 8, 64),
            "attention.head_count_kv": [0, 0, 0, 2, 0, 0],
            "feed_forward_length": [0, 512, 0, 0, 0, 512],
            "attention.layer_norm_epsilon": 1e-5,
        },
        added=_SCAN,
        dropped=("ffn_gate.weight", "ffn_norm.weight"),
    ),
    "mamba2": Synthetic(
        "mamba2",
        layers=3,
        heads=0,
        kv_heads=0,
        feed_forward=0,
        tied=False,
        extra=_sizes(8, 64, 1, 128),
        added=_SCAN,
        dropped=("ffn_norm.weight",),
    ),
}
SCAN_MODELS["nemotron_h-odd"] = replace(
    SCAN_MODELS["nemotron_h"],
    layers=5,
    embedding=328,
    heads=6,
    head=36,
    extra={
        **_sizes(9, 24, 3, 20, 3),
        "attention.head_count_kv": [3, 0, 0, 0, 2],
        "feed_forward_length": [0, 0, 200, 328, 0],
        "attention.layer_norm_epsilon": 1e-5,
    },
    added={**_SCAN, "ffn_up.bias": "inner", "ffn_down.bias": "width", "attn_output.bias": "width"},
)
SCAN_MODELS["mamba2-odd"] = replace(SCAN_MODELS["mamba2"], embedding=104, extra=_sizes(6, 12, 2, 8, 5))
SCAN_MODELS["nemotron_h_moe"] = replace(
    SCAN_MODELS["nemotron_h"],
    architecture="nemotron_h_moe",
    layers=5,
    experts=8,
    extra={
        **_sizes(8, 32, 2, 32),
        "attention.head_count_kv": [0, 0, 2, 0, 0],
        "feed_forward_length": [0, 128, 0, 128, 0],
        "attention.layer_norm_epsilon": 1e-5,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 256,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    added={**_SCAN, **SHARED_EXPERT, **CHOICE_BIAS},
    dropped=("ffn_gate_exps.weight", "ffn_gate_shexp.weight", "ffn_norm.weight"),
)
# As Nemotron 3 Super.
_ON_LATENTS = {"ffn_latent_down.weight": "expert latent, width", "ffn_latent_up.weight": "width, expert latent"}
SCAN_MODELS["nemotron_h_moe-latents"] = replace(
    SCAN_MODELS["nemotron_h_moe"],
    extra={**SCAN_MODELS["nemotron_h_moe"].extra, "moe_latent_size": 72},
    added={**SCAN_MODELS["nemotron_h_moe"].added, **_ON_LATENTS},
)
