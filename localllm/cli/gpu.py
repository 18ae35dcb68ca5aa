"""localllm gpu: the GPUs of this machine, and the installation of llama.cpp for them."""

from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import setting_flags
from localllm.front.terminal import StatusLine, answer, note
from localllm.settings import load_settings

_NONE = "No GPU was found: neither NVIDIA's driver nor a Vulkan driver reports one. Install the GPU's driver first."


def gpu(
    given: typer.Context,
    action: Annotated[
        str | None, typer.Argument(metavar="install", help="Install llama.cpp for the GPU.", show_default=False)
    ] = None,
    build: Annotated[
        str | None, typer.Option(metavar="NAME", help="cu130, cu124, cu118, metal, vulkan or cpu (what the GPU needs).")
    ] = None,
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HASH", help="What the wheel's SHA-256 must be.")
    ] = None,
    gpu_index: Annotated[
        str | None, typer.Option(metavar="URL", help="Another index of wheels, which you trust (llama-cpp-python's).")
    ] = None,
) -> None:
    """Show this machine's GPUs, or install llama.cpp for them.

    `install` finds the GPU (NVIDIA's driver, Vulkan, Metal), downloads the build of llama-cpp-python for it, and
    compares its hash. A child process then computes with it and compares with the CPU engine. Only a build that passes
    replaces the installed one; after any failure the environment is as it was.
    """
    from gpu_offload.builds import BUILDS, build_for, compile_command
    from gpu_offload.found_gpus import found_gpus

    if action not in (None, "install"):
        raise RequestError(f"`localllm gpu` has no action {action!r}. Choose install, or none to show the GPUs.")
    settings = load_settings(setting_flags(given))
    found = found_gpus()
    named = next((one for one in BUILDS if one.name == build), None)
    if build is not None and named is None:
        raise RequestError(f"There is no build {build!r}. Choose from: {', '.join(one.name for one in BUILDS)}.")
    if not found and named is None:
        raise RequestError(_NONE)
    chosen = named or build_for(found)
    if chosen is None:
        raise RequestError(
            f"No wheel of llama-cpp-python is for {found[0].label}. Compile it: {compile_command(found[0].kind, found)}"
        )
    if action is None:
        for one in found:
            answer(f"{one.label}\n")
        note(f"`localllm gpu install` installs the build {chosen.name} of llama-cpp-python.")
        return
    _check_hash(sha256)
    from localllm.gpu_install import install

    with StatusLine() as status:
        result = install(chosen, found, status.share, settings.gpu_index, sha256)
    answer(f"Installed the build {chosen.name} of llama-cpp-python. {result}.\n")


def _check_hash(sha256: str | None) -> None:
    if sha256 is not None and not (len(sha256) == 64 and all(c in "0123456789abcdef" for c in sha256.lower())):
        raise RequestError("--sha256 must be the 64 hexadecimal digits of a SHA-256.")
