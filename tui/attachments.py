"""Attachments of a message: files named in its text by @path, and long pasted texts."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from gguf_io.media import View
from gguf_io.system import file_of_url, read_file
from localllm.chats import PASTED, Attachment
from localllm.chats.attaching import attachments_of
from localllm.engine.request import Counts
from localllm.errors import LocalLLMError, RequestError
from localllm.files import user_path, with_slashes
from localllm.quoting.excerpt import as_file
from localllm.text import shortened

# At the start or after whitespace, as in "compare @a.py and @b.py"; quotes allow spaces in the name.
_MENTION = re.compile(r"""(?<!\S)@(?:"([^"]+)"|(\S+))""")

# What looks like a path: it contains a slash or has a file extension. `@app.route("/x")` and `@property` do not.
_FILE_LIKE = re.compile(r"[^()\[\]{}<>=,;]*/[^()\[\]{}<>=,;]*|[^()\[\]{}<>=,;/]*\.[A-Za-z0-9]{1,8}")

MAX_FILE_BYTES = 16 * 2**20

Counter = Callable[[str], int | None]
See = Callable[[bytes], View | None]
FileWeight = int | View | None
"""The tokens of a text, or what the model sees of a picture or hears of a sound; None if unknown."""


class MissingFileError(RequestError):
    """A prompt names a file that does not exist. It may be meant as text."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What a draft weighs. tokens: of its text and its attached texts. context: None if unknown.

    cost: the counts with which its answer would start, None if unknown. without: what costs that, if there is no draft.
    """

    tokens: int
    context: int | None = None
    attached: tuple[str, ...] = ()
    cost: Counts | None = None
    without: str = ""

    @property
    def is_too_much(self) -> bool:
        """Whether the draft alone exceeds the context."""
        return self.context is not None and self.tokens > self.context

    def __str__(self) -> str:
        cost = self.cost and f"computes {self.cost.prompt - self.cost.cached:,} of {self.cost.prompt:,}"
        if self.without:
            return f"{self.without} {cost} tokens"
        own = self._own
        return f"{own} · {cost}" if cost else own

    @property
    def _own(self) -> str:
        tokens = f"{self.tokens:,} token{'s' if self.tokens != 1 else ''}"
        most = f", more than the context of {self.context:,}" if self.is_too_much else ""
        files = "" if not self.attached else f" with {', '.join(self.attached)}"
        return f"{tokens}{files if len(files) < 32 else f' with {len(self.attached)} attachments'}{most}"


def weigh(
    text: str,
    files: Sequence[Attachment],
    context: int | None,
    count_tokens: Counter,
    see: See,
    weights: dict[Attachment, FileWeight],
) -> Weight | None:
    """The weight of a draft with the files that it names; None if tokens cannot be counted.

    A local model encodes a picture to see it, so that this is done before the draft is sent. weights: of the
    attachments that were weighed before; is updated.
    """
    for gone in weights.keys() - set(files):
        del weights[gone]
    tokens = count_tokens(text)
    if tokens is None:
        return None
    for file in files:
        if file not in weights:
            data = file.picture_data()
            weights[file] = see(data) if data else count_tokens(as_file(file.name, file.text))
        weight = weights[file]
        tokens += (weight if isinstance(weight, int) else _tokens(weight)) or 0
    names = dict.fromkeys(shortened(file.name if file.page else file.label, 24) for file in files)
    return Weight(tokens, context, tuple(names))


def _tokens(view: View | None) -> int | None:
    return None if view is None else view.tokens


def pasted(text: str) -> Attachment:
    """A long pasted text as an attachment, named by its size."""
    lines = text.count("\n") + 1
    size = f"{lines}-lines" if lines > 1 else f"{len(text)}-characters"
    return Attachment(f"pasted-{size}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}", text)


def named_files(text: str, known: Sequence[Attachment]) -> list[Attachment]:
    """The texts and pictures that a draft names, without files that are neither, or too large."""
    named = _by_name(known)
    files = (named.get(name) or _readable(name) for name in dict.fromkeys(_mentions(text)))
    return list(chain.from_iterable(files))


