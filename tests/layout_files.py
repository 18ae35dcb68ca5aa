"""Model files in Ollama's own layouts, made by the inverse of each translation from files in the standard one."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.models.synthetic import MODELS, Synthetic, write

Tensors = dict[str, NDArray[np.float32]]
_VISION = {"v.blk.0.attn_q.weight": (8, 8), "v.patch_embedding.weight": (8, 12), "mm.0.weight": (16, 8)}
_MTP = {"mtp.fc.weight": (16, 8), "mtp.layers.0.input_layernorm.weight": (8,)}


@dataclass(frozen=True)
class Layout:
    """How a standard file is brought into Ollama's layout. Keys are without the architecture's name where they have it.

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
    reader = gguf.GGUFReader(standard)
    own = f"{reader.fields['general.architecture'].contents()}."
    writer = gguf.GGUFWriter(path, layout.architecture)
    for key, value in reader.fields.items():
        short = key.removeprefix(own)
        if key.startswith("GGUF.") or key == "general.architecture" or short in (*layout.dropped, *layout.changed):
            continue
        name = layout.keys.get(short, short)
        whole = f"{layout.architecture}.{name}" if key.startswith(own) else name
        kinds = value.types
        writer.add_key_value(whole, value.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for short, value in layout.changed.items():
        whole = short if short.startswith("tokenizer.") else f"{layout.architecture}.{short}"
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        (writer.add_array if isinstance(value, list) else add[type(value)])(whole, value)
    for tensor in reader.tensors:
        name = tensor.name
        for pattern, new in layout.tensors.items():
            name = re.sub(pattern, new, name)
        writer.add_tensor(name, tensor.data)
    random = np.random.default_rng(5)
    for name, shape in layout.added.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    return _close(writer, path)


def _synthetic(model: Synthetic, tokens: int = 0) -> Callable[[Path], Path]:
    return lambda path: write(model, path, seed=9, tokens=[f"<{number}>" for number in range(tokens)])


def _made(architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """What writes a file of these keys and of random tensors."""

    def make(path: Path) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_tokenizer_model("no_vocab")
        for key, value in metadata.items():
            add: Any = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            add[type(value)](f"{architecture}.{key}", value)
        random = np.random.default_rng(9)
        for name, shape in shapes.items():
            values = random.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
            if name.endswith("ssm_a"):
                values = -np.abs(values)
            writer.add_tensor(name, values + np.float32(1.0) if name.endswith("norm.weight") else values)
        return _close(writer, path)

    return make


def _close(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}
_ENDS = {"token_embd.weight": (300, 64), "output_norm.weight": (64,)}
_DENSE = {"ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)}


def _blocks(*blocks: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"blk.{number}.{name}": shape for number, block in enumerate(blocks) for name, shape in block.items()}


_LFM2_NORMS = {"attn_norm.weight": (64,), "ffn_norm.weight": (64,), **_DENSE}
_LFM2_CONVOLUTION = {
    **_LFM2_NORMS,
    "shortconv.conv.weight": (64, 3),
    "shortconv.in_proj.weight": (192, 64),
    "shortconv.out_proj.weight": (64, 64),
}
_ATTENTION = {
    "attn_q.weight": (64, 64),
    "attn_k.weight": (32, 64),
    "attn_v.weight": (32, 64),
    "attn_output.weight": (64, 64),
}
_HEAD_NORMS = {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
_LFM2 = _made(
    "lfm2",
    {**_COMMON, "block_count": 3, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    {
        "token_embd.weight": (300, 64),
        "token_embd_norm.weight": (64,),
        **_blocks(_LFM2_CONVOLUTION, {**_LFM2_NORMS, **_ATTENTION, **_HEAD_NORMS}, _LFM2_CONVOLUTION),
    },
)

# Two key heads and four value heads of 16 in the layers without attention; every other layer has attention.
_QWEN35_NORMS = {"attn_norm.weight": (64,), "post_attention_norm.weight": (64,), **_DENSE}
_QWEN35_STATE = {
    **_QWEN35_NORMS,
    "attn_qkv.weight": (128, 64),
    "attn_gate.weight": (64, 64),
    "ssm_conv1d.weight": (128, 4),
    "ssm_dt.bias": (4,),
    "ssm_a": (4,),
    "ssm_beta.weight": (4, 64),
    "ssm_alpha.weight": (4, 64),
    "ssm_norm.weight": (16,),
    "ssm_out.weight": (64, 64),
}
_QWEN35 = _made(
    "qwen35",
    {
        **_COMMON,
        "block_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
        "full_attention_interval": 2,
    },
    {
        **_ENDS,
        **_blocks(*[_QWEN35_STATE, {**_QWEN35_NORMS, **_ATTENTION, **_HEAD_NORMS, "attn_q.weight": (128, 64)}] * 2),
    },
)

_EXPERTS = {
    "ffn_gate_inp.weight": (4, 64),
    "ffn_gate_exps.weight": (4, 48, 64),
    "ffn_up_exps.weight": (4, 48, 64),
    "ffn_down_exps.weight": (4, 64, 48),
}
_SHARED = {"ffn_gate_shexp.weight": (48, 64), "ffn_up_shexp.weight": (48, 64), "ffn_down_shexp.weight": (64, 48)}
_DEEPSEEK2_ATTENTION = {
    "attn_norm.weight": (64,),
    "ffn_norm.weight": (64,),
    "attn_q_a.weight": (32, 64),
    "attn_q_a_norm.weight": (32,),
    "attn_q_b.weight": (4 * 24, 32),
    "attn_kv_a_mqa.weight": (32 + 8, 64),
    "attn_kv_a_norm.weight": (32,),
    "attn_k_b.weight": (4, 32, 16),
    "attn_v_b.weight": (4, 24, 32),
    "attn_output.weight": (64, 4 * 24),
}
_DEEPSEEK2 = _made(
    "deepseek2",
    {
        **_COMMON,
        "block_count": 2,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 24,
        "rope.dimension_count": 8,
        "leading_dense_block_count": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 48,
        "expert_weights_scale": 1.8,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    },
    {**_ENDS, **_blocks({**_DEEPSEEK2_ATTENTION, **_DENSE}, {**_DEEPSEEK2_ATTENTION, **_EXPERTS, **_SHARED})},
)

# A state, attention, experts between projections to 32 values.
_NEMOTRON = _made(
    "nemotron_h_moe",
    {
        **_COMMON,
        "block_count": 3,
        "attention.head_count_kv": [0, 2, 0],
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [0, 0, 48],
        "attention.key_length": 16,
        "attention.value_length": 16,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 48,
        "expert_shared_feed_forward_length": 40,
        "moe_latent_size": 32,
    },
    {
        **_ENDS,
        **_blocks(
            {
                "attn_norm.weight": (64,),
                "ssm_in.weight": (2 * 64 + 2 * 2 * 16 + 4, 64),
                "ssm_conv1d.weight": (64 + 2 * 2 * 16, 4),
                "ssm_conv1d.bias": (64 + 2 * 2 * 16,),
                "ssm_dt.bias": (4,),
                "ssm_a": (4, 1),
                "ssm_d": (4, 1),
                "ssm_norm.weight": (2, 32),
                "ssm_out.weight": (64, 64),
            },
            {"attn_norm.weight": (64,), **_ATTENTION},
            {
                "attn_norm.weight": (64,),
                "ffn_gate_inp.weight": (4, 64),
                "exp_probs_b.bias": (4,),
                "ffn_latent_down.weight": (32, 64),
                "ffn_latent_up.weight": (64, 32),
                "ffn_up_exps.weight": (4, 48, 32),
                "ffn_down_exps.weight": (4, 32, 48),
                "ffn_up_shexp.weight": (40, 64),
                "ffn_down_shexp.weight": (64, 40),
            },
        ),
    },
)

_GEMMA4_BLOCK = {
    "attn_norm.weight": (64,),
    "post_attention_norm.weight": (64,),
    "ffn_norm.weight": (64,),
    "post_ffw_norm.weight": (64,),
    **_ATTENTION,
    **_HEAD_NORMS,
    **_DENSE,
    **_EXPERTS,
    "ffn_gate_inp.scale": (64,),
    "ffn_down_exps.scale": (4,),
    "pre_ffw_norm_2.weight": (64,),
    "post_ffw_norm_1.weight": (64,),
    "post_ffw_norm_2.weight": (64,),
}
_GEMMA4 = _made(
    "gemma4",
    {
        **_COMMON,
        "block_count": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count": 16,
        "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 1e4,
        "attention.sliding_window": 40,
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_per_layer_input": 0,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
    },
    {**_ENDS, "rope_freqs.weight": (8,), **_blocks(_GEMMA4_BLOCK, _GEMMA4_BLOCK)},
)

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
    "qwen35": Layout(
        _QWEN35,
        "qwen35",
        changed={
            "attention.head_count_kv": [0, 2, 0, 2],
            "rope.dimension_sections": [2, 1, 1],
            "vision.block_count": 1,
            "ssm.v_head_reordered": True,
        },
        tensors={r"\.ssm_dt\.bias$": ".ssm_dt"},
        added={**_VISION, **_MTP},
    ),
    "gemma4": Layout(
        _GEMMA4,
        "gemma4",
        tensors={r"\.ffn_down_exps\.scale$": ".ffn_gate_inp.per_expert_scale"},
        added={**_VISION, "a.blk.0.attn_q.weight": (8, 8), "model.vision_tower.std_bias": (8,)},
    ),
    "lfm2": Layout(
        _LFM2, "lfm2", changed={"feed_forward_length": 144}, tensors={r"^token_embd_norm\.": "output_norm."}
    ),
    "glm4moelite": Layout(
        _DEEPSEEK2,
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
        _NEMOTRON,
        "nemotron_h_moe",
        dropped=("moe_latent_size",),
        tensors={r"\.ffn_latent_down\.": ".ffn_latent_in.", r"\.ffn_latent_up\.": ".ffn_latent_out."},
        added=_MTP,
    ),
    "nemotron_h_omni": Layout(
        _NEMOTRON,
        "nemotron_h_omni",
        changed={"vision.block_count": 1},
        added={**_VISION, "a.blk.0.attn_q.weight": (8, 8)},
    ),
}
