"""Models of the Hugging Face hub: which files a repository has, and which of them make up the wanted quantisation.

GET /api/models/<repository>?blobs=true lists files with size and SHA-256; GET /<repository>/resolve/<revision>/<file>
is a file. HF_ENDPOINT names a mirror, and gets the token of HF_TOKEN or `hf auth login`; nobody else does.
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
from localllm.library.folders import is_model_name, is_projector_name
from localllm.library.manifest import MAX_LAYER_BYTES, blob_name, check_digest
from localllm.library.names import DEFAULT_TAG, ModelName, preference, quantization_of, without_part
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.web import Remote, get_small

MAX_LISTING_BYTES = 16 << 20
_PARTS = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_REVISION_CHARS = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. path: inside it, with slashes; size: bytes."""

    path: str
    size: int
    digest: str

    @property
    def stem(self) -> str:
        """The file's name without folder, part number and .gguf."""
        return without_part(PurePosixPath(self.path).name.removesuffix(".gguf"))

    @property
    def label(self) -> str:
        """The quantisation that the file's name tells of, or its folder's; "" for none."""
        return quantization_of(self.stem) or quantization_of(PurePosixPath(self.path).parent.name) or ""


def endpoint() -> str:
    """Address of the hub or its mirror."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def plan(client: httpx2.Client, name: ModelName) -> PullPlan:
    """Choose the files of the tag, a quantisation or a file's name without .gguf; of `latest`, a good one.

    Raises PullError, which lists what there is.
    """
    from huggingface_hub import get_token

    token, base = get_token(), endpoint()
    url = f"{base}/api/models/{name.repository}?blobs=true"
    listing = get_small(client, Remote(url, token), {}, f"the repository {name.repository}", MAX_LISTING_BYTES)
    revision, files = parse_listing(listing, url)
    chosen = choose(files, name)
    stem, label = chosen[0].stem, chosen[0].label
    alone = {file.stem for file in files if file.label == label and is_model_name(f"{file.stem}.gguf")} == {stem}
    wanted = [("model", file) for file in chosen] + [("projector", file) for file in projectors(files, chosen[0])[:1]]
    return PullPlan(
        name.tagged(label if label and alone else stem),
        tuple(
            RemoteFile(
                kind=kind,
                remote=Remote(f"{base}/{name.repository}/resolve/{revision}/{quote(file.path)}", token),
                size=file.size,
                what=f"{name.repository}/{file.path}",
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
        if not isinstance(revision, str) or not revision or not _REVISION_CHARS.issuperset(revision):
            raise LibraryError(f"its revision is {str(revision)[:60]!r}")
        items = [item for item in content["siblings"] if str(item["rfilename"]).endswith(".gguf")]
        files = [_hub_file(item) for item in items if item.get("lfs")]  # small files tell no SHA-256
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LibraryError) as error:
        raise PullError(f"{where}: the list of files cannot be read: {error}.") from error
    return revision, files


def choose(files: list[HubFile], name: ModelName) -> list[HubFile]:
    """The files of one model, in order of their parts. Raises PullError."""
    models: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if is_model_name(f"{file.stem}.gguf"):
            models.setdefault(f"{PurePosixPath(file.path).parent}/{file.stem}", []).append(file)
    if not models:
        raise PullError(f"{name.repository} has no GGUF files. Look for a repository whose name ends with -GGUF.")
    wanted = name.tag.lower()
    matching = [
        parts
        for parts in models.values()
        if name.tag == DEFAULT_TAG or wanted in (parts[0].stem.lower(), parts[0].label.lower())
    ]
    if not matching:
        there = ", ".join(sorted({parts[0].label or parts[0].stem for parts in models.values()}))
        raise PullError(f"{name.repository} has no {name.tag}. It has: {there}.")
    best = min(matching, key=lambda parts: (preference(parts[0].label), sum(file.size for file in parts)))
    told = _PARTS.search(best[0].path)
    if told is not None and int(told[1]) != len(best):
        raise PullError(f"{name.repository} has {len(best)} of the {int(told[1])} parts of {best[0].stem}.")
    return best


def projectors(files: list[HubFile], model: HubFile) -> list[HubFile]:
    """What shows images to a model, the best first: those in its folder, else those of the whole repository."""
    every = [file for file in files if is_projector_name(PurePosixPath(file.path).name)]
    beside = [file for file in every if PurePosixPath(file.path).parent == PurePosixPath(model.path).parent]
    return sorted(beside or every, key=lambda file: (_projector_rank(file.label), file.size, file.path))


def _projector_rank(label: str) -> int:
    """Encoders of images are small and lose by quantising; F32 is twice the size for nothing."""
    ranks = ("F16", "BF16", "Q8_0", "F32")
    return ranks.index(label) if label in ranks else len(ranks)


def _hub_file(item: dict[str, Any]) -> HubFile:
    path = str(item["rfilename"])
    path.encode()  # lone surrogates, which JSON can hold, are in no address
    stored = item["lfs"]
    size = stored["size"]
    if type(size) is not int or not 0 < size <= MAX_LAYER_BYTES:
        raise LibraryError(f"the size of {path[:200]!r} is {str(size)[:40]!r}")
    return HubFile(path, size, check_digest(f"sha256:{stored['sha256']}"))
