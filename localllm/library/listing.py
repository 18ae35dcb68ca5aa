"""What `localllm list` says of each model: read from headers alone, nothing is loaded."""

from collections.abc import Callable
from dataclasses import dataclass

from gguf_io import open_model
from gguf_io.model_file import ModelFile
from localllm.errors import LocalLLMError, OutOfMemoryError
from localllm.library.entry import LibraryModel
from localllm.library.suggestions import CHAT_TOKENS
from localllm.library.summary import summarize
from localllm.memory import plan_memory


@dataclass(frozen=True, slots=True)
class Listed:
    """One row. size: bytes; context: tokens the model was trained for; None where the file does not say.

    memory: bytes of the weights and a conversation of CHAT_TOKENS. fits: whether main memory that is free now holds the
    weights and a short conversation. speed: tokens a second that decoding should reach here. problem: why the file
    cannot be read, and then nothing but name, source and path is known.
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
    model: LibraryModel, available: int | None = None, speed: Callable[[ModelFile], float | None] = lambda _file: None
) -> Listed:
    """Open a model's header. A file that cannot be read gets a row that says why.

    available: bytes of free memory, asked of the machine if None. speed: what is expected of a file, see Listed.
    """
    try:
        with open_model(model.path) as file:
            summary = summarize(file)
            return Listed(
                model.name,
                model.source,
                str(model.path),
                size=summary.file_bytes,
                quantization=file_type(file) or summary.quantization,
                parameters=summary.parameters,
                architecture=summary.architecture,
                context=summary.context,
                memory=summary.memory_bytes(min(summary.context or 0, CHAT_TOKENS)),
                fits=fits(summary.weights_bytes, summary.kv_bytes_per_token, available, summary.state_bytes),
                speed=speed(file),
            )
    except LocalLLMError as error:
        return Listed(model.name, model.source, str(model.path), problem=str(error))


def fits(
    weights: int, kv_bytes_per_token: int | None, available: int | None = None, state_bytes: int = 0
) -> bool | None:
    """Whether the memory plan of the CPU engine holds; None where the KV of an architecture is not known."""
    if kv_bytes_per_token is None:
        return None
    try:
        plan_memory(weights, kv_bytes_per_token, available=available, states=lambda _: state_bytes)
    except OutOfMemoryError:
        return False
    return True


def file_type(file: ModelFile) -> str | None:
    """The mixture of formats by llama.cpp's name, such as Q4_K_M; None where the file does not say."""
    from gguf import LlamaFileType

    value = file.metadata.get("general.file_type")
    try:
        name = str(LlamaFileType(value).name)
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
