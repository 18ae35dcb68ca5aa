"""Projectors of all kinds with random weights, tiny or of any size, and a language model for them."""

import re
from collections.abc import Callable, Iterator
from ctypes import c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import add_keys, copying, finish

Tensors = Iterator[tuple[str, tuple[int, ...]]]
FLOATS = gguf.GGMLQuantizationType.F32
_GEMMA3_PROJECTION = "mm.input_projection.weight"
"""Stored with a row for each input; llama.cpp cannot transpose it if it is quantised."""


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
    deep: int = 0


@dataclass(frozen=True)
class Kind:
    """How a projector of one type is written. tensors: names and shapes. keys: beyond the common ones."""

    tensors: Callable[[Sizes], Tensors]
    sizes: Sizes = field(default=Sizes())
    keys: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    mean: float = 0.5
    deviation: float = 0.5
    activation: str = "gelu"


def _gemma4uv(s: Sizes) -> Tensors:
    pixels = 3 * (s.patch * s.merge) ** 2
    for number, size in enumerate((pixels, s.width, s.width), 1):
        yield f"v.patch_norm.{number}.weight", (size,)
        yield f"v.patch_norm.{number}.bias", (size,)
    yield "v.patch_embd.weight", (s.width, pixels)
    yield "v.patch_embd.bias", (s.width,)
    yield "v.position_embd.weight", (2, 320, s.width)
    yield "mm.input_projection.weight", (s.text, s.width)


