"""Write a small Llama-architecture GGUF whose weights are random numbers.

    random_model.py OUT.gguf [--seed N]

Everything but the weights is as in a real file: a sentencepiece vocabulary with byte tokens, Q8_0 matrices, and
grouped-query attention. What such a model writes is nonsense; it shows that the machinery runs where no other model
is at hand.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, CONTEXT = 4, 256, 768, 4, 2, 2048
WORDS = """
    a an the one two some all every no and or but so then when while because of to in on under over with from for at
    is was had saw said went came found made took gave kept lost loved ran sat slept sang once upon time
    he she it they we you little big old new red blue quiet kind wise brave slow happy sad
    day night sun moon star rain wind sea hill tree forest river garden house door window road
    king queen girl boy cat dog fox bird bear fish frog mouse friend mother father story book song lamp boat bread
"""
PUNCTUATION = [".", ",", "!", "?"]
CONTROL_TOKENS = ["<unk>", "<s>", "</s>"]


def vocabulary() -> tuple[list[str], list[float], list[TokenType], int]:
    """Return texts, scores and types of the tokens, and how many at their beginning should not be written.

    Those are control tokens, the 256 bytes and the beginnings of words, which sentencepiece needs as steps to a word.
    A word carries the leading U+2581 of sentencepiece. A longer piece has the higher score, so that it is preferred.
    """
    words = [f"\u2581{word}" for word in WORDS.split()]
    beginnings = {word[:length] for word in words for length in range(1, len(word))} | set("".join(words))
    steps = sorted(beginnings - set(words))
    pieces = [*steps, *words, *PUNCTUATION]
    texts = CONTROL_TOKENS + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    scores = [0.0] * (len(texts) - len(pieces)) + [float(len(piece)) for piece in pieces]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    return texts, scores, types, len(texts) - len(words) - len(PUNCTUATION)


def add_metadata(writer: gguf.GGUFWriter) -> tuple[int, int]:
    """Write hyperparameters and vocabulary; return the numbers of all tokens and of the silent ones before the rest."""
    texts, scores, types, silent = vocabulary()
    writer.add_name("random-llama")
    writer.add_description("Random weights: what it writes is nonsense.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return len(texts), silent


def add_weights(writer: gguf.GGUFWriter, tokens: int, silent: int, seed: int) -> None:
    """Write every tensor: norms of ones, matrices of normal noise in Q8_0."""
    noise = np.random.default_rng(seed)

    def add_matrix(name: str, rows: int, columns: int, silent_rows: int = 0) -> None:
        weights = noise.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)
        weights[:silent_rows] = 0.0
        blocks = gguf.quants.quantize(weights, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)

    ones = np.ones(WIDTH, np.float32)
    kv_width = WIDTH // HEADS * KV_HEADS
    add_matrix("token_embd.weight", tokens, WIDTH)
    # Silent tokens score 0, below the best words, so that what comes out is at least printable.
    add_matrix("output.weight", tokens, WIDTH, silent_rows=silent)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", ones)
        writer.add_tensor(block + "ffn_norm.weight", ones)
        add_matrix(block + "attn_q.weight", WIDTH, WIDTH)
        add_matrix(block + "attn_k.weight", kv_width, WIDTH)
        add_matrix(block + "attn_v.weight", kv_width, WIDTH)
        add_matrix(block + "attn_output.weight", WIDTH, WIDTH)
        add_matrix(block + "ffn_gate.weight", FEED_FORWARD, WIDTH)
        add_matrix(block + "ffn_up.weight", FEED_FORWARD, WIDTH)
        add_matrix(block + "ffn_down.weight", WIDTH, FEED_FORWARD)


def write_model(path: Path, seed: int) -> None:
    """Write the whole file to path (about 4 MB), making its folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    add_weights(writer, *add_metadata(writer), seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(arguments.path, arguments.seed)


if __name__ == "__main__":
    main()
