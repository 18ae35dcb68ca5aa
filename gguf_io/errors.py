"""The root of the errors that users see, and those that a model file can cause."""

MOST_SHOWN = 200
DAMAGED = "The file is damaged: download or convert it again."


def shortened(text: object, most: int = MOST_SHOWN) -> str:
    """Text from a file or request for an error message, cut to `most` characters."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}... ({len(whole):,} characters)"


class LocalLLMError(Exception):
    """Anything that went wrong in a way the user can act on.

    The message says what was wrong, where, and what to do next. It is shown unchanged, without a traceback. remedy:
    what only the person who starts localllm can do, such as another flag; str() includes it, and front ends for others
    leave it out.
    """

    def __init__(self, message: str = "", *, remedy: str = "") -> None:
        self.message = message.strip()
        self.remedy = remedy
        super().__init__(f"{self.message} {remedy}".strip() if remedy else message)


class ModelFileError(LocalLLMError):
    """A model file that is missing, truncated, hostile or not GGUF. The message names the file and the field."""


class TokenizerError(LocalLLMError):
    """A vocabulary that cannot be rebuilt from the file's metadata, or text that it cannot express."""


class TemplateError(LocalLLMError):
    """A chat template that does not compile, exceeds its bounds, or refuses the messages. Names the line if known."""


class PictureError(LocalLLMError):
    """An image or a sound that a model cannot take: of an unknown format, too large, or damaged.

    too_long: its tokens and those of the context, if it takes more than all of them.
    """

    def __init__(self, message: str = "", *, remedy: str = "", too_long: tuple[int, int] | None = None) -> None:
        self.too_long = too_long
        super().__init__(message, remedy=remedy)
