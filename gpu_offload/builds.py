"""Builds of llama-cpp-python: which one the GPUs of this machine need, and the command that compiles it.

A build supports one kind of device. llama-cpp-python publishes wheels of several builds, each in an index of its own.
"""

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gguf_io.system import pip_line

VERSION = "0.3.36"  # the oldest that works, and the one that is installed
INDEXES = "https://abetlen.github.io/llama-cpp-python/whl"
RELEASES = "https://github.com/abetlen/llama-cpp-python/releases/tag"


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU of this machine. kind: "CUDA", "Vulkan" or "Metal".

    capability: NVIDIA's compute capability, such as (9, 0). driver: the branch of NVIDIA's driver, such as 580.
    """

    name: str
    kind: str
    capability: tuple[int, int] = (0, 0)
    driver: int = 0

    @property
    def label(self) -> str:
        """Its name, and what decides the build."""
        if self.kind != "CUDA":
            return f"{self.name} ({self.kind})"
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]}, driver {self.driver})"


@dataclass(frozen=True, slots=True)
class Build:
    """A build with published wheels. kind: the devices it is for, by ggml's name of the backend, "CPU" for none.

    cmake: CMake's arguments that compile it. capabilities: of NVIDIA's GPUs. driver: the oldest branch of NVIDIA's
    driver that runs it. needs: what it loads beside the driver and does not have in its wheel.
    """

    name: str
    kind: str
    cmake: str
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 9))
    driver: int = 0
    needs: str = ""

    def runs_on(self, gpu: FoundGpu) -> bool:
        """Whether the GPU and its driver can run it."""
        least, most = self.capabilities
        return self.kind == gpu.kind and least <= gpu.capability <= most and gpu.driver >= self.driver

    def hash_page(self) -> str:
        """The page that shows the SHA-256 of the build's wheels."""
        return f"{RELEASES}/v{VERSION}{'' if self.kind == 'CPU' else f'-{self.name}'}"


_CUDA = "-DGGML_CUDA=on"
# The best one first. Capabilities are those of llama-cpp-python's wheels; drivers are from NVIDIA's "CUDA
# Compatibility": each major version of CUDA has an oldest driver.
BUILDS = (
    Build("cu130", "CUDA", _CUDA, ((7, 5), (99, 9)), 580, "NVIDIA's CUDA 13 runtime and cuBLAS"),
    Build("cu124", "CUDA", _CUDA, ((6, 0), (99, 9)), 525, "NVIDIA's CUDA 12 runtime and cuBLAS"),
    Build("cu118", "CUDA", _CUDA, ((6, 0), (8, 9)), 450, "NVIDIA's CUDA 11.8 runtime and cuBLAS"),
    Build("metal", "Metal", "-DGGML_METAL=on"),
    Build("vulkan", "Vulkan", "-DGGML_VULKAN=on", needs="the Vulkan loader"),
    Build("cpu", "CPU", ""),
)
# The SHA-256 of wheels, by build and file name. Only hashes of files that a maintainer has downloaded and tried belong
# here; a hash that is missing must be given by the user, who reads it on the release's page.
SHA256: dict[tuple[str, str], str] = {}


def build_for(gpus: Sequence[FoundGpu]) -> Build | None:
    """The best build that runs on all GPUs of the first one's kind; None if none does."""
    alike = [gpu for gpu in gpus if gpu.kind == gpus[0].kind]
    return next((build for build in BUILDS if alike and all(map(build.runs_on, alike))), None)


def compile_command(kind: str, gpus: Sequence[FoundGpu] = (), version: str = VERSION) -> str:
    """The shell command that compiles llama.cpp for a kind of devices.

    gpus: NVIDIA's GPUs to compile for; CMake finds those of this machine only if a driver runs. kind may also be "RPC".
    """
    cmake = next((build.cmake for build in BUILDS if build.kind == kind), f"-DGGML_{kind}=on")
    if architectures := sorted({f"{major}{minor}" for gpu in gpus for major, minor in [gpu.capability] if major}):
        cmake += f" -DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}"
    # Not from pip's cache, which may hold a wheel that was built for another device.
    flags = ("--no-cache-dir", "--no-binary", "llama-cpp-python", "--force-reinstall", "--no-deps")
    return pip_line("install", *flags, f"llama-cpp-python=={version}", variables={"CMAKE_ARGS": cmake})


def processor_command() -> str:
    """The shell command that installs llama.cpp for the processor alone."""
    wheels = ("--prefer-binary", "--extra-index-url", f"{INDEXES}/cpu")
    return pip_line("install", *wheels, f"llama-cpp-python>={VERSION}")


def has_metal() -> bool:
    """Whether this is a Mac whose GPU llama.cpp supports."""
    return sys.platform == "darwin" and platform.machine() == "arm64"
