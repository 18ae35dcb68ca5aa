"""localllm rm, cp: what is done with the models of our own store."""

from typing import Annotated

import typer

from localllm.cli.options import Debug
from localllm.cli.terminal import human_bytes, note


def remove(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Models of our own.")] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Remove what interrupted pulls left.")] = False,
    debug: Debug = False,
) -> None:
    """Remove models from our own store. Other programs' models are never touched."""
    from localllm.errors import RequestError
    from localllm.library.names import ModelName
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store
    from localllm.settings import load_settings

    if not names and not unfinished:
        raise RequestError("Say which model to remove; `localllm list` shows them, with their source.")
    store = OwnStore(own_store(load_settings({})))
    for name in names or ():
        freed = store.remove(ModelName.parse(name))
        note(f"{name} is removed, {human_bytes(freed)} are free.")
    if unfinished:
        note(f"{human_bytes(store.remove_unfinished())} are free.")


def copy(
    source: Annotated[str, typer.Argument(help="A model of our own.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Its second name.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Give one of our own models a second name; no file is copied."""
    from localllm.library.names import ModelName
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store
    from localllm.settings import load_settings

    OwnStore(own_store(load_settings({}))).copy(ModelName.parse(source), ModelName.parse(target))
    note(f"{target} is here.")
