"""Tiny models of families that transformers lacks, each equal to one that it has, under other names and layouts.

A model's weights are those of its equal, so that the logits that transformers computes of that are the expected ones.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from tests.localllm.importing.tiny_models import HEADS, MIXTURE, USUAL, values_of

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
}  # fmt: skip


@dataclass(frozen=True)
class Remote:
    """equal: a model of transformers. config: what differs from the usual one. stored: its tensors, of the equal's."""

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
}  # fmt: skip
