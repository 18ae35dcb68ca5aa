"""Standard files with random weights of architectures that llama.cpp supports and our engine does not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.gguf_files import add_keys, finish


def made(
    architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[Path], Path]:
    """A function that writes a file with these keys and random tensors."""

    def make(path: Path) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_tokenizer_model("no_vocab")
        add_keys(writer, {f"{architecture}.{key}": value for key, value in metadata.items()})
        random = np.random.default_rng(9)
        for name, shape in shapes.items():
            values = random.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
            if name.endswith("ssm_a"):
                values = -np.abs(values)
            writer.add_tensor(name, values + np.float32(1.0) if name.endswith("norm.weight") else values)
        return finish(writer)

    return make


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
LFM2 = made(
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
_QWEN35_KEYS: dict[str, Any] = {
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
}
_QWEN35_ATTENTION = {**_QWEN35_NORMS, **_ATTENTION, **_HEAD_NORMS, "attn_q.weight": (128, 64)}
QWEN35 = made("qwen35", _QWEN35_KEYS, {**_ENDS, **_blocks(*[_QWEN35_STATE, _QWEN35_ATTENTION] * 2)})

_EXPERTS = {
    "ffn_gate_inp.weight": (4, 64),
    "ffn_gate_exps.weight": (4, 48, 64),
    "ffn_up_exps.weight": (4, 48, 64),
    "ffn_down_exps.weight": (4, 64, 48),
}
_SHARED = {"ffn_gate_shexp.weight": (48, 64), "ffn_up_shexp.weight": (48, 64), "ffn_down_shexp.weight": (64, 48)}
_QWEN35_EXPERTS = {**_EXPERTS, **_SHARED, "ffn_gate_inp_shexp.weight": (64,)}
_WITHOUT_DENSE = [
    {name: shape for name, shape in block.items() if name not in _DENSE} | _QWEN35_EXPERTS
    for block in (_QWEN35_STATE, _QWEN35_ATTENTION)
]
QWEN35MOE = made(
    "qwen35moe",
    {
        **_QWEN35_KEYS,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
        "expert_shared_feed_forward_length": 48,
    },
    {**_ENDS, **_blocks(*_WITHOUT_DENSE * 2)},
)

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
DEEPSEEK2 = made(
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
NEMOTRON = made(
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
GEMMA4 = made(
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
