"""GPUs that one can plan for without having them: their memory as makers state it."""

import difflib
import re

from gguf_io.errors import LocalLLMError
from gpu_offload.placement import Gpu

_GIB = 2**30

# Names as makers write them; where one name has several sizes, each has its own row.
_MEMORY_GIB = {
    "RTX 5090": 32,
    "RTX 5080": 16,
    "RTX 5070 Ti": 16,
    "RTX 5070": 12,
    "RTX 5060 Ti 16GB": 16,
    "RTX 5060": 8,
    "RTX 4090": 24,
    "RTX 4080": 16,
    "RTX 4070 Ti SUPER": 16,
    "RTX 4070": 12,
    "RTX 4060 Ti 16GB": 16,
    "RTX 4060": 8,
    "RTX 3090": 24,
    "RTX 3080": 10,
    "RTX 3080 Ti": 12,
    "RTX 3070": 8,
    "RTX 3060": 12,
    "RTX 2080 Ti": 11,
    "GTX 1080 Ti": 11,
    "RTX 6000 Ada": 48,
    "RTX PRO 6000": 96,
    "RTX A6000": 48,
    "T4": 16,
    "L4": 24,
    "L40S": 48,
    "A10": 24,
    "V100 16GB": 16,
    "V100 32GB": 32,
    "A100 40GB": 40,
    "A100 80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "RX 9070 XT": 16,
    "RX 7900 XTX": 24,
    "RX 7900 XT": 20,
    "RX 7800 XT": 16,
    "RX 6800 XT": 16,
    "Instinct MI210": 64,
    "Instinct MI300X": 192,
    "Arc A770": 16,
    "Arc B580": 12,
}
_USABLE = 0.96  # drivers and error correction keep some of what the maker states
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])i?b?", re.IGNORECASE)


def imagined_gpu(text: str) -> Gpu:
    """Return a GPU named like "RTX 4090" (any case and spacing), or one of a size like "8GiB", all its memory free.

    Raises LocalLLMError that names the nearest known GPUs, or all of them.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        total = int(float(size[1]) * (_GIB if size[2] in "gG" else 2**20))
        return Gpu(f"GPU of {text.strip()}", total, total)
    by_key = {_key(name): name for name in _MEMORY_GIB}
    name = by_key.get(_key(text))
    if name is None:
        nearest = [by_key[key] for key in difflib.get_close_matches(_key(text), by_key, 3, 0.4)] or by_key.values()
        raise LocalLLMError(
            f"no GPU named {text!r} is known. Give its memory, like 8GiB, or one of: {', '.join(nearest)}."
        )
    total = int(_MEMORY_GIB[name] * _GIB * _USABLE)
    return Gpu(name, total, total)


def known_gpus() -> tuple[str, ...]:
    """Return the names that imagined_gpu knows."""
    return tuple(_MEMORY_GIB)


def _key(name: str) -> str:
    makers = re.compile(r"nvidia|geforce|amd|radeon|intel|tesla")
    return re.sub(r"[^a-z0-9]", "", makers.sub("", name.lower()))
