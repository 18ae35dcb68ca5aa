"""Small GGUF files: random weights that keep activations near one, no vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

# Tensors of a shared expert, and of what helps to choose experts, to be added.
SHARED_EXPERT = {
    "ffn_gate_shexp.weight": "shared, width",
    "ffn_up_shexp.weight": "shared, width",
    "ffn_down_shexp.weight": "width, shared",
}
CHOICE_BIAS = {"exp_probs_b.bias": "experts"}


@dataclass(frozen=True)
class Synthetic:
    """Sizes of a model to write.

    extra: further metadata, keys without the architecture's prefix. added: shapes of each layer's further tensors, by
    numbers and names of sizes (see `shapes`). dropped: those that all or one (blk.N.) do not have. beside: of no layer.
    """

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
    added: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    layer_norm: bool = False
    output_norm: str = "output_norm.weight"
    expert_width: int = 0  # where no key states it as a number

    @property
    def inner(self) -> int:
        """Width of the feed-forward network, or of each expert."""
        return self.expert_width or int(self.extra.get("expert_feed_forward_length", self.feed_forward))


def write(
    model: Synthetic,
    path: Path,
    seed: int = 1,
    values: Mapping[str, NDArray[np.float32]] | None = None,
    tokens: Sequence[str] = (),
) -> Path:
    """Write the file, matrices in F32, and return its path.

    values: tensors by name, instead of random ones. tokens: a vocabulary without merges or scores.
    """
    name = model.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_tokenizer_model("llama" if tokens else "no_vocab")
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
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
        f"attention.layer_norm_{'' if model.layer_norm else 'rms_'}epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    metadata |= {"expert_count": model.experts} if model.experts else {}
    for key, value in {**metadata, **model.extra}.items():
        add: Any = {
            list: writer.add_array,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }[type(value)]
        add(f"{name}.{key}", value)
    writer.add_token_type_count(2)
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
        model.output_norm: (width,),
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
        block |= _feed_forward(model, layer)
        block |= {name: _shape(model, text) for name, text in model.added.items()}
        block = {name: shape for name, shape in block.items() if _has(model, layer, name)}
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in block.items() if name not in model.dropped}
    beside = {name: _shape(model, text) for name, text in model.beside.items()}
    return {name: shape for name, shape in (tensors | beside).items() if name not in model.dropped}


def _shape(model: Synthetic, text: str) -> tuple[int, ...]:
    """A shape from the names of its sizes."""
    queries, keys = model.heads * model.head, model.kv_heads * model.head
    rank, key = model.extra.get("attention.kv_lora_rank", 0), "attention.key_length"
    sizes = {
        "width": model.embedding,
        "queries": queries,
        "keys": keys,
        "fused": queries + 2 * keys,
        "inner": model.inner,
        "both inner": 2 * model.inner,
        "shared": model.extra.get("expert_shared_feed_forward_length", 0),
        "heads": model.heads,
        "experts": model.experts,
        "all parts": 3 * model.embedding,
        "reach": model.extra.get("shortconv.l_cache", 0),
        "vocabulary": model.vocabulary,
        "head": model.head,
        "rank": rank,
        "stored": rank + model.extra.get("rope.dimension_count", 0),
        "query rank": model.extra.get("attention.q_lora_rank", 0),
        "latent queries": model.heads * model.extra.get(key + "_mla", model.extra.get(key, 0)),
    }
    return tuple(int(name) if name.isdigit() else sizes[name] for name in text.split(", "))


def _has(model: Synthetic, layer: int, name: str) -> bool:
    """Whether a layer has a tensor that only some layers have: those of attention, of convolutions, and of experts."""
    convolves = model.extra.get("attention.head_count_kv", [])[layer : layer + 1] == [0]
    if name.startswith("attn") and name != "attn_norm.weight":
        return not convolves
    if name.startswith("shortconv"):
        return convolves
    return ("shexp" not in name and not name.startswith("exp_probs")) or layer >= model.extra.get(
        "leading_dense_block_count", 0
    )


def _feed_forward(model: Synthetic, layer: int) -> dict[str, tuple[int, ...]]:
    width, inner = model.embedding, model.inner
    dense = layer < model.extra.get("leading_dense_block_count", 0)
    if dense:
        inner = model.feed_forward
    if model.experts and not dense:
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
    if name.endswith(("sinks.weight", "exps.bias")):
        return values
    if len(shape) == 1 and not name.endswith("gate_inp_shexp.weight"):
        return values * np.float32(0.1) + np.float32(0.0 if name.endswith("bias") else 1.0)
    return values * np.float32(1.0 / np.sqrt(shape[-1]))
