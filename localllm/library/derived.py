"""Weights of our own store that are made of others: parts put together, matrices in another format."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gguf_io import open_model
from localllm.files import sync_folder
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError
from localllm.library.manifest import Layer, Manifest, blob_name, model_file_names
from localllm.library.own_store import ELSEWHERE, OwnStore, free_bytes

# Told what is being done and which share of it is done, 0 to 1.
Progress = Callable[[str, float], None]

_READ_BYTES = 1 << 20


def uploaded_model(store: OwnStore, layers: Sequence[Layer]) -> LibraryModel:
    """The model of uploaded blobs, which are its parts in order. Raises ModelFileError where they are no model."""
    names = model_file_names(layers)
    if len(layers) > 1:
        for layer, name in zip(layers, names, strict=True):
            _second_name(store.blobs / blob_name(layer.digest), store.blobs / name)
        sync_folder(store.blobs)
    path = store.blobs / names[0]
    with open_model(path):
        pass
    return LibraryModel((layers[0].digest,), Source.OWN, path, Manifest(tuple(layers)), blobs=store.blobs)


def quantized_model(store: OwnStore, base: LibraryModel, kind: str, progress: Progress) -> LibraryModel:
    """The same model with its weights in another format, stored as a blob of ours.

    Raises RequestError for a format that does not exist or weights that are quantised already, LibraryError where the
    disk is too full, LlamaCppMissingError where llama.cpp is needed; and what progress raises, which stops the work.
    """
    from localllm.quality.quantize import quantize

    with open_model(base.path) as file:
        size = file.size_bytes
    if (free := free_bytes(store.root)) < size:
        raise LibraryError(
            f"Quantising {base.name} may take {size >> 20} MiB, and {free >> 20} MiB of the disk are free. "
            f"Remove a model. {ELSEWHERE}"
        )
    store.prepare()
    made = store.temporary(".gguf")
    try:
        quantize(base.path, made, kind, progress)
        layer = Layer("model", _digest(made), made.stat().st_size)
        made.replace(store.blobs / blob_name(layer.digest))
    finally:
        made.unlink(missing_ok=True)
    sync_folder(store.blobs)
    rest = () if base.manifest is None else tuple(one for one in base.manifest.layers if one.kind != "model")
    path = store.blobs / blob_name(layer.digest)
    manifest = Manifest((layer, *rest), projector_link=base.manifest.projector_link if base.manifest else None)
    return LibraryModel(base.names, Source.OWN, path, manifest, blobs=base.blobs or store.blobs)


def _second_name(blob: Path, name: Path) -> None:
    """Give a part the name by which its first part's loader looks for it."""
    if name.is_file():
        return
    try:
        os.link(blob, name)
    except OSError:  # a file system without links
        shutil.copyfile(blob, name)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return f"sha256:{digest.hexdigest()}"
