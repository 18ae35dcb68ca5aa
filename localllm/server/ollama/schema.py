"""Bodies of Ollama's requests. Unknown fields are ignored, as Ollama does."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from localllm.server.bodies import Body, Number, Tokens, Tools
from localllm.server.limits import MAX_IMAGES, MAX_INT, MAX_MESSAGES, MAX_TOP_LOGPROBS

ModelName = Annotated[str, Field(validation_alias=AliasChoices("model", "name"), max_length=1024)]
KeepAlive = Number | str | None


class Common(Body):
    """Fields of generate and chat. progress, our addition, asks for lines before the first token."""

    model: ModelName = ""
    stream: bool | None = None
    format: Any = None
    keep_alive: KeepAlive = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max", ""] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    progress: bool = False
    debug_render_only: Annotated[bool, Field(alias="_debug_render_only")] = False


class GenerateBody(Common):
    """/api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Tokens | None = None
    raw: bool | None = None
    images: Annotated[list[str], Field(fail_fast=True, max_length=MAX_IMAGES)] | None = None


class Function(Body):
    """The function of a tool call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class Call(Body):
    """A tool call."""

    id: str | None = None
    function: Function


class OllamaMessage(Body):
    """A message of a chat."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Field(fail_fast=True, max_length=MAX_IMAGES)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(Common):
    """/api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class EmbedBody(Body):
    """/api/embed."""

    model: ModelName = ""
    input: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsBody(Body):
    """/api/embeddings, the older form."""

    model: ModelName = ""
    prompt: str | None = None
    keep_alive: KeepAlive = None


class ShowBody(Body):
    """/api/show. system, options: described as if they were the model's."""

    model: ModelName = ""
    verbose: bool | None = None
    system: str | None = None
    options: dict[str, Any] | None = None


class PullBody(Body):
    """/api/pull."""

    model: ModelName = ""
    stream: bool | None = None


class PushBody(PullBody):
    """/api/push. insecure: without TLS."""

    insecure: bool | None = None


class CopyBody(Body):
    """/api/copy."""

    source: str = ""
    destination: str = ""


class DeleteBody(Body):
    """/api/delete."""

    model: ModelName = ""


class CreateBody(Body):
    """/api/create. files, adapters: digests of uploaded blobs by file name."""

    model: ModelName = ""
    from_: Annotated[str | None, Field(validation_alias="from")] = None
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    draft_files: dict[str, str] | None = None
    template: str | None = None
    license: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    quantize: Annotated[str | None, Field(validation_alias=AliasChoices("quantize", "quantization"))] = None
    renderer: str | None = None
    parser: str | None = None
    stream: bool | None = None
