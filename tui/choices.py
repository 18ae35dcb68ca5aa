"""The models that the picker offers: local ones, files next to the current one, suggestions to pull."""

import os
from pathlib import Path

from localllm.choices import described, suggested
from localllm.files import listed, user_path
from localllm.library.entry import LibraryModel, Source
from localllm.library.listing import Listed
from localllm.library.lookup import all_models, is_path
from localllm.library.names import is_gguf
from localllm.library.suggestions import Suggestion
from localllm.settings import Settings
from localllm.text import human_count
from tui.backend import PickerRow


def model_choices(settings: Settings, loaded: Path | None, near: str | None) -> list[PickerRow]:
    """The choices: local models first, then suggestions to pull, the best that fits first.

    loaded: the file of the current model; near: its name, loaded or not. Expected speeds are given only if `localllm
    bench` has measured this machine. Skips files that cannot be read.
    """
    found = list(all_models(settings))
    beside = loaded or (user_path(near) if near and is_path(near) else None)
    if beside is not None:
        paths = {os.path.realpath(model.path) for model in found}
        files = [path for path in listed(beside.parent) if is_gguf(path.name) and os.path.realpath(path) not in paths]
        found += [LibraryModel((str(path),), Source.FOLDER, path) for path in files]
    rows = zip(found, described(found, settings.threads, settings.mmproj), strict=True)
    here = [_here(row, model.path == loaded) for model, row in rows if row.problem is None]
    return here + [to_pull(suggestion, speed) for suggestion, speed in suggested(found, settings.threads)]


def _here(row: Listed, loaded: bool) -> PickerRow:
    return PickerRow(
        name=row.name,
        size=row.size,
        quantization=row.quantization or "",
        parameters="" if row.parameters is None else human_count(row.parameters),
        context=row.context,
        memory=row.memory,
        loaded=loaded,
        source=row.source,
        suits="small stories, help with localllm" if row.source == Source.BUILT_IN else "",
        speed=row.speed,
    )


def to_pull(suggestion: Suggestion, speed: float | None = None) -> PickerRow:
    """A suggestion as the picker shows it. speed: expected on this machine."""
    return PickerRow(
        name=suggestion.name,
        size=suggestion.size,
        quantization=suggestion.quantization,
        context=suggestion.context,
        memory=suggestion.memory,
        here=False,
        suits=suggestion.suits,
        licence=suggestion.licence,
        speed=speed,
    )
