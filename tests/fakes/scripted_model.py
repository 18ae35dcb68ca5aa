"""A model file with fixed answers: a Markov chain over tokens that each occur once."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.gguf_files import finish

WIDTH = 1024  # most pieces of all scripts
PIECE = 6  # fewest characters
NORMAL, CONTROL = 1, 3
MERGED = "th"  # a vocabulary without merges is invalid
CONTROLS = ("<|im_start|>", "<|im_end|>")

# Qwen's markup. The prompt ends with the name of the script to write: "plain" without tools, else the number of results
# so far, at most the last script's.
TEMPLATE = """\
{%- set ns = namespace(results=0) %}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<tool_call></tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% if message.role == "tool" %}{% set ns.results = ns.results + 1 %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if tools %}<|script:{{ [ns.results, @LAST@] | min }}|>{% else %}<|script:plain|>{% endif %}{% endif %}"""


def call(name: str, **arguments: object) -> str:
    """A tool call as models of this template write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_scripted_model(path: Path, scripts: Mapping[str, str], template: str = TEMPLATE, mark: str = "") -> Path:
    """Write a GGUF that answers with scripts["plain"], or with tools scripts["0"], scripts["1"], ...

    A script is ASCII text, at least as long as a piece. Any other prompt gets an empty answer. mark: a text that is one
    token, at the beginning of one script at most.
    """
    spelling = _byte_spelling()
    tokens = [*spelling.values(), MERGED]
    kinds = [NORMAL] * len(tokens)

    def add(text: str, kind: int) -> int:
        tokens.append(text)
        kinds.append(kind)
        return len(tokens) - 1

    _, end = (add(text, CONTROL) for text in CONTROLS)
    following: dict[int, int] = {}
    used = {MERGED}
    for name, text in scripts.items():
        last = add(f"<|script:{name}|>", CONTROL)
        marked = bool(mark) and text.startswith(mark)
        if marked:
            token = add(mark, gguf.TokenType.USER_DEFINED)
            following[last] = last = token
        for piece in _pieces(text[len(mark) :] if marked else text, used):
            token = add("".join(spelling[byte] for byte in piece.encode()), NORMAL)
            following[last] = last = token
        following[last] = end
    steps = {token: 1 + index for index, token in enumerate(following)}
    if len(steps) >= WIDTH:
        raise ValueError(f"the scripts have {len(steps)} pieces; fewer than {WIDTH} are possible")
    embeddings = np.zeros((len(tokens), WIDTH), np.float32)
    outputs = np.zeros_like(embeddings)
    embeddings[:, 0] = 1
    outputs[end, 0] = 2
    for token, step in steps.items():
        embeddings[token] = 0
        embeddings[token, step] = 1
        outputs[following[token], step] = 2
    last_script = str(max((int(name) for name in scripts if name.isdigit()), default=0))
    _write(path, tokens, kinds, embeddings, outputs, end, template.replace("@LAST@", last_script))
    return path


def _pieces(text: str, used: set[str]) -> list[str]:
    """Cut a text into pieces that occur in no other text."""
    found: list[str] = []
    while text:
        size = next((size for size in range(PIECE, len(text)) if text[:size] not in used), len(text))
        piece, text = text[:size], text[size:]
        while piece in used or len(piece) == 1:  # only the last one; bytes are tokens too
            piece = found.pop() + piece
        used.add(piece)
        found.append(piece)
    return found


def _byte_spelling() -> dict[int, str]:
    """GPT-2's spelling of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _write(
    path: Path,
    tokens: list[str],
    kinds: list[int],
    embeddings: "np.ndarray[tuple[int, int], np.dtype[np.float32]]",
    outputs: "np.ndarray[tuple[int, int], np.dtype[np.float32]]",
    end: int,
    template: str,
) -> None:
    """Attention and feed-forward network are zero, so that only the last token decides."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(262144)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", embeddings.astype(np.float16))
    writer.add_tensor("output.weight", outputs.astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name, rows, columns in (
        ("attn_q", 64, WIDTH),
        ("attn_k", 32, WIDTH),
        ("attn_v", 32, WIDTH),
        ("attn_output", WIDTH, 64),
        ("ffn_gate", 64, WIDTH),
        ("ffn_up", 64, WIDTH),
        ("ffn_down", WIDTH, 64),
    ):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((rows, columns), np.float16))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    finish(writer)
