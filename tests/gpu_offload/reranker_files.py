"""Tiny rerankers with random weights: an encoder with a classification head, and a decoder with a template."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import finish

EMBEDDING, INNER, CONTEXT, LAYERS = 64, 128, 96, 2
WORDS = ("what", "is", "a", "panda", "the", "bear", "eats", "bamboo", "hi", "snow", "falls", "##s", ".")
TOKENS = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENS += [word.removeprefix("##") if word.startswith("##") else f"\u2581{word}" for word in WORDS]
RERANK_TEMPLATE = "[CLS] what {query} the {document} [SEP]"

Head = dict[str, NDArray[np.float32]]


def bert_reranker(
    path: Path, *, pooling: bool = True, head: bool = True, template: str | None = None, unigram: bool = False
) -> Head:
    """Write an encoder of two layers with BERT's vocabulary or bge-reranker's; return its head's tensors."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5" if unigram else "bert")
    if unigram:
        writer.add_token_scores([-len(TOKENS) / (1 + len(token)) for token in TOKENS])
        writer.add_eos_token_id(102)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("[") else 1 for token in TOKENS])
    for name, token in (
        ("unknown", 100),
        ("bos", 101),
        ("cls", 101),
        ("seperator", 102),
        ("padding", 0),
        ("mask", 103),
    ):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if template is not None:
        writer.add_string("tokenizer.chat_template.rerank", template)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    if pooling:
        writer.add_pooling_type(gguf.PoolingType.RANK)
    rng = np.random.default_rng(23)

    def add(name: str, *shape: int, size: float = 0.4) -> NDArray[np.float32]:
        values = (rng.standard_normal(shape) * size).astype(np.float32)
        writer.add_tensor(name, values)
        return values

    def pair(name: str, *shape: int, size: float = 0.4) -> None:
        add(f"{name}.weight", *shape, size=size)
        add(f"{name}.bias", shape[0])

    add("token_embd.weight", len(TOKENS), EMBEDDING)
    add("position_embd.weight", CONTEXT, EMBEDDING)
    add("token_types.weight", 2, EMBEDDING)
    pair("token_embd_norm", EMBEDDING)
    for layer in range(LAYERS):
        # strong, so that the first state depends on the others
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            pair(f"blk.{layer}.{name}", EMBEDDING, EMBEDDING, size=1.0)
        pair(f"blk.{layer}.attn_output_norm", EMBEDDING)
        pair(f"blk.{layer}.ffn_up", INNER, EMBEDDING)
        pair(f"blk.{layer}.ffn_down", EMBEDDING, INNER)
        pair(f"blk.{layer}.layer_output_norm", EMBEDDING)
    made = {}
    if head:
        made = {
            "cls.weight": add("cls.weight", EMBEDDING, EMBEDDING, size=0.05),  # so that tanh distinguishes texts
            "cls.bias": add("cls.bias", EMBEDDING),
            "cls.output.weight": add("cls.output.weight", 1, EMBEDDING, size=2.0),
            "cls.output.bias": add("cls.output.bias", 1),
        }
    finish(writer)
    return made


def score(head: Head, first_state: NDArray[np.float32]) -> float:
    """The head's result for an encoder's first state: a layer with tanh, then one number."""
    inner = np.tanh(head["cls.weight"] @ first_state + head["cls.bias"])
    return float((head["cls.output.weight"] @ inner + head["cls.output.bias"])[0])
