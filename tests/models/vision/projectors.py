"""Projectors of all kinds with random weights: tiny ones for tests, and of any size for benchmarks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from tests.gguf_files import add_keys, finish

Tensors = Iterator[tuple[str, tuple[int, ...]]]
FLOATS = gguf.GGMLQuantizationType.F32


@dataclass(frozen=True)
class Sizes:
    """Sizes of a projector; `text` is the language model's width."""

    side: int = 32
    patch: int = 8
    width: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    merge: int = 2
    text: int = 64


@dataclass(frozen=True)
class Kind:
    """How a projector of one type is written. tensors: names and shapes. keys: beyond the common ones."""

    tensors: Callable[[Sizes], Tensors]
    sizes: Sizes = field(default=Sizes())
    keys: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    mean: float = 0.5
    deviation: float = 0.5
    gelu: bool = True


def _gemma4uv(s: Sizes) -> Tensors:
    pixels = 3 * (s.patch * s.merge) ** 2
    for number, size in enumerate((pixels, s.width, s.width), 1):
        yield f"v.patch_norm.{number}.weight", (size,)
        yield f"v.patch_norm.{number}.bias", (size,)
    yield "v.patch_embd.weight", (s.width, pixels)
    yield "v.patch_embd.bias", (s.width,)
    yield "v.position_embd.weight", (2, 320, s.width)
    yield "mm.input_projection.weight", (s.text, s.width)


KINDS = {
    "gemma4uv": Kind(
        _gemma4uv, Sizes(side=224, patch=4, merge=3, hidden=0, layers=0, heads=0), mean=0.0, deviation=1.0
    ),
}


def write_vision(
    path: Path,
    kind: str,
    *,
    weights: gguf.GGMLQuantizationType = FLOATS,
    keys: dict[str, Any] | None = None,
    changed: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    seed: int = 5,
    **sizes: int,
) -> Path:
    """Write a projector. changed: changes tensors in place. sizes: other Sizes.

    weights: the type of matrices, F16 where rows are no whole blocks of it.
    """
    made = KINDS[kind]
    s = replace(made.sizes, **sizes)
    writer = gguf.GGUFWriter(path, "clip")
    common = {
        "image_size": s.side,
        "patch_size": s.patch,
        "embedding_length": s.width,
        "feed_forward_length": s.hidden,
        "block_count": s.layers,
        "projection_dim": s.text,
        "attention.head_count": s.heads,
        "attention.layer_norm_epsilon": 1e-6,
        "projector.scale_factor": s.merge,
        "image_mean": [made.mean] * 3,
        "image_std": [made.deviation] * 3,
    }
    stated = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": made.gelu,
        **{f"clip.vision.{name}": value for name, value in (common | made.keys(s)).items()},
        **(keys or {}),
    }
    add_keys(writer, {key: value for key, value in stated.items() if value is not None})
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape) for name, shape in made.tensors(s)}
    changed(tensors)
    for name, values in tensors.items():
        chosen = weights if values.ndim == 2 and name.endswith(".weight") and "position" not in name else FLOATS
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = gguf.GGMLQuantizationType.F16
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)
    return finish(writer)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of a norm about 1, of a matrix such that outputs are about as large as inputs, others small."""
    values = rng.standard_normal(shape)
    if len(shape) == 1:
        return (1 + 0.2 * values if name.endswith(".weight") else 0.2 * values).astype(np.float32)
    scale = 0.3 if "position" in name else prod(shape[1:]) ** -0.5
    return (values * scale).astype(np.float32)