def _pair(name: str, *shape: int) -> Tensors:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _layers(
    s: Sizes,
    *,
    swapped: bool = False,
    gated: bool = False,
    fused: bool = False,
    biases: bool = True,
    plain_norms: bool = False,
    scaled: bool = False,
    gemma4: bool = False,
) -> Tensors:
    """The layers of a transformer. swapped: with the names of ffn_up and ffn_down as in old files.

    plain_norms: norms without biases. scaled: with factors of sub-layers' outputs. gemma4: with norms of heads and of
    sub-layers' outputs, and limits of matrices' inputs and outputs.
    """
    for number in range(s.layers):
        prefix = f"v.blk.{number}."
        parts = {"attn_out": (s.width, s.width), "ffn_up": (s.hidden, s.width), "ffn_down": (s.width, s.hidden)}
        parts |= {"attn_qkv": (3 * s.width, s.width)} if fused else {f"attn_{one}": (s.width, s.width) for one in "qkv"}
        if scaled:
            yield f"{prefix}ls1.weight", (s.width,)
            yield f"{prefix}ls2.weight", (s.width,)
        if gemma4:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"{prefix}{name}.weight", (s.width // s.heads,)
            yield f"{prefix}attn_post_norm.weight", (s.width,)
            yield f"{prefix}ffn_post_norm.weight", (s.width,)
            for name in [*parts, "ffn_gate"]:
                for end in ("input_min", "input_max", "output_min", "output_max"):
                    yield f"{prefix}{name}.{end}", (1,)
        if gated:
            parts["ffn_gate"] = (s.hidden, s.width)
        if swapped:
            parts["ffn_up"], parts["ffn_down"] = parts["ffn_down"], parts["ffn_up"]
        for name, shape in [*parts.items(), ("ln1", (s.width,)), ("ln2", (s.width,))]:
            for tensor, size in _pair(prefix + name, *shape):
                if not tensor.endswith("bias") or (biases and not (plain_norms and name in ("ln1", "ln2"))):
                    yield tensor, size


def _patches(s: Sizes) -> Tensors:
    yield "v.patch_embd.weight", (s.width, 3, s.patch, s.patch)
    yield "v.patch_embd.bias", (s.width,)


def _gemma3(s: Sizes) -> Tensors:
    yield from _patches(s)
    yield "v.position_embd.weight", ((s.side // s.patch) ** 2, s.width)
    yield from _layers(s, swapped=True)
    yield from _pair("v.post_ln", s.width)
    yield _GEMMA3_PROJECTION, (s.width, s.text)
    yield "mm.soft_emb_norm.weight", (s.width,)


def _qwen(s: Sizes, *, third: bool = False, windows: bool = False) -> Tensors:
    yield "v.patch_embd.weight", (s.width, 3, s.patch, s.patch)
    yield "v.patch_embd.weight.1", (s.width, 3, s.patch, s.patch)
    if third:
        yield "v.patch_embd.bias", (s.width,)
        yield "v.position_embd.weight", (49, s.width)
    yield from _layers(s, gated=windows, fused=third, plain_norms=windows)
    yield from (_pair("v.post_ln", s.width) if not windows else [("v.post_ln.weight", (s.width,))])
    yield from _pair("mm.0", 4 * s.width, 4 * s.width)
    yield from _pair("mm.2", s.text, 4 * s.width)
    for layer in range(s.deep):
        yield from _pair(f"v.deepstack.{layer}.norm", 4 * s.width)
        yield from _pair(f"v.deepstack.{layer}.fc1", 4 * s.width, 4 * s.width)
        yield from _pair(f"v.deepstack.{layer}.fc2", s.text, 4 * s.width)


def _idefics3(s: Sizes) -> Tensors:
    yield from _patches(s)
    yield "v.position_embd.weight", ((s.side // s.patch) ** 2, s.width)
    yield from _layers(s, swapped=True)
    yield from _pair("v.post_ln", s.width)
    yield "mm.model.fc.weight", (s.text, s.merge**2 * s.width)


def _gemma4v(s: Sizes) -> Tensors:
    yield "v.patch_embd.weight", (s.width, 3, s.patch, s.patch)
    yield "v.position_embd.weight", (2, 900, s.width)
    yield from _layers(s, gated=True, biases=False, gemma4=True)
    yield "v.std_bias", (s.width,)
    yield "v.std_scale", (s.width,)
    yield "mm.input_projection.weight", (s.text, s.width)
    yield "mm.input_projection.input_max", (1,)
    yield "mm.input_projection.input_min", (1,)


def _lfm2(s: Sizes) -> Tensors:
    yield from _patches(s)
    yield "v.position_embd.weight", ((s.side // s.patch) ** 2, s.width)
    yield from _layers(s)
    yield from _pair("v.post_ln", s.width)
    yield from _pair("mm.input_norm", s.merge**2 * s.width)
    yield from _pair("mm.1", 2 * s.text, s.merge**2 * s.width)
    yield from _pair("mm.2", s.text, 2 * s.text)


def _pixtral(s: Sizes) -> Tensors:
    yield "v.patch_embd.weight", (s.width, 3, s.patch, s.patch)
    yield "v.pre_ln.weight", (s.width,)
    yield from _layers(s, gated=True, biases=False)
    yield "v.token_embd.img_break", (s.text,)
    if s.merge > 1:
        yield "mm.input_norm.weight", (s.width,)
        yield "mm.patch_merger.weight", (s.width, s.merge**2 * s.width)
    yield from _pair("mm.1", s.text, s.width)
    yield from _pair("mm.2", s.text, s.text)


def _internvl(s: Sizes) -> Tensors:
    yield from _patches(s)
    yield "v.class_embd", (s.width,)
    yield "v.position_embd.weight", ((s.side // s.patch) ** 2 + 1, s.width)
    yield from _layers(s, scaled=True)
    yield from _pair("mm.model.mlp.0", s.merge**2 * s.width)
    yield from _pair("mm.model.mlp.1", s.text, s.merge**2 * s.width)
    yield from _pair("mm.model.mlp.3", s.text, s.text)


def _llava(s: Sizes) -> Tensors:
    yield "v.patch_embd.weight", (s.width, 3, s.patch, s.patch)
    yield "v.class_embd", (s.width,)
    yield "v.position_embd.weight", ((s.side // s.patch) ** 2 + 1, s.width)
    yield from _pair("v.pre_ln", s.width)
    yield from _layers(s, swapped=True)
    yield from _pair("mm.0", s.text, s.width)
    yield from _pair("mm.2", s.text, s.text)


MLP_ROWS = (Sizes.side // Sizes.patch) ** 2
"""Rows of a picture by the kind "mlp"."""

KINDS = {
    "idefics3": Kind(_idefics3, keys=lambda s: {"preproc_image_size": 4 * s.side}),
    "internvl": Kind(_internvl, Sizes(side=48)),
    "mlp": Kind(_llava, Sizes(layers=3, merge=1), activation="quick"),
    "lfm2": Kind(_lfm2, Sizes(side=64, patch=16)),
    "pixtral": Kind(_pixtral, Sizes(side=512), activation="silu"),
    "qwen2vl_merger": Kind(_qwen),
    "qwen2.5vl_merger": Kind(
        partial(_qwen, windows=True), Sizes(layers=3), lambda s: {"n_wa_pattern": 2}, activation="silu"
    ),
    "qwen3vl_merger": Kind(partial(_qwen, third=True)),
    "gemma3": Kind(_gemma3, Sizes(side=96, width=96, hidden=208, merge=3)),
    "gemma4v": Kind(_gemma4v, Sizes(side=224, patch=4, merge=3), mean=0.0, deviation=1.0),
    "gemma4uv": Kind(
        _gemma4uv, Sizes(side=224, patch=4, merge=3, hidden=0, layers=0, heads=0), mean=0.0, deviation=1.0
    ),
}


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The blocks of an array's rows; those of K-quants are made by ggml."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(values, kind)
    from gpu_offload.library import ggml

    rows = np.ascontiguousarray(values)
    items, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.empty((len(rows), rows.shape[1] // items * size), np.uint8)
    kinds = c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
    quantize = ggml("ggml_quantize_chunk", c_size_t, *kinds)
    assert quantize(kind.value, rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, None) == blocks.nbytes
    return blocks


def write_projector(
    path: Path,
    kind: str = "mlp",
    *,
    weights: gguf.GGMLQuantizationType = FLOATS,
    blocks: Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray] = quantized,
    keys: dict[str, Any] | None = None,
    changed: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    seed: int = 5,
    sound: str = "",
    **sizes: int,
) -> Path:
    """Write a projector. changed: changes tensors in place. sizes: other Sizes. sound: the type of a sound encoder.

    weights: the type of matrices, F16 where rows are no whole blocks of it. blocks: makes an array's blocks of a type.
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
        "spatial_merge_size": s.merge,
        "image_mean": [made.mean] * 3,
        "image_std": [made.deviation] * 3,
    }
    stated = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": made.activation == "gelu",
        "clip.use_silu": made.activation == "silu",
        **{f"clip.vision.{name}": value for name, value in (common | made.keys(s)).items()},
        **(_sound_keys(kind, sound, s) if sound else {}),
        **(keys or {}),
    }
    add_keys(writer, {key: value for key, value in stated.items() if value is not None})
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape) for name, shape in made.tensors(s)}
    if sound:
        tensors["mm.a.input_projection.weight"] = _random(rng, "matrix", (s.text, 640))
    changed(tensors)
    for name, values in tensors.items():
        stays = "position_embd" in name or (kind == "gemma3" and name == _GEMMA3_PROJECTION)
        chosen = weights if values.ndim == 2 and name.endswith(".weight") and not stays else FLOATS
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = gguf.GGMLQuantizationType.F16
        writer.add_tensor(name, blocks(values, chosen), raw_dtype=chosen)
    return finish(writer)


def _sound_keys(kind: str, sound: str, s: Sizes) -> dict[str, Any]:
    sizes = {"embedding_length": 640, "projection_dim": s.text, "num_mel_bins": 128}
    zeros = dict.fromkeys(("feed_forward_length", "block_count", "attention.head_count"), 0)
    return {
        "clip.projector_type": None,
        "clip.vision.projector_type": kind,
        "clip.has_audio_encoder": True,
        "clip.audio.projector_type": sound,
        "clip.audio.attention.layer_norm_epsilon": 1e-6,
        **{f"clip.audio.{name}": value for name, value in (sizes | zeros).items()},
    }


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Limits that change some values, weights of a norm about 1, of a matrix such that outputs are about as large as
    inputs, others small.
    """
    values = rng.standard_normal(shape)
    if name.endswith(("_min", "_max")):
        return np.asarray((np.abs(values) + 1.5) * (-1 if name.endswith("_min") else 1), np.float32)
    if len(shape) == 1:
        return (1 + 0.2 * values if name.endswith(".weight") else 0.2 * values).astype(np.float32)
    scale = 0.3 if "position" in name else prod(shape[1:]) ** -0.5
    return (values * scale).astype(np.float32)


def write_qwen2vl(source: Path, path: Path) -> Path:
    """Write a Llama's weights as a model with M-RoPE positions."""
    renamed = partial(re.sub, r"^llama\.", "qwen2vl.")
    reader, writer = copying(source, path, architecture="qwen2vl", renamed=renamed)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            writer.add_tensor(tensor.name.replace("weight", "bias"), np.zeros(len(tensor.data), np.float32))
    return finish(writer)
