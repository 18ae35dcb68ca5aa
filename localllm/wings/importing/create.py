"""localllm create: creates a model from a Modelfile, or from a folder of safetensors."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.files import read_text, user_path
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, note
from localllm.library.names import ModelName
from localllm.settings import load_settings

if TYPE_CHECKING:
    from localllm.library.entry import LibraryModel
    from localllm.library.own_store import OwnStore
    from localllm.library.places import Places

_USUAL_FILE = Path("Modelfile")


def create(
    name: Annotated[str, typer.Argument(help="The new model's name.", show_default=False)],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile; by default ./Modelfile.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="A folder of safetensors, or any model; replaces FROM."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--quantize", "-q", metavar="TYPE", help="Quantise to this type: Q8_0, Q4_K_M, ...")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="PATH", help="Add a LoRA adapter: a GGUF file or PEFT's folder; repeatable."),
    ] = None,
) -> None:
    """Create a model from another one. With your own system text, parameters, template, messages, adapters.

    FROM takes a name, a path or a URL; a missing model is pulled. Weights are not copied. FROM and --from also take a
    folder of safetensors with config.json and tokenizer.json, as on Hugging Face, and convert it to a GGUF file in the
    store. With --from no Modelfile is needed.
    """
    from localllm.library.create import create as create_model
    from localllm.library.modelfile import Modelfile, parse_modelfile
    from localllm.library.own_store import OwnStore
    from localllm.library.places import own_store

    settings = load_settings({})
    target = ModelName.parse(name)
    recipe = Modelfile()
    if file is not None or source is None:
        file = file or _USUAL_FILE
        recipe = parse_modelfile(read_text(file, pipes=True), source)
        recipe.adapters = [_beside(file, adapter) for adapter in recipe.adapters]
    base = source if source is not None else _beside(file or _USUAL_FILE, recipe.source)
    store = OwnStore(own_store(settings))
    recipe.adapters += adapter or []
    model = _base(store, base, kind, settings)
    with tempfile.TemporaryDirectory(prefix="localllm-") as made:
        recipe.adapters = [_adapter_file(path, model, Path(made)) for path in recipe.adapters]
        create_model(store, target, recipe, model)
    note(f'{target} is here. Try: localllm run {target} "Hello"')


def _base(store: "OwnStore", source: str, kind: str | None, where: "Places") -> "LibraryModel":
    """The model for a source: imported from safetensors, or found or pulled; quantised if kind is given."""
    from localllm.library.lookup import is_path
    from localllm.wings.importing.convert import imported_model
    from localllm.wings.lab.quality.quantize import quantized_model

    folder = user_path(source)
    imports = os.path.isfile(folder / "config.json")
    if not imports and is_path(source) and os.path.isdir(folder):
        raise RequestError(
            f"{folder} has no config.json, so it is not a folder of safetensors as Hugging Face has them. Name the "
            "folder that has it, or a .gguf file."
        )
    base = None if imports else obtain(source, where)
    with StatusLine() as status:
        if base is None:
            return imported_model(store, folder, kind, status.share, note)
        return base if kind is None else quantized_model(store, base, kind, status.share)


def _adapter_file(path: str, model: "LibraryModel", made: Path) -> str:
    """The GGUF file of an adapter: converted to a new file in the folder `made`, if it is a folder."""
    from gguf_io import open_model
    from localllm.wings.importing.adapters import convert_adapter

    folder = user_path(path)
    if not os.path.isdir(folder):
        return path
    target = made / f"{len(os.listdir(made))}.gguf"
    with open_model(model.path) as file:
        convert_adapter(folder, target, file)
    return str(target)


def _beside(file: Path, source: str) -> str:
    """Resolve a path in a Modelfile, which is relative to it; a source that is not a path is returned unchanged."""
    beside = file.parent / user_path(source)
    folder = any(os.path.isfile(beside / name) for name in ("config.json", "adapter_config.json"))
    return str(beside) if os.path.isfile(beside) or folder else source
