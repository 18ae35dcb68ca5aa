"""Small heads in llama.cpp's EAGLE-3 layout, for models of tests.models.synthetic."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from tests.models.synthetic import Synthetic, shapes, write

TRAINED = Path(__file__).parent / "builtin" / "draft-head-Q8_0.gguf"
"""The built-in model's head, written by benchmarks.training.draft_head."""
TARGET = Synthetic("llama", layers=4)
_READ = [1, 2, 3]
_JOINED = {f"attn_{part}.weight": f"{rows}, 512" for part, rows in (("q", "queries"), ("k", "keys"), ("v", "keys"))}
_SHARING = Synthetic(
    "eagle3",
    layers=1,
    extra={"target_layers": _READ, "target_hidden_size": 256},
    added={"attn_norm_2.weight": "width", **_JOINED},
    beside={"fc.weight": "width, 768"},
    dropped=("token_embd.weight",),
)
OUTPUTS = 96
HEADS = {
    "sharing": _SHARING,
    "norms": replace(
        _SHARING,
        extra={**_SHARING.extra, "norm_before_fc": True, "norm_before_residual": True},
        beside={**_SHARING.beside, "enc.output_norm.weight": "768"},
        factors={"rope_freqs.weight": 4.0},
    ),
    "own": replace(
        _SHARING,
        embedding=128,
        heads=8,
        kv_heads=8,
        head=32,
        added={name: shape.replace("512", "256") for name, shape in _SHARING.added.items()},
        beside={"fc.weight": "width, 768", "output.weight": f"{OUTPUTS}, width", "d2t": str(OUTPUTS)},
        dropped=(),
    ),
}


def write_head(head: Synthetic, path: Path, seed: int = 7) -> Path:
    """Write a head with random weights; with d2t, its outputs map to tokens in random order."""
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes(head).items():
        values[name] = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        if len(shape) == 1:
            values[name] = (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
    types = {"d2t": gguf.GGMLQuantizationType.I64} if "d2t" in values else {}
    if types:
        values["d2t"] = random.permutation(head.vocabulary)[:OUTPUTS].astype(np.int64)
    return write(head, path, values=values, types=types)
