"""Small GGUF files: random weights that keep activations near one, no vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import add_keys, finish

STILL = 1e30
"""A frequency factor that leaves three of four pairs unchanged."""
# Tensors of a shared expert, and of the choice of experts, to be added.
SHARED_EXPERT = {
    "ffn_gate_shexp.weight": "shared, width",
    "ffn_up_shexp.weight": "shared, width",
    "ffn_down_shexp.weight": "width, shared",
}
CHOICE_BIAS = {"exp_probs_b.bias": "experts"}
# Tensors that Kimi delta attention and attention on latents both have.
_IN_BOTH = ("attn_norm.weight", "attn_q.weight", "attn_output.weight")


@dataclass(frozen=True)
class Synthetic:
    """Sizes of a model to write.

    extra: further metadata, keys without the architecture's prefix; a list has a value for each layer. shared: the same
    for keys that have no such prefix. added: shapes of each layer's further tensors, by numbers and names of sizes (see
    `shapes`). dropped: tensors that all layers, or one (blk.N.), lack. beside: tensors outside of layers.
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
    shared: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    layer_norm: bool = False
    output_norm: str = "output_norm.weight"
    expert_width: int = 0  # if no key states it as a number
    window_head: int = 0  # of layers with a window, if their heads have another size
    per_layer: int = 0  # values that each layer gets from a token's second embedding
    query_norm: float = 1.0  # a factor, for architectures that do not scale scores by the head size

    @property
    def inner(self) -> int:
        """Width of the feed-forward network, or of each expert."""
        return self.expert_width or int(self.extra.get("expert_feed_forward_length", self.feed_forward))

    def of_layer(self, layer: int) -> "Synthetic":
        """The sizes that a layer has."""
        found: dict[str, Any] = {}
        listed = {"head_count": "heads", "head_count_kv": "kv_heads"}
        listed = {f"attention.{key}": name for key, name in listed.items()} | {"feed_forward_length": "feed_forward"}
        for key, name in listed.items():
            value = self.extra.get(key)
            if isinstance(value, list) and layer < len(value):
                found[name] = value[layer]
        pattern = self.extra.get("attention.sliding_window_pattern")
        if self.window_head and isinstance(pattern, list) and pattern[layer]:
            found["head"] = self.window_head
        return replace(self, **found)


