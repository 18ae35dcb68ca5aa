"""localllm create: a model of one's own from a Modelfile."""

from pathlib import Path
from typing import Annotated

import typer

from localllm.cli.options import Debug
from localllm.cli.terminal import note
from localllm.files import user_path


def create(
    name: Annotated[str, typer.Argument(help="The new model's name.", show_default=False)],
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile.")] = Path("Modelfile"),
    debug: Debug = False,
) -> None:
    """Make a model of your own from another. With its own system text, parameters, template, messages, adapters.

    FROM takes a name, a path or a URL, and pulls what is not here. The weights are not copied.
    """
    from localllm.cli.prompt import read_text
    from localllm.cli.pull import obtain
    from localllm.library.create import create as create_model
    from localllm.library.modelfile import parse_modelfile
    from localllm.library.names import ModelName
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store
    from localllm.settings import load_settings

    settings = load_settings({})
    target = ModelName.parse(name)
    recipe = parse_modelfile(read_text(file).replace("\r\n", "\n"))
    recipe.adapters = [_beside(file, adapter) for adapter in recipe.adapters]
    create_model(OwnStore(own_store(settings)), target, recipe, obtain(_beside(file, recipe.source), settings))
    note(f'{target} is here. Try: localllm run {target} "Hello"')


def _beside(file: Path, source: str) -> str:
    """A path in a Modelfile is relative to it."""
    beside = file.parent / user_path(source)
    return str(beside) if beside.is_file() else source
