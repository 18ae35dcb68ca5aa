"""Files that accompany a model: the settings' draft model or head, LoRA adapters, an image projector."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from gguf_io.lora import Adapter
from localllm.errors import RequestError
from localllm.files import file_problem, listed, user_path
from localllm.library import resolve
from localllm.library.names import is_gguf, is_projector_name
from localllm.settings import Settings, parse_lora
from models.eagle_head import EAGLE

log = logging.getLogger(__name__)

WITHOUT = "none"  # value of the setting mmproj: no projector, even if the model's folder has one


@contextlib.contextmanager
def draft_file(name: str | None) -> Iterator[ModelFile | None]:
    """Open the file that the setting draft names, a small draft model or a head of the large one; None for no name.

    Raises what resolve and open_model raise.
    """
    if name is None:
        yield None
        return
    with open_model(resolve(name)) as file:
        yield file


def is_head(file: ModelFile) -> bool:
    """Whether a file is a head that drafts for a model, and no model itself."""
    return file.architecture == EAGLE


def native_drafts(settings: Settings, draft: ModelFile | None) -> bool | ModelFile:
    """What the native engine loads with a model to draft: the head, or whether to load the model's own drafting layers.

    draft: from draft_file.
    """
    return draft if draft is not None and is_head(draft) else settings.self_draft and settings.draft is None


def for_draft(settings: Settings) -> Settings:
    """The settings for a draft model: without those about devices, adapters, KV types and drafting."""
    plain = replace(settings, gpu_layers=None, main_gpu=None, split_mode=None, n_cpu_moe=None, lora="", rpc="")
    return replace(plain, draft=None, self_draft=False, kv_type_k=None, kv_type_v=None, mmproj=WITHOUT)


def refuse_as_model(file: ModelFile) -> None:
    """Raise RequestError for a head, which cannot be used alone."""
    if is_head(file):
        raise RequestError(
            f"{file.path.name} is an EAGLE-3 head, which only drafts for the model that it was made for.",
            remedy="Name that model, and this file with --draft.",
        )


def refuse_head_on_llama(draft: ModelFile | None, reason: str) -> None:
    """Raise RequestError if `draft` is a head. reason: why llama.cpp computes the model."""
    if draft is not None and is_head(draft):
        raise RequestError(
            f"{draft.path.name} is an EAGLE-3 head, which drafts on the native engine only, and llama.cpp would "
            f"compute this model ({reason}).",
            remedy="Leave out --draft, or choose --backend native.",
        )


def usual_adapters(lora: str) -> list[tuple[Path, float]]:
    """The adapter files of the setting lora and their weights. Raises RequestError for a missing file."""
    found = parse_lora(lora) if lora else []
    for path, _ in found:
        if problem := file_problem(path):
            raise RequestError(f"{path}: adapter not found: {problem}.", remedy="Check the lora setting, --lora.")
    return found


def lora_of_encoder(lora: str, model: ModelFile) -> str:
    """The setting lora for an embedding model or reranker: "" if one of the adapters is for another architecture.

    A server's adapters may be for its generating models.
    """
    for path, _ in usual_adapters(lora):
        with open_model(path) as file:
            if file.architecture != model.architecture:
                return ""
    return lora


@contextlib.contextmanager
def open_adapters(lora: str, model: ModelFile) -> Iterator[list[Adapter]]:
    """Open the adapters of the setting lora for a model. Raises ModelFileError for one that is not for this model."""
    with contextlib.ExitStack() as opened:
        yield [Adapter(opened.enter_context(open_model(path)), model) for path, _ in usual_adapters(lora)]


def projector_of(file: ModelFile, mmproj: str | None) -> Path | None:
    """The model's image projector: the named one, else the only one in its folder; None if the setting leaves it out.

    A projector in the model's folder has mmproj in its name and the width of the model's embeddings. Raises
    RequestError if the named one is missing.
    """
    if mmproj == WITHOUT:
        return None
    if mmproj:
        path = user_path(mmproj)
        if problem := file_problem(path):
            raise RequestError(
                f"{path}: projector not found: {problem}.", remedy="Check the mmproj setting or --mmproj."
            )
        return path
    beside = (path for path in listed(file.path.parent) if is_gguf(path.name) and is_projector_name(path.name))
    found = [path for path in beside if _fits(path, file)]
    if len(found) > 1:
        log.warning("%s: its folder has several projectors; choose one with --mmproj", file.path.name)
    return found[0] if len(found) == 1 else None


def _fits(path: Path, model: ModelFile) -> bool:
    """Whether a file is an encoder of images or sound whose last layers have the width of the model's embeddings."""
    width = model.metadata.get_int(f"{model.architecture}.embedding_length", 0)
    try:
        with open_model(path) as file:
            kinds = [file.metadata.get_bool(f"clip.has_{each}_encoder", False) for each in ("vision", "audio")]
            # Gemma 3's projection alone is stored with a row for each input.
            outputs = -1 if "mm.soft_emb_norm.weight" in file.tensors else 0
            projection = [tensor.shape for name, tensor in file.tensors.items() if not name.startswith(("v.", "a."))]
            makes = {shape[outputs] for shape in projection if len(shape) > 1}
            return file.architecture == "clip" and any(kinds) and width in makes
    except ModelFileError as error:
        log.warning("%s is not used: %s", path, error)
        return False
