"""Bodies of OpenAI's requests, with the extensions of `bodies.Extensions`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.server.bodies import Body, Count, Extensions, Messages, Number, Object, Sampled, Tokens, Tools
from localllm.server.limits import MAX_EMBED_TEXTS, MAX_INT, MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS, MAX_TOP_LOGPROBS

# Passed on to the chat template.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Body):
    """effort: how much to reason."""

    effort: Effort | None = None


class TemplateArguments(Body):
    """The chat template argument that a request may set, as in vLLM, SGLang and llama.cpp."""

    enable_thinking: bool | None = None


class ChatBody(Sampled):
    """/v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    response_format: Object | None = None
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateArguments | None = None


class CompletionBody(Sampled):
    """/v1/completions. prompt: a text, a list of token ids, or a list of either."""

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
    """/v1/responses."""

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
