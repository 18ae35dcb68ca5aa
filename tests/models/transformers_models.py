"""Tiny models that transformers supports too: their configurations, and GGUF files with the same weights.

Used by the tests and by make_transformers_goldens.py, which runs in another environment. The names of tensors and keys
are written out here; files that localllm imports are tested in tests/localllm/wings/importing.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import add_keys, finish
from tests.localllm.wings.importing.tiny_models import USUAL, VOCABULARY, values_of

Shapes = Mapping[str, list[int]]
_ATTENTION = {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"} | {"self_attn.o_proj": "attn_output"}
_NETWORK = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {f"self_attn.{letter}_norm": f"attn_{letter}_norm" for letter in "qk"}
_OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAGUNA_LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Twin:
    """A model of transformers, and its GGUF file.

    config: of transformers. names: of tensors, without the layer and mostly without .weight and .bias. metadata: keys
    without the architecture's name; shared: those without that prefix. kind: what transformers adds to the states, if
    anything. changed: functions that change a layer's tensor, by its name in the file.
    """

    architecture: str
    config: dict[str, Any]
    names: dict[str, str]
    metadata: dict[str, Any]
    shared: Mapping[str, Any] | None = None
    kind: str = "CausalLM"
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None


TWINS: dict[str, Twin] = {
    "apertus": Twin(
        "apertus",
        {**USUAL, "model_type": "apertus", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_NETWORK,
            **_OUTSIDE,
            "attention_layernorm": "attn_norm",
            "feedforward_layernorm": "ffn_norm",
        },
        {"rope.dimension_count": 16},
        shared={"xielu.beta": [0.5, 0.5], "xielu.eps": [-1e-6, -1e-6]},
    ),
    "laguna": Twin(
        "laguna",
        {
            **USUAL,
            "model_type": "laguna",
            "head_dim": 32,
            "num_hidden_layers": 5,
            "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 2.5,
            "layer_types": _LAGUNA_LAYERS,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            },
        },
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_NETWORK,
            **_NORMS,
            **_OUTSIDE,
            **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
            "self_attn.g_proj": "attn_gate",
            "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "mlp.experts.down_proj": "ffn_down_exps.weight",
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
            "mlp.gate": "ffn_gate_inp",
        },
        {
            "attention.head_count": [4, 6, 6, 6, 4],
            "attention.sliding_window": 8,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 16,
            "rope.dimension_count_swa": 32,
            "rope.freq_base": 500_000.0,
            "rope.freq_base_swa": 10_000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "nemotron_h_moe": Twin(
        "nemotron_h_moe",
        {
            **USUAL,
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "ME*E",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
        },
        {
            "norm": "attn_norm",
            **{f"mixer.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
            "mixer.o_proj": "attn_output",
            "mixer.dt_bias": "ssm_dt.bias",
            "mixer.A_log": "ssm_a",
            "mixer.D": "ssm_d",
            "mixer.conv1d": "ssm_conv1d",
            "mixer.in_proj": "ssm_in",
            "mixer.out_proj": "ssm_out",
            "mixer.norm": "ssm_norm",
            "mixer.experts.up_proj": "ffn_up_exps.weight",
            "mixer.experts.down_proj": "ffn_down_exps.weight",
            "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            "mixer.gate": "ffn_gate_inp",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
            "mixer.fc1_latent_proj": "ffn_latent_down",
            "mixer.fc2_latent_proj": "ffn_latent_up",
            "embeddings": "token_embd",
            "norm_f": "output_norm",
            "lm_head": "output",
        },
        {
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 48, 0, 48],
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 80,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "moe_latent_size": 32,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 128,
        },
        changed={
            "ssm_a": lambda values: -np.exp(values)[:, None],
            "ssm_d": lambda values: values[:, None],
            "ssm_conv1d.weight": lambda values: values[:, 0],
            "ssm_norm.weight": lambda values: values.reshape(2, -1),
        },
    ),
    "eurobert": Twin(
        "eurobert",
        {**USUAL, "model_type": "eurobert", "num_key_value_heads": 4, "mask_token_id": 3},
        {**_ATTENTION, **_NETWORK, **_NORMS, **_OUTSIDE},
        {"attention.head_count_kv": 4, "attention.causal": False, "pooling_type": 1},
        kind="",
    ),
    "jina-bert-v3": Twin(
        "jina-bert-v3",
        {**USUAL, "model_type": "jina_embeddings_v3", "hidden_act": "gelu", "type_vocab_size": 1},
        {
            **_ATTENTION,
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "post_attention_layernorm": "attn_output_norm",
            "post_mlp_layernorm": "layer_output_norm",
            "embeddings.word_embeddings": "token_embd",
            "embeddings.token_type_embeddings": "token_types",
            "embeddings.LayerNorm": "token_embd_norm",
        },
        {
            "attention.head_count_kv": 4,
            "attention.causal": False,
            "attention.layer_norm_epsilon": 1e-5,
            "pooling_type": 1,
            "rope.freq_base": 20_000.0,
        },
        kind="",
    ),
    "modern-bert": Twin(
        "modern-bert",
        {
            **USUAL,
            "model_type": "modernbert",
            "num_hidden_layers": 4,
            "num_labels": 1,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "global_attn_every_n_layers": 3,
            "classifier_pooling": "mean",
        },
        {
            "attn.Wqkv": "attn_qkv",
            "attn.Wo": "attn_output",
            "attn_norm": "attn_norm",
            "mlp_norm": "ffn_norm",
            "mlp.Wi": "ffn_up",
            "mlp.Wo": "ffn_down",
            "embeddings.tok_embeddings": "token_embd",
            "embeddings.norm": "token_embd_norm",
            "final_norm": "output_norm",
            "head.dense": "cls",
            "head.norm": "cls.norm",
            "classifier": "cls.output",
        },
        {
            "attention.head_count_kv": 4,
            "attention.causal": False,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.sliding_window": 8,
            "rope.freq_base": 160_000.0,
            "pooling_type": 4,
        },
        kind="SequenceClassification",
    ),
}


def weights(shapes: Shapes) -> dict[str, np.ndarray]:
    """Each tensor's values."""
    return {name: values_of(name, tuple(shape)) for name, shape in shapes.items()}


