"""How a command ends, for scripts and for people."""

import contextlib
import errno
import io
import sys
from collections.abc import Iterator
from enum import IntEnum

from cpu_kernels import UnusableIsaError
from localllm.cli import terminal
from localllm.errors import LocalLLMError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class ExitCode(IntEnum):
    """DONE: the answer is complete. FAILED: something broke inside localllm. REFUSED: the request cannot be served.

    INTERRUPTED: Ctrl-C (128 + SIGINT); what was written stays. UNREAD: the reader closed the pipe (128 + SIGPIPE).
    """

    DONE = 0
    FAILED = 1
    REFUSED = 2
    INTERRUPTED = 130
    UNREAD = 141


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """End the program where there is an error: one sentence on stderr and an exit code; --debug adds the traceback."""
    try:
        yield
    except (terminal.UnreadError, io.UnsupportedOperation):  # the latter where stdout was closed from the start
        sys.exit(ExitCode.UNREAD)
    except (LocalLLMError, UnusableIsaError) as error:
        terminal.fail(str(error), error)
        sys.exit(ExitCode.REFUSED)
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in _DISK_FULL:
            where = f" for {error.filename}" if isinstance(error, OSError) and error.filename else ""
            terminal.fail(f"The disk is full{where}. Free some space: `localllm cache` shows what is stored.", error)
            sys.exit(ExitCode.REFUSED)
        if number == errno.ENOMEM or isinstance(error, MemoryError):
            advice = "Close other programs, raise the limit (ulimit -v), or choose a smaller model or --ctx."
            terminal.fail(f"There is not enough memory. {advice}", error)
            sys.exit(ExitCode.REFUSED)
        terminal.fail(f"{type(error).__name__}: {error}. This is a defect in localllm; --debug shows where.", error)
        sys.exit(ExitCode.FAILED)
