"""Small GGUF files of every native architecture: random weights that keep activations near one, no vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Synthetic:
    """Sizes of a model to write. extra: further metadata, keys without the architecture's prefix."""

    architecture: str
    layers: int = 2
    embedding: int = 256
    feed_forward: int = 512
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    vocabulary: int = 320
    context: int = 1024
    tied: bool = True
    bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    fused: bool = False
    experts: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)


_GEMMA = Synthetic("gemma2", layers=4, post_norms=True, extra={"attention.sliding_window": 40})

MODELS: dict[str, Synthetic] = {
    "llama": Synthetic("llama", tied=False, extra={"rope.dimension_count": 64}),
    "llama-multi-query": Synthetic("llama", heads=8, kv_heads=1, head=32, extra={"rope.dimension_count": 32}),
    "llama-linear-rope": Synthetic(
        "llama", extra={"rope.dimension_count": 64, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    "llama-yarn": Synthetic(
        "llama",
        extra={
            "rope.dimension_count": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 256,
        },
    ),
    "llama3-rope": Synthetic("llama", extra={"rope.dimension_count": 64}, factors={"rope_freqs.weight": 8.0}),
    "mixtral": Synthetic("llama", experts=6, extra={"rope.dimension_count": 64, "expert_used_count": 2}),
    "qwen2": Synthetic("qwen2", bias=True, embedding=448, heads=7, kv_heads=1, head=64),
    "qwen3": Synthetic("qwen3", head_norms=True, head=128, heads=4),
    "qwen3moe": Synthetic(
        "qwen3moe",
        head_norms=True,
        experts=16,
        extra={"expert_used_count": 4, "expert_feed_forward_length": 256},
    ),
    "phi3": Synthetic("phi3", fused=True, kv_heads=4, extra={"rope.dimension_count": 64}),
    "phi3-longrope": Synthetic(
        "phi3",
        fused=True,
        extra={
            "rope.dimension_count": 64,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.19,
        },
        factors={"rope_factors_short.weight": 1.5, "rope_factors_long.weight": 6.0},
    ),
    "gemma2": replace(_GEMMA, extra={**_GEMMA.extra, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": replace(
        _GEMMA,
        architecture="gemma3",
        layers=7,
        head_norms=True,
        head=256,
        heads=2,
        kv_heads=1,
        extra={**_GEMMA.extra, "rope.freq_base": 1_000_000.0},
    ),
}


def write(model: Synthetic, path: Path, seed: int = 1, values: Mapping[str, NDArray[np.float32]] | None = None) -> Path:
    """Write the file, matrices in F32, and return its path. values: tensors by name, instead of random ones."""
    name = model.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_tokenizer_model("no_vocab")
    metadata: dict[str, Any] = {
        "vocab_size": model.vocabulary,
        "block_count": model.layers,
        "context_length": model.context,
        "embedding_length": model.embedding,
        "feed_forward_length": model.feed_forward,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head,
        "attention.value_length": model.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    if model.experts:
        metadata["expert_count"] = model.experts
    for key, value in {**metadata, **model.extra}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{name}.{key}", value)
    random = np.random.default_rng(seed)
    for tensor, shape in shapes(model).items():
        writer.add_tensor(tensor, _values(tensor, shape, random) if values is None else values[tensor])
    for tensor, factor in model.factors.items():
        pairs = model.head // 2
        writer.add_tensor(tensor, np.linspace(1.0, factor, pairs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes(model: Synthetic) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors."""
    width, head = model.embedding, model.head
    queries, keys = model.heads * head, model.kv_heads * head
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocabulary, width),
        "output_norm.weight": (width,),
    }
    if not model.tied:
        tensors["output.weight"] = (model.vocabulary, width)
    for layer in range(model.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "attn_output.weight": (width, queries),
        }
        if model.fused:
            block["attn_qkv.weight"] = (queries + 2 * keys, width)
        else:
            for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
                block[f"attn_{letter}.weight"] = (rows, width)
                if model.bias:
                    block[f"attn_{letter}.bias"] = (rows,)
        if model.head_norms:
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        if model.post_norms:
            block |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
        block |= _feed_forward(model)
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return tensors


def _feed_forward(model: Synthetic) -> dict[str, tuple[int, ...]]:
    width, inner = model.embedding, model.feed_forward
    if model.experts:
        inner = model.extra.get("expert_feed_forward_length", inner)
        up = (model.experts, inner, width)
        return {
            "ffn_gate_inp.weight": (model.experts, width),
            "ffn_gate_exps.weight": up,
            "ffn_up_exps.weight": up,
            "ffn_down_exps.weight": (model.experts, width, inner),
        }
    if model.fused:
        return {"ffn_up.weight": (2 * inner, width), "ffn_down.weight": (width, inner)}
    return {"ffn_gate.weight": (inner, width), "ffn_up.weight": (inner, width), "ffn_down.weight": (width, inner)}


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    values = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return values * np.float32(0.1) + np.float32(0.0 if name.endswith("bias") else 1.0)
    return values * np.float32(1.0 / np.sqrt(shape[-1]))
