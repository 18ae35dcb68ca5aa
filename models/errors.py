"""Errors of loading a model into the native engine."""

from gguf_io.errors import LocalLLMError


class UnsupportedModelError(LocalLLMError):
    """An architecture, tensor type or option that the native engine does not compute. Names what it met."""
