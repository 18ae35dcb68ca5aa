"""What `localllm verify` does: compares stored models with their SHA-256, and pulls damaged ones again."""

from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from gguf_io import open_model
from localllm.front.pulling import with_progress
from localllm.front.terminal import ExitCode, StatusLine, fail, note, warn
from localllm.library.entry import Source
from localllm.library.errors import LibraryError
from localllm.library.lookup import find, wanted_names
from localllm.library.names import plain
from localllm.library.places import Places, ollama_stores, own_store
from localllm.library.pull import pull
from localllm.library.stores import UnusableError, damaged_blobs, stored_models
from localllm.settings import load_settings
from localllm.text import counted


def verify_models(names: Sequence[str], repair: bool) -> None:
    """Verify the named models, or all. Raises typer.Exit if one stays damaged."""
    settings = load_settings({})
    stores = [(own_store(settings), Source.OWN), *((store, Source.OLLAMA) for store in ollama_stores())]
    unusable: list[UnusableError] = []
    models = [model for root, source in stores for model in stored_models(root, source, unusable.append)]
    if names:
        known = {plain(name) for model in models for name in model.names} | {plain(error.name) for error in unusable}
        for name in names:
            if known.isdisjoint(wanted_names(name)):
                with open_model(find(name, settings).path):
                    pass  # raises for what is no model, or is cut
                warn(
                    f"{name} is not verified beyond its header: there is no SHA-256 for models outside localllm's and "
                    "Ollama's stores."
                )
        wanted = {each for name in names for each in wanted_names(name)}
        models = [model for model in models if not wanted.isdisjoint(map(plain, model.names))]
        unusable = [error for error in unusable if plain(error.name) in wanted]
    damaged_models = 0
    for error in unusable:
        warn(str(error))
        damaged_models += not (repair and error.source is Source.OWN and _repaired(error.name, settings, ()))
    for model in models:
        with StatusLine() as status:
            damaged = damaged_blobs(model, lambda share, of=model: status.share(f"reading {of.name}", share))  # type: ignore[misc]
        if damaged:
            warn(f"{model.name} is damaged: {', '.join(map(str, damaged))}")
            damaged_models += not (repair and model.source is Source.OWN and _repaired(model.name, settings, damaged))
    count = len(models) + len(unusable)
    if damaged_models:
        note(f"{damaged_models} of {counted(count, 'model')} damaged.")
        raise typer.Exit(ExitCode.REFUSED)
    note(f"{counted(count, 'model')} verified." if count or names else "There are no stored models to verify.")


def _repaired(name: str, where: Places, damaged: Collection[Path]) -> bool:
    """Pull a model's damaged files again; on failure, report it and return False."""
    try:
        with_progress(name, lambda progress: pull(name, where, progress, damaged))
    except LibraryError as error:
        fail(str(error), error)
        return False
    return True
