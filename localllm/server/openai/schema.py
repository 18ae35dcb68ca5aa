"""Bodies of OpenAI's requests, with the extensions of `bodies.Extensions`."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from localllm.server.bodies import (
    Body,
    ComputedBody,
    Count,
    Limit,
    Messages,
    Object,
    Sampled,
    Timed,
    Tokens,
)
from localllm.server.limits import MAX_INT, MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS, MAX_TOP_LOGPROBS

# Passed on to the chat template.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class Reasoning(Body):
    """effort: how much to reason. summary: of any kind, asks for reasoning as a summary."""

    parameter = "reasoning"
    effort: Effort | None = None
    summary: str | None = None


class TextOptions(Body):
    """format: what the answer must fit, see `wire.format_of`."""

    parameter = "text"
    format: Any = None


class Constrained(Sampled):
    """What the answer must fit, at most one of them.

    grammar (GBNF) and json_schema are llama.cpp's, structured_outputs vLLM's, and guided_* that of its older versions.
    n_predict is llama.cpp's name of max_tokens.
    """

    max_tokens: Annotated[Limit | None, Field(validation_alias=AliasChoices("max_tokens", "n_predict"))] = None

    response_format: Object | None = None
    json_schema: Object | None = None
    grammar: str | None = None
    guided_json: Object | str | None = None
    guided_grammar: str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)] | None = None
    structured_outputs: Object | None = None

    @model_validator(mode="before")
    @classmethod
    def _structured_outputs_as_guided(cls, given: Any) -> Any:
        outputs = given.get("structured_outputs") if isinstance(given, dict) else None
        if not isinstance(outputs, dict):
            return given
        return {f"guided_{name}": value for name, value in outputs.items() if value is not None} | given


class ChatBody(Constrained):
    """/v1/chat/completions. functions and function_call are the older form of tools and tool_choice.

    add_generation_prompt and continue_final_message (vLLM's, llama.cpp's) say whether the answer continues an
    assistant's message at the end.
    """

    messages: Messages
    max_completion_tokens: Limit | None = None
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    functions: Annotated[list[Object], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    function_call: str | Object | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[str], Field(fail_fast=True, max_length=8)] | None = None


class CompletionBody(Constrained):
    """/v1/completions. prompt: a text, a list of token ids, or a list of either. prompt_logprobs: vLLM's."""

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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class EmbeddingsBody(ComputedBody):
    """/v1/embeddings."""

    input: (
        str
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None


# A client's own notes, echoed.
_Note = Annotated[str, Field(max_length=512)] | float | bool | None
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], _Note], Field(max_length=16)]


class ResponsesBody(Timed):
    """/v1/responses. conversation: an id, or an object with it. prompt: of a template that OpenAI stores; refused."""

    input: str | Annotated[list[Object], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    stream: bool | None = None
    max_output_tokens: Limit | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    background: bool | None = None
    prompt: Any = None
    metadata: Metadata | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
