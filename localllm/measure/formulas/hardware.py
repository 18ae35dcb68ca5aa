"""Machines with the figures that limit inference, from their makers' data sheets and white papers.

Read in November 2026. Arithmetic is dense FP16 or BF16 with FP32 accumulation on matrix units, without sparsity, which
data sheets often double. Power is the board's or module's limit. None: the maker states no comparable figure.
"""

from dataclasses import dataclass

from localllm.measure.formulas.speed import memory_bandwidth

AS_OF = "2026-11"


@dataclass(frozen=True, slots=True)
class Hardware:
    """memory_gb: in 10^9 bytes, None if it depends on the modules installed. bandwidth: bytes a second.

    f16_peak: operations a second. watts: the power limit.
    """

    name: str
    memory_gb: int | None
    bandwidth: float
    f16_peak: float | None = None
    watts: int | None = None


HARDWARE = (
    Hardware("2 channels DDR4-3200", None, memory_bandwidth(2, 3200e6)),
    Hardware("2 channels DDR5-5600", None, memory_bandwidth(2, 5600e6)),
    Hardware("8 channels DDR5-4800", None, memory_bandwidth(8, 4800e6)),
    Hardware("12 channels DDR5-6400", None, memory_bandwidth(12, 6400e6)),
    Hardware("Ryzen AI Max+ 395 (LPDDR5X-8000, 256 bit)", 128, memory_bandwidth(4, 8000e6)),
    Hardware("Apple M4", 32, 120e9),
    Hardware("Apple M4 Pro", 64, 273e9),
    Hardware("Apple M4 Max", 128, 546e9),
    Hardware("Apple M3 Ultra", 512, 819e9),
    Hardware("RTX 3060", 12, 360e9, None, 170),
    Hardware("RTX 3090", 24, 936e9, 71e12, 350),
    Hardware("RTX 4090", 24, 1008e9, 165e12, 450),
    Hardware("RTX 5090", 32, 1792e9, 210e12, 575),
    Hardware("Arc B580", 12, 456e9, None, 190),
    Hardware("RX 7900 XTX", 24, 960e9, 123e12, 355),
    Hardware("T4", 16, 320e9, 65e12, 70),
    Hardware("L4", 24, 300e9, 121e12, 72),
    Hardware("A10", 24, 600e9, 125e12, 150),
    Hardware("L40S", 48, 864e9, 362e12, 350),
    Hardware("V100 32GB", 32, 900e9, 125e12, 300),
    Hardware("A100 80GB", 80, 2039e9, 312e12, 400),
    Hardware("H100", 80, 3350e9, 989e12, 700),
    Hardware("H200", 141, 4800e9, 989e12, 700),
    Hardware("B200", 180, 8000e9, 2250e12, 1000),
    Hardware("Instinct MI300X", 192, 5300e9, 1307e12, 750),
)
