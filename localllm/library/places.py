"""Where each program keeps its models on this machine. Only our own store is ever written to, by its module."""

import os
from pathlib import Path
from typing import Protocol

import platformdirs

from gguf_io.system import read_file
from localllm.files import user_path


class Places(Protocol):
    """The settings that say where models are."""

    @property
    def model_store(self) -> str | None: ...

    @property
    def model_folders(self) -> str: ...


def own_store(where: Places) -> Path:
    """Our store: the setting model_store, or the user's data folder (~/.local/share/localllm/models on Linux)."""
    if where.model_store:
        return user_path(where.model_store)
    return Path(platformdirs.user_data_dir("localllm", appauthor=False)) / "models"


def ollama_stores() -> list[Path]:
    """Ollama's stores: OLLAMA_MODELS, or the user's and the Linux service's."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [user_path(chosen)]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def hugging_face_hub() -> Path:
    """The Hugging Face cache, by the variables that huggingface_hub documents."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return user_path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return user_path(str(os.environ.get("HF_HOME") or Path(cache) / "huggingface")) / "hub"


MOST_POINTED = 4096  # bytes of a pointer file, a path


def lm_studio_models() -> list[Path]:
    """LM Studio's folders: under the home that its pointer file names, and under its two default homes."""
    homes = [Path.home() / ".lmstudio", Path.home() / ".cache" / "lm-studio"]
    pointer = Path.home() / ".lmstudio-home-pointer"
    try:
        named = read_file(pointer, MOST_POINTED).decode("utf-8-sig", "replace").strip()
    except OSError:  # LM Studio is not here
        named = ""
    homes = [Path(named), *homes] if named else homes
    return list(dict.fromkeys(home / "models" for home in homes))


def llama_cpp_cache() -> Path:
    """llama.cpp's downloads: LLAMA_CACHE or the platform's cache folder. Newer versions use the Hugging Face cache."""
    if chosen := os.environ.get("LLAMA_CACHE"):
        return user_path(chosen)
    return Path(platformdirs.user_cache_dir("llama.cpp", appauthor=False, opinion=False))


def configured_folders(where: Places) -> list[Path]:
    """The folders of the setting model_folders, separated as in PATH."""
    return [user_path(folder) for folder in where.model_folders.split(os.pathsep) if folder]
