"""Finds the model on this machine for a name. docs/models.md describes the order."""

import os
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from localllm.files import user_path
from localllm.library import folders, places
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.names import (
    BUILT_IN,
    DEFAULT_TAG,
    HUGGING_FACE_HOST,
    ModelName,
    canonical_host,
    preference,
    quantization_of,
)
from localllm.library.stores import stored_models
from localllm.settings import Settings
from localllm.text import nearest, shortened

BUILT_IN_NAMES = (BUILT_IN, f"{BUILT_IN}:{DEFAULT_TAG}")


def all_models(settings: Settings) -> Iterator[LibraryModel]:
    """Every model on this machine, in lookup order."""
    yield built_in_model()
    yield from users_models(settings)


def built_in_model() -> LibraryModel:
    """The demonstration model that comes with localllm."""
    from models import builtin

    return LibraryModel(BUILT_IN_NAMES, Source.BUILT_IN, builtin.path())


def users_models(settings: Settings) -> Iterator[LibraryModel]:
    """Every model on this machine except the built-in one, in lookup order."""
    yield from stored_models(places.own_store(settings), Source.OWN)
    for store in places.ollama_stores():
        yield from stored_models(store, Source.OLLAMA)
    yield from folders.hugging_face_models(places.hugging_face_hub())
    for folder in places.lm_studio_models():
        yield from folders.lm_studio_models(folder)
    yield from folders.llama_cpp_models(places.llama_cpp_cache())
    for folder in places.configured_folders(settings):
        yield from folders.folder_models(folder)


def find(name: str, settings: Settings) -> LibraryModel:
    """The model for a path, a URL that was pulled, or a name.

    Uses no network. Raises ModelNotFoundError, and LibraryError for an invalid name.
    """
    if is_path(name):
        return LibraryModel((name,), Source.PATH, user_path(name))
    wanted = wanted_names(name)
    models = []  # those before the one that is wanted; further stores are not looked through
    for model in all_models(settings):
        if not wanted.isdisjoint(known.lower() for known in model.names):
            return model
        models.append(model)
    if (untagged := _untagged_repository(name)) is not None and (chosen := _preferred(untagged, models)) is not None:
        return chosen
    raise _not_found(name, models)


def is_path(name: str) -> bool:
    """Whether a name is a path: it looks like one, or such a file exists."""
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf") or os.path.isfile(name)


def wanted_names(name: str) -> set[str]:
    """The lower-case names of the model that this name means, any of which identifies it."""
    if "://" in name:
        return {str(name_of_url(name)).lower(), name_of_url(name).key}
    wanted = {name.lower()}
    parsed = _parsed(name)
    return wanted if parsed is None else wanted | {parsed.key, str(parsed).lower()}


def stored_name(text: str) -> ModelName:
    """The name in our store for a model's name or address, stored or not. Raises LibraryError."""
    return name_of_url(text) if "://" in text else ModelName.parse(text)


def name_of_url(url: str) -> ModelName:
    """The name under which the file of a URL is stored: hf.co/user/repo:<tag> for Hugging Face, else host/web/<file>.

    Raises LibraryError for a URL that is not http(s) to a .gguf file.
    """
    try:
        url.encode()
        parts = urlsplit(url)
    except ValueError as error:  # UnicodeEncodeError among them
        raise LibraryError(f"{shortened(url)!r} is not a valid address: {error}.") from error
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    if parts.scheme not in ("http", "https") or not parts.hostname or not segments:
        raise LibraryError(f"{shortened(url)!r} is not the address of a model: give http(s)://host/.../file.gguf.")
    if canonical_host(parts.hostname) == HUGGING_FACE_HOST and segments[0] != "api" and len(segments) >= 2:
        file = segments[-1] if len(segments) > 4 and segments[-1].endswith(".gguf") else ""
        stem = file.removesuffix(".gguf")
        return ModelName(segments[1], stem or DEFAULT_TAG, segments[0], HUGGING_FACE_HOST)
    if not segments[-1].endswith(".gguf"):
        raise LibraryError(f"{shortened(url)!r} is not the address of a .gguf file.")
    return ModelName(segments[-1].removesuffix(".gguf"), DEFAULT_TAG, "web", parts.netloc.rpartition("@")[2])


def _parsed(name: str) -> ModelName | None:
    """None if it is not a registry name, such as a file name with a space: it may still be in a folder."""
    try:
        return ModelName.parse(name)
    except LibraryError:
        return None


def _untagged_repository(name: str) -> str | None:
    """The common prefix of a repository's model names, for a name without a quantisation; else None."""
    parsed = name_of_url(name) if "://" in name else _parsed(name)
    if parsed is None or parsed.tag != DEFAULT_TAG or "/" not in name:
        return None
    return f"{parsed.host}/{parsed.repository}:".lower() if parsed.host == HUGGING_FACE_HOST else f"{name.lower()}:"


def _preferred(repository: str, models: list[LibraryModel]) -> LibraryModel | None:
    """Of a repository's models, the one that a pull would choose."""
    of_it = [
        model
        for model in models
        if model.source is not Source.OLLAMA and any(known.lower().startswith(repository) for known in model.names)
    ]
    return min(of_it, key=lambda model: preference(quantization_of(model.name.rpartition(":")[2])), default=None)


def _not_found(name: str, models: list[LibraryModel]) -> ModelNotFoundError:
    near = nearest(name.lower(), (model.name for model in models))
    hint = f" (did you mean {near}?)" if near else ""
    advice = "`localllm list` shows the ones there are"
    if os.path.isdir(name):
        advice = f"There is a folder of that name: choose a .gguf file in it; {advice}"
    elif "://" in name or _parsed(name) is not None:
        advice += f", `localllm pull {shortened(name)}` gets it"
    return ModelNotFoundError(f"There is no model {shortened(name)!r} on this machine{hint}", f"{advice}.")
