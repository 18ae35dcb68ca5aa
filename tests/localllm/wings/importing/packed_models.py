"""Tiny models with matrices packed in fewer bits: random words, which are valid in each of these formats."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.localllm.wings.importing.tiny_models import CONFIGS, bfloat16, values_of

Stored = dict[str, tuple[str, np.ndarray]]
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def _compressed(bits: int, group: int, symmetric: bool, order: str | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group > 0 else "channel",
               "group_size": group if group > 0 else None, "actorder": order}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


PACKINGS: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "gptq-order": {**_GPTQ, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq-8-bits": {**_GPTQ, "bits": 8, "group_size": -1, "sym": True},
    "gptq_v2": {**_GPTQ, "checkpoint_format": "gptq_v2"},
    "awq": _AWQ,
    "awq-row": {**_AWQ, "group_size": -1},
    "pack-quantized": _compressed(4, 32, True),
    "pack-quantized-zeros": _compressed(4, 16, False),
    "pack-quantized-order": _compressed(4, 16, True, "group"),
    "pack-quantized-8": _compressed(8, -1, True),
}
CONFIG = CONFIGS["llama"]
NVFP4: dict[str, dict[str, Any]] = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float",
                                                                         "group_size": 16}}},
    },
}  # fmt: skip
# Matrices of experts, and biases, with factors of their own.
NVFP4_EXPERTS = {**CONFIGS["qwen3_moe"], "moe_intermediate_size": 64, "attention_bias": True}


def is_packed(name: str) -> bool:
    """Whether a tensor is a packed matrix; embeddings and logits are not."""
    return name.endswith("_proj.weight")


def stored_tensors(packing: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Stored:
    """All tensors of the model as stored, generated from their names alone."""
    stored: Stored = {}
    for name, shape in shapes.items():
        if is_packed(name):
            parts = packed(packing, name, shape[0], shape[1])
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            stored[name] = "BF16", bfloat16(values_of(name, tuple(shape)))
    return stored


def packed(packing: Mapping[str, Any], name: str, rows: int, width: int) -> Stored:
    """A matrix's tensors, by the ends of their names. Stored zeros are below 8, which all versions read alike."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    method = packing["quant_method"]
    if packing in NVFP4.values():
        return _nvfp4(random, rows, width, method)
    weights = packing["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else packing
    bits, group = weights.get("bits", weights.get("num_bits")), weights["group_size"] or -1
    groups, each = (1 if group < 0 else width // group), 32 // bits

    def words(*shape: int, mask: int = 0xFFFFFFFF) -> tuple[str, np.ndarray]:
        return "I32", (random.integers(0, 1 << 32, shape, np.uint32) & np.uint32(mask)).view(np.int32)

    small = 0.3 / (1 << bits)
    scales = (small * random.uniform(0.5, 1.5, (groups, rows))).astype(np.float16)
    order = random.permutation(np.arange(width) // (width // groups)).astype(np.int32)
    if method == "compressed-tensors":
        half = bfloat16(np.ascontiguousarray(scales.T).astype(np.float32))
        parts = {"weight_packed": words(rows, width // each), "weight_scale": ("BF16", half),
                 "weight_shape": ("I64", np.array([rows, width]))}  # fmt: skip
        if not weights["symmetric"]:
            parts["weight_zero_point"] = words(rows // each, groups)
        if weights["actorder"]:
            parts["weight_g_idx"] = "I32", order
        return parts
    zeros = words(groups, rows // each, mask=0x77777777 if bits == 4 else 0x7F7F7F7F)
    if method == "awq":
        return {"qweight": words(width, rows // 8), "qzeros": zeros, "scales": ("F16", scales)}
    if packing.get("checkpoint_format") == "gptq_v2":
        zeros = "I32", zeros[1] | 0x11111111
    order = order if packing["desc_act"] else np.arange(width, dtype=np.int32) // (width // groups)
    return {"qweight": words(width // each, rows), "qzeros": zeros, "scales": ("F16", scales),
            "g_idx": ("I32", order)}  # fmt: skip


def _nvfp4(random: np.random.Generator, rows: int, width: int, method: str) -> Stored:
    """Pairs of codes, their scales (from 2 ** -4 to 2) and the factor of the matrix, or its inverse."""
    pairs = "U8", random.integers(0, 256, (rows, width // 2), np.uint8)
    scales = "F8_E4M3", random.integers(0x18, 0x41, (rows, width // 16), np.uint8)
    factor = random.uniform(0.03, 0.08)
    if method == "modelopt":
        return {"weight": pairs, "weight_scale": scales, "weight_scale_2": ("F32", np.array(factor, np.float32)),
                "input_scale": ("F32", np.array(0.5, np.float32))}  # fmt: skip
    return {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": ("F32", np.float32([1 / factor])),
            "input_global_scale": ("F32", np.float32([2.0]))}  # fmt: skip
