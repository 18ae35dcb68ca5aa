"""A model file as data: header, tensors, quantised blocks, tokenizer, chat template.

Names resolve on first use (PEP 562), so that reading a header imports neither tokenizers nor jinja2.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf_io.blocks import BLOCK_TYPES, BlockType, dequantize
    from gguf_io.chat_template import load_chat_template
    from gguf_io.model_file import ModelFile, TensorInfo, open_model
    from gguf_io.tokenizer import load_tokenizer

__all__ = [
    "BLOCK_TYPES",
    "BlockType",
    "ModelFile",
    "TensorInfo",
    "dequantize",
    "load_chat_template",
    "load_tokenizer",
    "open_model",
]

_HOMES = {
    "BLOCK_TYPES": "blocks",
    "BlockType": "blocks",
    "ModelFile": "model_file",
    "TensorInfo": "model_file",
    "dequantize": "blocks",
    "load_chat_template": "chat_template",
    "load_tokenizer": "tokenizer",
    "open_model": "model_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
