"""Finds the model on this machine for a name. docs/models.md describes the order."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
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
    is_gguf,
    looks_like_path,
    plain,
    preference,
    quantization_of,
    without_suffix,
)
from localllm.library.stores import stored_models
from localllm.text import nearest, shortened
from models import builtin


def all_models(where: places.Places, first: Iterable[LibraryModel] = ()) -> Iterator[LibraryModel]:
    """The models to list: `first`, the built-in one, those on this machine. Each is found by the name that it has here.

    The names of earlier models are taken: a stored model whose names are all taken is left out; a file gets the first
    of its names that is free, or a number as its tag. A file that two folders lead to is listed once.
    """
    return (model for model, is_listed in _looked_up(where, first) if is_listed)


def built_in_model() -> LibraryModel:
    """The demonstration model that comes with localllm."""
    return LibraryModel((BUILT_IN,), Source.BUILT_IN, builtin.path())


def users_models(where: places.Places) -> Iterator[LibraryModel]:
    """The models to list without the built-in one, in lookup order."""
    return (model for model in all_models(where) if model.source is not Source.BUILT_IN)


def find(name: str, where: places.Places) -> LibraryModel:
    """The model for a path, a URL that was pulled, or a name.

    Uses no network. Raises ModelNotFoundError, and LibraryError for an invalid name.
    """
    is_one = is_path(name)
    if not is_one or not os.path.exists(user_path(name)):
        try:
            return named(name, where)
        except ModelNotFoundError:
            if not is_one:
                raise
    return LibraryModel((name,), Source.PATH, user_path(name))


def named(name: str, where: places.Places, first: Iterable[LibraryModel] = ()) -> LibraryModel:
    """The model with a name or the URL that was pulled, never that of a path. first: see all_models. Raises as find."""
    wanted = wanted_names(name)
    models = []  # those before the one that is wanted; further stores are not looked through
    for model, _ in _looked_up(where, first):
        if not wanted.isdisjoint(map(plain, model.names)):
            return model
        models.append(model)
    if (untagged := _untagged_repository(name)) is not None and (chosen := _preferred(untagged, models)) is not None:
        return chosen
    raise _not_found(name, models)


def _looked_up(where: places.Places, first: Iterable[LibraryModel]) -> Iterator[tuple[LibraryModel, bool]]:
    """All models with the names of all_models, and whether all_models has them."""
    taken: set[str] = set()
    files: dict[str, set[str]] = {}  # the names of each by its real path
    for model in chain(first, _everywhere(where)):
        names = [name for name in model.names if wanted_names(name).isdisjoint(taken)]
        is_repeated = False
        if model.manifest is None:
            same = files.setdefault(os.path.realpath(model.path), set())
            is_repeated = not same.isdisjoint(model.names)
            same.update(model.names)
            if not names or is_gguf(names[0]):  # a name with .gguf could be that of a file in the current folder
                numbered = (f"{model.name}:{tag}" for tag in count(2))
                names = [next(name for name in numbered if wanted_names(name).isdisjoint(taken)), *names]
        yield replace(model, names=tuple(names) or model.names), bool(names) and not is_repeated
        taken.update(map(plain, names))


def _everywhere(where: places.Places) -> Iterator[LibraryModel]:
    """Every model on this machine with its own names, in lookup order."""
    yield built_in_model()
    yield from stored_models(places.own_store(where), Source.OWN)
    for store in places.ollama_stores():
        yield from stored_models(store, Source.OLLAMA)
    yield from folders.hugging_face_models(places.hugging_face_hub())
    for folder in places.lm_studio_models():
        yield from folders.lm_studio_models(folder)
    yield from folders.llama_cpp_models(places.llama_cpp_cache())
    for folder in places.configured_folders(where):
        yield from folders.folder_models(folder)


def is_path(name: str) -> bool:
    """Whether a name is a path: it looks like one, or such a file exists."""
    if "://" in name:
        return False
    return looks_like_path(name) or is_gguf(name) or os.path.isfile(name)


def wanted_names(name: str) -> set[str]:
    """The names for comparing (see plain) of the model that this name means, any of which identifies it."""
    if "://" in name:
        return {plain(str(name_of_url(name))), plain(name_of_url(name).key)}
    wanted = {plain(name)}
    parsed = _parsed(name)
    return wanted if parsed is None else wanted | {plain(parsed.key), plain(str(parsed))}


def stored_name(text: str) -> ModelName:
    """The name in our store for a model's name or address, stored or not. Raises LibraryError, also for a path."""
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
        file = segments[-1] if len(segments) > 4 and is_gguf(segments[-1]) else ""
        return ModelName(segments[1], without_suffix(file) or DEFAULT_TAG, segments[0], HUGGING_FACE_HOST)
    if not is_gguf(segments[-1]):
        raise LibraryError(f"{shortened(url)!r} is not the address of a .gguf file.")
    return ModelName(without_suffix(segments[-1]), DEFAULT_TAG, "web", parts.netloc.rpartition("@")[2])


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
    return f"{parsed.host}/{parsed.repository}:".lower() if parsed.host == HUGGING_FACE_HOST else f"{plain(name)}:"


def _preferred(repository: str, models: list[LibraryModel]) -> LibraryModel | None:
    """Of a repository's models, the one that a pull would choose."""
    of_it = [
        model
        for model in models
        if model.source is not Source.OLLAMA and any(known.lower().startswith(repository) for known in model.names)
    ]
    return min(of_it, key=lambda model: preference(quantization_of(model.name.rpartition(":")[2])), default=None)


def _not_found(name: str, models: list[LibraryModel]) -> ModelNotFoundError:
    near = nearest(name, (model.name for model in models))
    hint = f" (did you mean {near}?)" if near else ""
    advice = "`localllm list` shows the ones there are"
    if os.path.isdir(name):
        advice = f"There is a folder of that name: choose a .gguf file in it; {advice}"
    elif "://" in name or _parsed(name) is not None:
        advice += f", `localllm pull {shortened(name)}` gets it"
    return ModelNotFoundError(f"There is no model {shortened(name)!r} on this machine{hint}", f"{advice}.")
