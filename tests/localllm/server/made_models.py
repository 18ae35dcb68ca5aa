"""Models made from real tiny ones by changing their files' metadata."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from tests.gguf_files import copying, finish

USER_DEFINED = 4


def with_metadata(source: Path, target: Path, *flags: str) -> Path:
    """A copy with other metadata; flags are gguf_new_metadata's."""
    script = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", *flags]
    subprocess.run([*script, str(source), str(target)], check=True, capture_output=True)
    return target


def rename_token(path: Path, token: int, text: str) -> None:
    """Give a token another name of the same length, and make it a token that is found in text as a whole."""
    fields = GGUFReader(path, "r+").fields
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    names.parts[names.data[token]][:] = np.frombuffer(text.encode(), np.uint8)
    kinds.parts[kinds.data[token]][:] = USER_DEFINED


def split(source: Path, folder: Path, tensors_a_part: int) -> list[Path]:
    """The model split into several files."""
    reader, writer = copying(source, folder / "part.gguf", split_max_tensors=tensors_a_part)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(folder.glob("part-*.gguf"))
