"""Reads a prompt from arguments, files and standard input."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf_io.system import as_utf_8, is_terminal
from localllm.bounded_json import parsed
from localllm.errors import RequestError
from localllm.files import read_text, text_of
from localllm.text import shortened

_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".wav", ".pdf", ".docx")


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Join the non-empty ones of argument, file and standard input by empty lines.

    Standard input is read unless it is a terminal. The final newline of a file or of standard input is dropped. Raises
    RequestError if a source cannot be read or all are empty.
    """
    parts = [check_text(argument or "")]
    if file:
        parts.append(read_text(file, pipes=True).removesuffix("\n"))
    if sys.stdin is not None and not is_terminal(sys.stdin):
        parts.append(text_of(as_utf_8(sys.stdin.buffer.read()), "standard input", utf_16=False).removesuffix("\n"))
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise RequestError(
            "No prompt. Pass it as an argument, with --file, or on standard input; `localllm run MODEL` on a terminal, "
            "without options for one answer, opens the chat."
        )
    return text


def read_format(argument: str) -> Any:
    """ "json", or the JSON Schema that the argument is or that its file has. Raises RequestError if it is neither."""
    if argument == "json":
        return argument
    in_place = argument.lstrip().startswith("{")
    if argument.isalpha() and not os.path.exists(argument):
        raise RequestError(f"--format {shortened(argument)}: is neither json, nor a JSON Schema, nor a file with one.")
    try:
        schema = parsed(check_text(argument) if in_place else read_text(Path(argument), pipes=True))
    except ValueError as error:
        raise RequestError(f"--format {shortened(argument)}: is not JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise RequestError(f"--format {shortened(argument)}: is not a JSON Schema, which is an object.")
    return schema


def files_among(arguments: Sequence[str]) -> tuple[list[Path], str | None]:
    """The pictures, sounds and documents that arguments name by a path, and the prompt, if there is one.

    Raises RequestError for a second prompt.
    """
    files, prompts = [], []
    for argument in arguments:
        is_named = argument.lower().endswith(_FILES)
        if is_named and (os.path.isfile(argument) or (len(arguments) > 1 and not re.search(r"\s", argument))):
            files.append(Path(argument))
        else:
            prompts.append(argument)
    if len(prompts) > 1:
        raise RequestError(
            f"'{shortened(prompts[1])}' is a second prompt. Put a prompt of several words between quotation marks."
        )
    return files, prompts[0] if prompts else None


def user_content(text: str, files: Sequence[Path]) -> str | list[dict[str, Any]]:
    """A user message's content: files of text, documents, pictures and sounds before the text, as in the chat.

    Pages of a document that also has text have a note in their place for models that see no pictures. Raises
    RequestError if a file cannot be read, or is of another type.
    """
    if not files:
        return text
    from localllm.answer.placeholders import NOTE
    from localllm.chats.attaching import attachments_of
    from localllm.quoting.excerpt import as_file

    texts, pictures = [], []
    for path in files:
        attached = attachments_of(str(path), _read(path))
        texts += [as_file(path.name, file.text) for file in attached if not file.picture]
        noted = any(not file.picture for file in attached)
        for file in attached:
            if file.picture:
                note = {NOTE: f"[page {file.page} of the file, a picture: left out]"} if noted else {}
                pictures.append({"type": "image", "data": file.picture_data(), **note})
    joined = "\n".join([*texts, text])
    return [*pictures, {"type": "text", "text": joined}] if pictures else joined


def check_text(argument: str) -> str:
    """Return the argument. Raises RequestError if its bytes on the command line were not UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"An argument is not UTF-8 text (character {error.start}). Convert it first.") from error
    return argument


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}. Check the path.") from error
