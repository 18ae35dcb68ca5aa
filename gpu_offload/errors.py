"""Errors of llama.cpp and its devices, and the commands that install it."""

import platform
import shutil
import sys
from pathlib import Path

from gguf_io.errors import LocalLLMError

_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
_BUILD = "--no-binary llama-cpp-python"
# One build of llama-cpp-python supports one kind of device. Some have wheels; the others are built locally. CMake's
# arguments are given for wheels too: if there is none for this platform, pip builds.
_BUILDS = {
    "cuda": ("-DGGML_CUDA=on", f"--prefer-binary --extra-index-url {_WHEELS}/cu124"),
    "rocm": ("-DGGML_HIP=on", _BUILD),
    "vulkan": ("-DGGML_VULKAN=on", _BUILD),
    "sycl": ("-DGGML_SYCL=on -DCMAKE_C_COMPILER=icx -DCMAKE_CXX_COMPILER=icpx", _BUILD),
    "metal": ("-DGGML_METAL=on", f"--prefer-binary --extra-index-url {_WHEELS}/metal"),
    "cpu": ("", f"--prefer-binary --extra-index-url {_WHEELS}/cpu"),
    "rpc": ("-DGGML_RPC=on", _BUILD),
}


class LlamaCppError(LocalLLMError):
    """llama.cpp refused a model, a context or a step. The message ends with llama.cpp's own."""


class LlamaCppMemoryError(LlamaCppError):
    """The model or its context did not fit into a device's memory, or the KV cache has no room for a step's tokens."""


class PictureError(LocalLLMError):
    """An image that a model cannot take: unsupported format, too large, or damaged."""


class DeviceRequestError(LocalLLMError):
    """A setting names a GPU or a worker that does not exist or does not answer."""


class LlamaCppMissingError(LocalLLMError):
    """llama-cpp-python is not installed or does not run here. The message says how to install it here."""

    def __init__(self, reason: str, command: str | None = None) -> None:
        """command: the command that fixes it, if not one of the usual installation commands."""
        self.reason = reason
        if command:
            super().__init__(f"llama.cpp cannot do that ({reason}). Install it again:\n  {command}")
            return
        super().__init__(f"llama.cpp is not available ({reason}). Install it for your device:\n{install_commands()}")


# The package itself, not localllm[llama]: localllm may be installed from a folder, where pip does not find it.
REQUIREMENT = "'llama-cpp-python>=0.3.36'"


def install_commands(replaced: str = "") -> str:
    """Return the commands for the devices that this platform may have, one per line. replaced: see install_command."""
    return "\n".join(f"  {backend:7}{install_command(backend, replaced)}" for backend in _backends_here())


def install_command(backend: str, replaced: str = "") -> str:
    """Return the shell command that installs llama.cpp for a key of _BUILDS. On Windows it is for PowerShell.

    replaced: the version that is installed for another device. The CUDA wheel is for CUDA 12.4 and later 12.x; for
    others, pip builds.
    """
    arguments, flags = _BUILDS[backend]
    # Bypass pip's cache, which may hold a wheel built for another device.
    package = f"--force-reinstall --no-deps llama-cpp-python=={replaced}" if replaced else REQUIREMENT
    command = f"{_pip()} install --no-cache-dir {flags} {package}"
    if not arguments:
        return command
    return (
        f'$env:CMAKE_ARGS="{arguments}"; {command}'
        if sys.platform == "win32"
        else f'CMAKE_ARGS="{arguments}" {command}'
    )


def _pip() -> str:
    """The pip of this Python; the first one on the path may belong to another."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    call = "& " if sys.platform == "win32" else ""  # PowerShell treats a quoted path as text
    return f'{call}"{sys.executable}" -m pip'


def _backends_here() -> tuple[str, ...]:
    """Return the backends of this platform, the likeliest first."""
    if sys.platform == "darwin":
        return ("metal", "cpu") if platform.machine() == "arm64" else ("cpu",)
    return ("cuda", "vulkan", "rocm", "sycl", "cpu")
