"""Tiny models of families that transformers lacks, each equivalent to one that it has, under other names and layouts.

A model has the weights of its equivalent, whose logits by transformers are the expected ones.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from tests.localllm.wings.importing.tiny_models import HEADS, MIXTURE, USUAL, VOCABULARY, values_of

Weights = dict[str, np.ndarray]
EQUALS: dict[str, dict[str, Any]] = {
    "granite-minicpm": {**USUAL, "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.5,
                        "attention_multiplier": 0.25, "logits_scaling": 4.0, "num_hidden_layers": 4,
                        "tie_word_embeddings": True},
    "llama-exaone": {**USUAL, "model_type": "llama",
                     "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                                         "rope_theta": 5000.0}},
    "glm4_moe-bailing": {**USUAL, **HEADS, **MIXTURE, "model_type": "glm4_moe", "partial_rotary_factor": 0.5,
                         "attention_bias": False, "use_qk_norm": True, "n_routed_experts": 4, "n_shared_experts": 1,
                         "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
                         "norm_topk_prob": True},
    "granitemoeshared-bailing": {**USUAL, "model_type": "granitemoeshared", "num_local_experts": 4,
                                 "num_experts_per_tok": 2, "shared_intermediate_size": 192,
                                 "attention_multiplier": 0.25},
    "jina_embeddings_v3-nomic": {"model_type": "jina_embeddings_v3", "hidden_size": 64, "intermediate_size": 96,
                                 "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
                                 "vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
                                 "type_vocab_size": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Remote:
    """equal: the equivalent in transformers. config: differences from the usual one. stored: its tensors, from the
    equivalent's.
    """

    equal: str
    config: dict[str, Any]
    stored: Callable[[Weights], Iterable[tuple[str, np.ndarray]]]


def weights_of(shapes: dict[str, list[int]]) -> Weights:
    return {name: values_of(name, tuple(shape)) for name, shape in shapes.items()}


def _renamed(*pairs: tuple[str, str]) -> Callable[[Weights], Iterable[tuple[str, np.ndarray]]]:
    def stored(weights: Weights) -> Iterable[tuple[str, np.ndarray]]:
        for name, values in weights.items():
            yield reduce(lambda text, pair: re.sub(*pair, text), pairs, name), values

    return stored


def _fused(prefix: str, name: str, together: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """Queries, keys and values of each layer in one tensor."""

    def stored(weights: Weights) -> Iterable[tuple[str, np.ndarray]]:
        rest = dict(weights)
        for layer in range(2):
            parts = (rest.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv")
            yield f"{prefix}{layer}{name}", together(*parts)
        yield from rest.items()

    return stored


def _by_groups(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Two queries, their key and their value, of heads of 16."""
    heads = [each.reshape(2, -1, 16, 64) for each in (queries, keys, values)]
    return np.concatenate(heads, axis=1).reshape(-1, 64)


