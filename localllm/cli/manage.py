"""localllm rm, cp, verify: removes, copies and verifies stored models."""

from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import model_names
from localllm.front.terminal import note
from localllm.settings import load_settings
from localllm.text import human_bytes


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
    from localllm.cli.verifying import verify_models

    verify_models(names or (), repair)
