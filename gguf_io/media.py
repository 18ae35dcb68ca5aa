"""What a model sees of pictures and hears of sounds. Without NumPy, which the chat loads after its first screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf_io.errors import PictureError

DEAF = "This model reads text and images, but hears no sound. Choose another model."

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class PictureView:
    """What a model sees of a picture.

    source, resized: the whole picture's size in its file, and as the model sees it; None where llama.cpp encodes, which
    does not tell. tiles: (rows, columns) that it is then cut into; (1, 1) for none. tokens: with the marks around it.
    small_text: whether it looks like text that became too small to read, see `gguf_io.pictures.text_is_too_small`.
    """

    source: Size
    resized: Size | None
    tiles: tuple[int, int]
    tokens: int
    small_text: bool = False

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        seen = {}
        if self.resized:
            (width, height), (rows, columns) = self.resized, self.tiles
            seen = {"resized_width": width, "resized_height": height, "tiles": rows * columns}
        return {
            "width": self.source[0],
            "height": self.source[1],
            **seen,
            "tokens": self.tokens,
            **({"small_text": True} if self.small_text else {}),
        }

    @property
    def warning(self) -> str:
        """What to do about text that became too small, "" if there is none; begins with a verb."""
        if not (self.small_text and self.resized):
            return ""
        (width, height), (seen_width, seen_height) = self.source, self.resized
        return (
            f"seems to have text that is too small to read, since {width:,} x {height:,} pixels "
            f"became {seen_width:,} x {seen_height:,}: raise image_max_tokens, or send a part of it."
        )

    @property
    def sizes(self) -> str:
        """The size in the file and that as the model sees it, in words."""
        rows, columns = self.tiles
        seen = f", seen as {self.resized[0]:,} x {self.resized[1]:,}" if self.resized else ""
        tiles = f" in {rows} x {columns} tiles" if rows * columns > 1 else ""
        return f"{self.source[0]:,} x {self.source[1]:,}{seen}{tiles}"

    def __str__(self) -> str:
        hint = "; its text may be too small to read: raise image_max_tokens" if self.small_text else ""
        return f"{self.sizes}, {self.tokens:,} tokens{hint}"


@dataclass(frozen=True, slots=True)
class SoundView:
    """What a model hears of a sound. tokens: with the marks around it."""

    seconds: float
    tokens: int
    warning: str = ""

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {"seconds": self.seconds, "tokens": self.tokens}

    def __str__(self) -> str:
        return f"{self.seconds:,.1f} s of sound, {self.tokens:,} tokens"


View = PictureView | SoundView


def told_fields(views: Sequence[View]) -> dict[str, list[dict[str, Any]]]:
    """What a model saw and heard, as fields of an answer in JSON: pictures, sounds; none that is empty."""
    told = {
        "pictures": [view.fields() for view in views if isinstance(view, PictureView)],
        "sounds": [view.fields() for view in views if isinstance(view, SoundView)],
    }
    return {name: found for name, found in told.items() if found}


def told_lines(views: Sequence[View]) -> list[tuple[str, View]]:
    """The views with their names: Picture 1, Sound 1, Picture 2."""
    counts: dict[str, int] = {}
    found = []
    for view in views:
        kind = "Sound" if isinstance(view, SoundView) else "Picture"
        counts[kind] = counts.get(kind, 0) + 1
        found.append((f"{kind} {counts[kind]}", view))
    return found


def check_room(what: str, tokens: int, context: int) -> None:
    """Raise PictureError for an "image" or a "sound" that takes more tokens than the context."""
    if tokens >= context:
        less = "Lower image_max_tokens, or send a smaller one" if what == "image" else "Send a shorter one"
        told = f"The {what} takes {tokens:,} tokens, more than the context of {context:,}. {less}."
        raise PictureError(told, too_long=(tokens, context))


def is_sound(data: bytes) -> bool:
    """Whether a file is a WAV."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"
