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
    """The message of a system or network error for people, without the error number."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


class RequestError(LocalLLMError):
    """A request that cannot be served: a bad option, an empty prompt, an impossible combination."""


class ContextOverflowError(RequestError):
    """A prompt longer than the context. Carries the counts, so that front ends can show them.

    prompt_tokens, context_tokens: token counts. advice: how to get a longer context. by_request: whether the request
    itself limits the context, so that its sender can take the advice.
    """

    def __init__(
        self,
        prompt_tokens: int,
        context_tokens: int,
        advice: str = "raise the context limit (--ctx)",
        by_request: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        too_long = f"The prompt has {prompt_tokens} tokens and the context holds {context_tokens}. Shorten the prompt"
        if by_request:
            super().__init__(f"{too_long} or {advice}.")
        else:
            super().__init__(f"{too_long}.", remedy=f"Or {advice}.")


class QueueFullError(LocalLLMError):
    """Too many requests are waiting; try again later."""


class EngineStoppedError(LocalLLMError):
    """The engine accepts no more requests: its model is being unloaded, or its runner failed. Load the model again."""


class OutOfMemoryError(LocalLLMError):
    """The memory plan does not fit. The message shows the sums."""


class SettingsError(LocalLLMError):
    """A setting that does not exist or has an invalid value. The message names its source."""
