"""Tiny models of every family: configurations, and weights derived from the tensors' names alone.

Used by the tests and by make_goldens.py, which runs in another environment, so these files import only NumPy.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = (1, 17, 250, 64, 99, 3, 180, 33, 210, 5, 77, 128, 300, 8, 41, 290)
VOCABULARY = 320
USUAL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
_GEMMA = {**HEADS, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 8}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**USUAL, "model_type": "llama"},
    "llama-rope": {**USUAL, "model_type": "llama", "rope_parameters": _LLAMA3, "attention_bias": True},
    "mistral": {**USUAL, "model_type": "mistral", **HEADS, "sliding_window": None},
    "mixtral": {
        **USUAL,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2": {**USUAL, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**USUAL, "model_type": "qwen3", **HEADS},
    "qwen3-yarn": {
        **USUAL,
        "model_type": "qwen3",
        **HEADS,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e6,
        },
    },
    "qwen2_moe": {
        **USUAL,
        "model_type": "qwen2_moe",
        **MIXTURE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {**USUAL, "model_type": "qwen3_moe", **HEADS, **MIXTURE, "num_experts": 4, "norm_topk_prob": True},
    "olmoe": {**USUAL, "model_type": "olmoe", "num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": False},
    "gemma": {**USUAL, "model_type": "gemma", **HEADS, "tie_word_embeddings": True},
    "gemma2": {**USUAL, "model_type": "gemma2", **_GEMMA},
    "gemma3": {**USUAL, "model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 6},
    "phi3": {**USUAL, "model_type": "phi3"},
    "phi3-longrope": {**USUAL, "model_type": "phi3", "rope_parameters": _LONG},
    "lfm2": {
        **USUAL,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    },
    "glm4": {**USUAL, "model_type": "glm4", **HEADS, "partial_rotary_factor": 0.5, "attention_bias": True},
    "granite": {
        **USUAL,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "olmo2": {**USUAL, "model_type": "olmo2"},
    "smollm3": {**USUAL, "model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "cohere2": {
        **USUAL,
        "model_type": "cohere2",
        **HEADS,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "seed_oss": {**USUAL, "model_type": "seed_oss", **HEADS},
    "ernie4_5": {**USUAL, "model_type": "ernie4_5", **HEADS},
}


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32: uint16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers derived from a tensor's name, exact in BF16: norms near one, all else small."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(shape).astype(np.float32)
    values = 1 + 0.2 * values if "norm" in name and len(shape) == 1 else values * (0.3 if len(shape) == 1 else 0.15)
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Write arrays with the given type names; their bytes are written unchanged."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def write_weights(folder: Path, shapes: Mapping[str, list[int]], smaller: tuple[str, float] = ("nothing", 1.0)) -> None:
    """Write a model's weights in BF16. smaller: a pattern of names, and a factor for their values."""
    pattern, factor = smaller
    tensors = {
        name: ("BF16", bfloat16(values_of(name, tuple(shape)) * (factor if re.search(pattern, name) else 1.0)))
        for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)


def mxfp4_weights(shapes: Mapping[str, list[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Experts of a gpt-oss as blocks and exponents, from the names of the tensors that they represent."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = shape
            random = np.random.default_rng(zlib.crc32(name.encode()))
            blocks = random.integers(0, 256, (experts, rows, width // 32, 16), np.uint8)
            found[name] = blocks, random.integers(121, 125, (experts, rows, width // 32), np.uint8)
    return found
