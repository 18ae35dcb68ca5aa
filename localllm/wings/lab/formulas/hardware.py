"""Machines with the figures that limit inference, from their makers' data sheets and white papers.

Read in November 2026; see gpu_offload.known_gpus, which has the GPUs. None: the maker states no comparable figure.
"""

from dataclasses import dataclass

from gpu_offload.known_gpus import KNOWN_GPUS
from localllm.wings.lab.formulas.speed import memory_bandwidth

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
    *(
        Hardware(gpu.name, gpu.memory, gpu.bandwidth, gpu.f16_peak, gpu.watts)
        for gpu in KNOWN_GPUS
        if gpu.bandwidth is not None
    ),
)
