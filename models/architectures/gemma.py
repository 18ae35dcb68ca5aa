"""Gemma 1 to 4: Llama with GELU, and embeddings scaled by the root of their width."""

from dataclasses import replace

from models.architecture import (
    HALVES,
    Activation,
    Architecture,
    Experts,
    Norms,
    Scales,
    full_width_scale,
    one,
    root_of_width,
    stated_windows,
    unscaled,
    windows,
)

_LAYERS_OF_2_27B, _LAYERS_OF_3_27B = 46, 62

_GEMMA = Architecture("gemma", HALVES, scales=Scales(root_of_width), activation=Activation.GELU)
# Norms after each sub-layer, capped scores and logits, every other layer sees a window only.
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    norms=Norms(after=True),
    scales=Scales(root_of_width, attention=full_width_scale(_LAYERS_OF_2_27B)),
    window=windows(2, 4096),
    attention_cap=50.0,
    logit_cap=30.0,
)
# Norms of heads, and five layers with a window and a rotation base of their own to one that sees all.
GEMMA3 = replace(
    _GEMMA,
    name="gemma3",
    rotation=replace(HALVES, window_base=10_000.0, window_scaling=unscaled),
    norms=Norms(after=True),
    scales=Scales(root_of_width, attention=full_width_scale(_LAYERS_OF_3_27B)),
    window=windows(6),
)
# A second embedding for each layer, heads of two sizes, and layers that share keys and values. Values are normalised.
# Rotation of layers that see everything turns few values of a head, by factors that the file has. The mixture has a
# dense network beside its experts.
_GEMMA4 = replace(
    GEMMA3,
    name="gemma4",
    scales=Scales(root_of_width, attention=one),
    experts=Experts(beside=True),
    window=stated_windows(6),
    value_norms=True,
)
# Parallel residual streams, a low-rank path beside attention, sparse gates in the first layers; else like Gemma 4.
_GEMMA3N = replace(_GEMMA4, name="gemma3n", window=windows(5), logit_cap=30.0)

ARCHITECTURES = (_GEMMA, _GEMMA2, GEMMA3, _GEMMA3N, _GEMMA4)
