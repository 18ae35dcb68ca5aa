"""Models of the Hugging Face hub: which files a repository has, and which of them make up the wanted quantisation.

GET /api/models/<repository>?blobs=true lists files with size and SHA-256; GET /<repository>/resolve/<revision>/<file>
returns a file. HF_ENDPOINT names a mirror. The token of HF_TOKEN or `hf auth login` goes to that host only.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx2

from localllm.library.errors import LibraryError, PullError
from localllm.library.folders import is_model_name
from localllm.library.manifest import MAX_LAYER_BYTES, blob_name, check_digest
from localllm.library.names import (
    DEFAULT_TAG,
    ModelName,
    is_gguf,
    is_projector_name,
    preference,
    quantization_of,
    without_part,
    without_suffix,
)
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.web import Remote, get_small

MAX_LISTING_BYTES = 16 << 20
_PARTS = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_REVISION = re.compile(r"[0-9a-f]+")
# Image encoders are small and lose quality when quantised; F32 doubles the size for no gain.
_PROJECTORS = ("F16", "BF16", "Q8_0", "F32")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. path: inside it, with slashes; size: bytes."""

    path: str
    size: int
    digest: str

    @property
    def stem(self) -> str:
        """The file's name without folder, part number and .gguf."""
        return without_part(without_suffix(PurePosixPath(self.path).name))

    @property
    def label(self) -> str:
        """The quantisation in the file's name, or its folder's; "" for none."""
        return quantization_of(self.stem) or quantization_of(PurePosixPath(self.path).parent.name)


def endpoint() -> str:
    """Address of the hub or its mirror."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def plan(client: httpx2.Client, name: ModelName) -> PullPlan:
    """Choose the files of the tag: a quantisation, a file's name without .gguf, or `latest` for the preferred one.

    Raises PullError listing what is available.
    """
    repository = _Repository(client, name)
    return repository.plan(choose(repository.files, name))


def every_plan(client: httpx2.Client, name: ModelName) -> list[PullPlan]:
    """All models of a repository, whatever the tag, smallest first; models with missing parts are left out.

    Raises PullError if there is none.
    """
    repository = _Repository(client, name)
    models = [parts for parts in _models(repository.files, name) if not _missing_parts(parts)]
    return [repository.plan(parts) for parts in sorted(models, key=lambda parts: sum(part.size for part in parts))]


class _Repository:
    """The files of a repository, from its listing."""

    def __init__(self, client: httpx2.Client, name: ModelName) -> None:
        from huggingface_hub import get_token

        self._name, self._token, self._base = name, get_token(), endpoint()
        url = f"{self._base}/api/models/{name.repository}?blobs=true"
        remote = Remote(url, self._token)
        listing = get_small(client, remote, {}, f"the repository {name.repository}", MAX_LISTING_BYTES)
        self._revision, self.files = parse_listing(listing, url)

    def plan(self, parts: list[HubFile]) -> PullPlan:
        """The plan for a model of these parts and its projector."""
        stem, label = parts[0].stem, parts[0].label
        same = {file.stem for file in self.files if file.label == label and is_model_name(f"{file.stem}.gguf")}
        wanted = [("model", file) for file in parts]
        wanted += [("projector", file) for file in projectors(self.files, parts[0])[:1]]
        repository = self._name.repository
        return PullPlan(
            self._name.tagged(label if label and same == {stem} else stem),
            tuple(
                RemoteFile(
                    kind=kind,
                    remote=Remote(
                        f"{self._base}/{repository}/resolve/{self._revision}/{quote(file.path)}", self._token
                    ),
                    size=file.size,
                    what=f"{repository}/{file.path}",
                    key=blob_name(file.digest),
                    digest=file.digest,
                )
                for kind, file in wanted
            ),
            title=stem,
        )


def parse_listing(data: bytes, where: str) -> tuple[str, list[HubFile]]:
    """Revision and GGUF model files of a repository's listing. Raises PullError."""
    try:
        content = json.loads(data)
        revision = content["sha"]
        if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
            raise LibraryError(f"its revision is {str(revision)[:60]!r}")
        items = [item for item in content["siblings"] if is_gguf(str(item["rfilename"]))]
        files = [_hub_file(item) for item in items if item.get("lfs")]  # small files have no SHA-256
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LibraryError) as error:
        raise PullError(f"{where}: the list of files cannot be read: {error}.") from error
    return revision, files


def choose(files: list[HubFile], name: ModelName) -> list[HubFile]:
    """The files of one model, in order of their parts. Raises PullError."""
    models = _models(files, name)
    wanted = name.tag.lower()
    matching = [
        parts
        for parts in models
        if name.tag == DEFAULT_TAG or wanted in (parts[0].stem.lower(), parts[0].label.lower())
    ]
    if not matching:
        there = ", ".join(sorted({parts[0].label or parts[0].stem for parts in models}))
        raise PullError(f"{name.repository} has no {name.tag}. It has: {there}.")
    best = min(matching, key=lambda parts: (preference(parts[0].label), sum(file.size for file in parts)))
    if missing := _missing_parts(best):
        raise PullError(f"{name.repository} has {len(best)} of the {missing} parts of {best[0].stem}.")
    return best


def _models(files: list[HubFile], name: ModelName) -> list[list[HubFile]]:
    """The files of each model, in order of their parts. Raises PullError if there is no model."""
    models: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if is_model_name(f"{file.stem}.gguf"):
            models.setdefault(f"{PurePosixPath(file.path).parent}/{file.stem}", []).append(file)
    if not models:
        raise PullError(f"{name.repository} has no GGUF files. Look for a repository whose name ends with -GGUF.")
    return list(models.values())


def _missing_parts(parts: list[HubFile]) -> int:
    """How many parts a model should have if some are missing, else 0."""
    match = _PARTS.search(parts[0].path)
    return int(match[1]) if match is not None and int(match[1]) != len(parts) else 0


def projectors(files: list[HubFile], model: HubFile) -> list[HubFile]:
    """The projectors for a model, best first: those in its folder, else those of the whole repository."""
    every = [file for file in files if is_projector_name(PurePosixPath(file.path).name)]
    beside = [file for file in every if PurePosixPath(file.path).parent == PurePosixPath(model.path).parent]
    return sorted(beside or every, key=lambda file: (preference(file.label, _PROJECTORS), file.size, file.path))


def _hub_file(item: dict[str, Any]) -> HubFile:
    path = str(item["rfilename"])
    path.encode()  # raises for lone surrogates, which JSON allows and addresses do not
    stored = item["lfs"]
    size = stored["size"]
    if type(size) is not int or not 0 < size <= MAX_LAYER_BYTES:
        raise LibraryError(f"the size of {path[:200]!r} is {str(size)[:40]!r}")
    return HubFile(path, size, check_digest(f"sha256:{stored['sha256']}"))