def _then(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weights: second(dict(first(weights)))


_INTERN = _renamed((r"embed_tokens", "tok_embeddings"), (r"self_attn\.o_proj", "attention.wo"), (r"lm_head", "output"),
                   (r"mlp\.gate_proj", "feed_forward.w1"), (r"mlp\.up_proj", "feed_forward.w3"),
                   (r"mlp\.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"),
                   ("post_attention_layernorm", "ffn_norm"))  # fmt: skip
_EXAONE = _renamed((r"model\.layers\.", "transformer.h."), (r"self_attn\.o_", "self_attn.out_"),
                   (r"self_attn\.", "attn.attention."), (r"mlp\.gate_proj", "mlp.c_fc_0"),
                   (r"mlp\.up_proj", "mlp.c_fc_1"), (r"mlp\.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"),
                   ("post_attention_layernorm", "ln_2"), (r"model\.embed_tokens", "transformer.wte"),
                   (r"model\.norm", "transformer.ln_f"))  # fmt: skip
_BAILING = _renamed((r"embed_tokens", "word_embeddings"), (r"self_attn\.o_proj", "attention.dense"),
                    (r"self_attn\.([qk])_norm", r"attention.\1_layernorm"), (r"\.q_layernorm", ".query_layernorm"),
                    (r"\.k_layernorm", ".key_layernorm"), (r"e_score_correction_bias", "expert_bias"))  # fmt: skip
_HALVES = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


def _experts_alone(weights: Weights) -> Iterable[tuple[str, np.ndarray]]:
    """Granite's experts one by one, with gate and up separate; the shared experts too."""
    for name, values in weights.items():
        match = re.fullmatch(r"(.+\.)(block_sparse_moe|shared_mlp)\.(\w+_linear)\.weight", name)
        if match is None:
            yield name, values
            continue
        shared = match[2] == "shared_mlp"
        for expert, matrix in enumerate([values] if shared else values):
            parts = _HALVES[match[3]]
            place = "shared_experts" if shared else f"experts.{expert}"
            for part, half in zip(parts, np.split(matrix, len(parts)), strict=True):
                yield f"{match[1]}mlp.{place}.{part}.weight", half


def _spread(weights: Weights) -> Iterable[tuple[str, np.ndarray]]:
    """The second layer's network as four experts, all of which are used, each giving a quarter of the result."""
    quarters = 4 * np.kron(np.eye(4, dtype=np.float32), np.ones((24, 1), np.float32)).T.reshape(-1, 1)
    for name, values in weights.items():
        match = re.fullmatch(r"(encoder\.layers\.1\.mlp\.)fc(\d)\.(weight|bias)", name)
        if match is None:
            yield name.replace(".mixer.", ".attn."), values
        elif match[3] == "weight":
            each = np.tile(values, (4, 1)) if match[2] == "1" else quarters * np.tile(values.T, (4, 1))
            yield f"{match[1]}experts.mlp.w{match[2]}", each
    yield "encoder.layers.1.mlp.router.layer.weight", np.zeros((4, 64), np.float32)
    yield "encoder.layers.1.mlp.experts.bias", np.zeros(64, np.float32)


def _with_adapters(weights: Weights) -> Iterable[tuple[str, np.ndarray]]:
    """As in Jina's own repository: matrices with adapters, one for each of two tasks."""
    for name, values in weights.items():
        if values.ndim < 2 or "token_type" in name:
            yield f"roberta.{name}", values
            continue
        place = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        yield f"{place}.original", values
        yield f"{place}.0.lora_A", np.ones((2, 4, values.shape[1]), np.float32)
        yield f"{place}.0.lora_B", np.ones((2, values.shape[0], 4), np.float32)


_GRANITE = _renamed((r"block_sparse_moe\.router\.layer", "mlp.gate"), ("embed_tokens", "word_embeddings"),
                    (r"self_attn\.o_proj", "attention.dense"))  # fmt: skip
_NO_LLAMA = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                           "max_position_embeddings", "layer_norm_eps", "hidden_act", "rope_parameters"))  # fmt: skip
# Embedding models.
REMOTE_ENCODERS: dict[str, Remote] = {
    "nomic-bert-moe": Remote(
        "jina_embeddings_v3-nomic",
        {**_NO_LLAMA, "model_type": "nomic_bert", "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4,
         "n_positions": 256, "layer_norm_epsilon": 1e-5, "rotary_emb_base": 20_000, "rotary_emb_fraction": 1.0,
         "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
         "moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 4, "moe_normalize_expert_weights": False,
         "expert_choice_router": False, "ffn_div": 1, "num_shared_experts": 0},
        _spread,
    ),
    "jina-bert-v3": Remote(
        "jina_embeddings_v3",
        {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20_000.0,
         "rope_parameters": None},
        _with_adapters,
    ),
}  # fmt: skip
REMOTE: dict[str, Remote] = {
    "exaone": Remote(
        "llama-exaone",
        {"model_type": "exaone", "activation_function": "silu", "num_layers": 2, "layer_norm_epsilon": 1e-5,
         "rope_theta": 5000.0, "rope_scaling": EQUALS["llama-exaone"]["rope_parameters"]},
        _EXAONE,
    ),
    "minicpm": Remote(
        "granite-minicpm",
        {"model_type": "minicpm", "num_hidden_layers": 4, "scale_emb": 12, "scale_depth": 1.0, "dim_model_base": 16,
         "tie_word_embeddings": None},
        _renamed(),
    ),
    "internlm2": Remote(
        "llama",
        {"model_type": "internlm2", "bias": False, "rope_theta": 10000.0,
         "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        _then(_fused("model.layers.", ".attention.wqkv.weight", _by_groups), _INTERN),
    ),
    "bailing_moe_v2": Remote(
        "glm4_moe-bailing",
        {**HEADS, **MIXTURE, "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"],
         "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True, "score_function": "sigmoid", "rope_theta": 10000.0,
         "partial_rotary_factor": 0.5},
        _then(_fused("model.layers.", ".attention.query_key_value.weight", lambda *parts: np.concatenate(parts)),
              _BAILING),
    ),
    "bailing_moe": Remote(
        "granitemoeshared-bailing",
        {**MIXTURE, "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], "num_experts": 4,
         "num_shared_experts": 2, "moe_intermediate_size": 96, "norm_topk_prob": True, "rope_theta": 10000.0,
         "use_bias": False, "use_qkv_bias": False, "norm_head": False, "rope_scaling": None},
        _then(_then(_fused("model.layers.", ".attention.query_key_value.weight",
                           lambda *parts: np.concatenate(parts)), _experts_alone), _GRANITE),
    ),
}  # fmt: skip
