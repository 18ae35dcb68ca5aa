"""Output of commands: answers on stdout, everything else on stderr, and an exit code at the end.

Nothing here depends on the width of a terminal. Progress is drawn on terminals only; colour only on terminals without
NO_COLOR (https://no-color.org).
"""

import contextlib
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from enum import IntEnum
from typing import Self, TextIO

from cpu_kernels import VariableError
from gguf_io.system import is_terminal, obeys_escapes, reader_has_left
from localllm.errors import LocalLLMError, RequestError
from localllm.text import harmless, shortened

CLEAR_LINE = "\r\033[K"
LONGEST_MESSAGE = 4000  # characters; a message may quote a model's template
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class UnreadError(Exception):
    """The reader of the command's output has closed the pipe, as `head` does."""


def answer(text: str) -> None:
    """Write a piece of the command's result to stdout and flush; on terminals, replace control characters.

    Raises UnreadError if the reader has closed the pipe, RequestError if it cannot be written, OSError for a full disk.
    """
    with _written():
        sys.stdout.write(harmless(text) if is_terminal(sys.stdout) else text)


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """Flush stdout afterwards. If that fails, discard what is in its buffer: Python would try again at exit, and fail.

    Raises what answer raises.
    """
    try:
        yield
        sys.stdout.flush()
    except io.UnsupportedOperation:  # it was closed at startup
        raise
    except OSError as error:
        _discard(sys.stdout)
        if reader_has_left(error):
            raise UnreadError from error
        if error.errno in _DISK_FULL:
            raise
        raise RequestError(f"The output cannot be written: {error.strerror}. Send it elsewhere.") from error


def _discard(stream: TextIO) -> None:
    """Discard what is in a stream's buffer, and what is written from now on."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _is_unread(stream: TextIO) -> bool:
    """Whether writing to a stream fails because its reader has left; tried with the end of a line."""
    try:
        os.write(stream.fileno(), b"\n")
    except OSError as error:
        return reader_has_left(error)
    return False


def note(text: str) -> None:
    """Tell the user something that is not part of the result."""
    _tell(harmless(text))


def warn(text: str) -> None:
    """Warn the user; the command continues."""
    _tell(f"{_coloured('warning:', 33)} {harmless(text)}")


def fail(text: str, error: BaseException | None = None) -> None:
    """Tell the user why the command ends; with --debug, also print the traceback."""
    _tell(f"{_coloured('error:', 31)} {harmless(shortened(text, LONGEST_MESSAGE))}")
    if error and logging.getLogger().isEnabledFor(logging.DEBUG):
        sys.stderr.write("".join(traceback.format_exception(error)))


def log_to_stderr(debug: bool) -> None:
    """Show log messages as warnings and errors; with debug, all of them and with tracebacks."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[_LogHandler()], force=True)
    logging.getLogger("numba").setLevel(logging.WARNING)  # it logs every bytecode it compiles


class _LogHandler(logging.Handler):
    """Prints log records through note, warn and fail."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            note(f"{record.name}: {record.getMessage()}")
        elif record.levelno < logging.ERROR:
            warn(record.getMessage())
        else:
            fail(record.getMessage(), record.exc_info[1] if record.exc_info else None)


class StatusLine:
    """One line on stderr that is redrawn and finally removed. Silent if stderr is not a terminal."""

    def __init__(self) -> None:
        self._active = _draws(sys.stderr)
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._active and text != self._shown:
            sys.stderr.write(f"{CLEAR_LINE}{harmless(text)}")
            sys.stderr.flush()
            self._shown = text

    def share(self, what: str, done: float) -> None:
        """Show an activity and its completed fraction, 0 to 1; at 1, remove the line."""
        if done < 1:
            self.show(f"{what}: {done:.0%}")
        else:
            self.clear()

    def clear(self) -> None:
        """Remove the line. Idempotent."""
        if self._shown:
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()
            self._shown = ""


def _tell(line: str) -> None:
    # Overwrite a status line that may be on this line.
    start = CLEAR_LINE if _draws(sys.stderr) else ""
    try:
        sys.stderr.write(f"{start}{line}\n")
    except OSError:  # a full disk, or a reader that has left: there is no other place to tell it
        _discard(sys.stderr)


def _coloured(text: str, colour: int) -> str:
    if os.environ.get("NO_COLOR") or not _draws(sys.stderr):
        return text
    return f"\033[{colour}m{text}\033[0m"


def _draws(stream: TextIO) -> bool:
    """Whether a stream is a terminal that obeys escape sequences."""
    return is_terminal(stream) and obeys_escapes(stream)


class ExitCode(IntEnum):
    """DONE: the answer is complete. FAILED: an error inside localllm. REFUSED: the request cannot be served.

    INTERRUPTED: Ctrl-C (128 + SIGINT); text already written stays. UNREAD: the reader closed the pipe (128 + SIGPIPE).
    """

    DONE = 0
    FAILED = 1
    REFUSED = 2
    INTERRUPTED = 130
    UNREAD = 141


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """On an error, exit with one sentence on stderr and an exit code; --debug adds the traceback.

    Output that cannot be written is an error too, also what libraries have written and not flushed.
    """
    try:
        try:
            yield
        finally:
            with _written():
                pass
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # click's help was not read, for which it exits with 1
            sys.exit(ExitCode.UNREAD)
        raise
    except (UnreadError, io.UnsupportedOperation):  # the latter if stdout was closed at startup
        sys.exit(ExitCode.UNREAD)
    except (LocalLLMError, VariableError) as error:
        fail(str(error), error)
        sys.exit(ExitCode.REFUSED)
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if sys.platform == "win32" and number == errno.EINVAL and _is_unread(sys.stdout):  # typer's help
            sys.exit(ExitCode.UNREAD)
        if number in _DISK_FULL:
            where = f" for {error.filename}" if isinstance(error, OSError) and error.filename else ""
            fail(f"The disk is full{where}. Free some space: `localllm cache` shows what is stored.", error)
            sys.exit(ExitCode.REFUSED)
        if number == errno.ENOMEM or isinstance(error, MemoryError):
            advice = "Close other programs, raise the limit (ulimit -v), or choose a smaller model or --ctx."
            fail(f"There is not enough memory. {advice}", error)
            sys.exit(ExitCode.REFUSED)
        fail(f"{type(error).__name__}: {error}. This is a bug in localllm; --debug shows where.", error)
        sys.exit(ExitCode.FAILED)
