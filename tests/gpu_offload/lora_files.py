"""Small LoRA adapters for a model file, and the same change merged into a copy of its weights."""

import shutil
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import finish

RANK = 4
ALPHA = 6.0
TARGETS = ("attn_q", "attn_v", "ffn_down")

# For each tensor: the two factors, (rank, inputs) and (outputs, rank).
Factors = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def factors(model: Path, seed: int, size: float = 0.3) -> Factors:
    """Random factors for some matrices of every layer of an F32 model."""
    random = np.random.default_rng(seed)
    made: Factors = {}
    for tensor in gguf.GGUFReader(model).tensors:
        if any(f".{target}.weight" in tensor.name for target in TARGETS):
            outputs, inputs = tensor.data.shape
            down = random.normal(0, size, (RANK, inputs)).astype(np.float32)
            made[tensor.name] = down, random.normal(0, size, (outputs, RANK)).astype(np.float32)
    return made


def write(path: Path, made: Factors, architecture: str = "llama", kind: str = "lora") -> Path:
    """Write the adapter as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (down, up) in made.items():
        writer.add_tensor(f"{name}.lora_a", down)
        writer.add_tensor(f"{name}.lora_b", up)
    finish(writer)
    return path


def merge(model: Path, path: Path, *weighted: tuple[Factors, float]) -> Path:
    """Write a copy of an F32 model with adapters added to its weights."""
    shutil.copyfile(model, path)
    path.chmod(0o600)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        for made, weight in weighted:
            if tensor.name in made:
                down, up = made[tensor.name]
                tensor.data[:] += weight * ALPHA / RANK * (up @ down)
    return path
