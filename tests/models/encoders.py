"""Small GGUF files of every architecture with pooled states."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf

from tests.gguf_files import copying, finish
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic

_SEES_ALL: dict[str, Any] = {"attention.causal": False}
_BIASES = {"attn_output.bias": "width", "ffn_down.bias": "width", "ffn_up.bias": "inner"}
_POST_NORM = {
    **{f"{name}.weight": "width" for name in ("attn_output_norm", "layer_output_norm")},
    "attn_output_norm.bias": "width",
    "layer_output_norm.bias": "width",
}
_UNUSED = ("attn_norm.weight", "ffn_norm.weight", "output_norm.weight")
_EMBEDDING_NORM = {"token_embd_norm.weight": "width", "token_embd_norm.bias": "width"}

_BERT = Synthetic(
    "bert",
    layer_norm=True,
    bias=True,
    kv_heads=4,
    context=512,
    extra=_SEES_ALL,
    added={**_POST_NORM, **_BIASES},
    dropped=(*_UNUSED, "ffn_gate.weight"),
    beside={**_EMBEDDING_NORM, "token_types.weight": "2, width", "position_embd.weight": "512, width"},
)
_NOMIC = Synthetic(
    "nomic-bert",
    layer_norm=True,
    kv_heads=4,
    extra={**_SEES_ALL, "rope.freq_base": 1000.0},
    added={**_POST_NORM, "attn_qkv.weight": "fused, width"},
    dropped=(*_UNUSED, "attn_q.weight", "attn_k.weight", "attn_v.weight"),
    beside={**_EMBEDDING_NORM, "token_types.weight": "2, width"},
)
_JINA = Synthetic(
    "jina-bert-v2",
    layer_norm=True,
    bias=True,
    kv_heads=4,
    extra=_SEES_ALL,
    added={**_POST_NORM, "attn_output.bias": "width", "ffn_down.bias": "width"},
    dropped=_UNUSED,
    beside={**_EMBEDDING_NORM, "token_types.weight": "2, width"},
)
_JINA_CODE = {
    f"{name}.{part}": "width" for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2") for part in ("weight", "bias")
}
_MODERN = Synthetic(
    "modern-bert",
    layers=4,
    layer_norm=True,
    kv_heads=4,
    extra={**_SEES_ALL, "attention.sliding_window": 40, "rope.freq_base": 160_000.0, "vocab_size": 320},
    added={"attn_qkv.weight": "fused, width", "ffn_up.weight": "both inner, width"},
    dropped=("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "blk.0.attn_norm.weight"),
    beside={"token_embd_norm.weight": "width"},
)
_HEAD = {"cls.weight": "width, width", "cls.bias": "width", "cls.output.weight": "1, width", "cls.output.bias": "1"}
_MODERN_HEAD = {
    "cls.weight": "width, width",
    "cls.norm.weight": "width",
    "cls.output.weight": "1, width",
    "cls.output.bias": "1",
}


def _pooled(
    model: Synthetic, pooling: gguf.PoolingType, more: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Synthetic:
    return replace(model, extra={**model.extra, "pooling_type": int(pooling), **more}, **changes)


ENCODERS: dict[str, Synthetic] = {
    "bert": _pooled(_BERT, gguf.PoolingType.MEAN),
    # The shape of all-MiniLM: heads of 32, and sizes that are not multiples of 256.
    "bert-small-heads": _pooled(
        _BERT, gguf.PoolingType.CLS, embedding=96, feed_forward=160, heads=3, kv_heads=3, head=32
    ),
    "nomic-bert": _pooled(_NOMIC, gguf.PoolingType.MEAN),
    "modern-bert": _pooled(_MODERN, gguf.PoolingType.CLS),
    "modern-bert-silu": _pooled(_MODERN, gguf.PoolingType.CLS, {"hidden_activation": "silu"}),
    "modern-bert-relu": _pooled(_MODERN, gguf.PoolingType.CLS, {"hidden_activation": "reglu"}),
    "jina-bert-v2": _pooled(_JINA, gguf.PoolingType.MEAN),
    # As jina-embeddings-v2-base-code, with a number of heads that is not a power of two.
    "jina-bert-v2-code": _pooled(
        _JINA,
        gguf.PoolingType.MEAN,
        embedding=192,
        feed_forward=136,
        heads=6,
        kv_heads=6,
        head=32,
        added={**_JINA.added, **_JINA_CODE, "ffn_up.weight": "both inner, width"},
        dropped=(*_JINA.dropped, "ffn_gate.weight"),
    ),
    "jina-bert-v3": _pooled(
        replace(
            _BERT,
            architecture="jina-bert-v3",
            context=1024,
            beside={**_EMBEDDING_NORM, "token_types.weight": "2, width"},
        ),
        gguf.PoolingType.MEAN,
    ),
    "eurobert": _pooled(
        Synthetic("eurobert", kv_heads=4, extra={**_SEES_ALL, "rope.freq_base": 250_000.0}), gguf.PoolingType.LAST
    ),
    "nomic-bert-moe": _pooled(
        _BERT,
        gguf.PoolingType.MEAN,
        {"moe_every_n_layers": 2, "expert_used_count": 4, "rope.freq_base": 10_000.0},
        architecture="nomic-bert-moe",
        layers=4,
        feed_forward=384,
        experts=8,
        dropped=(*_UNUSED, "ffn_gate.weight", "ffn_gate_exps.weight"),
        beside={**_EMBEDDING_NORM, "token_types.weight": "2, width"},
    ),
    "gemma-embedding": _pooled(replace(MODELS["gemma3"], architecture="gemma-embedding"), gguf.PoolingType.MEAN),
    "qwen3": _pooled(MODELS["qwen3"], gguf.PoolingType.LAST),
    "qwen2-sees-all": _pooled(
        replace(MODELS["qwen2"], extra={**MODELS["qwen2"].extra, **_SEES_ALL}), gguf.PoolingType.MEAN
    ),
}
"""Models that give a vector per text, by name."""

RERANKERS: dict[str, Synthetic] = {
    "bert": _pooled(_BERT, gguf.PoolingType.RANK, beside={**_BERT.beside, **_HEAD}),
    "bert-without-inner": _pooled(
        _BERT, gguf.PoolingType.RANK, beside={**_BERT.beside, "cls.output.weight": "1, width"}
    ),
    "modern-bert": _pooled(_MODERN, gguf.PoolingType.RANK, beside={**_MODERN.beside, **_MODERN_HEAD}),
    "modern-bert-first": _pooled(
        _MODERN,
        gguf.PoolingType.RANK,
        more={"classifier.pooling_type": int(gguf.PoolingType.CLS)},
        beside={**_MODERN.beside, "cls.weight": "width, width", "cls.output.weight": "1, width"},
        embedding=200,
        feed_forward=136,
        heads=5,
        kv_heads=5,
        head=40,
    ),
    # As jina-reranker-v1: one layer with tanh, which gives the score.
    "jina-bert-v2": _pooled(
        _JINA,
        gguf.PoolingType.RANK,
        beside={**_JINA.beside, "cls.weight": "1, width", "cls.bias": "1"},
    ),
    "qwen3": _pooled(
        MODELS["qwen3"],
        gguf.PoolingType.RANK,
        beside={"cls.output.weight": "2, width"},
        more={"classifier.output_labels": ["yes", "no"]},
    ),
}
"""Models that give a score per text, by name."""


def in_type(source: Path, target: Path, kind: str) -> Path:
    """Write a copy of a file of floats with its layers' matrices in another type of floats, and return its path."""
    reader, writer = copying(source, target)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        changed = tensor.name.startswith("blk.") and values.ndim > 1
        to = gguf.GGMLQuantizationType[kind if changed else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, to), raw_dtype=to)
    return finish(writer)
