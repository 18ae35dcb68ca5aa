"""The models that the picker offers: local ones, files next to the current one, suggestions to pull."""

import os
from collections.abc import Callable
from pathlib import Path

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from localllm.errors import LocalLLMError
from localllm.files import listed, user_path
from localllm.library.entry import LibraryModel, Source
from localllm.library.lookup import all_models, is_path
from localllm.library.names import is_gguf, plain
from localllm.library.suggestions import CHAT_TOKENS, Suggestion, ranked
from localllm.library.summary import summarize
from localllm.placement.backends import loaded_projector
from localllm.placement.memory import conversation_bytes
from localllm.roofline.expected import expect_decode, expected_decode
from localllm.roofline.kept import KeptLimits, kept_limits
from localllm.settings import Settings
from localllm.text import human_count
from tui.backend import ModelChoice


def model_choices(settings: Settings, loaded: Path | None, near: str | None) -> list[ModelChoice]:
    """The choices: local models first, then suggestions to pull, the best that fits first.

    loaded: the file of the current model; near: its name, loaded or not. Expected speeds are given only if `localllm
    bench` has measured this machine. Skips files that cannot be read.
    """
    found = list(all_models(settings))
    names = {plain(name) for model in found for name in model.names}
    beside = loaded or (user_path(near) if near and is_path(near) else None)
    if beside is not None:
        paths = {os.path.realpath(model.path) for model in found}
        files = [path for path in listed(beside.parent) if is_gguf(path.name) and os.path.realpath(path) not in paths]
        found += [LibraryModel((str(path),), Source.FOLDER, path) for path in files]
    speed, kept = expect_decode(settings.threads), kept_limits(settings.threads)
    choices = [choice for model in found if (choice := _choice(model, settings, loaded, speed))]
    missing = [suggestion for suggestion in ranked(available_memory()) if plain(suggestion.name) not in names]
    return choices + [to_pull(suggestion, kept) for suggestion in missing]


def _choice(
    model: LibraryModel, settings: Settings, loaded: Path | None, speed: Callable[[ModelFile], float | None]
) -> ModelChoice | None:
    try:
        with open_model(model.path) as file:
            summary = summarize(file)
            tokens = min(summary.context or 0, CHAT_TOKENS)
            memory, _ = conversation_bytes(file, tokens, loaded_projector(file, settings, model.projectors()))
            expected = speed(file)
    except LocalLLMError:
        return None
    return ModelChoice(
        name=model.name,
        size=summary.file_bytes,
        quantization=summary.quantization,
        parameters=human_count(summary.parameters),
        context=summary.context,
        memory=memory,
        loaded=model.path == loaded,
        source=model.source,
        suits="small stories, help with localllm" if model.source is Source.BUILT_IN else "",
        speed=expected,
    )


def to_pull(suggestion: Suggestion, kept: KeptLimits | None = None) -> ModelChoice:
    """A suggestion as the picker shows it. kept: the measured limits of this machine."""
    return ModelChoice(
        name=suggestion.name,
        size=suggestion.size,
        quantization=suggestion.quantization,
        context=suggestion.context,
        memory=suggestion.memory,
        here=False,
        suits=suggestion.suits,
        licence=suggestion.licence,
        speed=expected_decode(suggestion.read, suggestion.main_type, kept)[0] if kept else None,
    )
