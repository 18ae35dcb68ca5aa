"""Manifests: which blobs make up a model. Ollama's registry, its store and our store share the format.

A model is a list of layers, each a kind and the SHA-256 of its content. Digests are checked before use in a path.
Format: Docker's image manifest, version 2, with the media types application/vnd.ollama.image.*.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf_io.system import read_file
from localllm.files import listed
from localllm.library.errors import LibraryError

MEDIA_TYPE: Final = "application/vnd.docker.distribution.manifest.v2+json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_LAYERS = 1024
MAX_TEXT_BYTES = 1 << 20  # of a text layer
MAX_LAYER_BYTES = 1 << 46  # 64 TiB, beyond any disk

# Kinds of layers that localllm uses: the model's file or parts, and what is added to it.
KINDS = ("model", "template", "system", "params", "messages", "license", "adapter", "projector")
_LAYER_TYPE = "application/vnd.ollama.image."
_TITLE = "org.opencontainers.image.title"
_LINK_TYPE = "application/vnd.localllm.link"
_PROJECTOR_LINK_TYPE = "application/vnd.localllm.projector.link"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob. kind: one of KINDS, or another that is not used. size: bytes."""

    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model's layers.

    link, projector_link: GGUF files outside the store that replace the layers of the model and its projector.
    title: the file's original name without .gguf, usable as a second tag.
    """

    layers: tuple[Layer, ...]
    link: Path | None = None
    projector_link: Path | None = None
    title: str | None = None

    def of_kind(self, kind: str) -> list[Layer]:
        """The layers of one kind, in order."""
        return [layer for layer in self.layers if layer.kind == kind]

    def dump(self) -> bytes:
        """As JSON."""
        layers: list[dict[str, object]] = [
            {"mediaType": f"{_LAYER_TYPE}{layer.kind}", "digest": layer.digest, "size": layer.size}
            for layer in self.layers
        ]
        for kind, link in ((_LINK_TYPE, self.link), (_PROJECTOR_LINK_TYPE, self.projector_link)):
            if link is not None:
                layers.append({"mediaType": kind, "path": str(link)})
        content: dict[str, object] = {"schemaVersion": 2, "mediaType": MEDIA_TYPE, "layers": layers}
        if self.title is not None:
            content["annotations"] = {_TITLE: self.title}
        return json.dumps(content, indent=1).encode()


_OWN_REMEDY = "Pull or create the model again, which replaces it, or remove it with `localllm rm`."
_FOREIGN_REMEDY = "Pull the model again with the program that keeps it, or with localllm."


def check_digest(digest: object) -> str:
    """The digest, unchanged. Raises LibraryError if it is not one."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise LibraryError(f"{str(digest)[:100]!r} is not a digest like sha256:<64 hex digits>.")
    return digest


def blob_name(digest: str) -> str:
    """The file name of a blob, in Ollama's store and in ours."""
    return check_digest(digest).replace(":", "-")


def blob_files(layers: Sequence[Layer]) -> list[str]:
    """Blob file names of layers, in order; the parts of a split model have the names that its loader looks for."""
    names = [blob_name(layer.digest) for layer in layers]
    parts = [index for index, layer in enumerate(layers) if layer.kind == "model"]
    if len(parts) > 1:
        stem = names[parts[0]]
        for number, index in enumerate(parts, start=1):
            names[index] = f"{stem}-{number:05}-of-{len(parts):05}.gguf"
    return names


def parse_manifest(data: bytes, where: str, remedy: str, *, own: bool = False) -> Manifest:
    """Parse a manifest. Items that are no layers of models are left out.

    own: whether it is from our own store; links of other manifests are not followed.
    Raises LibraryError naming where it came from, and the remedy.
    """
    try:
        content = json.loads(data)
        items = content["layers"]
        if not isinstance(items, list) or len(items) > MAX_LAYERS:
            raise LibraryError(f"its layers must be a list of at most {MAX_LAYERS}")
        known = [_layer(item) for item in items if str(item["mediaType"]).startswith(_LAYER_TYPE)]
        links = {item["mediaType"]: Path(item["path"]) for item in items if own and "path" in item}
        title = content.get("annotations", {}).get(_TITLE) if own else None
        if not isinstance(title, str | None):
            raise LibraryError(f"its title is {str(title)[:40]!r}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LibraryError) as error:
        raise LibraryError(f"{where}: is not a model's manifest: {error}. {remedy}") from error
    return Manifest(tuple(known), links.get(_LINK_TYPE), links.get(_PROJECTOR_LINK_TYPE), title)


def manifest_files(manifests: Path, report: Callable[[OSError], object]) -> Iterator[Path]:
    """The manifests in a store's folder of them, sorted. report: see files.listed."""
    for folder in model_folders(manifests, report):
        yield from (path for path in listed(folder, report) if not path.name.startswith(".") and os.path.isfile(path))


def model_folders(manifests: Path, report: Callable[[OSError], object]) -> list[Path]:
    """The folders <host>/<namespace>/<model> of a store's manifests, sorted."""
    folders = [manifests]
    for _ in ("host", "namespace", "model"):
        folders = [each for folder in folders for each in listed(folder, report)]
    return folders


def read_manifest(path: Path, *, own: bool = False) -> Manifest:
    """Read a manifest's file. Raises LibraryError."""
    remedy = _OWN_REMEDY if own else _FOREIGN_REMEDY
    return parse_manifest(read_bounded(path, MAX_MANIFEST_BYTES, remedy), str(path), remedy, own=own)


def read_bounded(path: Path, most: int, remedy: str) -> bytes:
    """The content of a store's file. Raises LibraryError, with the remedy, if it is longer or cannot be read."""
    try:
        data = read_file(path, most + 1)
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. {remedy}") from error
    if len(data) > most:
        raise LibraryError(f"{path}: has more than {most} bytes. {remedy}")
    return data


def _layer(item: dict[str, Any]) -> Layer:
    size = item["size"]
    if type(size) is not int or not 0 <= size <= MAX_LAYER_BYTES:
        raise LibraryError(f"a layer's size is {str(size)[:40]!r}")
    return Layer(item["mediaType"].removeprefix(_LAYER_TYPE), check_digest(item["digest"]), size)
