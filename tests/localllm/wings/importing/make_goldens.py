"""Make goldens.json: the names of each tiny model's tensors, and transformers' results for them.

Packed weights are unpacked by the libraries that define the formats. Needs torch, transformers, safetensors, and
(unpacked beside each other in a folder that PYTHONPATH names) auto_gptq 0.7.1, awq 0.2.9 and compressed_tensors 0.20,
which the project does not; run it from the root of the project, where these are:

    python -m tests.localllm.wings.importing.make_goldens goldens.json
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.localllm.wings.importing.hybrid_models import HYBRIDS, SMALLER
from tests.localllm.wings.importing.more_models import ENCODERS, MORE, RERANKED, RERANKER
from tests.localllm.wings.importing.packed_models import CONFIG, NVFP4, NVFP4_EXPERTS, PACKINGS, is_packed, packed
from tests.localllm.wings.importing.remote_models import EQUALS
from tests.localllm.wings.importing.tiny_models import (
    CONFIGS,
    TOKENS,
    mxfp4_weights,
    values_of,
    write_safetensors,
    write_weights,
)


def encodes(name: str) -> bool:
    return name in ENCODERS or name == "jina_embeddings_v3-nomic"


def golden(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the saved tensors, and the logits of TOKENS in float32, or the states of an encoder."""
    values = dict(config)
    kind = transformers.AutoModel if encodes(name) else transformers.AutoModelForCausalLM
    if "vision_config" in config:
        kind = transformers.AutoModelForImageTextToText
    if "num_labels" in config:
        kind = transformers.AutoModelForSequenceClassification
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        kind.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        write_weights(folder, shapes, SMALLER.get(name, ("nothing", 1.0)))
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        saved = json.loads((folder / "config.json").read_text())
    if "num_labels" in config:
        with torch.no_grad():
            logits = [round(model(torch.tensor([text])).logits.item(), 7) for text in RERANKED]
    else:
        logits = computed(model, states=encodes(name))
    return {"config": saved, "shapes": shapes, "logits": logits}


def computed(model: Any, *, states: bool = False) -> list[float]:
    """The last token's logits; for an encoder the mean of all states."""
    with torch.no_grad():
        found = model(torch.tensor([TOKENS]))
        row = found.last_hidden_state[0].mean(0) if states else found.logits[0, -1]
    return np.round(row.numpy().astype(float), 5).tolist()


def with_weights(config: dict[str, Any], weights: dict[str, np.ndarray]) -> list[float]:
    """Logits of a model with these weights."""
    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=True)
    return computed(model.eval())


def unpacked(packing: dict[str, Any], name: str, rows: int, width: int) -> np.ndarray:
    """A packed matrix, unpacked by its format's reference library."""
    parts = {end: value for end, (_, value) in packed(packing, name, rows, width).items()}
    if packing["quant_method"] == "gptq":
        return _gptq(packing, parts, rows, width)
    if packing["quant_method"] == "awq":
        dequantize_gemm = _alone("awq/utils/packing_utils.py").dequantize_gemm
        group = width if packing["group_size"] < 0 else packing["group_size"]
        tensors = (torch.tensor(parts[key]) for key in ("qweight", "qzeros", "scales"))
        return dequantize_gemm(*tensors, 4, group).T.float().numpy()
    if packing in NVFP4.values():
        return _nvfp4(parts, rows, width)
    return _compressed(packing, parts, rows, width)


def _nvfp4(parts: dict[str, np.ndarray], rows: int, width: int) -> np.ndarray:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    pairs = parts["weight"] if "weight" in parts else parts["weight_packed"]
    values = unpack_fp4_from_uint8(torch.tensor(pairs), rows, width, torch.float32).numpy()
    scales = torch.tensor(parts["weight_scale"]).view(torch.float8_e4m3fn).float().numpy()
    factor = parts["weight_scale_2"] if "weight_scale_2" in parts else 1 / parts["weight_global_scale"]
    return values * np.repeat(scales, 16, axis=1) * factor


