"""Models under manifests: Ollama's store and ours, which has the same layout.

    manifests/<host>/<namespace>/<model>/<tag>    a manifest
    blobs/sha256-<64 hex digits>                  a layer

A manifest that is damaged or whose blobs are gone hides nobody else's; it is told of in the log.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError
from localllm.library.manifest import Manifest, blob_name, model_file_names, read_manifest
from localllm.library.names import ModelName
from localllm.library.notices import warn_once

SMALL_KINDS = ("template", "system", "params", "messages", "license", "adapter", "projector")


def stored_models(root: Path, source: Source) -> Iterator[LibraryModel]:
    """All models of a store, by name."""
    manifests = root / "manifests"
    for path in sorted(_files(manifests)):
        try:
            name = ModelName(*_reordered(path.relative_to(manifests).parts))
            manifest = read_manifest(path, own=source is Source.OWN)
            file = model_path(root / "blobs", manifest)
        except LibraryError as error:
            warn_once(str(error))
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
    return files[0] if all(map(os.path.isfile, files)) else None  # where we may not look, too


def damaged_blobs(model: LibraryModel, progress: Callable[[float], None]) -> list[Path]:
    """Blobs of a model whose content is not what their digests say, or that are gone. progress: the share read."""
    if model.manifest is None or model.blobs is None:
        return []
    models = model.manifest.of_kind("model")
    names = model_file_names(models) if models else []
    others = [layer for layer in model.manifest.layers if layer.kind in SMALL_KINDS]
    checked = [*zip(names, models, strict=True), *((blob_name(layer.digest), layer) for layer in others)]
    total = sum(layer.size for _, layer in checked) or 1
    read, damaged = 0, []
    for name, layer in checked:
        digest = hashlib.sha256()
        try:
            with (model.blobs / name).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    read += len(piece)
                    progress(min(read / total, 1.0))
        except OSError:
            damaged.append(model.blobs / name)
            continue
        if f"sha256:{digest.hexdigest()}" != layer.digest:
            damaged.append(model.blobs / name)
    return damaged


def _files(manifests: Path) -> Iterator[Path]:
    """Files four folders deep; links to folders are not followed."""
    for folder, _, names in os.walk(manifests):
        base = Path(folder)
        if len(base.relative_to(manifests).parts) == 3:
            yield from (base / name for name in names if not name.startswith("."))


def _reordered(parts: tuple[str, ...]) -> tuple[str, str, str, str]:
    host, namespace, model, tag = parts
    return model, tag, namespace, host
