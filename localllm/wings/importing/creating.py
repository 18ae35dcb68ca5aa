"""What `localllm create` does: reads a Modelfile, converts and quantises what it names, and stores the model."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gguf_io import open_model
from localllm.errors import RequestError
from localllm.files import read_text, user_path
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, note
from localllm.library.create import create
from localllm.library.entry import LibraryModel
from localllm.library.lookup import is_path
from localllm.library.modelfile import Modelfile, parse_modelfile
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore
from localllm.library.places import Places, own_store
from localllm.settings import load_settings
from localllm.wings.importing.adapters import convert_adapter
from localllm.wings.importing.convert import imported_model
from localllm.wings.lab.quality.quantize import quantized_model

_USUAL_FILE = Path("Modelfile")


def create_model(name: str, file: Path | None, source: str | None, kind: str | None, adapters: Sequence[str]) -> None:
    """Create a model in localllm's store. The arguments are those of the command."""
    settings = load_settings({})
    target = ModelName.parse(name)
    recipe = Modelfile()
    if file is not None or source is None:
        file = file or _USUAL_FILE
        recipe = parse_modelfile(read_text(file, pipes=True), source)
        recipe.adapters = [_beside(file, adapter) for adapter in recipe.adapters]
    base = source if source is not None else _beside(file or _USUAL_FILE, recipe.source)
    store = OwnStore(own_store(settings))
    recipe.adapters += adapters
    model = _base(store, base, kind, settings)
    with tempfile.TemporaryDirectory(prefix="localllm-") as made:
        recipe.adapters = [_adapter_file(path, model, Path(made)) for path in recipe.adapters]
        create(store, target, recipe, model)
    note(f'{target} is here. Try: localllm run {target} "Hello"')


def _base(store: OwnStore, source: str, kind: str | None, where: Places) -> LibraryModel:
    """The model for a source: imported from safetensors, or found or pulled; quantised if kind is given."""
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


def _adapter_file(path: str, model: LibraryModel, made: Path) -> str:
    """The GGUF file of an adapter: converted to a new file in the folder `made`, if it is a folder."""
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
