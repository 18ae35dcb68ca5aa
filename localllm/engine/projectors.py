"""Finding a model's image projector: the one that is named, else the only one in the model's folder."""

import logging
from pathlib import Path

from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from localllm.errors import RequestError
from localllm.settings import Settings

log = logging.getLogger(__name__)

WITHOUT = "none"


def projector_of(file: ModelFile, settings: Settings) -> Path | None:
    """The file of the model's projector; None if there is none or the settings leave it out.

    In the model's folder it has mmproj in its name and the width of the model's embeddings. Raises RequestError if the
    named one is missing.
    """
    if settings.mmproj == WITHOUT:
        return None
    if settings.mmproj:
        path = Path(settings.mmproj).expanduser()
        if not path.is_file():
            raise RequestError(f"{path}: projector not found. Check the mmproj setting or --mmproj.")
        return path
    found = [path for path in sorted(file.path.parent.glob("*mmproj*.gguf")) if _fits(path, file)]
    if len(found) > 1:
        log.warning("%s: its folder has several projectors; choose one with --mmproj", file.path.name)
    return found[0] if len(found) == 1 else None


def _fits(path: Path, model: ModelFile) -> bool:
    """Whether a file is an image encoder whose last layers have the width of the model's embeddings."""
    width = model.metadata.get_int(f"{model.architecture}.embedding_length", 0)
    try:
        with open_model(path) as file:
            sees = file.architecture == "clip" and file.metadata.get_bool("clip.has_vision_encoder", False)
            projection = [tensor for name, tensor in file.tensors.items() if not name.startswith("v.")]
            return sees and any(width in tensor.shape for tensor in projection)
    except ModelFileError as error:
        log.warning("%s is not used: %s", path, error)
        return False
