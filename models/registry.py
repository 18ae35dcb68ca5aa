"""The architectures that the native engine computes, by `general.architecture`."""

from collections.abc import Iterable

from gguf_io.errors import shortened
from models.architecture import Architecture
from models.architectures import encoders, gemma, llama, mixtures, scans
from models.errors import UnsupportedModelError
from models.scan_sizes import SCANS

_ONLY_WRITING = (*SCANS, "qwen35", "qwen35moe", "qwen3next")  # an encoder has no slots for their states


def _by_name(*families: Iterable[Architecture]) -> dict[str, Architecture]:
    return {one.name: one for one in sorted((one for family in families for one in family), key=lambda one: one.name)}


ARCHITECTURES = _by_name(llama.ARCHITECTURES, gemma.ARCHITECTURES, mixtures.ARCHITECTURES, scans.ARCHITECTURES)
"""Decoders: architectures that generate text."""
TEXT_ENCODERS: dict[str, Architecture] = {
    name: one for name, one in ARCHITECTURES.items() if name not in _ONLY_WRITING
} | _by_name(encoders.ARCHITECTURES)
"""Architectures whose states can be pooled: encoders, and decoders without states in slots."""


def find_architecture(name: str, among: dict[str, Architecture] = ARCHITECTURES) -> Architecture:
    """Return the architecture of that name.

    Raises UnsupportedModelError if it is unknown; the llama.cpp backend may still support it.
    """
    if name not in among:
        raise UnsupportedModelError(
            f"The native engine does not support the architecture '{shortened(name)}' (it supports "
            f"{', '.join(among)}).",
            remedy="The llama.cpp backend may: use --backend llama.",
        )
    return among[name]
