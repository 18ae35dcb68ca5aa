"""A small process that outlives the chat: however the chat is killed, the terminal is as it was."""

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

# In the order in which Textual's driver leaves, whatever of it was on: pasting in brackets, reports of resizing, the
# mouse and the focus, kitty's keys, drawing at once, the other screen, colours, the hidden cursor.
_RESET = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[<u\x1b[?2026l"
    "\x1b[?1049l\x1b[0m\x1b[?25h"
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def go_on_watched() -> None:
    """Go on in a child process, while this one waits for it and never returns.

    Where the child is killed (a defect in native code, too little memory, kill -9), the terminal is put back and a
    sentence tells what happened; the exit code is the child's, or 128 and the signal. Call it in the one thread that
    there is, before anything large is imported. Windows gives a program that ends its console back by itself.
    """
    if sys.platform == "win32":
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _leave_with_parent()
        return

    def pass_on(number: int, _frame: "FrameType | None") -> None:
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it from the terminal too
    killed_by = _wait(child)
    termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
    sys.stdout.write(_RESET)
    sys.stdout.flush()
    from localllm.cli.terminal import fail

    name = signal.Signals(killed_by).name
    fail(f"The chat was ended by {name}. What was said is kept: F3 lists it after the next start.")
    sys.stderr.flush()
    os._exit(128 + killed_by)


def _leave_with_parent() -> None:
    """Have the system hang up on this process where the one that watches is killed: its shell draws again."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)


def _wait(child: int) -> int:
    """The number of the signal that kills the child; where it exits by itself, so does this process."""
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for this one; it wakes both
        elif os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))  # what an interpreter does at its end is the child's
        else:
            return os.WTERMSIG(status)
