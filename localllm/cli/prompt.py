"""Where the prompt of a one-shot command comes from: arguments, files, standard input."""

import sys
from pathlib import Path

from localllm.errors import RequestError


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Join argument, file and standard input, in this order, by empty lines; those that are empty are left out.

    Standard input is read unless it is a terminal. The last newline of a file or of standard input is dropped, as the
    shell does. Raises RequestError if a source cannot be read or all are empty.
    """
    parts = [check_text(argument or "")]
    if file:
        parts.append(read_text(file).removesuffix("\n"))
    if sys.stdin is not None and not sys.stdin.isatty():
        parts.append(_decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n"))
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise RequestError(
            "There is no prompt. Give it as an argument, with --file, or on standard input; "
            "`localllm chat MODEL` opens a chat."
        )
    return text


def read_text(file: Path) -> str:
    """Read a text. Raises RequestError for a file that cannot be read, and for one that is not UTF-8."""
    return _decoded(_read(file), str(file))


def read_image(file: Path) -> bytes:
    """Read a picture. Raises RequestError for a file that cannot be read, PictureError for one that is refused."""
    from gpu_offload.pictures import check_picture

    data = _read(file)
    check_picture(data)
    return data


def check_text(argument: str) -> str:
    """Return the argument if it is text. RequestError for bytes of the command line that are not UTF-8."""
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


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: is not UTF-8 text (byte {error.start}). Convert it first.") from error
