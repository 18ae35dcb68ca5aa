"""localllm rm, cp, verify: removes, copies and verifies stored models."""

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import model_names
from localllm.front.pulling import with_progress
from localllm.front.terminal import ExitCode, StatusLine, fail, note, warn
from localllm.library.errors import LibraryError
from localllm.library.names import plain
from localllm.settings import load_settings
from localllm.text import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from localllm.library.places import Places


def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models in localllm's store.", autocompletion=model_names)
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Remove what interrupted pulls left.")] = False,
) -> None:
    """Remove models from localllm's own store. Other programs' models are never changed."""
    from localllm.library.lookup import stored_name
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store

    if not names and not unfinished:
        raise RequestError("Name a model to remove; `localllm list` shows them, with their source.")
    store = OwnStore(own_store(load_settings({})))
    for name in names or ():
        freed = store.remove(stored_name(name))
        note(f"Removed {name}, which frees {human_bytes(freed)}.")
    if unfinished:
        note(f"Removed what interrupted pulls left, which frees {human_bytes(store.remove_unfinished())}.")


def copy(
    source: Annotated[
        str, typer.Argument(help="A model in localllm's store.", show_default=False, autocompletion=model_names)
    ],
    target: Annotated[str, typer.Argument(help="Second name of the model.", show_default=False)],
) -> None:
    """Copy a model under a new name; no data is duplicated."""
    from localllm.library.lookup import stored_name
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store

    OwnStore(own_store(load_settings({}))).copy(stored_name(source), stored_name(target))
    note(f"{target} is here.")


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Models to verify (all stored ones).", autocompletion=model_names),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Pull damaged files again.")] = False,
) -> None:
    """Compare stored models with their SHA-256. Every file is read in full.

    Ollama's models are verified too, but only localllm's own are repaired. A damaged file stays until a new one
    replaces it. Of models elsewhere, only the header is read. Exit status: 2 if a model stays damaged.
    """
    from gguf_io import open_model
    from localllm.library.entry import Source
    from localllm.library.lookup import find, wanted_names
    from localllm.library.places import ollama_stores, own_store
    from localllm.library.stores import UnusableError, damaged_blobs, stored_models

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


def _repaired(name: str, where: "Places", damaged: "Collection[Path]") -> bool:
    """Pull a model's damaged files again; on failure, report it and return False."""
    from localllm.library.pull import pull

    try:
        with_progress(name, lambda progress: pull(name, where, progress, damaged))
    except LibraryError as error:
        fail(str(error), error)
        return False
    return True
