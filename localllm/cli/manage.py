"""localllm rm, cp, verify: looking after stored models."""

from typing import Annotated

import typer

from localllm.cli.exit_code import ExitCode
from localllm.cli.options import Debug, model_names
from localllm.cli.terminal import StatusLine, note
from localllm.text import human_bytes


def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models of our own.", autocompletion=model_names)
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Remove what interrupted pulls left.")] = False,
    debug: Debug = False,
) -> None:
    """Remove models from our own store. Other programs' models are never touched."""
    from localllm.errors import RequestError
    from localllm.library.lookup import stored_name
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store
    from localllm.settings import load_settings

    if not names and not unfinished:
        raise RequestError("Say which model to remove; `localllm list` shows them, with their source.")
    store = OwnStore(own_store(load_settings({})))
    for name in names or ():
        freed = store.remove(stored_name(name))
        note(f"{name} is removed, which frees {human_bytes(freed)}.")
    if unfinished:
        note(f"What interrupted pulls left is removed, which frees {human_bytes(store.remove_unfinished())}.")


def copy(
    source: Annotated[str, typer.Argument(help="A model of our own.", show_default=False, autocompletion=model_names)],
    target: Annotated[str, typer.Argument(help="Its second name.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Give one of our own models a second name; no file is copied."""
    from localllm.library.lookup import stored_name
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store
    from localllm.settings import load_settings

    OwnStore(own_store(load_settings({}))).copy(stored_name(source), stored_name(target))
    note(f"{target} is here.")


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="All stored models without.", autocompletion=model_names),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged, and pull it again.")] = False,
    debug: Debug = False,
) -> None:
    """Compare stored models with their SHA-256. They are read in full.

    Ollama's models are checked too, but only our own are repaired. Exits with 2 where something stays damaged.
    """
    from localllm.cli.pull import pull_with_progress
    from localllm.library.entry import Source
    from localllm.library.lookup import all_models, find
    from localllm.library.stores import damaged_blobs
    from localllm.settings import load_settings

    settings = load_settings({})
    models = [find(name, settings) for name in names] if names else list(all_models(settings))
    bad = 0
    for model in models:
        with StatusLine() as status:
            damaged = damaged_blobs(model, lambda share, of=model: status.share(f"reading {of.name}", share))  # type: ignore[misc]
        if not damaged:
            continue
        note(f"{model.name} is damaged: {', '.join(map(str, damaged))}")
        if repair and model.source is Source.OWN:
            for path in damaged:
                path.unlink(missing_ok=True)
            pull_with_progress(model.name, settings)
        else:
            bad += 1
    if bad:
        raise typer.Exit(ExitCode.REFUSED)
    note("All is as it should be.")
