"""Encoders: models whose states are pooled to one row per text, and which do not generate text."""

from dataclasses import replace

from models.architecture import (
    HALVES,
    Activation,
    Architecture,
    Experts,
    Norms,
    SelfAttention,
    inverse_root,
    stated_expert_scale,
    unscaled,
    windows,
)
from models.architectures.gemma import GEMMA3
from models.sizes.attention import ALL_FIRST

# Any other name means GELU, as in llama.cpp.
_MODERN_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish", "swiglu"), Activation.SILU),
    **dict.fromkeys(("relu", "reglu"), Activation.RELU),
}
_UNTURNED = replace(HALVES, turns=lambda _config, _layer: False)
_BOTH_WAYS = SelfAttention(causal=False)
_NORMS_OF_SUMS = Norms(layer_norm=True, before=False, sums=True)

ARCHITECTURES = (
    # BERT and XLM-RoBERTa: learned positions, and norms of the residual stream after each sub-layer.
    Architecture(
        "bert",
        _UNTURNED,
        _NORMS_OF_SUMS,
        activation=Activation.GELU_ALONE,
        attention=_BOTH_WAYS,
    ),
    # Jina embeddings 3: BERT with rotated heads.
    Architecture("jina-bert-v3", HALVES, _NORMS_OF_SUMS, activation=Activation.GELU_ALONE, attention=_BOTH_WAYS),
    # EuroBERT: Llama with rotated pairs in halves, and bidirectional attention.
    Architecture("eurobert", HALVES, attention=_BOTH_WAYS),
    # Nomic BERT: BERT with rotated heads and a gated feed-forward network.
    Architecture("nomic-bert", HALVES, _NORMS_OF_SUMS, attention=_BOTH_WAYS),
    # Jina BERT 2: ALiBi, and a gate with GELU.
    Architecture(
        "jina-bert-v2",
        _UNTURNED,
        _NORMS_OF_SUMS,
        activation=Activation.GELU,
        attention=SelfAttention(causal=False, alibi=8.0),
    ),
    # Nomic Embed 2: BERT with rotated heads, and experts in every other layer.
    Architecture(
        "nomic-bert-moe",
        HALVES,
        _NORMS_OF_SUMS,
        activation=Activation.GELU_ALONE,
        experts=Experts(normalise=False, scale=stated_expert_scale),
        attention=_BOTH_WAYS,
    ),
    # ModernBERT: norms before sub-layers, gated GELU; of three layers, two have a window around each row.
    Architecture(
        "modern-bert",
        replace(HALVES, window_base=10_000.0, window_scaling=unscaled),
        Norms(layer_norm=True, first=False),
        activation=Activation.GELU,
        stated_activations=_MODERN_ACTIVATIONS,
        attention=SelfAttention(windows(ALL_FIRST["modern-bert"]), causal=False),
    ),
    # EmbeddingGemma: Gemma 3 with bidirectional attention over the whole text, or over a window around each row.
    replace(
        GEMMA3,
        name="gemma-embedding",
        scales=replace(GEMMA3.scales, attention=inverse_root),
        attention=replace(GEMMA3.attention, causal=False),
    ),
)
