"""The models that requests may name, and what their files contain. A request never names a path."""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf_io import ModelFile, load_chat_template, load_tokenizer, open_model
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from gguf_io.pooling import is_reranker
from localllm.answer.local import can_think
from localllm.errors import LocalLLMError
from localllm.library import errors as library_errors
from localllm.library.behaviour import Behaviour, behaviour_of
from localllm.library.entry import LibraryModel, Source
from localllm.library.listing import file_type
from localllm.library.lookup import all_models, find, named
from localllm.library.names import ModelName, without_suffix
from localllm.library.places import Places
from localllm.library.summary import FileSummary, summarize
from localllm.placement.companions import projector_of
from localllm.server.errors import AdapterNotFoundError, ApiError, ModelNotFoundError
from localllm.server.limits import MAX_NAME_CHARS
from localllm.server.served import ServedDetails, ServedRow
from localllm.settings import Settings, parse_lora
from localllm.text import human_count
from models.vision.config import sound_kind
from models.vision.gemma4ua import KIND

log = logging.getLogger(__name__)
_BLOB = re.compile(r"sha256[-:][0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that requests can name. behaviour: what its manifest adds to requests.

    adapter: the name of the LoRA adapter that its answers are computed with, if the request named one.
    """

    name: str
    model: LibraryModel
    behaviour: Behaviour = field(default_factory=Behaviour)
    adapter: str = ""

    @property
    def path(self) -> Path:
        return self.model.path


@dataclass(frozen=True, slots=True)
class HeaderFacts:
    """Facts from a file's header. digest: 64 hex digits that identify the content.

    quantization: the name of `general.file_type`, or else of the block format that most bytes are in. only: the one
    thing that a model without a language head can do, "reranking" or "embedding"; None for one that generates.
    """

    summary: FileSummary
    digest: str
    quantization: str
    only: str | None


class Catalog:
    """The models named when the server started, and those of this machine's library.

    Its methods read folders: call them off the event loop.
    """

    def __init__(self, served: Sequence[str], settings: Settings) -> None:
        """served: names or paths. Raises the library's ModelNotFoundError, ModelFileError for an unreadable file."""
        self.settings = settings
        self._served = [_served(name, settings) for name in served]

    def entries(self) -> list[CatalogEntry]:
        """All models with readable files, including those defined by manifests; those named at startup come first."""
        models = all_models(self.settings, self._served)
        return [_listed(model) for model in models if _is_model(model.path)]

    def names(self) -> list[str]:
        """The names of all models, with those whose files cannot be read now."""
        return [model.name for model in all_models(self.settings, self._served)]

    def find(self, name: str) -> CatalogEntry:
        """Find a model by name; ":latest" is optional, and ":ADAPTER" may follow, the name of one of its adapters.

        Raises ApiError: 400 for an invalid name, 404 if missing.
        """
        if not name or len(name) > MAX_NAME_CHARS or "://" in name:
            parse_name(name)
        try:
            return _entry(named(name, self.settings, self._served))
        except library_errors.ModelNotFoundError:
            base, _, adapter = name.rpartition(":")
            with suppress(library_errors.ModelNotFoundError, library_errors.LibraryError):
                entry = _entry(named(base, self.settings, self._served))
                found = adapters_of(entry, self.settings.lora)
                for number, (known, weight) in enumerate(found):
                    if known == adapter:
                        behaviour = replace(entry.behaviour, adapters=((number, weight or 1.0),))
                        return replace(entry, behaviour=behaviour, adapter=adapter)
                if found:
                    names = ", ".join(known for known, _ in found)
                    raise AdapterNotFoundError(name, f'"{base}" has no adapter "{adapter}"; it has {names}') from None
            parse_name(name)
            raise ModelNotFoundError(name) from None


def parse_name(name: str) -> ModelName:
    """Parse a model's name. Raises ApiError 400."""
    try:
        if len(name) <= MAX_NAME_CHARS:
            return ModelName.parse(name)
    except library_errors.LibraryError:
        pass
    raise ApiError(400, "model is required" if not name else "invalid model name")


def with_files(settings: Settings, entry: CatalogEntry) -> Settings:
    """The settings, with the adapters and the projector from the model's manifest where the settings name none."""
    if lora := entry.behaviour.settings.get("lora"):
        settings = replace(settings, lora=settings.lora or str(lora))
    if mmproj := entry.behaviour.settings.get("mmproj"):
        settings = replace(settings, mmproj=settings.mmproj or str(mmproj))
    return settings


def adapters_of(entry: CatalogEntry, lora: str) -> list[tuple[str, float]]:
    """The names of a model's LoRA adapters, by number, and their usual weights. lora: the setting.

    A name is that of the file without its suffix, or for a blob of a manifest, adapter-NUMBER.
    """
    lora = lora or str(entry.behaviour.settings.get("lora") or "")
    files = enumerate(parse_lora(lora) if lora else [])
    return [
        (f"adapter-{number}" if _BLOB.fullmatch(path.name) else without_suffix(path.name), weight)
        for number, (path, weight) in files
    ]


def facts_of(path: Path) -> HeaderFacts:
    """Read a file's header; cached until the file changes. Raises ModelFileError."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}. Check the path.") from error
    return _facts(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _facts(path: Path, _changed: int, _size: int) -> HeaderFacts:
    with open_model(path) as file:
        summary = summarize(file)
        return HeaderFacts(summary, file.identity(), file_type(file) or summary.quantization, _only(file))


def _served(name: str, where: Places) -> LibraryModel:
    """A model that the server was started with, under the name that was given, or its file's."""
    model = find(name, where)
    facts_of(model.path)  # fail at the start rather than at the first request
    shown = without_suffix(model.path.name) if model.source is Source.PATH else name
    return replace(model, names=(shown,))


def _listed(model: LibraryModel) -> CatalogEntry:
    """An entry, even if the manifest cannot be read: a request for the model reports the error."""
    try:
        return _entry(model)
    except library_errors.LibraryError:
        pass
    except Exception:
        log.exception("%s: reading its manifest failed", model.name)
    return CatalogEntry(model.name, model)


def _entry(model: LibraryModel) -> CatalogEntry:
    return CatalogEntry(model.name, model, behaviour_of(model))


def _is_model(path: Path) -> bool:
    """Whether the file's header can be read. Lists omit files for which it cannot."""
    try:
        facts_of(path)
    except (OSError, LocalLLMError):
        return False
    except Exception:
        log.exception("%s: reading its header failed", path)
        return False
    return True


def _moment(seconds: float) -> str:
    """A time since 1970 in ISO 8601; a file's may lie beyond the calendar, which ends with the year 9999."""
    latest = datetime.max.replace(microsecond=0, tzinfo=UTC)
    time = datetime.fromtimestamp(seconds, UTC) if 0 <= seconds < latest.timestamp() else latest
    return time.isoformat().replace("+00:00", "Z")


def about(entry: CatalogEntry, lora: str) -> ServedRow:
    """A model's row in lists. lora: the setting. Raises ModelFileError or another file error."""
    facts, status = facts_of(entry.path), entry.path.stat()
    return ServedRow(
        name=f"{entry.name}:{entry.adapter}" if entry.adapter else entry.name,
        parent=entry.name if entry.adapter else "",
        adapters=() if entry.adapter else tuple(name for name, _ in adapters_of(entry, lora)),
        created=int(status.st_mtime),
        modified=_moment(status.st_mtime),
        digest=facts.digest,
        size=facts.summary.file_bytes,
        family=facts.summary.architecture,
        parameters=human_count(facts.summary.parameters).replace(" ", ""),
        quantization=facts.quantization,
        context=facts.summary.context or 0,
        width=facts.summary.width or 0,
    )


def capabilities(entry: CatalogEntry, mmproj: str | None, backend: str) -> list[str]:
    """What a model can do: completion, embedding or reranking; and tools, thinking, insert, vision, audio.

    mmproj, backend: the settings. From its file and its template; cached until the file changes. Raises ModelFileError
    or another file error.
    """
    found = _capabilities(entry.path, entry.path.stat().st_mtime_ns, entry.behaviour.template)
    projector = projector_for(entry, mmproj) if "completion" in found else None
    return [*found, *(_senses(projector, projector.stat().st_mtime_ns, backend) if projector else [])]


@lru_cache(maxsize=256)
def _senses(projector: Path, _changed: int, backend: str) -> list[str]:
    """What a model perceives with a projector; the native engine, which has the choice, knows one encoder of sound."""
    with open_model(projector) as file:
        kind, sees = sound_kind(file), file.metadata.get_bool("clip.has_vision_encoder", False)
    hears = kind and (kind == KIND or backend == "llama" or not sees)
    return [*(["vision"] if sees else []), *(["audio"] if hears else [])]


def projector_for(entry: CatalogEntry, mmproj: str | None) -> Path | None:
    """The file of a model's image projector, None without one. mmproj: the setting.

    Raises RequestError if the named file is missing.
    """
    path = entry.path
    changed = path.stat().st_mtime_ns, path.parent.stat().st_mtime_ns
    own = entry.behaviour.settings.get("mmproj")
    return _projector(path, changed, mmproj or (str(own) if own else None))


def describe(entry: CatalogEntry, settings: Settings, verbose: bool) -> ServedDetails:
    """Describe a model. verbose adds arrays, such as the vocabulary, and tensors.

    Raises ModelFileError or another file error, LibraryError.
    """
    projector = projector_for(entry, settings.mmproj)
    return ServedDetails(
        about=about(entry, settings.lora),
        capabilities=capabilities(entry, settings.mmproj, settings.backend),
        template=entry.behaviour.template or facts_of(entry.path).summary.chat_template or "",
        behaviour=entry.behaviour,
        defaults=entry.model.defaults(),
        info=_info(entry.path, verbose),
        projector_info=_info(projector, False) if projector else None,
        tensors=_tensors(entry.path) if verbose else None,
    )


def _info(path: Path, verbose: bool) -> dict[str, Any]:
    """The file's metadata. Arrays are None unless verbose."""
    with open_model(path) as file:
        return {
            **{key: _json(value, verbose) for key, value in file.metadata.items() if key != "tokenizer.chat_template"},
            "general.parameter_count": file.parameter_count,
        }


def _tensors(path: Path) -> list[dict[str, Any]]:
    """Every tensor's name, type and shape, innermost dimension first, as in the file."""
    with open_model(path) as file:
        return [
            {"name": name, "type": tensor.type.name, "shape": list(reversed(tensor.shape))}
            for name, tensor in file.tensors.items()
        ]


def _only(file: ModelFile) -> str | None:
    if is_reranker(file):
        return "reranking"
    return "embedding" if f"{file.architecture}.pooling_type" in file.metadata else None  # no other model has this key


def _json(value: Any, verbose: bool) -> Any:
    if isinstance(value, MetadataArray):
        return [_json(item, verbose) for item in value] if verbose else None
    if isinstance(value, float) and not abs(value) < float("inf"):  # JSON has neither infinity nor NaN
        return str(value)
    return value


@lru_cache(maxsize=256)
def _capabilities(path: Path, _changed: int, template_source: str | None) -> tuple[str, ...]:
    if only := facts_of(path).only:
        return (only,)
    with open_model(path) as file:
        template, tokenizer = load_chat_template(file, template_source), load_tokenizer(file)
        found = {
            "completion": True,
            "tools": template.supports_tools,
            "thinking": can_think(template),
            "insert": None not in (tokenizer.fim_prefix_id, tokenizer.fim_suffix_id, tokenizer.fim_middle_id),
        }
    return tuple(name for name, has in found.items() if has)


@lru_cache(maxsize=256)
def _projector(path: Path, _changed: tuple[int, int], mmproj: str | None) -> Path | None:
    with open_model(path) as file:
        return projector_of(file, mmproj)
