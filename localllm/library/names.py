"""Model names in the registries' form: [host/][namespace/]model[:tag].

The parts become folders, so each is checked here before any other use. Names compare case-insensitively.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from gguf_io.system import can_name_file
from localllm.library.errors import LibraryError
from localllm.text import shortened

OLLAMA_HOST = "registry.ollama.ai"
HUGGING_FACE_HOST = "hf.co"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
SUFFIX = ".gguf"
BUILT_IN = "builtin"  # the model that comes with localllm; no stored model may have this name

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?")
_WINDOWS_PATH = re.compile(r"\\|^[A-Za-z]:/")
_COLON = ":" if can_name_file("host:80") else "%3A"  # before a host's port, in a folder's name
_HUGGING_FACE_HOSTS = (HUGGING_FACE_HOST, "huggingface.co", "www.huggingface.co")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:IQ[1-8]_[A-Z0-9]+|T?Q[1-8]_[0-9K](?:_[A-Z]{1,2})?|MXFP4(?:_MOE)?|BF16|F16|F32))(?=$|[-._])",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")

# What a repository's name means when no quantisation is given: small enough for most, good enough for most.
PREFERRED_QUANTIZATIONS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0")


def looks_like_path(text: str, on_windows: bool = sys.platform == "win32") -> bool:
    """Whether a text is written as a path, not as a model's name; on Windows also with a drive, or backslashes."""
    return text.startswith(("/", ".", "~")) or (on_windows and _WINDOWS_PATH.search(text) is not None)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A full name. `str` leaves out Ollama's host and namespace: qwen3:0.6b, hf.co/user/repo:Q4_K_M."""

    model: str
    tag: str = DEFAULT_TAG
    namespace: str = DEFAULT_NAMESPACE
    host: str = OLLAMA_HOST

    def __post_init__(self) -> None:
        for part in (self.namespace, self.model, self.tag):
            if not _PART.fullmatch(part) or ".." in part:
                raise LibraryError(
                    f"{shortened(part)!r} cannot be a part of a model's name. Use letters, digits, '.', '_' and '-'."
                )
            if not can_name_file(part):
                raise LibraryError(f"{part!r} cannot be a part of a model's name on Windows, which reserves it.")
        if not _HOST.fullmatch(self.host) or ".." in self.host:
            raise LibraryError(f"{shortened(self.host)!r} is not the name of a host.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name and fill in the defaults. Raises LibraryError, also for parts that would leave their folder."""
        if looks_like_path(text, on_windows=True):
            raise LibraryError(
                f"{shortened(text)} is a path, not a model's name, which is like qwen3:0.6b or hf.co/user/repo:Q4_K_M. "
                f'A model file needs no name: localllm run {shortened(text)} "Hello".'
            )
        *before, last = text.split("/")
        model, colon, tag = last.partition(":")
        if len(before) > 2:
            raise LibraryError(f"{shortened(text)!r} is not a model's name: it has more than host/namespace/model:tag.")
        if colon and not tag:
            raise LibraryError(f"{shortened(text)!r} is not a model's name: nothing follows the colon.")
        host = before[0] if len(before) == 2 else OLLAMA_HOST
        return cls(
            model=model,
            tag=tag or DEFAULT_TAG,
            namespace=before[-1] if before else DEFAULT_NAMESPACE,
            host=canonical_host(host),
        )

    @property
    def key(self) -> str:
        """The full name in lower case, for comparing."""
        return f"{self.host}/{self.repository}:{self.tag}".lower()

    @property
    def repository(self) -> str:
        """Namespace and model, which registries and Hugging Face call the repository."""
        return f"{self.namespace}/{self.model}"

    @property
    def folders(self) -> tuple[str, str, str, str]:
        """The manifest's path below the manifests folder; the last part is the file."""
        return self.host.replace(":", _COLON), self.namespace, self.model, self.tag

    @classmethod
    def from_folders(cls, host: str, namespace: str, model: str, tag: str) -> Self:
        """The name whose `folders` these are. Raises LibraryError if there is none."""
        return cls(model, tag, namespace, host_of(host))

    def tagged(self, tag: str) -> Self:
        """The same model under another tag."""
        return replace(self, tag=tag)

    def __str__(self) -> str:
        if self.host != OLLAMA_HOST:
            return f"{self.host}/{self.repository}:{self.tag}"
        return f"{self.model if self.namespace == DEFAULT_NAMESPACE else self.repository}:{self.tag}"


def host_of(folder: str) -> str:
    """The host whose manifests are in a folder of this name."""
    return folder.replace(_COLON, ":")


def canonical_host(host: str) -> str:
    """The host, or its name here if it is one of Hugging Face's."""
    return HUGGING_FACE_HOST if host.lower() in _HUGGING_FACE_HOSTS else host


def quantization_of(stem: str) -> str:
    """The quantisation in a file's name (without .gguf), in upper case: Q4_K_M of Qwen3-0.6B-Q4_K_M; "" for none."""
    found = _QUANTIZATION.findall(_SPLIT.sub("", stem))
    return found[-1].upper() if found else ""


def plain(name: str) -> str:
    """A name for comparing: in lower case, without the usual tag."""
    return name.lower().removesuffix(f":{DEFAULT_TAG}")


def is_gguf(name: str) -> bool:
    """Whether a file's name or path ends like that of a GGUF file, in upper or lower case."""
    return name.lower().endswith(SUFFIX)


def is_projector_name(name: str) -> bool:
    """Whether a file of this name is a projector, which encodes images or sound for a model."""
    return "mmproj" in name.lower()


def without_suffix(name: str) -> str:
    """A file's name or path without .gguf; unchanged if it does not end so."""
    return name[: -len(SUFFIX)] if is_gguf(name) else name


def without_part(stem: str) -> str:
    """A file's name (without .gguf) without -00001-of-00003."""
    return _SPLIT.sub("", stem)


def preference(quantization: str, best: Sequence[str] = PREFERRED_QUANTIZATIONS) -> int:
    """Rank of a quantisation if none was requested; smaller is better. best: the preferred ones, best first."""
    known = quantization.upper()
    return best.index(known) if known in best else len(best)
