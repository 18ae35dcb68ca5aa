"""Errors and their HTTP status. Each protocol has its own format for them: see `ProtocolRoute.error_body`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gguf_io.errors import PictureError
from gpu_offload.errors import LlamaCppMemoryError, LlamaCppMissingError
from localllm.errors import (
    ContextOverflowError,
    LocalLLMError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    TemplateError,
    TokenizerError,
)
from localllm.library.errors import LibraryError, PullError, PushError
from localllm.remote.connection import RemoteError
from localllm.remote.openai import unavailable

# Statuses of a remote server that concern the client. Others, such as 401 for our own key, become 502.
_PASSED_ON = frozenset({400, 404, 413, 422, 429, 501, 503})
_STATUSES = (
    ((PullError, PushError), 502),
    ((RequestError, TemplateError, TokenizerError, LibraryError, PictureError), 400),
    ((LlamaCppMissingError,), 501),
    ((QueueFullError, OutOfMemoryError, LlamaCppMemoryError), 503),
)
LONGEST_MESSAGE = 4000
RETRY_AFTER = {"Retry-After": "1"}

# An absolute path's folders, which clients should not learn. A pointer into a schema begins with "#/".
_FOLDER = re.compile(r"(?<![\w.:#/\\])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"]+[/\\])+")

T = TypeVar("T")

# What each protocol's own servers say first about a prompt that is too long. Programs search for these words, and read
# the counts after them, to shorten the conversation and go on.
TOO_LONG_ANTHROPIC = "prompt is too long: {tokens} tokens > {most} maximum."
TOO_LONG_OPENAI = (
    "This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} tokens. Please "
    "reduce the length of the messages."
)
TOO_LONG_LLAMA_CPP = (
    "the request ({tokens} tokens) exceeds the available context size ({most} tokens), try increasing it."
)
TOO_LONG_OLLAMA = (
    "the input length exceeds the context length ({tokens} tokens, maximum context length is {most} tokens)."
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client is told about an error.

    too_long: a prompt's tokens and the most that fit, if that is the error. code: see ApiError.
    """

    status: int
    message: str
    too_long: tuple[int, int] | None = None
    code: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """llama.cpp's fields about a prompt that is too long; none for other errors."""
        return {} if self.too_long is None else dict(zip(("n_prompt_tokens", "n_ctx"), self.too_long, strict=True))

    def worded(self, too_long: str) -> str:
        """The message; about a prompt that is too long, after a protocol's own words (TOO_LONG_...)."""
        if self.too_long is None:
            return self.message
        tokens, most = self.too_long
        return f"{too_long.format(tokens=tokens, most=most)} {self.message}"


# Makes an error's JSON.
ErrorBody = Callable[[Refusal], dict[str, Any]]


class ApiError(LocalLLMError):
    """An error with its HTTP status. code: OpenAI's name of it, by which programs know what to do."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)


class ModelNotFoundError(ApiError):
    """No model has this name: 404."""

    def __init__(self, name: str, message: str = "") -> None:
        super().__init__(404, message or f"model '{name}' not found", "model_not_found")


class AdapterNotFoundError(ModelNotFoundError):
    """A model that is there has no adapter of this name: 404, for which no other model may answer."""


class InputTooLongError(ApiError):
    """A text to embed or rank, longer than the model accepts: 400."""

    def __init__(self, what: str, tokens: int, most: int) -> None:
        self.tokens = tokens
        self.most = most
        super().__init__(400, f"{what} {tokens} tokens; the model accepts {most}")


class ClientGoneError(ApiError):
    """The client closed the connection; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


def status_of(error: LocalLLMError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, RemoteError):
        return error.status if error.status in _PASSED_ON else 502
    return next((status for kinds, status in _STATUSES if isinstance(error, kinds)), 500)


def refusal_of(error: LocalLLMError) -> Refusal:
    """What a client is told about an error."""
    too_long = None
    if isinstance(error, ContextOverflowError):
        too_long = error.prompt_tokens, error.context_tokens
    elif isinstance(error, InputTooLongError):
        too_long = error.tokens, error.most
    elif isinstance(error, RemoteError | PictureError):
        too_long = error.too_long
    code = error.code if isinstance(error, ApiError) else None
    return Refusal(status_of(error), message_of(error), too_long, code)


def known(value: T | None, what: str) -> T:
    """The value. Raises RemoteError 501 for None: a remote server does not provide it."""
    if value is None:
        raise unavailable(what)
    return value


def message_of(error: LocalLLMError) -> str:
    """The error's message for a client, without folder paths and without the remedy, which is for who runs the server.

    Long messages, such as those that quote the request or a template, are cut in the middle.
    """
    if isinstance(error, LlamaCppMissingError):
        return "this server has no llama.cpp, which this request needs; `localllm doctor` says how to install it there"
    message = error.message if isinstance(error, ApiError | RemoteError) else _FOLDER.sub("", error.message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def kind_of(status: int, kinds: dict[int, str]) -> str:
    """OpenAI's and Anthropic's type of an error. kinds: types of particular statuses."""
    return kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
