"""Small GGUF files of every native architecture: random weights that keep activations near one, no vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


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
    expert_width: int = 0  # where no key states it as a number

    @property
    def inner(self) -> int:
        """Width of the feed-forward network, or of each expert."""
        return self.expert_width or int(self.extra.get("expert_feed_forward_length", self.feed_forward))


_GEMMA = Synthetic("gemma2", layers=4, post_norms=True, extra={"attention.sliding_window": 40})
_GRANITE: dict[str, Any] = {
    "embedding_scale": 1.5,
    "residual_scale": 0.7,
    "attention.scale": 0.03,
    "logit_scale": 8.0,
}
_SHARED_EXPERT = {
    "ffn_gate_shexp.weight": "shared, width",
    "ffn_up_shexp.weight": "shared, width",
    "ffn_down_shexp.weight": "width, shared",
}
_NORMS_OF_ALL_HEADS = {"attn_q_norm.weight": "queries", "attn_k_norm.weight": "keys"}
_OUTPUT_BIASES = {"attn_output.bias": "width", "ffn_up.bias": "inner", "ffn_down.bias": "width"}
_NORMS_BEFORE = ("attn_norm.weight", "ffn_norm.weight")

MODELS: dict[str, Synthetic] = {
    "llama": Synthetic("llama", tied=False, extra={"rope.dimension_count": 64}),
    "llama-multi-query": Synthetic("llama", heads=8, kv_heads=1, head=32, extra={"rope.dimension_count": 32}),
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
    "gemma3-rope-swa": replace(
        _GEMMA, architecture="gemma3", head_norms=True, extra={**_GEMMA.extra, "attention.sliding_window_pattern": 3}
    ),
    **{name: Synthetic(name) for name in ("gemma", "ernie4_5")},
    "internlm2": Synthetic("internlm2", tied=False),
    "exaone": Synthetic("exaone", factors={"rope_freqs.weight": 8.0}),
    "seed_oss": Synthetic(
        "seed_oss", bias=True, added={"post_attention_norm.weight": "width"}, dropped=("ffn_norm.weight",)
    ),
    "smollm3": Synthetic("smollm3", layers=4),
    "mistral3": Synthetic(
        "mistral3",
        extra={
            "attention.temperature_scale": 0.5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
    ),
    "granite": Synthetic("granite", extra=_GRANITE),
    "granitemoe": Synthetic(
        "granitemoe",
        experts=8,
        extra={**_GRANITE, "expert_used_count": 3, "expert_shared_feed_forward_length": 384},
        added=_SHARED_EXPERT,
    ),
    "minicpm": Synthetic("minicpm", layers=4, extra={key: _GRANITE[key] for key in ("embedding_scale", "logit_scale")}),
    "qwen2moe": Synthetic(
        "qwen2moe",
        tied=False,
        bias=True,
        experts=8,
        extra={
            "expert_used_count": 3,
            "expert_feed_forward_length": 128,
            "expert_shared_feed_forward_length": 384,
        },
        added={**_SHARED_EXPERT, "ffn_gate_inp_shexp.weight": "width"},
    ),
    "olmoe": Synthetic(
        "olmoe", tied=False, kv_heads=4, experts=6, extra={"expert_used_count": 3}, added=_NORMS_OF_ALL_HEADS
    ),
    "olmo2": Synthetic("olmo2", tied=False, post_norms=True, added=_NORMS_OF_ALL_HEADS, dropped=_NORMS_BEFORE),
    "olmo3": Synthetic(
        "olmo2",
        layers=4,
        tied=False,
        post_norms=True,
        extra={
            "attention.sliding_window": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.attn_factor": 1.2,
            "rope.scaling.original_context_length": 128,
        },
        added=_NORMS_OF_ALL_HEADS,
        dropped=_NORMS_BEFORE,
    ),
    "exaone4": Synthetic("exaone4", head_norms=True, post_norms=True, dropped=_NORMS_BEFORE),
    "exaone4-32b": Synthetic(
        "exaone4",
        layers=64,
        embedding=64,
        feed_forward=64,
        heads=2,
        kv_heads=1,
        head=32,
        head_norms=True,
        post_norms=True,
        extra={"attention.sliding_window": 40},
        dropped=_NORMS_BEFORE,
    ),
    "glm4": Synthetic(
        "glm4",
        bias=True,
        post_norms=True,
        extra={"rope.dimension_count": 32},
        added={"ffn_up.weight": "both inner, width"},
        dropped=("ffn_gate.weight",),
    ),
    "hunyuan-dense": Synthetic(
        "hunyuan-dense",
        head_norms=True,
        extra={"rope.scaling.alpha": 1000.0, "rope.scaling.type": "none"},
    ),
    "cohere2": Synthetic(
        "cohere2",
        layers=4,
        layer_norm=True,
        extra={"attention.sliding_window": 40, "logit_scale": 0.25, "rope.dimension_count": 64},
        dropped=("ffn_norm.weight",),
    ),
    "starcoder2": Synthetic(
        "starcoder2",
        bias=True,
        layer_norm=True,
        added={**_OUTPUT_BIASES, "ffn_norm.bias": "width", "attn_norm.bias": "width"},
        dropped=("ffn_gate.weight",),
        beside={"output_norm.bias": "width"},
    ),
    "phi2": Synthetic(
        "phi2",
        tied=False,
        layer_norm=True,
        kv_heads=4,
        extra={"rope.dimension_count": 32},
        added={
            **_OUTPUT_BIASES,
            "attn_norm.bias": "width",
            "attn_qkv.weight": "fused, width",
            "attn_qkv.bias": "fused",
        },
        dropped=("ffn_gate.weight", "ffn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"),
        beside={"output_norm.bias": "width", "output.bias": "vocabulary"},
    ),
    "gpt-oss": Synthetic(
        "gpt-oss",
        layers=4,
        tied=False,
        bias=True,
        heads=8,
        head=32,
        experts=8,
        extra={
            "expert_used_count": 4,
            "expert_feed_forward_length": 288,
            "attention.sliding_window": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 256,
        },
        added={
            "post_attention_norm.weight": "width",
            "attn_output.bias": "width",
            "attn_sinks.weight": "heads",
            "ffn_gate_inp.bias": "experts",
            "ffn_gate_exps.bias": "experts, inner",
            "ffn_up_exps.bias": "experts, inner",
            "ffn_down_exps.bias": "experts, width",
        },
        dropped=("ffn_norm.weight",),
    ),
}


def _varied(name: str, *, without: tuple[str, ...] = (), expert_width: int = 0, **extra: Any) -> Synthetic:
    """One of the models with other metadata; "__" in a key is a dot."""
    model = MODELS[name]
    changed = {key: value for key, value in model.extra.items() if key not in without}
    changed |= {key.replace("__", "."): value for key, value in extra.items()}
    return replace(model, extra=changed, expert_width=expert_width)


_WIDTH = ("expert_feed_forward_length",)
MODELS["llama-linear-rope"] = _varied("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
MODELS["llama-yarn"] = _varied(
    "llama", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=256
)
MODELS["granite-unturned"] = _varied("granite", rope__scaling__finetuned=False)
MODELS["gemma2-rope-swa"] = _varied("gemma2", rope__freq_base_swa=500.0)
MODELS["gemma3-attention-factor"] = _varied("gemma3-rope-swa", rope__scaling__attn_factor=1.3)
MODELS["gemma3-rope-swa"] = _varied("gemma3-rope-swa", rope__freq_base_swa=500.0)
MODELS["gpt-oss-rope-swa"] = _varied("gpt-oss", rope__freq_base_swa=300.0)
MODELS["qwen2moe-unstated"] = _varied("qwen2moe", without=_WIDTH, expert_width=256, expert_used_count=2)
MODELS["qwen3moe-unstated"] = replace(_varied("qwen3moe", without=_WIDTH, expert_width=128), experts=8)
MODELS["qwen3moe-listed"] = _varied(
    "qwen3moe", expert_width=192, expert_used_count=[4, 4], expert_feed_forward_length=[192, 192]
)


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
        block |= {name: _shape(model, text) for name, text in model.added.items()}
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in block.items() if name not in model.dropped}
    beside = {name: _shape(model, text) for name, text in model.beside.items()}
    return {name: shape for name, shape in (tensors | beside).items() if name not in model.dropped}


def _shape(model: Synthetic, text: str) -> tuple[int, ...]:
    """A shape from the names of its sizes."""
    queries, keys = model.heads * model.head, model.kv_heads * model.head
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
        "vocabulary": model.vocabulary,
    }
    return tuple(int(name) if name.isdigit() else sizes[name] for name in text.split(", "))


def _feed_forward(model: Synthetic) -> dict[str, tuple[int, ...]]:
    width, inner = model.embedding, model.inner
    if model.experts:
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
