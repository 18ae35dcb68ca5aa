"""The `localllm` program: the command line with the chat, which opens where no command is given."""

import sys

from localllm.cli import main as command_line
from tui.command import chat

command_line.app.command()(chat)


def main() -> None:
    """Run the command line; alone in a terminal, it is the chat."""
    if len(sys.argv) == 1 and sys.stdin.isatty() and sys.stdout.isatty():
        sys.argv.append("chat")
    command_line.main()