def _by_name(files: Sequence[Attachment]) -> dict[str, list[Attachment]]:
    """Files by their names; a PDF has its text and the pages that are pictures."""
    named: dict[str, list[Attachment]] = {}
    for file in files:
        named.setdefault(file.name, []).append(file)
    return named


def _readable(name: str) -> Sequence[Attachment]:
    path = user_path(name)
    try:
        if not os.path.isfile(path):
            return ()
        return attachments_at(name, path)
    except (RequestError, ValueError):  # sending it says why it cannot be read
        return ()


def _mentions(text: str) -> list[str]:
    return [quoted or plain.rstrip(".,;:!?)") for quoted, plain in _MENTION.findall(text)]


def find_attachments(
    text: str,
    count_tokens: Counter,
    see: See,
    known: Sequence[Attachment] = (),
    strict: bool = True,
) -> tuple[Attachment, ...]:
    """Read the files that a prompt names: text and pictures. An @word that does not look like a path stays text.

    known: attachments that take precedence over files of the same name: pasted texts, or a file as it was when the
    message was first sent. Raises RequestError if a file cannot be read, has another type or is too large,
    MissingFileError if strict and a name looks like a path but does not exist, and what see raises.
    """
    named = _by_name(known)
    found: dict[str, Sequence[Attachment]] = {}
    for quoted, plain in _MENTION.findall(text):
        name = quoted or plain.rstrip(".,;:!?)")
        path = user_path(name)
        if name in named:
            found[name] = [
                file if file.picture or file.tokens is not None else text_file(name, file.text, count_tokens)
                for file in named[name]
            ]
        elif os.path.isfile(path):
            found[name] = counted(attachments_at(name, path), count_tokens, see)
        elif strict and PASTED.fullmatch(name):
            raise MissingFileError(
                f"{name} was pasted into another chat. Paste it again; Enter sends its name as text."
            )
        elif strict and (quoted or _FILE_LIKE.fullmatch(name)):
            what = "is a folder" if os.path.isdir(path) else "does not exist"
            raise MissingFileError(f"{shortened(name)} {what}. Correct the name; Enter again sends it as text.")
    return tuple(chain.from_iterable(found.values()))


def text_file(name: str, text: str, count_tokens: Counter) -> Attachment:
    return Attachment(name, text, count_tokens(text))


def mention_of(pasted: str) -> str | None:
    """The @mention for a pasted or dropped file path; None if the text is anything else."""
    text = pasted.strip()
    if not text or "\n" in text or len(text) > 4096:
        return None
    try:
        is_url = text.startswith("file://")
        name = with_slashes(file_of_url(text)) if is_url else text.strip("'\"").replace("\\ ", " ")
        path = user_path(name)
        if not path.is_absolute() or not os.path.isfile(path):
            return None
    except (OSError, ValueError):
        return None  # for example a file name that is too long, or a malformed URL
    return f'@"{name}"' if " " in name else f"@{name}"


def attachments_at(name: str, path: Path) -> tuple[Attachment, ...]:
    """A file as attachments, whose tokens are not counted. Raises RequestError."""
    return attachments_of(name, _read(path))


def counted(files: Sequence[Attachment], count_tokens: Counter, see: See) -> tuple[Attachment, ...]:
    """The attachments of one file with their tokens. Raises RequestError if the model reads none of them."""
    texts = [replace(file, tokens=count_tokens(file.text)) for file in files if not file.picture]
    pictures = [file for file in files if file.picture]
    try:
        pictures = [replace(file, tokens=_tokens(see(file.picture_data()))) for file in pictures]
    except LocalLLMError as error:
        if not texts:
            what = "has no text, only pictures of pages" if files[0].page else "cannot be attached"
            raise RequestError(f"{files[0].name} {what}. {error}") from error
    # Without their tokens if the model reads text only; the answer says that they were not seen.
    return (*texts, *pictures)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB. Attach a part of it.")
        return read_file(path)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}. Check the path.") from error
