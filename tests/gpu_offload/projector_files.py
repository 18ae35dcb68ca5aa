"""Tiny projectors with random weights for models of width 64, and pictures for them."""

import re
import struct
import zlib
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import copying, finish

WIDTH, INNER, SIDE, PATCH, LAYERS = 32, 64, 32, 8, 3
PATCHES = (SIDE // PATCH) ** 2


def write_projector(path: Path, kind: str = "mlp", width: int = 64, architecture: str = "clip", seed: int = 5) -> Path:
    """Write a vision transformer with the projection of LLaVA ("mlp"), Gemma 3 ("gemma3") or Qwen2-VL ("qwen2vl")."""
    qwen = kind == "qwen2vl"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen2vl_merger" if qwen else kind)
    writer.add_bool("clip.use_gelu", True)
    for name, number in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "projection_dim": width,
        "attention.head_count": 4,
        "projector.scale_factor": 2,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    rng = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.3).astype(np.float32))

    def pair(name: str, rows: int, *columns: int) -> None:
        add(f"{name}.weight", rows, *columns)
        add(f"{name}.bias", rows)

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    if qwen:
        add("v.patch_embd.weight.1", WIDTH, 3, PATCH, PATCH)
    else:
        add("v.patch_embd.bias", WIDTH)
        add("v.position_embd.weight", PATCHES + (kind == "mlp"), WIDTH)
    if kind == "mlp":
        add("v.class_embd", WIDTH)
    pair("v.post_ln", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            pair(f"v.blk.{layer}.{name}", WIDTH, WIDTH)
        pair(f"v.blk.{layer}.ffn_up", INNER, WIDTH)
        pair(f"v.blk.{layer}.ffn_down", WIDTH, INNER)
        pair(f"v.blk.{layer}.ln1", WIDTH)
        pair(f"v.blk.{layer}.ln2", WIDTH)
    if kind == "mlp":
        pair("mm.0", width, WIDTH)
        pair("mm.2", width, width)
    elif qwen:
        pair("mm.0", 4 * WIDTH, 4 * WIDTH)
        pair("mm.2", width, 4 * WIDTH)
    else:
        add("mm.input_projection.weight", WIDTH, width)
        add("mm.soft_emb_norm.weight", WIDTH)
    finish(writer)
    return path


def write_qwen2vl(source: Path, path: Path) -> Path:
    """Write a Llama's weights as a model with M-RoPE positions."""
    renamed = partial(re.sub, r"^llama\.", "qwen2vl.")
    reader, writer = copying(source, path, architecture="qwen2vl", renamed=renamed)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            writer.add_tensor(tensor.name.replace("weight", "bias"), np.zeros(len(tensor.data), np.float32))
    finish(writer)
    return path


def png(seed: int = 0, width: int = 40, height: int = 30) -> bytes:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png_of(pixels)


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels, uint8[height, width, 3]."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*each)
        for each in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
    )


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
