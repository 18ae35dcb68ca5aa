"""Gemma 1 to 4: Llama with GELU, and embeddings multiplied by the square root of their width."""

from dataclasses import replace

from models.architecture import (
    HALVES,
    Activation,
    Architecture,
    Experts,
    Norms,
    Scales,
    SelfAttention,
    full_width_scale,
    one,
    root_of_width,
    stated_windows,
    unscaled,
    windows,
)

_LAYERS_OF_2_27B, _LAYERS_OF_3_27B = 46, 62

_GEMMA = Architecture("gemma", HALVES, scales=Scales(root_of_width), activation=Activation.GELU)
# Norms after each sub-layer, capped scores and logits, and a sliding window in every other layer.
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    norms=Norms(after=True),
    scales=Scales(root_of_width, attention=full_width_scale(_LAYERS_OF_2_27B)),
    attention=SelfAttention(windows(2, 4096), cap=50.0),
    logit_cap=30.0,
)
# Norms of heads; five of six layers have a window and their own rotation base.
GEMMA3 = replace(
    _GEMMA,
    name="gemma3",
    rotation=replace(HALVES, window_base=10_000.0, window_scaling=unscaled),
    norms=Norms(after=True),
    scales=Scales(root_of_width, attention=full_width_scale(_LAYERS_OF_3_27B)),
    attention=SelfAttention(windows(6)),
)
# A second embedding for each layer, heads of two sizes, and layers that share keys and values. Values are normalised.
# Layers without a window rotate only part of a head, with frequency factors from the file. The mixture-of-experts model
# has a dense network beside its experts.
_GEMMA4 = replace(
    GEMMA3,
    name="gemma4",
    scales=Scales(root_of_width, attention=one),
    experts=Experts(beside=True),
    attention=SelfAttention(stated_windows(6), value_norms=True, images_in_windows=True),
)
# Like Gemma 4, with parallel residual streams, a low-rank path beside attention, and sparse gates in the first layers.
_GEMMA3N = replace(_GEMMA4, name="gemma3n", attention=replace(_GEMMA4.attention, window=windows(5)), logit_cap=30.0)

ARCHITECTURES = (_GEMMA, _GEMMA2, GEMMA3, _GEMMA3N, _GEMMA4)
