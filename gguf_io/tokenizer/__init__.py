"""Tokenizers from a model file's metadata alone."""

from pathlib import Path

from gguf_io.model_file import ModelFile, open_model
from gguf_io.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(model: str | Path | ModelFile) -> Tokenizer:
    """The tokenizer of a model file; an open one may be closed afterwards.

    Raises ModelFileError for a damaged file, TokenizerError for a vocabulary that cannot be rebuilt from it.
    """
    if isinstance(model, ModelFile):
        return Tokenizer(model.metadata)
    with open_model(model) as opened:
        return Tokenizer(opened.metadata)
