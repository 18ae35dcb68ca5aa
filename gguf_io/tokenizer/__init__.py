"""Tokenizers from a model file's metadata alone."""

from gguf_io.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
