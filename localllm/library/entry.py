"""One model on this machine: where its file is, and what its manifest adds to it."""

import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from localllm.library.errors import LibraryError
from localllm.library.manifest import MAX_TEXT_BYTES, Manifest, blob_name, read_bounded
from localllm.library.modelfile import checked_parameters

PULL_AGAIN = "Pull the model again."


class Source(StrEnum):
    """The program whose folder a model was found in, in lookup order."""

    BUILT_IN = "built-in"
    OWN = "localllm"
    OLLAMA = "ollama"
    HUGGING_FACE = "huggingface"
    LM_STUDIO = "lmstudio"
    LLAMA_CPP = "llama.cpp"
    FOLDER = "folder"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class ManifestDefaults:
    """What a manifest adds to a model file. parameters: Ollama's names, with values as parsed from JSON.

    template: the stored text, a Go or Jinja template. messages: begin every conversation.
    """

    template: str | None = None
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()
    licenses: tuple[str, ...] = ()
    adapters: tuple[Path, ...] = ()
    projectors: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model and its names. names: all of them, the display name first; path: its file, or the first part."""

    names: tuple[str, ...]
    source: Source
    path: Path
    manifest: Manifest | None = None
    blobs: Path | None = None

    @property
    def name(self) -> str:
        """The display name."""
        return self.names[0]

    def defaults(self) -> ManifestDefaults:
        """Read what the manifest adds. Raises LibraryError for a layer that is missing or damaged."""
        template, system = self._texts("template"), self._texts("system")
        return ManifestDefaults(
            template=template[-1] if template else None,
            system=system[-1] if system else None,
            parameters=self._parameters(),
            messages=self._messages(),
            licenses=tuple(self._texts("license")),
            adapters=tuple(self._layers("adapter")),
            projectors=self.projectors(),
        )

    def projectors(self) -> tuple[Path, ...]:
        """The manifest's projectors that exist on this machine: older pulls left them out."""
        paths = self._layers("projector")
        if self.manifest is not None and self.manifest.projector_link is not None:
            paths.append(self.manifest.projector_link)
        return tuple(path for path in paths if os.path.isfile(path))

    def _parameters(self) -> dict[str, Any]:
        try:
            return checked_parameters(self._json("params", dict) or {})
        except LibraryError as error:
            raise LibraryError(f"{self.name}: {error} {PULL_AGAIN}") from error

    def _messages(self) -> tuple[dict[str, str], ...]:
        found = []
        for message in self._json("messages", list) or ():
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise LibraryError(f"{self.name}: its messages layer holds an invalid message. {PULL_AGAIN}")
            found.append({"role": role, "content": content})
        return tuple(found)

    def _layers(self, kind: str) -> list[Path]:
        """The files of the manifest's layers of one kind."""
        if self.manifest is None or self.blobs is None:
            return []
        return [self.blobs / blob_name(layer.digest) for layer in self.manifest.of_kind(kind)]

    def _texts(self, kind: str) -> list[str]:
        return [_read_text(path) for path in self._layers(kind)]

    def _json(self, kind: str, wanted: type) -> Any:
        texts = self._texts(kind)
        if not texts:
            return None
        try:
            value = json.loads(texts[-1])
        except (ValueError, RecursionError) as error:
            raise LibraryError(f"{self.name}: its {kind} layer is not JSON: {error}. {PULL_AGAIN}") from error
        if not isinstance(value, wanted):
            raise LibraryError(f"{self.name}: its {kind} layer holds {type(value).__name__}. {PULL_AGAIN}")
        return value


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEXT_BYTES, PULL_AGAIN).decode()
    except UnicodeDecodeError as error:
        raise LibraryError(f"{path}: is not UTF-8 text. {PULL_AGAIN}") from error
