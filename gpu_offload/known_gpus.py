"""GPUs to plan for that are not in this machine, with the memory that vendors state."""

import difflib
import re

from gguf_io.errors import LocalLLMError
from gpu_offload.devices import Device, DeviceKind

_GIB = 2**30

# Vendors' names by GiB; where one name comes in several sizes, the entry names the size.
_NAMES = {
    8: "RTX 3070, RTX 4060, RTX 5060",
    10: "RTX 3080",
    11: "GTX 1080 Ti, RTX 2080 Ti",
    12: "RTX 3060, RTX 3080 Ti, RTX 4070, RTX 5070, Arc B580",
    16: "RTX 4060 Ti 16GB, RTX 4070 Ti SUPER, RTX 4080, RTX 5060 Ti 16GB, RTX 5070 Ti, RTX 5080, T4, V100 16GB, "
    "RX 6800 XT, RX 7800 XT, RX 9070 XT, Arc A770",
    20: "RX 7900 XT",
    24: "RTX 3090, RTX 4090, L4, A10, RX 7900 XTX",
    32: "RTX 5090, V100 32GB",
    40: "A100 40GB",
    48: "RTX 6000 Ada, RTX A6000, L40S",
    64: "Instinct MI210",
    80: "A100 80GB, H100",
    96: "RTX PRO 6000",
    141: "H200",
    180: "B200",
    192: "Instinct MI300X",
}
_MEMORY_GIB = {name: size for size, names in _NAMES.items() for name in names.split(", ")}
_USABLE = 0.96  # drivers and error correction take some of the stated memory
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([gm])i?b?", re.IGNORECASE)


def imagined_gpu(text: str) -> Device:
    """Return a GPU by name, like "RTX 4090" (any case and spacing), or by size, like "8GiB", with all its memory free.

    Raises LocalLLMError naming the nearest known GPUs, or all of them.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        return _gpu(f"GPU of {text.strip()}", float(size[1]) * (_GIB if size[2] in "gG" else 2**20))
    by_key = {_key(name): name for name in _MEMORY_GIB}
    name = by_key.get(_key(text))
    if name is None:
        nearest = [by_key[key] for key in difflib.get_close_matches(_key(text), by_key, 3, 0.4)] or by_key.values()
        raise LocalLLMError(
            f"no GPU named {text!r} is known. Give its memory, like 8GiB, or one of: {', '.join(nearest)}."
        )
    return _gpu(name, _MEMORY_GIB[name] * _GIB * _USABLE)


def known_gpus() -> tuple[str, ...]:
    """Return the names that imagined_gpu knows."""
    return tuple(_MEMORY_GIB)


def _gpu(name: str, size: float) -> Device:
    return Device(name, name, "", DeviceKind.GPU, int(size), int(size))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|amd|radeon|intel|tesla", "", name.lower())
