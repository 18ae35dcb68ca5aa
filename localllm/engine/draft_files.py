"""What the draft setting names: a small model that guesses tokens beside the large one, or a head of the large one."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from gguf_io import ModelFile, open_model
from localllm.engine.projectors import WITHOUT
from localllm.errors import RequestError
from localllm.settings import Settings


@contextlib.contextmanager
def draft_beside(settings: Settings) -> Iterator[ModelFile | None]:
    """The file of the model that is to draft, if any, so that its memory is planned too. Raises what resolve raises."""
    with _named(settings) as file:
        yield None if file is None or is_head(file) else file


@contextlib.contextmanager
def native_drafts(settings: Settings) -> Iterator[bool | ModelFile]:
    """What the native engine loads with a model to draft: the head that is named, or the model's own layers if it may.

    Raises what resolve raises.
    """
    with _named(settings) as file:
        yield file if file is not None and is_head(file) else settings.self_draft and file is None


def is_head(file: ModelFile) -> bool:
    """Whether a file has no model but a head that drafts for one."""
    from models.eagle_head import EAGLE

    return file.architecture == EAGLE


def for_draft(settings: Settings) -> Settings:
    """The same settings for a second, small model, to which wishes about devices, adapters and types do not belong."""
    plain = replace(settings, gpu_layers=None, main_gpu=None, split_mode=None, n_cpu_moe=None, lora="", rpc="")
    return replace(plain, draft=None, self_draft=False, kv_type_k=None, kv_type_v=None, mmproj=WITHOUT)


def refuse_as_model(file: ModelFile) -> None:
    """Raise RequestError for a head, which computes nothing alone."""
    if is_head(file):
        raise RequestError(
            f"{file.path.name} is an EAGLE-3 head, which only drafts for the model that it was made for. "
            f"Name that model, and this file with --draft."
        )


def refuse_head_on_llama(settings: Settings, reason: str) -> None:
    """Raise RequestError where the settings name a head. reason: why llama.cpp computes the model."""
    with native_drafts(settings) as drafts:
        if isinstance(drafts, ModelFile):
            raise RequestError(
                f"{drafts.path.name} is an EAGLE-3 head, which drafts on the native engine only, and llama.cpp would "
                f"compute this model ({reason}). Leave out --draft, or choose --backend native."
            )


@contextlib.contextmanager
def _named(settings: Settings) -> Iterator[ModelFile | None]:
    """The file that the setting names, None without one."""
    from localllm.library import resolve

    if settings.draft is None:
        yield None
        return
    with open_model(resolve(settings.draft)) as file:
        yield file
