"""The architectures that the native engine computes, by `general.architecture`."""

from collections.abc import Iterable

from gguf_io.errors import shortened
from models.architecture import Architecture
from models.architectures import encoders, gemma, llama, mixtures, states
from models.errors import UnsupportedModelError


def _by_name(*families: Iterable[Architecture]) -> dict[str, Architecture]:
    return {one.name: one for one in sorted((one for family in families for one in family), key=lambda one: one.name)}


_WITHOUT_SLOTS = llama.ARCHITECTURES, gemma.ARCHITECTURES, mixtures.ARCHITECTURES
ARCHITECTURES = _by_name(*_WITHOUT_SLOTS, states.ARCHITECTURES)
"""Decoders: architectures that generate text."""
TEXT_ENCODERS = dict(_by_name(*_WITHOUT_SLOTS), **_by_name(encoders.ARCHITECTURES))
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
