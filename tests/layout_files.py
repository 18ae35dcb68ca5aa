"""Model files in Ollama's own layouts, made from standard files by the inverse of each translation."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import copying, finish
from tests.llama_models import DEEPSEEK2, GEMMA4, LFM2, NEMOTRON, QWEN35, QWEN35MOE
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write

_VISION = {"v.blk.0.attn_q.weight": (8, 8), "v.patch_embedding.weight": (8, 12), "mm.0.weight": (16, 8)}
_MTP = {"mtp.fc.weight": (16, 8), "mtp.layers.0.input_layernorm.weight": (8,)}


@dataclass(frozen=True)
class Layout:
    """How to convert a standard file to Ollama's layout. Keys that begin with the architecture's name are given without
    it.

    base: writes the standard file. keys: new names of keys. dropped: keys that the layout lacks. changed: new values.
    tensors: new names, by patterns. added: tensors that no text model has.
    """

    base: Callable[[Path], Path]
    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    changed: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    native: bool = False


def write_layout(layout: Layout, standard: Path, path: Path) -> Path:
    """Write the model of the file `standard` in the layout."""
    own = f"{gguf.GGUFReader(standard).fields['general.architecture'].contents()}."

    def renamed(key: str) -> str:
        short = key.removeprefix(own)
        name = layout.keys.get(short, short)
        return f"{layout.architecture}.{name}" if key.startswith(own) else name

    without = tuple(key for short in (*layout.dropped, *layout.changed) for key in (short, own + short))
    reader, writer = copying(standard, path, architecture=layout.architecture, without=without, renamed=renamed)
    for short, value in layout.changed.items():
        whole = short if short.startswith("tokenizer.") else f"{layout.architecture}.{short}"
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        (writer.add_array if isinstance(value, list) else add[type(value)])(whole, value)
    for tensor in reader.tensors:
        name = tensor.name
        for pattern, new in layout.tensors.items():
            name = re.sub(pattern, new, name)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    random = np.random.default_rng(5)
    for name, shape in layout.added.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    return finish(writer)


def _synthetic(model: Synthetic, tokens: int = 0) -> Callable[[Path], Path]:
    return lambda path: write(model, path, seed=9, tokens=[f"<{number}>" for number in range(tokens)])


_EPSILON = {"attention.layer_norm_rms_epsilon": 1e-6}
_GEMMA3 = MODELS["gemma3"]
_LARGE_GEMMA3 = replace(
    _GEMMA3,
    context=131072,
    extra={**_GEMMA3.extra, **_EPSILON, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
)
_SMALL_GEMMA3 = replace(
    _GEMMA3, extra={**_GEMMA3.extra, **_EPSILON, "rope.freq_base": 300_000.0, "rope.freq_base_swa": 500.0}
)
_EMBEDDING_GEMMA = replace(
    _GEMMA3,
    architecture="gemma-embedding",
    extra={
        **_GEMMA3.extra,
        **_EPSILON,
        "rope.freq_base_swa": 10_000.0,
        "pooling_type": 1,
        "dense_2_feat_in": 256,
        "dense_2_feat_out": 512,
        "dense_3_feat_in": 512,
        "dense_3_feat_out": 256,
    },
    beside={"dense_2.weight": "inner, width", "dense_3.weight": "width, inner"},
)
_QWEN2VL = replace(
    MODELS["qwen2"],
    architecture="qwen2vl",
    embedding=256,
    heads=4,
    kv_heads=2,
    extra={"rope.dimension_sections": [16, 8, 8, 0]},
)
_QWEN3VL = replace(
    MODELS["qwen3"],
    architecture="qwen3vl",
    layers=4,
    extra={"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3},
)

_QWEN35_LAYOUT = Layout(
    QWEN35,
    "qwen35",
    changed={
        "attention.head_count_kv": [0, 2, 0, 2],
        "rope.dimension_sections": [2, 1, 1],
        "vision.block_count": 1,
        "ssm.v_head_reordered": True,
    },
    tensors={r"\.ssm_dt\.bias$": ".ssm_dt"},
    added={**_VISION, **_MTP},
    native=True,
)

LAYOUTS: dict[str, Layout] = {
    "gptoss": Layout(
        _synthetic(MODELS["gpt-oss"]),
        "gptoss",
        dropped=("expert_feed_forward_length", "rope.scaling.type"),
        tensors={
            r"\.attn_output\.": ".attn_out.",
            r"\.attn_sinks\.weight$": ".attn_sinks",
            r"\.post_attention_norm\.": ".ffn_norm.",
        },
        native=True,
    ),
    "olmo3": Layout(_synthetic(MODELS["olmo3"]), "olmo3", native=True),
    "gemma3-1b": Layout(
        _synthetic(_SMALL_GEMMA3),
        "gemma3",
        keys={"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"},
        dropped=("attention.layer_norm_rms_epsilon",),
        native=True,
    ),
    "gemma3-4b": Layout(
        _synthetic(_LARGE_GEMMA3, tokens=_GEMMA3.vocabulary),
        "gemma3",
        dropped=(
            "attention.layer_norm_rms_epsilon",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.scores",
        ),
        changed={
            "mm.tokens_per_image": 256,
            "vision.block_count": 1,
            "tokenizer.ggml.tokens": [f"<{number}>" for number in range(_GEMMA3.vocabulary + 1)],
            "tokenizer.ggml.scores": [0.0] * (_GEMMA3.vocabulary + 1),
        },
        added=_VISION,
        native=True,
    ),
    "mistral3": Layout(
        _synthetic(MODELS["mistral3"]),
        "mistral3",
        keys={
            "attention.temperature_scale": "rope.scaling_beta",
            "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
            "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
        },
        added=_VISION,
        native=True,
    ),
    "embeddinggemma": Layout(
        _synthetic(_EMBEDDING_GEMMA),
        "gemma3",
        keys={"rope.freq_base_swa": "rope.local.freq_base"},
        dropped=tuple(f"dense_{number}_feat_{end}" for number in (2, 3) for end in ("in", "out")),
        changed={"attention.causal": False},
        tensors={r"^dense_2\.": "dense.0.", r"^dense_3\.": "dense.1.", r"^output_norm\.": "norm."},
    ),
    "qwen25vl": Layout(
        _synthetic(_QWEN2VL),
        "qwen25vl",
        dropped=("rope.dimension_sections",),
        changed={"rope.mrope_section": [16, 8, 8]},
        added=_VISION,
    ),
    "qwen3vl": Layout(
        _synthetic(_QWEN3VL),
        "qwen3vl",
        dropped=("rope.dimension_sections", "n_deepstack_layers"),
        changed={"vision.deepstack_visual_indexes": [5, 11, 17]},
        added=_VISION,
    ),
    "qwen35": _QWEN35_LAYOUT,
    "qwen35moe": replace(_QWEN35_LAYOUT, base=QWEN35MOE, architecture="qwen35moe"),
    "gemma4": Layout(
        GEMMA4,
        "gemma4",
        tensors={r"\.ffn_down_exps\.scale$": ".ffn_gate_inp.per_expert_scale"},
        added={**_VISION, "a.blk.0.attn_q.weight": (8, 8), "model.vision_tower.std_bias": (8,)},
        native=True,
    ),
    "lfm2": Layout(LFM2, "lfm2", changed={"feed_forward_length": 144}, tensors={r"^token_embd_norm\.": "output_norm."}),
    "glm4moelite": Layout(
        DEEPSEEK2,
        "glm4moelite",
        dropped=("expert_group_count", "expert_group_used_count"),
        changed={
            "attention.head_count_kv": 4,
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.key_length_mla": 40,
            "attention.value_length_mla": 32,
        },
    ),
    "nemotron_h_moe": Layout(
        NEMOTRON,
        "nemotron_h_moe",
        dropped=("moe_latent_size",),
        tensors={r"\.ffn_latent_down\.": ".ffn_latent_in.", r"\.ffn_latent_up\.": ".ffn_latent_out."},
        added=_MTP,
    ),
    "nemotron_h_omni": Layout(
        NEMOTRON,
        "nemotron_h_omni",
        changed={"vision.block_count": 1},
        added={**_VISION, "a.blk.0.attn_q.weight": (8, 8)},
    ),
}