def write_twin(twin: Twin, shapes: Shapes, path: Path) -> Path:
    """Write the model as a GGUF file, and return its path."""
    writer = gguf.GGUFWriter(path, twin.architecture)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    values, config = weights(shapes), twin.config
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    if "attention.layer_norm_epsilon" in twin.metadata:
        del sizes["attention.layer_norm_rms_epsilon"]
    keys = {f"{twin.architecture}.{key}": value for key, value in {**sizes, **twin.metadata}.items()}
    keys |= twin.shared or {}
    for name in ("alpha_n", "alpha_p"):
        stated = [float(value[0]) for key, value in values.items() if key.endswith(f"act_fn.{name}")]
        keys |= {f"xielu.{name}": stated} if stated else {}
    add_keys(writer, keys)
    for name, tensor in values.items():
        if named := _named(twin, name):
            change = (twin.changed or {}).get(named.partition(".")[2].partition(".")[2], _same)
            writer.add_tensor(named, np.ascontiguousarray(change(tensor)))
    return finish(writer)


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _named(twin: Twin, name: str) -> str:
    """A tensor's name in the file; empty for tensors that become metadata or are not needed."""
    if ".act_fn." in name or name.startswith("pooler."):
        return ""
    name = name.removeprefix("model.")
    layer = re.match(r"layers\.(\d+)\.", name)
    prefix, rest = (f"blk.{layer[1]}.", name[layer.end() :]) if layer else ("", name)
    if rest in twin.names:
        return prefix + twin.names[rest]
    stem, _, end = rest.rpartition(".")
    return f"{prefix}{twin.names[stem]}.{end}"
