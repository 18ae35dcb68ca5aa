"""Write the trained model as a GGUF file.

python -m benchmarks.training.export FOLDER model.gguf --type Q8_0
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from tokenizers import Tokenizer

from benchmarks.training.network import Shape
from benchmarks.training.tokens import BEGIN, CONTROL, END, load_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FILE_TYPES = {"F32": LlamaFileType.ALL_F32, "Q8_0": LlamaFileType.MOSTLY_Q8_0}


def _add_description(writer: gguf.GGUFWriter, parameters: int) -> None:
    writer.add_name("localllm demo")
    writer.add_basename("localllm-demo")
    writer.add_size_label(f"{parameters / 1e6:.1f}M")
    writer.add_description(
        "A small demonstration model that comes with localllm: it tells short stories and answers simple questions "
        "about the use of localllm. Trained from scratch on text of a small grammar; it knows nothing else."
    )
    writer.add_license("Apache-2.0")
    writer.add_languages(["en"])


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Write a network's sizes to the metadata."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocabulary)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]
    ]
    texts = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([TokenType.CONTROL if text in CONTROL else TokenType.NORMAL for text in texts])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.token_to_id(BEGIN))
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    writer.add_eot_token_id(tokenizer.token_to_id(END))
    writer.add_pad_token_id(tokenizer.token_to_id(BEGIN))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_weights(writer: gguf.GGUFWriter, weights: dict[str, torch.Tensor], kind: str) -> None:
    """Add tensors in F32 or Q8_0; norms stay in F32."""
    for name, tensor in weights.items():
        values = tensor.numpy().astype(np.float32)
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            blocks = gguf.quants.quantize(values, GGMLQuantizationType[kind])
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])


def write_model(folder: Path, target: Path, kind: str) -> None:
    """Write folder's checkpoint and tokenizer to target, in F32 or Q8_0."""
    weights = torch.load(folder / "checkpoint.pt", weights_only=True)["network"]
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _add_description(writer, sum(tensor.numel() for tensor in weights.values()))
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, Shape())
    _add_tokenizer(writer, load_tokenizer(folder / "tokenizer.json"))
    add_weights(writer, weights, kind)  # without an output matrix: it is tied to the embedding
    finish(writer, unfinished, target)


def finish(writer: gguf.GGUFWriter, unfinished: Path, target: Path) -> None:
    """Write everything that was added to the unfinished file, and rename it to the target."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description="Write what was trained as a GGUF file.")
    parser.add_argument("folder", type=Path, help="the folder given to train")
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=sorted(_FILE_TYPES), default="Q8_0")
    chosen = parser.parse_args()
    write_model(chosen.folder, chosen.target, chosen.type)


if __name__ == "__main__":
    main()
