"""What `localllm list` shows of each model: read from headers alone, nothing is loaded."""

from collections.abc import Callable
from dataclasses import dataclass

from gguf_io import open_model
from gguf_io.model_file import ModelFile
from localllm.errors import LocalLLMError
from localllm.library.entry import LibraryModel
from localllm.library.suggestions import CHAT_TOKENS
from localllm.library.summary import summarize


@dataclass(frozen=True, slots=True)
class Listed:
    """One row. size: bytes; context: tokens the model was trained for; None if the file does not say.

    memory: bytes that the model and a conversation of CHAT_TOKENS take. fits: whether the currently free main memory
    holds the model and a short conversation. speed: tokens per second that decoding should reach here. problem: why
    the file cannot be read; then only name, source and path are known.
    """

    name: str
    source: str
    path: str
    size: int | None = None
    quantization: str | None = None
    parameters: int | None = None
    architecture: str | None = None
    context: int | None = None
    memory: int | None = None
    fits: bool | None = None
    speed: float | None = None
    problem: str | None = None


def describe(
    model: LibraryModel,
    speed: Callable[[ModelFile], float | None],
    memory: Callable[[ModelFile, int], tuple[int | None, bool | None]],
) -> Listed:
    """Read a model's header. A file that cannot be read gets a row that says why.

    speed: expected speed of a file, see Listed. memory: Listed.memory and fits, of a file and a
    conversation of some tokens.
    """
    try:
        with open_model(model.path) as file:
            summary = summarize(file)
            needed, fits = memory(file, min(summary.context or 0, CHAT_TOKENS))
            return Listed(
                model.name,
                model.source,
                str(model.path),
                size=summary.file_bytes,
                quantization=file_type(file) or summary.quantization,
                parameters=summary.parameters,
                architecture=summary.architecture,
                context=summary.context,
                memory=needed,
                fits=fits,
                speed=speed(file),
            )
    except LocalLLMError as error:
        return Listed(model.name, model.source, str(model.path), problem=str(error))


def file_type(file: ModelFile) -> str | None:
    """llama.cpp's name for the mixture of formats, such as Q4_K_M; None if the file does not say."""
    from gguf import LlamaFileType

    value = file.metadata.get("general.file_type")
    try:
        name = str(LlamaFileType(value).name)
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
