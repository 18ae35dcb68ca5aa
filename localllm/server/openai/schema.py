"""Bodies of OpenAI's requests, with extensions that are named as such. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from localllm.server.limits import (
    MAX_ADAPTERS,
    MAX_CHOICES,
    MAX_EMBED_TEXTS,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
)

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# It reaches the chat template, and templates know no others.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Object = dict[str, Any]
# The first wrong item ends the look at a list: a list may have two million, and a field other shapes to try.
Tokens = Annotated[list[Count], Field(fail_fast=True)]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(protected_namespaces=(), populate_by_name=True)


class AppliedAdapter(Body):
    """A LoRA adapter that the server was started with, by number, as llama.cpp's server has it."""

    id: Count
    scale: Number = 1.0


class Extensions(Body):
    """What OpenAI lacks: context limit, time to stay loaded, whether old messages may go, samplers, progress events.

    lora takes other adapters than the usual ones; an empty list takes none.
    """

    num_ctx: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    keep_alive: Number | str | None = None
    truncate: bool = False
    progress: bool = False
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Number | None = None
    repeat_penalty: Number | None = None
    lora: Annotated[list[AppliedAdapter], Field(max_length=MAX_ADAPTERS)] | None = None


class StreamOptions(Body):
    """Whether the last chunk tells the usage."""

    include_usage: bool = False


class Sampled(Extensions):
    """What chat completions and completions share."""

    model: str = ""
    temperature: Number | None = None
    top_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class FunctionCall(Body):
    """The function of a tool call; arguments are JSON text."""

    name: str
    arguments: str | Object = "{}"


class ToolCall(Body):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message."""

    role: str
    content: str | list[Object] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ToolFunction(Body):
    """What a tool is; the rest goes to the template as it is."""

    model_config = ConfigDict(extra="allow")

    name: str


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class Reasoning(Body):
    """How hard to think."""

    effort: Effort | None = None


class ChatBody(Sampled):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    response_format: Object | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None


class CompletionBody(Sampled):
    """/v1/completions. prompt: text, token ids, or lists of either."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    ) = ""
    suffix: str | None = None
    echo: bool | None = None
    best_of: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class EmbeddingsBody(Extensions):
    """/v1/embeddings."""

    model: str = ""
    input: (
        str
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_EMBED_TEXTS)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MAX_EMBED_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None


class ResponsesBody(Extensions):
    """/v1/responses, without memory of earlier ones."""

    model: str = ""
    input: str | Annotated[list[Object], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    tools: Annotated[list[Object], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    max_output_tokens: Count | None = None
    reasoning: Reasoning | None = None
    text: Object | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
