"""GPUs by name, with the memory and speed that their makers state: to plan for those that are not in this machine.

From data sheets and white papers, read in November 2026. Arithmetic is dense FP16 or BF16 with FP32 accumulation on
matrix units, without sparsity, which data sheets often double.
"""

import difflib
import re
from dataclasses import dataclass

from gguf_io.errors import LocalLLMError
from gpu_offload.devices import Device, DeviceKind

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU as its maker describes it; where one name comes in several sizes, this one's names the size."""

    name: str
    memory: int  # GiB, which some data sheets call GB
    bandwidth: float | None = None  # bytes a second; None if the data sheet was not read
    f16_peak: float | None = None  # operations a second; None also if the maker states no comparable figure
    watts: int | None = None  # the limit of the board or module


KNOWN_GPUS = (
    KnownGpu("GTX 1080 Ti", 11),
    KnownGpu("RTX 2080 Ti", 11),
    KnownGpu("RTX 3060", 12, 360e9, None, 170),
    KnownGpu("RTX 3070", 8),
    KnownGpu("RTX 3080", 10),
    KnownGpu("RTX 3080 Ti", 12),
    KnownGpu("RTX 3090", 24, 936e9, 71e12, 350),
    KnownGpu("RTX 4060", 8),
    KnownGpu("RTX 4060 Ti 16GB", 16),
    KnownGpu("RTX 4070", 12),
    KnownGpu("RTX 4070 Ti SUPER", 16),
    KnownGpu("RTX 4080", 16),
    KnownGpu("RTX 4090", 24, 1008e9, 165e12, 450),
    KnownGpu("RTX 5060", 8),
    KnownGpu("RTX 5060 Ti 16GB", 16),
    KnownGpu("RTX 5070", 12),
    KnownGpu("RTX 5070 Ti", 16),
    KnownGpu("RTX 5080", 16),
    KnownGpu("RTX 5090", 32, 1792e9, 210e12, 575),
    KnownGpu("RTX A6000", 48),
    KnownGpu("RTX 6000 Ada", 48),
    KnownGpu("RTX PRO 6000", 96),
    KnownGpu("Arc A770", 16),
    KnownGpu("Arc B580", 12, 456e9, None, 190),
    KnownGpu("RX 6800 XT", 16),
    KnownGpu("RX 7800 XT", 16),
    KnownGpu("RX 7900 XT", 20),
    KnownGpu("RX 7900 XTX", 24, 960e9, 123e12, 355),
    KnownGpu("RX 9070 XT", 16),
    KnownGpu("T4", 16, 320e9, 65e12, 70),
    KnownGpu("L4", 24, 300e9, 121e12, 72),
    KnownGpu("A10", 24, 600e9, 125e12, 150),
    KnownGpu("L40S", 48, 864e9, 362e12, 350),
    KnownGpu("V100 16GB", 16),
    KnownGpu("V100 32GB", 32, 900e9, 125e12, 300),
    KnownGpu("A100 40GB", 40),
    KnownGpu("A100 80GB", 80, 2039e9, 312e12, 400),
    KnownGpu("H100", 80, 3350e9, 989e12, 700),
    KnownGpu("H200", 141, 4800e9, 989e12, 700),
    KnownGpu("B200", 180, 8000e9, 2250e12, 1000),
    KnownGpu("Instinct MI210", 64),
    KnownGpu("Instinct MI300X", 192, 5300e9, 1307e12, 750),
)
_USABLE = 0.96  # drivers and error correction take some of the stated memory
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([gm])i?b?", re.IGNORECASE)


def imagined_gpu(text: str) -> Device:
    """Return a GPU by name, like "RTX 4090" (any case and spacing), or by size, like "8GiB", with all its memory free.

    Raises LocalLLMError naming the nearest known GPUs, or all of them.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        return _gpu(f"GPU of {text.strip()}", float(size[1]) * (_GIB if size[2] in "gG" else 2**20))
    by_key = {_key(gpu.name): gpu for gpu in KNOWN_GPUS}
    known = by_key.get(_key(text))
    if known is None:
        near = difflib.get_close_matches(_key(text), by_key, 3, 0.4) or by_key
        nearest = [by_key[key].name for key in near]
        raise LocalLLMError(
            f"no GPU named {text!r} is known. Give its memory, like 8GiB, or one of: {', '.join(nearest)}."
        )
    return _gpu(known.name, known.memory * _GIB * _USABLE)


def _gpu(name: str, size: float) -> Device:
    return Device(name, name, "", DeviceKind.GPU, int(size), int(size))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|amd|radeon|intel|tesla", "", name.lower())
