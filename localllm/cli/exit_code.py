"""How a command ends, for scripts."""

from enum import IntEnum


class ExitCode(IntEnum):
    """DONE: the answer is complete. FAILED: something broke inside localllm. REFUSED: what was asked cannot be done.

    INTERRUPTED: Ctrl-C (128 + SIGINT); what was written stays.
    """

    DONE = 0
    FAILED = 1
    REFUSED = 2
    INTERRUPTED = 130
