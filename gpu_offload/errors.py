"""What can go wrong between us and llama.cpp."""

import platform
import sys

from gguf_io.errors import LocalLLMError

__all__ = [
    "DeviceRequestError",
    "LlamaCppError",
    "LlamaCppMemoryError",
    "LlamaCppMissingError",
    "PictureError",
    "install_command",
]

_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
_PACKAGE = "'localllm[llama]'"

# One build of llama-cpp-python serves one kind of device. Its README names wheels for some; the others are built here,
# past pip's cache, which would hand out a wheel built for another device.
_WHEEL = f"pip install --prefer-binary {_PACKAGE} --extra-index-url {_WHEELS}"
_BUILD = f"pip install --no-cache-dir --no-binary llama-cpp-python {_PACKAGE}"
_COMMANDS = {
    # Where there is no wheel, pip builds: without the variable for no device, and without the flag it may find such a
    # build in its cache.
    "cuda": f'CMAKE_ARGS="-DGGML_CUDA=on" {_WHEEL}/cu124 --no-cache-dir',
    "rocm": f'CMAKE_ARGS="-DGGML_HIP=on" {_BUILD}',
    "vulkan": f'CMAKE_ARGS="-DGGML_VULKAN=on" {_BUILD}',
    "sycl": f'CMAKE_ARGS="-DGGML_SYCL=on -DCMAKE_C_COMPILER=icx -DCMAKE_CXX_COMPILER=icpx" {_BUILD}',
    "metal": f"{_WHEEL}/metal",
    "cpu": f"{_WHEEL}/cpu",
    # What is installed already is built anew, as it is.
    "rpc": 'CMAKE_ARGS="-DGGML_RPC=on" pip install --no-cache-dir --force-reinstall --no-deps '
    "--no-binary llama-cpp-python llama-cpp-python",
}


class LlamaCppError(LocalLLMError):
    """llama.cpp refused a model, a context or a step. The message carries llama.cpp's own last words."""


class LlamaCppMemoryError(LlamaCppError):
    """The model or its context did not fit into a device's memory, or a step found no room for its tokens."""


class PictureError(LocalLLMError):
    """An image that cannot be shown to a model: of another format, too large, or damaged."""


class DeviceRequestError(LocalLLMError):
    """A GPU or layers on GPUs were asked for that are not there."""


class LlamaCppMissingError(LocalLLMError):
    """llama-cpp-python is not installed or does not load. The message says how to install it here."""

    def __init__(self, reason: str, command: str | None = None) -> None:
        """command: what mends it, where that is none of the usual installations."""
        if command:
            super().__init__(f"llama.cpp cannot do that ({reason}). Install it anew:\n  {command}")
            return
        commands = "\n".join(f"  {backend:7}{install_command(backend)}" for backend in _backends_here())
        super().__init__(f"llama.cpp is not available ({reason}). Install it for your device:\n{commands}")


def install_command(backend: str) -> str:
    """Return the shell command that installs llama.cpp for "cuda", "rocm", "vulkan", "sycl", "metal" or "cpu",
    or, for workers on other machines, "rpc".

    On Windows it is for PowerShell. The CUDA wheel is for CUDA 12.4 and later 12.x; for others, build from source with
    CMAKE_ARGS="-DGGML_CUDA=on".
    """
    command = _COMMANDS[backend]
    if sys.platform != "win32" or not command.startswith("CMAKE_ARGS"):
        return command
    arguments, rest = command.removeprefix("CMAKE_ARGS=").split('" ', 1)
    return f'$env:CMAKE_ARGS={arguments}"; {rest}'


def _backends_here() -> tuple[str, ...]:
    """Return the backends that exist on this platform, the likeliest first."""
    if sys.platform == "darwin":
        return ("metal", "cpu") if platform.machine() == "arm64" else ("cpu",)
    return ("cuda", "vulkan", "rocm", "sycl", "cpu")
