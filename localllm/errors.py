"""Errors of the application. The root and the file errors live in gguf_io, the lowest package that raises them."""

import re

from gguf_io.errors import LocalLLMError, ModelFileError, TemplateError, TokenizerError

__all__ = [
    "ContextOverflowError",
    "EngineStoppedError",
    "LocalLLMError",
    "ModelFileError",
    "OutOfMemoryError",
    "QueueFullError",
    "RequestError",
    "SettingsError",
    "TemplateError",
    "TokenizerError",
    "reason",
]


def reason(error: Exception) -> str:
    """Why the system or a network refused, for people: without its number."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


class RequestError(LocalLLMError):
    """A request that cannot be served as it stands: a bad option, an empty prompt, an impossible combination."""


class ContextOverflowError(RequestError):
    """A prompt longer than the context. Carries the counts, so that front ends can show them.

    prompt_tokens and context_tokens are numbers of tokens. remedy: what would make room for more.
    """

    def __init__(
        self, prompt_tokens: int, context_tokens: int, remedy: str = "raise the context limit (--ctx)"
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        super().__init__(
            f"The prompt has {prompt_tokens} tokens and the context holds {context_tokens}. "
            f"Shorten the prompt or {remedy}."
        )


class QueueFullError(LocalLLMError):
    """Too many requests are waiting; try again later."""


class EngineStoppedError(LocalLLMError):
    """The engine takes no requests any more: its model is being unloaded, or its runner failed. Load the model anew."""


class OutOfMemoryError(LocalLLMError):
    """The plan of memory does not fit. The message shows the sums."""


class SettingsError(LocalLLMError):
    """A setting that does not exist or has a value of the wrong kind. The message names its source."""
