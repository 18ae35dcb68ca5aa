"""Models under manifests: Ollama's store and ours, which has the same layout.

    manifests/<host>/<namespace>/<model>/<tag>    a manifest
    blobs/sha256-<64 hex digits>                  a layer

A manifest that is damaged, or whose blobs are missing, does not hide other models; a warning is logged.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gguf_io.system import open_regular
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError, unreadable_folder, warn_once
from localllm.library.manifest import KINDS, blob_files, manifest_files, read_manifest
from localllm.library.names import ModelName, host_of


class UnusableError(LibraryError):
    """A stored model that cannot be used. name: from its manifest's path."""

    def __init__(self, name: str, source: Source, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.source = source


def stored_models(
    root: Path, source: Source, report: Callable[[UnusableError], None] = lambda error: warn_once(str(error))
) -> Iterator[LibraryModel]:
    """All usable models of a store, by name. report is called for each of the others."""
    manifests = root / "manifests"
    for path in manifest_files(manifests, unreadable_folder):
        host, namespace, model, tag = path.relative_to(manifests).parts
        try:
            name = ModelName.from_folders(host, namespace, model, tag)
            manifest = read_manifest(path, own=source is Source.OWN)
        except LibraryError as error:
            report(UnusableError(f"{host_of(host)}/{namespace}/{model}:{tag}", source, str(error)))
            continue
        blobs, layers = root / "blobs", manifest.of_kind("model")
        if manifest.link is None and not layers:
            continue  # a model that runs only on its vendor's servers
        files = [blobs / name for name in blob_files(layers)] if manifest.link is None else []
        if missing := [path for path in files if not os.path.isfile(path)]:  # or in a folder that cannot be read
            remedy = f"`localllm verify {name} --repair`" if source is Source.OWN else f"`ollama pull {name}`"
            message = f"{name}: {missing[0]} is gone or cannot be read. {remedy} pulls it again."
            report(UnusableError(str(name), source, message))
            continue
        titled = [] if manifest.title is None else [f"{name.host}/{name.repository}:{manifest.title}"]
        yield LibraryModel((str(name), name.key, *titled), source, manifest.link or files[0], manifest, blobs)


def damaged_blobs(model: LibraryModel, progress: Callable[[float], None]) -> list[Path]:
    """Blobs of a model that are missing or do not match their digest. progress: receives the share read."""
    if model.manifest is None or model.blobs is None:
        return []
    layers = [layer for layer in model.manifest.layers if layer.kind in KINDS]
    checked = [(model.blobs / name, layer) for name, layer in zip(blob_files(layers), layers, strict=True)]
    total = sum(layer.size for _, layer in checked) or 1
    read, damaged = 0, []
    for path, layer in checked:
        digest = hashlib.sha256()
        try:
            with open(open_regular(path), "rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    read += len(piece)
                    progress(min(read / total, 1.0))
        except OSError:
            damaged.append(path)
            continue
        if f"sha256:{digest.hexdigest()}" != layer.digest:
            damaged.append(path)
    return damaged
