"""Small LoRA adapters for a model file, and the same change merged into a copy of its weights."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import finish

RANK = 4
ALPHA = 6.0
TARGETS = ("attn_q", "attn_v", "ffn_down")

# For each tensor: the two factors, (rank, inputs) and (outputs, rank).
Factors = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def factors(model: Path, seed: int, size: float = 0.3, targets: Sequence[str] = TARGETS, rank: int = RANK) -> Factors:
    """Random factors for some matrices of every layer of an F32 model, and those of token embeddings transposed."""
    random = np.random.default_rng(seed)
    made: Factors = {}
    for tensor in gguf.GGUFReader(model).tensors:
        if any(tensor.name.endswith(f"{target}.weight") for target in targets) and tensor.data.ndim > 1:
            *experts, outputs, inputs = tensor.data.shape
            down = random.normal(0, size, (*experts, rank, inputs)).astype(np.float32)
            if tensor.name == "token_embd.weight":
                down, outputs = random.normal(0, size, (outputs, rank)).astype(np.float32), inputs
            made[tensor.name] = down, random.normal(0, size, (*experts, outputs, rank)).astype(np.float32)
    return made


def write(
    path: Path,
    made: Mapping[str, tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]],
    architecture: str = "llama",
    kind: str = "lora",
    alpha: float = ALPHA,
    beside: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> Path:
    """Write the adapter as llama.cpp's converter does; None leaves a factor out. beside: further tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (down, up) in made.items():
        for part, values in (("lora_a", down), ("lora_b", up)):
            if values is not None:
                writer.add_tensor(f"{name}.{part}", np.asarray(values, np.float32))
    for name, values in beside.items():
        writer.add_tensor(name, values)
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
                tensor.data[:] += weight * ALPHA / up.shape[-1] * (up @ down)
    return path