def write(
    model: Synthetic,
    path: Path,
    seed: int = 1,
    values: Mapping[str, NDArray[Any]] | None = None,
    tokens: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write the file, matrices in F32, and return its path.

    values: tensors by name, instead of random ones, those in `types` in blocks of that type. tokens: a vocabulary
    without merges or scores. metadata: keys that differ from the model's.
    """
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_tokenizer_model("llama" if tokens else "no_vocab")
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
    add_keys(writer, keys_of(model, metadata))
    writer.add_token_type_count(2)
    random = np.random.default_rng(seed)
    for tensor, shape in shapes(model).items():
        made = random_values(tensor, shape, random) if values is None else values[tensor]
        if types and tensor in types:
            writer.add_tensor(tensor, made, raw_dtype=types[tensor])
            continue
        factor = model.query_norm if values is None and tensor.endswith("attn_q_norm.weight") else 1.0
        writer.add_tensor(tensor, made * np.float32(factor))
    for tensor, factors in rope_factors(model).items():
        writer.add_tensor(tensor, factors)
    finish(writer)
    return path


def keys_of(model: Synthetic, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A model's metadata, and `metadata` in place of its own values, without the vocabulary."""
    keys: dict[str, Any] = {
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
    keys |= {"expert_count": model.experts} if model.experts else {}
    if model.window_head:
        keys |= {"attention.key_length_swa": model.window_head, "attention.value_length_swa": model.window_head}
        keys |= {"embedding_length_per_layer_input": model.per_layer}
    named = {f"{model.architecture}.{key}": value for key, value in {**keys, **model.extra, **(metadata or {})}.items()}
    return {**named, **model.shared}


def rope_factors(model: Synthetic) -> dict[str, NDArray[np.float32]]:
    """Tensors with factors of rotary frequencies, by name."""
    pairs = model.head // 2
    made = {}
    for tensor, factor in model.factors.items():
        factors = np.linspace(1.0, factor, pairs, dtype=np.float32)
        if factor >= STILL:
            factors = np.where(np.arange(pairs) < pairs // 4, np.float32(1.0), np.float32(factor))
        made[tensor] = factors
    return made


def shapes(model: Synthetic) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors."""
    width = model.embedding
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocabulary, width),
        model.output_norm: (width,),
    }
    if not model.tied:
        tensors["output.weight"] = (model.vocabulary, width)
    if model.per_layer:
        inputs = model.layers * model.per_layer
        tensors["per_layer_token_embd.weight"] = (model.vocabulary, inputs)
        tensors["per_layer_model_proj.weight"] = (inputs, width)
        tensors["per_layer_proj_norm.weight"] = (model.per_layer,)
    for layer in range(model.layers):
        own = model.of_layer(layer)
        head = own.head
        queries, keys = own.heads * head, own.kv_heads * head
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
        block |= _feed_forward(own, layer)
        if model.per_layer:
            block |= {"inp_gate.weight": (model.per_layer, width), "proj.weight": (width, model.per_layer)}
            block |= {"post_norm.weight": (width,)}
        block |= {name: _shape(own, text) for name, text in model.added.items()}
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
        "dense": model.feed_forward,
        "both inner": 2 * model.inner,
        "shared": model.extra.get("expert_shared_feed_forward_length", 0),
        "heads": model.heads,
        "expert latent": model.extra.get("moe_latent_size", 0),
        "experts": model.experts,
        "all parts": 3 * model.embedding,
        "reach": model.extra.get("shortconv.l_cache", 0),
        "vocabulary": model.vocabulary,
        "head": model.head,
        "rank": rank,
        "stored": rank + model.extra.get("rope.dimension_count", 0),
        "query rank": model.extra.get("attention.q_lora_rank", 0),
        "latent queries": model.heads * model.extra.get(key + "_mla", model.extra.get(key, 0)),
        "both queries": 2 * queries,
        **_delta_sizes(model.extra),
        **_scan_sizes(model.extra),
    }
    return tuple(int(name) if name.isdigit() else sizes[name] for name in text.split(", "))


def _delta_sizes(extra: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of gated delta networks by name."""
    state, groups, heads = (extra.get(f"ssm.{key}", 0) for key in ("state_size", "group_count", "time_step_rank"))
    return {
        "state": state,
        "convolved": (2 * groups + heads) * state,
        "delta values": heads * state,
        "all of delta": 2 * (groups + heads) * state,
        "delta heads": heads,
        "both of delta heads": 2 * heads,
        "delta reach": extra.get("ssm.conv_kernel", 0),
    }


def _scan_sizes(extra: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of selective scans by name."""
    state, groups, heads = (extra.get(f"ssm.{key}", 0) for key in ("state_size", "group_count", "time_step_rank"))
    inner = extra.get("ssm.inner_size", 0)
    return {
        "scanned": inner,
        "groups": groups,
        "of a group": inner // max(groups, 1),
        "scan convolved": inner + 2 * groups * state,
        "all of scan": 2 * inner + 2 * groups * state + heads,
    }


def scans(model: Synthetic, layer: int) -> bool:
    """Whether a layer of a model with selective scans has one."""
    own = model.of_layer(layer)
    if model.architecture.startswith("nemotron_h"):
        return not own.kv_heads and not own.feed_forward
    return model.architecture == "falcon-h1" or not own.kv_heads


def _recurs(model: Synthetic, layer: int) -> bool:
    """Whether a layer is a gated delta network."""
    if "ssm.state_size" not in model.extra:
        return False
    listed = model.extra.get("attention.recurrent_layers")
    if listed is not None:
        return bool(listed[layer])
    computed = model.layers - model.extra.get("nextn_predict_layers", 0)
    return layer < computed and (layer + 1) % model.extra.get("full_attention_interval", 4) != 0


def _has(model: Synthetic, layer: int, name: str) -> bool:
    """Whether a layer has a tensor that only some layers have: those of attention, of convolutions, and of experts."""
    if "ssm_d" in model.added and name != "attn_norm.weight":
        own = model.of_layer(layer)
        networks = bool(own.feed_forward)
        kinds = {"ssm": scans(model, layer), "attn": bool(own.kv_heads), "ffn": networks, "exp": networks}
        return kinds.get(name.partition("_")[0], True)
    if "ssm.state_size" in model.extra and name not in ("attn_norm.weight", "post_attention_norm.weight"):
        if name.startswith("ssm") or name in ("attn_qkv.weight", "attn_gate.weight"):
            return _recurs(model, layer)
        if name.startswith("attn"):
            return not _recurs(model, layer)
    convolves = model.extra.get("attention.head_count_kv", [])[layer : layer + 1] == [0]
    if "kda.head_dim" in model.extra and name.startswith(("attn", "ssm")):
        of_kda = name.startswith("ssm") or name in ("attn_k.weight", "attn_v.weight")
        return name in _IN_BOTH or convolves == of_kda
    if name.startswith("shortconv") or (name.startswith("attn") and name != "attn_norm.weight"):
        return convolves == name.startswith("shortconv")
    of_experts = "shexp" in name or name.startswith("exp_probs")
    of_dense = "moe_every_n_layers" in model.extra and name in ("ffn_up.bias", "ffn_down.bias")
    return not (of_experts or of_dense) or _dense(model, layer) == of_dense


def _dense(model: Synthetic, layer: int) -> bool:
    """Whether a layer has no experts."""
    period = model.extra.get("moe_every_n_layers", 0)
    in_turn = (not period or layer % period == 1) and (layer + 1) % model.extra.get("interleave_moe_layer_step", 1) == 0
    return layer < model.extra.get("leading_dense_block_count", 0) or not in_turn


def _feed_forward(model: Synthetic, layer: int) -> dict[str, tuple[int, ...]]:
    width, inner = model.embedding, model.inner
    dense = _dense(model, layer)
    if dense:
        inner = model.feed_forward
    if model.experts and not dense:
        width = int(model.extra.get("moe_latent_size", width))
        up = (model.experts, inner, width)
        return {
            "ffn_gate_inp.weight": (model.experts, model.embedding),
            "ffn_gate_exps.weight": up,
            "ffn_up_exps.weight": up,
            "ffn_down_exps.weight": (model.experts, width, inner),
        }
    if model.fused:
        return {"ffn_up.weight": (2 * inner, width), "ffn_down.weight": (width, inner)}
    return {"ffn_gate.weight": (inner, width), "ffn_up.weight": (inner, width), "ffn_down.weight": (width, inner)}


def random_values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    values = random.standard_normal(shape, dtype=np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(values)
    if name.endswith(("sinks.weight", "exps.bias")):
        return values
    if (len(shape) == 1 or name.endswith("ssm_norm.weight")) and not name.endswith("gate_inp_shexp.weight"):
        return values * np.float32(0.1) + np.float32(0.0 if name.endswith("bias") else 1.0)
    return values * np.float32(1.0 / np.sqrt(shape[-1]))
