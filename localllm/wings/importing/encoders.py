"""Text encoders, whose states are pooled to one row per text: keys and tensors.

Sources: llama.cpp, conversion/bert.py; for families that transformers lacks, the code beside their weights.
"""

import numpy as np

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import TensorRule, half
from localllm.wings.importing.family_keys import gemma3
from localllm.wings.importing.matrices import CheckpointMatrix, MatrixRows, Turned, chosen_rows
from localllm.wings.importing.rotation import Keys

_MEAN, _RANK = 1, 4  # pooling_type


# The only values of options that the engine supports. Nomic's are of its older configurations.
BERT_OPTIONS = {"position_embedding_type": "absolute", "is_decoder": False}
NOMIC_OPTIONS = {"prenorm": False, "rotary_emb_interleaved": False, "rotary_emb_fraction": 1.0, "causal": False,
                 "rotary_emb_scale_base": None}  # fmt: skip
NOMIC_EXPERTS_OPTIONS = {**NOMIC_OPTIONS, "activation_function": "gelu", "moe_normalize_expert_weights": False,
                         "ffn_div": 1, "expert_choice_router": False, "num_shared_experts": 0}  # fmt: skip


def unmasked(_config: Config) -> Keys:
    return {"attention.causal": False}


def roberta(config: Config) -> Keys:
    """BERT whose positions begin after that of padding. With a classification head it scores pairs of texts."""
    keys = {**unmasked(config), "context_length": config.whole("max_position_embeddings") - _first_position(config)}
    return {**keys, "pooling_type": _RANK} if _scores(config) else keys


def _scores(config: Config) -> bool:
    names = config.values.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def _from_first_position(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    """Position embeddings without the unused first ones."""
    return chosen_rows(matrix, lambda rows: rows[_first_position(config) :])


def _first_position(config: Config) -> int:
    return config.whole("pad_token_id", 1) + 1


def modern_bert(config: Config) -> Keys:
    old = config.number("local_rope_theta", 10_000.0)
    return {
        "attention.causal": False,
        "attention.layer_norm_epsilon": config.number("norm_eps", 1e-5),
        "attention.sliding_window": config.whole("local_attention"),
        "attention.sliding_window_pattern": config.whole("global_attn_every_n_layers"),
        "rope.freq_base": config.rope("full_attention").number("rope_theta", config.number("global_rope_theta", 160e3)),
        "rope.freq_base_swa": config.rope("sliding_attention").number("rope_theta", old),
    }


def gemma_embedding(config: Config) -> Keys:
    config.expect("use_bidirectional_attention", True)
    both_ways = Config({**config.values, "use_bidirectional_attention": False}, config.where)
    return {**gemma3(both_ways), "attention.causal": False}


def jina_bert_v2(config: Config) -> Keys:
    """BERT with ALiBi in place of position embeddings, and with a gated feed-forward network."""
    if _scores(config):
        raise CheckpointError(f"{config.where}: Jina's rerankers cannot be imported. Get the model as GGUF instead.")
    keys: Keys = {"attention.causal": False}
    return {**keys, "pooling_type": _MEAN} if config.values.get("emb_pooler") else keys


def jina_bert_v3(config: Config) -> Keys:
    """XLM-RoBERTa with RoPE. Only its configuration still counts the positions up to that of padding."""
    config.expect("position_embedding_type", "absolute", "rotary")
    context = config.whole("max_position_embeddings") - _first_position(config)
    return {"attention.causal": False, "context_length": context}


def nomic_bert_moe(config: Config) -> Keys:
    """Nomic Embed 2: every other layer has experts, weighted by a softmax over all of them."""
    return {
        "attention.causal": False,
        "moe_every_n_layers": config.whole("moe_every_n_layers"),
        "expert_count": config.whole("num_experts"),
        "expert_used_count": config.whole("moe_top_k"),
    }


def _of_experts(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    """Split the rows of all experts into a matrix for each. Raises ValueError if they do not divide evenly."""
    experts, (rows, width) = config.whole("num_experts"), matrix.shape
    if not experts or rows % experts:
        raise ValueError("rows of no experts")
    return MatrixRows(matrix, np.arange(rows), (experts, rows // experts, width))


BERT = (
    TensorRule(r"(?:bert\.)?(?:pooler|cls)\..+", ""),
    TensorRule(r"bert\.(.+)\.gamma", r"\1.weight"),
    TensorRule(r"bert\.(.+)\.beta", r"\1.bias"),
    TensorRule(r"bert\.(.+\.(?:weight|bias))", r"\1"),
)
ROBERTA = (
    TensorRule(r"(?:roberta\.)?(?:pooler|lm_head)\..+", ""),
    TensorRule(r"(?:roberta\.)?(embeddings\.position_embeddings\.weight)", r"\1", _from_first_position),
    TensorRule(r"roberta\.(embeddings\.(?!position_).+|encoder\..+)", r"\1"),
)
MODERN_BERT = (
    TensorRule(r"(?:head|decoder)\..+", ""),
    TensorRule(r"model\.(.+)", r"\1"),
)
EUROBERT = (TensorRule(r"lm_head\..+", ""),)
_LAYER = r"(?:bert\.)?(encoder\.layer\.\d+\.mlp\.)"
JINA_BERT_V2 = (
    TensorRule(r"(?:bert\.)?(?:pooler|cls)\..+", ""),
    TensorRule(r"bert\.((?!.+gated_layers?\.).+)", r"\1"),
    TensorRule(_LAYER + r"gated_layers\.weight", r"\1gated_layers_w.weight", half(0)),
    TensorRule(_LAYER + r"gated_layers\.weight", r"\1gated_layers_v.weight", half(1)),
    TensorRule(_LAYER + r"up_gated_layer\.weight", r"\1gated_layers_v.weight", half(0)),
    TensorRule(_LAYER + r"up_gated_layer\.weight", r"\1gated_layers_w.weight", half(1)),
)
JINA_BERT_V3 = (
    TensorRule(r"(?:roberta\.)?(?:pooler|lm_head)\..+|.+\.lora_[AB]", ""),
    TensorRule(r"(?:roberta\.)?((?:embeddings|emb_ln|encoder)(?:(?!\.parametrizations\.).)+)", r"\1"),
    TensorRule(r"(?:roberta\.)?((?:embeddings|encoder)\..+)\.parametrizations\.weight\.original", r"\1.weight"),
)
_EXPERTS = r"(encoder\.layers\.\d+\.mlp\.experts\.mlp)"
NOMIC_BERT_MOE = (
    *BERT,
    TensorRule(_EXPERTS + r"\.w1", r"\1.w1.weight", _of_experts),
    TensorRule(_EXPERTS + r"\.w2", r"\1.w2.weight", lambda matrix, config: Turned(_of_experts(matrix, config))),
    TensorRule(r"encoder\.layers\.\d+\.mlp\.experts\.bias", ""),
)
