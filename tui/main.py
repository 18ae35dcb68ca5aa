"""The `localllm` program: the command line with the chat, which opens where no command is given."""

import gc
import os
import sys


def main() -> None:
    """Run the command line; alone in a terminal, it is the chat. Ctrl-C ends it without a word, also as it starts."""
    try:
        _run()
    except KeyboardInterrupt:
        from localllm.cli.terminal import ExitCode

        sys.exit(ExitCode.INTERRUPTED)


def _run() -> None:
    _open_closed_streams()
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    match sys.argv[1:]:
        case [] if in_terminal:
            _chat(None)
        case ["chat"] if in_terminal:
            _chat(None)
        case ["chat", model] if in_terminal and not model.startswith("-"):
            _chat(model)
        case _:
            from localllm.cli import main as command_line

            command_line.main({"chat": "tui.command:chat", **command_line.COMMANDS})  # first in the help


def _open_closed_streams() -> None:
    """Open standard streams that were closed at the start, where Python has None; writing to stdout then fails."""
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run


def _chat(model: str | None) -> None:
    """Open the chat without flags: nothing is to be parsed, and what parses takes as long to import as all the rest."""
    from localllm.cli.terminal import errors_told
    from tui.terminal import go_on_watched

    go_on_watched()
    gc.disable()  # what is imported stays; the chat turns it on after its first picture
    with errors_told():
        from tui.start import run_chat

        sys.exit(run_chat(model, {}))
