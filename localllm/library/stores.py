"""Models under manifests: Ollama's store and ours, which has the same layout.

    manifests/<host>/<namespace>/<model>/<tag>    a manifest
    blobs/sha256-<64 hex digits>                  a layer

A manifest that is damaged or whose blobs are gone hides nobody else's; it is told of in the log.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError
from localllm.library.manifest import Manifest, model_file_names, read_manifest
from localllm.library.names import ModelName

log = logging.getLogger(__name__)


def stored_models(root: Path, source: Source) -> Iterator[LibraryModel]:
    """All models of a store, by name."""
    manifests = root / "manifests"
    for path in sorted(_files(manifests)):
        try:
            name = ModelName(*_reordered(path.relative_to(manifests).parts))
            manifest = read_manifest(path, own=source is Source.OWN)
            file = model_path(root / "blobs", manifest)
        except LibraryError as error:
            log.warning("%s", error)
            continue
        if file is not None:
            titled = [] if manifest.title is None else [f"{name.host}/{name.repository}:{manifest.title}"]
            yield LibraryModel((str(name), name.key, *titled), source, file, manifest, path, root / "blobs")


def model_path(blobs: Path, manifest: Manifest) -> Path | None:
    """The file of a manifest's model, or its first part; None where it names none that is on this machine."""
    if manifest.link is not None:
        return manifest.link
    layers = manifest.of_kind("model")
    if not layers:
        return None
    files = [blobs / name for name in model_file_names(layers)]
    return files[0] if all(file.is_file() for file in files) else None


def _files(manifests: Path) -> Iterator[Path]:
    """Files four folders deep; links to folders are not followed."""
    for folder, _, names in os.walk(manifests):
        base = Path(folder)
        if len(base.relative_to(manifests).parts) == 3:
            yield from (base / name for name in names if not name.startswith("."))


def _reordered(parts: tuple[str, ...]) -> tuple[str, str, str, str]:
    host, namespace, model, tag = parts
    return model, tag, namespace, host
