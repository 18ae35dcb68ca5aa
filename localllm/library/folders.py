"""Models stored as plain GGUF files: the Hugging Face cache, LM Studio's and llama.cpp's folders, configured ones."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from localllm.files import listed
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import unreadable_folder
from localllm.library.names import is_gguf, is_projector_name, quantization_of, without_part, without_suffix

MAX_DEPTH = 6
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def hugging_face_models(hub: Path) -> Iterator[LibraryModel]:
    """models--<user>--<repo>/snapshots/<revision>/<file>; the newest revision of each file wins."""
    for repository in listed(hub, unreadable_folder):
        kind, _, name = repository.name.partition("--")
        if kind != "models" or "--" not in name:
            continue
        user, _, repo = name.partition("--")
        snapshots = sorted(listed(repository / "snapshots", unreadable_folder), key=_changed, reverse=True)
        files: dict[str, Path] = {}
        for snapshot in snapshots:
            for file in gguf_files(snapshot):
                files.setdefault(str(file.relative_to(snapshot)), file)
        yield from _of_repository(files, (f"hf.co/{user}/{repo}",), Source.HUGGING_FACE)


def lm_studio_models(root: Path) -> Iterator[LibraryModel]:
    """<publisher>/<repo>/<file>, where publisher and repo are Hugging Face's."""
    for publisher in listed(root, unreadable_folder):
        for repository in listed(publisher, unreadable_folder):
            files = {str(file.relative_to(repository)): file for file in gguf_files(repository)}
            repo = f"{publisher.name}/{repository.name}"
            yield from _of_repository(files, (repo, f"hf.co/{repo}"), Source.LM_STUDIO)


def llama_cpp_models(cache: Path) -> Iterator[LibraryModel]:
    """<user>_<repo>_<file>, told apart by the manifest=<user>=<repo>=<tag>.json beside them."""
    repositories = [path.name.split("=")[1:3] for path in listed(cache, unreadable_folder) if path.name.count("=") == 3]
    for file in gguf_files(cache, depth=1):
        for user, repo in repositories:
            prefix = f"{user}_{repo}_"
            if file.name.startswith(prefix):
                plain = file.name.removeprefix(prefix)
                yield from _of_repository({plain: file}, (f"hf.co/{user}/{repo}",), Source.LLAMA_CPP)
                break
        else:
            yield LibraryModel((without_part(without_suffix(file.name)),), Source.LLAMA_CPP, file)


def folder_models(folder: Path) -> Iterator[LibraryModel]:
    """Every GGUF file below a folder, under its name without .gguf, also with the folders that it is in."""
    for file in gguf_files(folder):
        stem, inside = without_part(without_suffix(file.name)), file.relative_to(folder).parent
        names = stem, (inside / stem).as_posix(), file.name, (inside / file.name).as_posix()
        yield LibraryModel(tuple(dict.fromkeys(names)), Source.FOLDER, file)


def gguf_files(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Model files below a folder, sorted: the first part of split models, no projectors (mmproj), nothing hidden."""
    for path in listed(folder, unreadable_folder):
        if os.path.isdir(path):
            if depth > 1 and not path.is_symlink():
                yield from gguf_files(path, depth - 1)
        elif is_gguf(path.name) and not path.name.startswith(".") and is_model_name(path.name) and os.path.isfile(path):
            yield path


def is_model_name(name: str) -> bool:
    """Whether a file of this name is a model or its first part, not a projector for images or sound."""
    return not _LATER_PART.search(name) and not is_projector_name(name)


def _of_repository(files: Mapping[str, Path], repositories: Sequence[str], source: Source) -> Iterator[LibraryModel]:
    """Name a repository's files by quantisation, or by their whole names where that is ambiguous.

    files: by their paths in the repository. repositories: its names, the display name first. The quantisation is in a
    file's name, or in its folder's.
    """
    places = [(Path(name), path) for name, path in sorted(files.items())]
    named = [(without_part(without_suffix(place.name)), place.parent.name, path) for place, path in places]
    labels = [quantization_of(stem) or quantization_of(folder) for stem, folder, _ in named]
    for (stem, _, path), label in zip(named, labels, strict=True):
        tag = label if label and labels.count(label) == 1 else stem
        names = [f"{base}:{end}" for end in (tag, stem) for base in repositories]
        yield LibraryModel(tuple(dict.fromkeys([*names, stem])), source, path)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
