"""Errors as the three protocols write them."""

from typing import Any

from gpu_offload.errors import LlamaCppMemoryError, PictureError
from localllm.errors import LocalLLMError, OutOfMemoryError, QueueFullError, RequestError, TemplateError, TokenizerError
from localllm.library.errors import LibraryError, PullError
from localllm.remote.errors import RemoteError

# What a server elsewhere refuses its client with is passed on; all else, our own key among it, is between us and it.
_PASSED_ON = frozenset({400, 404, 413, 422, 429, 501, 503})


LONGEST_MESSAGE = 4000


class ApiError(LocalLLMError):
    """A refusal with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ModelNotFoundError(ApiError):
    """No model goes by that name here."""

    def __init__(self, name: str) -> None:
        super().__init__(404, f"model '{name}' not found")


class ClientGoneError(ApiError):
    """The client has closed the connection; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


def status_of(error: LocalLLMError) -> int:
    """The HTTP status that says whose fault an error is."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, RemoteError):
        return error.status if error.status in _PASSED_ON else 502
    if isinstance(error, PullError):
        return 502
    if isinstance(error, RequestError | TemplateError | TokenizerError | LibraryError | PictureError):
        return 400
    if isinstance(error, QueueFullError | OutOfMemoryError | LlamaCppMemoryError):
        return 503
    return 500


def shortened(message: str) -> str:
    """A message with its middle left out where it is long: some repeat what a client or a template wrote."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def error_body(path: str, status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The error's JSON in the protocol that the route belongs to. code: OpenAI's name for it."""
    message = shortened(message)
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": _anthropic_type(status), "message": message}}
    if path.startswith("/v1/"):
        return openai_error(status, message, code)
    return {"error": message}


def openai_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape, which also stands inside of streams."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _anthropic_type(status: int) -> str:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        503: "overloaded_error",
    }
    return kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
