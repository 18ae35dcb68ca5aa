"""The `localllm` program: the command line, and the chat, which opens if no command is given."""

import gc
import os
import re
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any

from gguf_io.system import is_terminal

COMMANDS = {"chat": "tui.command:chat", "agent": "tui.acp.command:agent", "man": "tui.manual:man"}
"""The commands of this package, as in localllm.cli.main."""

_NAME_OR_PATH = re.compile(r"[\w.:@~%+=-]*|\S*[/\\]\S*")


def main() -> None:
    """Run the command line, or the chat if no command is given. Ctrl-C exits silently, even during startup."""
    try:
        _run()
    except KeyboardInterrupt:
        from localllm.front.terminal import ExitCode

        sys.exit(ExitCode.INTERRUPTED)


def _run() -> None:
    _prepare_streams()
    in_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    match sys.argv[1:]:
        case [] | ["chat"] if in_terminal:
            _chat(None)
        case ["chat", word] if in_terminal and not word.startswith("-"):
            _chat(*model_and_prompt(word))
        case ["run", model] if in_terminal and not model.startswith("-"):
            _chat(model)
        case _:
            from localllm.cli import main as command_line

            command_line.main({**COMMANDS, **command_line.COMMANDS}, open_chat)  # ours come first in the help


def model_and_prompt(word: str) -> tuple[str | None, str | None]:
    """What the only argument of `localllm chat` is: a prompt if it has spaces or marks such as "?" and is no path."""
    if not (_NAME_OR_PATH.fullmatch(word.strip()) or os.path.lexists(word)):
        return None, word
    return word, None


def _prepare_streams() -> None:
    """Open standard streams that were closed at startup (None in Python). stdout is read-only, so writing fails.

    Pipes and files get UTF-8 on Windows, whose own default lacks most characters. Elsewhere the user chose another
    encoding: characters that it lacks become question marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open until exit
        elif isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            if sys.platform == "win32":
                stream.reconfigure(encoding="utf-8")
            elif mode == "w" or name == "stdout":
                stream.reconfigure(errors="replace")


def _chat(model: str | None, prompt: str | None = None) -> None:
    """Open the chat without the argument parser, whose import takes as long as all other imports together."""
    from localllm.front.terminal import reported_errors

    with reported_errors():
        sys.exit(open_chat(model, {}, prompt=prompt))


def open_chat(model: str | None, flags: Mapping[str, object], **more: Any) -> int:
    """Run the chat and return its exit code; on a terminal, in a watched child process. more: see run_chat."""
    from tui.terminal import go_on_watched, in_browser

    if not in_browser():
        go_on_watched()
    gc.disable()  # imports produce no garbage; the chat enables it after its first frame
    from tui.start import run_chat

    return run_chat(model, flags, **more)
