"""Write models of random weights in the full-size shapes of hybrids, Gemma 3, Gemma 4 and latent attention.

    full_size.py SHAPE OUT.gguf [--type Q4_K_M] [--vocabulary MODEL.gguf]

The text that such a model writes is noise; its matrices, its vocabulary's size and its mix of tensor types are those
of the real one, since llama.cpp quantises it. --vocabulary copies another file's tokenizer, padded to the shape's size,
for benchmarks that read text. Sizes are those of the published configurations; where a name ends in a number of
layers, the model is cut to them. Needs some 5 bytes of disk for each weight.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localllm.wings.lab.quality.quantize import quantize
from tests.gguf_files import add_keys
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, keys_of, random_values, rope_factors, shapes

UNUSED_TOKEN = 5


def _delta_net(width: int, inner: int) -> Synthetic:
    small = MODELS["qwen35"]
    sizes = {"ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 16, "ssm.inner_size": 2048}
    rotation = {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7}
    return replace(
        small,
        layers=24,
        embedding=width,
        feed_forward=inner,
        heads=8,
        kv_heads=2,
        head=256,
        vocabulary=248_320,
        context=32_768,
        extra={**small.extra, **sizes, **rotation},
    )


SHAPES = {
    "lfm2-1.2b": replace(
        MODELS["lfm2"],
        layers=16,
        embedding=2048,
        feed_forward=8192,
        heads=32,
        kv_heads=8,
        vocabulary=65_536,
        context=32_768,
        extra={
            "shortconv.l_cache": 3,
            "attention.head_count_kv": [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
            "rope.freq_base": 1e6,
        },
    ),
    "qwen3.5-0.8b": _delta_net(1024, 3584),
    "qwen3.5-2b": _delta_net(2048, 6144),
    "gemma3-4b": replace(
        MODELS["gemma3"],
        layers=34,
        embedding=2560,
        feed_forward=10_240,
        heads=8,
        kv_heads=4,
        vocabulary=262_144,
        context=131_072,
        extra={**MODELS["gemma3"].extra, "attention.sliding_window": 1024},
    ),
    "gemma4-e2b-15": replace(
        MODELS["gemma4"],
        layers=15,
        embedding=1536,
        feed_forward=6144,
        heads=8,
        head=512,
        window_head=256,
        per_layer=256,
        vocabulary=262_144,
        context=32_768,
        extra={
            **MODELS["gemma4"].extra,
            "feed_forward_length": [6144] * 15,
            "attention.sliding_window": 512,
            "attention.sliding_window_pattern": [True, True, True, True, False] * 3,
            "attention.shared_kv_layers": 10,  # llama.cpp expects one layer of each kind just before them
            "rope.dimension_count_swa": 256,
        },
    ),
    "granite-h-350m": replace(
        MODELS["granitehybrid"],
        layers=32,
        embedding=768,
        feed_forward=2048,
        heads=12,
        kv_heads=4,
        vocabulary=100_352,
        context=32_768,
        extra={
            **MODELS["granitehybrid"].extra,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.time_step_rank": 48,
            "ssm.inner_size": 1536,
            "attention.head_count_kv": [4 if layer in (10, 13, 17, 27) else 0 for layer in range(32)],
        },
    ),
    "deepseek-v2-lite-6": replace(
        MODELS["deepseek2"],
        layers=6,
        embedding=2048,
        feed_forward=10_944,
        heads=16,
        head=128,
        experts=16,
        vocabulary=102_400,
        context=32_768,
        extra={
            **MODELS["deepseek2"].extra,
            "expert_used_count": 6,
            "expert_feed_forward_length": 1408,
            "expert_shared_feed_forward_length": 2816,
            "leading_dense_block_count": 1,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "rope.scaling.original_context_length": 4096,
        },
        added={**MODELS["deepseek2"].added, "attn_k_b.weight": "heads, rank, 128"},
    ),
}


def write(model: Synthetic, path: Path, vocabulary: Path | None, seed: int = 1) -> None:
    """Write a model whose matrices are F16, one tensor in memory at a time."""
    writer = gguf.GGUFWriter(path, model.architecture)
    add_keys(writer, keys_of(model))
    if vocabulary:
        _copy_tokenizer(writer, vocabulary, model.vocabulary)
    else:
        writer.add_tokenizer_model("no_vocab")
    tables = rope_factors(model)
    layout = shapes(model) | {name: values.shape for name, values in tables.items()}
    kinds = {name: np.dtype(np.float32 if _stays_float(name, shape) else np.float16) for name, shape in layout.items()}
    for name, shape in layout.items():
        writer.add_tensor_info(name, shape, kinds[name], int(np.prod(shape)) * kinds[name].itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.Generator(np.random.SFC64(seed))
    for name, shape in layout.items():
        values = tables[name] if name in tables else random_values(name, shape, random)
        factor = model.query_norm if name.endswith("attn_q_norm.weight") else 1.0
        writer.write_tensor_data((values * np.float32(factor)).astype(kinds[name]))
    writer.close()


def _stays_float(name: str, shape: tuple[int, ...]) -> bool:
    """Whether converters leave a tensor in F32."""
    floats = ("shortconv.conv.weight", "ssm_a", "ssm_conv1d.weight", "ssm_d", "ssm_norm.weight", "gate_inp.weight")
    return len(shape) == 1 or name.endswith(floats)


def _copy_tokenizer(writer: gguf.GGUFWriter, source: Path, tokens: int) -> None:
    fields = gguf.GGUFReader(source).fields
    for key, field in fields.items():
        if not key.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        missing = tokens - len(value) if items else 0
        if key == "tokenizer.ggml.tokens":
            value = [*value, *(f"<unused {at}>" for at in range(missing))]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *[UNUSED_TOKEN] * missing]
        elif key == "tokenizer.ggml.scores":
            value = [*value, *[0.0] * missing]
        writer.add_key_value(key, value, field.types[0], items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("F16", "Q8_0", "Q4_K_M"), default="Q4_K_M")
    parser.add_argument("--vocabulary", type=Path, metavar="MODEL.gguf")
    arguments = parser.parse_args()
    model = SHAPES[arguments.shape]
    if arguments.type == "F16":
        write(model, arguments.out, arguments.vocabulary)
        return
    with tempfile.TemporaryDirectory(dir=arguments.out.resolve().parent) as folder:
        floats = Path(folder) / "floats.gguf"
        write(model, floats, arguments.vocabulary)
        quantize(floats, arguments.out, arguments.type, lambda stage, share: None)


if __name__ == "__main__":
    main()
