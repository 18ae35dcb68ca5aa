"""Creates a model of the user's own: from a recipe, without copying the weights, or from uploaded files."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gguf_io import ModelFile, open_model
from gguf_io.lora import Adapter
from gguf_io.system import read_file, sync_folder
from localllm.files import file_problem
from localllm.library.behaviour import own_template
from localllm.library.entry import PULL_AGAIN, LibraryModel, ManifestDefaults, Source
from localllm.library.errors import LibraryError
from localllm.library.go_templates import jinja_of
from localllm.library.manifest import (
    MAX_LAYERS,
    MAX_TEXT_BYTES,
    Layer,
    Manifest,
    blob_files,
    blob_name,
)
from localllm.library.modelfile import Modelfile, checked_parameters
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore

MAX_LICENSES = 32


def create(store: OwnStore, name: ModelName, recipe: Modelfile, base: LibraryModel) -> None:
    """Write a model that is `base` with the recipe's changes.

    Weights in our store are shared with the base; others stay where they are and are linked to. Raises LibraryError
    for an invalid recipe, and ModelFileError if the base is not a model.
    """
    with open_model(base.path) as file:
        adapters = [_adapter(Path(path), file) for path in recipe.adapters]
    defaults = base.defaults()
    template = defaults.template
    if recipe.template is not None:
        jinja_of(recipe.template, own_template(base))
        template = recipe.template
    try:
        kept = [read_file(path) for path in defaults.adapters]
    except OSError as error:
        raise LibraryError(f"{error.filename}: cannot be read: {error.strerror}. {PULL_AGAIN}") from error
    projectors, projector_link = _projectors(store, base)
    stored = base.manifest if base.source is Source.OWN else None
    weights = [*(stored.of_kind("model") if stored else []), *projectors]
    link = stored.link if stored else base.path.absolute()
    blobs = [*(("adapter", content) for content in (*kept, *adapters)), *_texts(recipe, defaults, template)]
    if len(weights) + len(blobs) > MAX_LAYERS:
        raise LibraryError(f"{name} would have {len(weights) + len(blobs)} layers, more than {MAX_LAYERS}.")
    store.prepare()
    layers = [*weights, *(store.add_blob(kind, content) for kind, content in blobs)]
    if not store.add_manifest(name, Manifest(tuple(layers), link, projector_link)):
        raise LibraryError(f"{base.name} was removed while {name} was made from it. Pull it again.")


def uploaded_model(store: OwnStore, layers: Sequence[Layer]) -> LibraryModel:
    """The model of uploaded blobs, which are its parts in order. Raises ModelFileError if they are not a model."""
    names = blob_files(layers)
    if len(layers) > 1:
        for layer, name in zip(layers, names, strict=True):
            _name_part(store, store.blobs / blob_name(layer.digest), store.blobs / name)
        sync_folder(store.blobs)
    path = store.blobs / names[0]
    with open_model(path):
        pass
    return LibraryModel((layers[0].digest,), Source.OWN, path, Manifest(tuple(layers)), blobs=store.blobs)


def _name_part(store: OwnStore, blob: Path, name: Path) -> None:
    """Give a part the name under which the loader of a split model looks for it."""
    if os.path.isfile(name):
        return
    try:
        os.link(blob, name)
    except OSError:  # a file system without links
        copy = store.temporary()
        try:
            shutil.copyfile(blob, copy)
            copy.replace(name)
        finally:
            copy.unlink(missing_ok=True)


def _projectors(store: OwnStore, base: LibraryModel) -> tuple[list[Layer], Path | None]:
    """The base's projectors: their layers if they are in our store, else the file to link to.

    Without a manifest, a projector beside the linked model file is found there.
    """
    if base.manifest is not None and base.blobs == store.blobs and (found := base.manifest.of_kind("projector")):
        return found, None
    return [], next(iter(base.projectors()), None)


def _adapter(path: Path, model: ModelFile) -> bytes:
    """The content of a LoRA adapter for a model. Raises LocalLLMError."""
    if problem := file_problem(path):
        raise LibraryError(f"ADAPTER {path}: {problem}.")
    with open_model(path) as file:
        Adapter(file, model)
    return read_file(path)


def _texts(recipe: Modelfile, base: ManifestDefaults, template: str | None) -> list[tuple[str, bytes]]:
    """The text layers with their kinds: the recipe's, else the base's; licences of both.

    Raises LibraryError for anything that ManifestDefaults would not accept when it is read back.
    """
    system = base.system if recipe.system is None else recipe.system
    parameters = checked_parameters(base.parameters | recipe.parameters)
    messages = recipe.messages or list(base.messages)
    licenses = dict.fromkeys([*base.licenses, *recipe.licenses])
    if len(licenses) > MAX_LICENSES:
        raise LibraryError(f"There are {len(licenses)} licences, more than {MAX_LICENSES}. Join them into one.")
    texts = [
        *([("template", template)] if template is not None else []),
        *([("system", system)] if system else []),
        *([("params", json.dumps(parameters))] if parameters else []),
        *([("messages", json.dumps(messages, ensure_ascii=False))] if messages else []),
        *(("license", text) for text in licenses),
    ]
    layers = []
    for kind, text in texts:
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise LibraryError(f"The {kind} is not valid Unicode text (character {error.start}).") from error
        if len(content) > MAX_TEXT_BYTES:
            raise LibraryError(f"The {kind} has {len(content)} bytes, more than {MAX_TEXT_BYTES}. Shorten it.")
        layers.append((kind, content))
    return layers
