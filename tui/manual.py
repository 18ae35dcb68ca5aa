"""localllm man: the manual page of the whole program, the chat's commands among them."""

from importlib.metadata import version

from localllm.cli.main import COMMANDS
from localllm.cli.reference import man_page
from localllm.front.terminal import answer
from tui.main import COMMANDS as CHAT_COMMANDS


def man() -> None:
    """Print the manual page: every command, option and setting.

    `localllm man | man -l -` shows it; written to ~/.local/share/man/man1/localllm.1, `man localllm` finds it.
    """
    answer(man_page({**CHAT_COMMANDS, **COMMANDS}, version("localllm")))
