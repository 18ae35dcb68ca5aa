"""How a command ends, for scripts and for people."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from enum import IntEnum

from localllm.cli import terminal
from localllm.errors import LocalLLMError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class ExitCode(IntEnum):
    """DONE: the answer is complete. FAILED: something broke inside localllm. REFUSED: what was asked cannot be done.

    INTERRUPTED: Ctrl-C (128 + SIGINT); what was written stays. UNREAD: nobody reads the output (128 + SIGPIPE).
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
    except terminal.UnreadError:
        sys.exit(ExitCode.UNREAD)
    except LocalLLMError as error:
        terminal.fail(str(error), error)
        sys.exit(ExitCode.REFUSED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            where = f" for {error.filename}" if error.filename else ""
            terminal.fail(f"The disk is full{where}. Free some space: `localllm cache` shows what is stored.", error)
            sys.exit(ExitCode.REFUSED)
        terminal.fail(f"{type(error).__name__}: {error}. This is a defect in localllm; --debug shows where.", error)
        sys.exit(ExitCode.FAILED)
