"""GGUF files with real models' headers, no vocabulary, and holes for weights, which take next to no disk."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import gguf
import numpy as np

Q4, Q6, Q8, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "Q8_0", "F16", "F32"))


@dataclass(frozen=True)
class SparseModel:
    """Sizes of one model. kv_heads may differ by layer; extra: further metadata under the architecture's name."""

    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_length: int
    vocabulary: int
    context: int = 32768
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    dense_layers: int = 0
    weight_type: gguf.GGMLQuantizationType = Q4
    output_type: gguf.GGMLQuantizationType = Q6
    extra: dict[str, int | float | list[bool] | list[int]] = field(default_factory=dict)


def write(model: SparseModel, path: Path, seed: int | None = None) -> Path:
    """Write the file and return its path. A seed fills the weights, which must all be float32, with noise."""
    name = model.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_tokenizer_model("no_vocab")
    numbers = {
        "vocab_size": model.vocabulary,
        "block_count": model.layers,
        "context_length": model.context,
        "embedding_length": model.embedding,
        "feed_forward_length": model.feed_forward,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_length,
        "attention.value_length": model.head_length,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    if model.experts:
        numbers |= {
            "expert_count": model.experts,
            "expert_used_count": model.experts_used,
            "expert_feed_forward_length": model.expert_feed_forward,
        }
    for key, value in (numbers | model.extra).items():
        if isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)
    size = 0
    for tensor, shape, kind in _tensors(model):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = prod(shape) // block * block_bytes
        # The writer expects a quantised tensor's shape in bytes.
        stored = shape if kind in (F32, F16) else (*shape[:-1], shape[-1] // block * block_bytes)
        dtype = {F32: np.dtype(np.float32), F16: np.dtype(np.float16)}.get(kind, np.dtype(np.uint8))
        writer.add_tensor_info(tensor, stored, dtype, nbytes, raw_dtype=kind)
        size += gguf.GGUFWriter.ggml_pad(nbytes, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = gguf.GGUFWriter.ggml_pad(path.stat().st_size, 32)
        file.truncate(start + size)
        if seed is not None:
            file.seek(start)
            file.write((np.random.default_rng(seed).standard_normal(size // 4) * 0.2).astype(np.float32).tobytes())
    return path


def _tensors(model: SparseModel) -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    width, weight = model.embedding, model.weight_type
    found = [
        ("token_embd.weight", (model.vocabulary, width), model.output_type if model.tied else weight),
        ("output_norm.weight", (width,), F32),
    ]
    if not model.tied:
        found.append(("output.weight", (model.vocabulary, width), model.output_type))
    for layer in range(model.layers):
        experts = model.experts if layer >= model.dense_layers else 0
        found += [(f"blk.{layer}.{name}", shape, kind) for name, shape, kind in _layer(model, experts)]
    return found


def _layer(model: SparseModel, experts: int) -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    width, weight, inner = model.embedding, model.weight_type, model.feed_forward
    found = [("attn_norm.weight", (width,), F32), ("ffn_norm.weight", (width,), F32), *_attention(model)]
    if model.architecture.startswith("gemma"):
        found += [("post_attention_norm.weight", (width,), F32), ("post_ffw_norm.weight", (width,), F32)]
    if not experts:
        return [
            *found,
            ("ffn_gate.weight", (inner, width), weight),
            ("ffn_up.weight", (inner, width), weight),
            ("ffn_down.weight", (width, inner), weight),
        ]
    inner = model.expert_feed_forward
    found += [
        ("ffn_gate_inp.weight", (experts, width), F32),
        ("ffn_gate_exps.weight", (experts, inner, width), weight),
        ("ffn_up_exps.weight", (experts, inner, width), weight),
        ("ffn_down_exps.weight", (experts, width, inner), weight),
    ]
    if model.architecture == "deepseek2":
        found += [
            ("ffn_gate_shexp.weight", (2 * inner, width), weight),
            ("ffn_up_shexp.weight", (2 * inner, width), weight),
            ("ffn_down_shexp.weight", (width, 2 * inner), weight),
        ]
    return found


def _attention(model: SparseModel) -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    width, weight, heads, length = model.embedding, model.weight_type, model.heads, model.head_length
    if model.architecture == "deepseek2":
        # Multi-head latent attention of DeepSeek-V2-Lite: rank 512; per head 64 rotated, 128 other and 128 value
        # numbers.
        return [
            ("attn_q.weight", (heads * 192, width), weight),
            ("attn_kv_a_mqa.weight", (576, width), weight),
            ("attn_kv_a_norm.weight", (512,), F32),
            ("attn_k_b.weight", (heads, 512, 128), Q8),
            ("attn_v_b.weight", (heads, 128, 512), weight),
            ("attn_output.weight", (width, heads * 128), weight),
        ]
    found = [
        ("attn_q.weight", (heads * length, width), weight),
        ("attn_k.weight", (model.kv_heads * length, width), weight),
        ("attn_v.weight", (model.kv_heads * length, width), weight),
        ("attn_output.weight", (width, heads * length), weight),
    ]
    if model.architecture.startswith(("qwen3", "gemma3")):
        found += [("attn_q_norm.weight", (length,), F32), ("attn_k_norm.weight", (length,), F32)]
    return found


TINY_QWEN3 = SparseModel("qwen3", 2, 256, 512, 4, 2, 128, 1000, context=2048, tied=True)
TINY_GEMMA3 = SparseModel(
    "gemma3",
    7,
    64,
    128,
    4,
    2,
    32,
    300,
    context=1024,
    tied=True,
    weight_type=F32,
    output_type=F32,
    extra={"attention.sliding_window": 16},
)
LLAMA_8B = SparseModel("llama", 32, 4096, 14336, 32, 8, 128, 128256, context=131072)
QWEN3_06B = SparseModel("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, tied=True)
QWEN3_30B_A3B = SparseModel(
    "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, experts=128, experts_used=8, expert_feed_forward=768
)
GEMMA3_27B = SparseModel(
    "gemma3", 62, 5376, 21504, 32, 16, 128, 262144, tied=True, extra={"attention.sliding_window": 1024}
)
GEMMA2_9B = SparseModel(
    "gemma2", 42, 3584, 14336, 16, 8, 256, 256000, context=8192, tied=True, extra={"attention.sliding_window": 4096}
)
QWEN2_VL_7B = SparseModel(
    "qwen2vl", 28, 3584, 18944, 28, 4, 128, 152064, extra={"rope.dimension_sections": [16, 24, 24, 0]}
)
DEEPSEEK_V2_LITE = SparseModel(
    "deepseek2",
    27,
    2048,
    10944 // 256 * 256,
    16,
    1,
    576,
    102400,
    experts=64,
    experts_used=6,
    expert_feed_forward=1536,
    dense_layers=1,
    extra={
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    },
)