def _gptq(packing: dict[str, Any], parts: dict[str, np.ndarray], rows: int, width: int) -> np.ndarray:
    layer = _alone("auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    made = layer(packing["bits"], packing["group_size"], width, rows, False, kernel_switch_threshold=0)
    zeros = parts["qzeros"].view(np.uint32)
    if packing.get("checkpoint_format") == "gptq_v2":  # the class reads the first version, which is one less
        zeros = zeros - np.uint32(0x11111111)
    made.qweight, made.g_idx = torch.tensor(parts["qweight"]), torch.tensor(parts["g_idx"])
    made.qzeros, made.scales = torch.tensor(zeros.view(np.int32)), torch.tensor(parts["scales"]).float()
    made.autogptq_cuda_available = False
    with torch.no_grad():
        return made(torch.eye(width)).T.numpy()


def _compressed(packing: dict[str, Any], parts: dict[str, np.ndarray], rows: int, width: int) -> np.ndarray:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    bits = packing["config_groups"]["group_0"]["weights"]["num_bits"]
    codes = unpack_from_int32(torch.tensor(parts["weight_packed"]), bits, torch.Size([rows, width])).float().numpy()
    scales = (parts["weight_scale"].astype(np.uint32) << 16).view(np.float32)
    groups = scales.shape[1]
    zeros = np.zeros((rows, groups), np.float32)
    if "weight_zero_point" in parts:
        stored = torch.tensor(parts["weight_zero_point"])
        zeros = unpack_from_int32(stored, bits, torch.Size([rows, groups]), packed_dim=0).float().numpy()
    order = parts.get("weight_g_idx", np.arange(width) // (width // groups))
    return (codes - zeros[:, order]) * scales[:, order]


def _alone(path: str) -> Any:
    """A module of a library, without importing the rest."""
    found = next(Path(folder) / path for folder in sys.path if (Path(folder) / path).is_file())
    spec = importlib.util.spec_from_file_location(found.stem, found)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed_golden(packing: dict[str, Any], shapes: dict[str, list[int]]) -> list[float]:
    weights = {
        name: unpacked(packing, name, *shape) if is_packed(name) else values_of(name, tuple(shape))
        for name, shape in shapes.items()
    }
    return with_weights(CONFIG, weights)


def experts_golden(packing: dict[str, Any]) -> dict[str, Any]:
    """The same for a mixture of experts, from a folder, since transformers joins experts while loading."""
    values = dict(NVFP4_EXPERTS)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind = transformers.AutoModelForCausalLM
        kind.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        weights = {
            name: unpacked(packing, name, *shape) if is_packed(name) else values_of(name, tuple(shape))
            for name, shape in shapes.items()
        }
        write_safetensors(
            folder / "model.safetensors", {name: ("F32", np.float32(value)) for name, value in weights.items()}
        )
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        saved = json.loads((folder / "config.json").read_text())
    return {"config": saved, "shapes": shapes, "logits": computed(model)}


def mxfp4_golden(shapes: dict[str, list[int]]) -> list[float]:
    """Logits of a gpt-oss with MXFP4 experts, unpacked by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = {name: values_of(name, tuple(shape)) for name, shape in shapes.items()}
    for name, (blocks, scales) in mxfp4_weights(shapes).items():
        weights[name] = convert_moe_packed_tensors(
            torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
        ).numpy()
    return with_weights(MORE["gpt_oss"], weights)


def main() -> None:
    wanted = {**CONFIGS, **MORE, **HYBRIDS, **EQUALS, **ENCODERS, "reranker": RERANKER}
    made: dict[str, Any] = {name: golden(name, config) for name, config in wanted.items()}
    packings = {
        name: packed_golden(packing, made["llama"]["shapes"]) for name, packing in {**PACKINGS, **NVFP4}.items()
    }
    made["nvfp4-experts"] = experts_golden(NVFP4["nvfp4"])
    packings["mxfp4"] = mxfp4_golden(made["gpt_oss"]["shapes"])
    made["packed"] = packings
    Path(sys.argv[1]).write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
