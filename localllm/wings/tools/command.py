"""The tool that runs a command in the folder's shell."""

import os
import re
import subprocess
import tempfile
import threading
import time
from typing import Any

from gguf_io.system import Started, as_utf_8
from localllm.actions.action import Action, Tool, ToolError, schema_of
from localllm.actions.folder import LIMIT_S, Folder, RunCommand

MAX_OUTPUT_BYTES = 16 * 2**20  # a command that writes more is killed
POLL_S = 0.05

# A pattern may only cover commands without quotes, variables, wildcards or several parts.
_PLAIN = re.compile(r"[\w./:=@%+,-]+(?: [\w./:=@%+,-]+)*")
_WORD = re.compile(r"\w[\w./-]*")


def command_tool(folder: Folder, run: RunCommand | None = None) -> Tool:
    """run_command. Commands run with the user's rights; only approval protects the machine.

    run: what runs them; None is the system's shell.
    """
    return Tool(
        "run_command",
        f"Run a shell command in the folder and return what it prints. It gets no input and {LIMIT_S} s. "
        "The user sees the command and decides.",
        schema_of({"command": {"type": "string", "minLength": 1}}, "command"),
        lambda arguments: _plan(folder, run or run_in_shell, arguments),
    )


def _plan(folder: Folder, run: RunCommand, arguments: dict[str, Any]) -> Action:
    command: str = arguments["command"].strip()
    if not command or "\0" in command:
        raise ToolError("The command is empty or has a NUL character.")

    return Action("run_command", command, command, lambda stop: run(command, folder, stop), pattern=pattern_of(command))


def pattern_of(command: str) -> str | None:
    """A pattern for the same command with any arguments after a subcommand; None if no pattern may cover it."""
    words = command.split(" ")
    if not _PLAIN.fullmatch(command) or "=" in words[0]:
        return None
    return f"{words[0]} {words[1]} *" if len(words) > 1 and _WORD.fullmatch(words[1]) else command


def run_in_shell(command: str, folder: Folder, stop: threading.Event) -> str:
    """A RunCommand."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCALLLM_")}
    with tempfile.TemporaryFile() as output:
        started = Started(
            command,
            shell=True,
            cwd=folder.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ended = ""
        until = time.monotonic() + LIMIT_S
        try:
            while started.process.poll() is None and not ended:
                if stop.wait(POLL_S):
                    ended = "stopped by the user"
                elif time.monotonic() > until:
                    ended = f"ended after {LIMIT_S} s"
                elif os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES:
                    ended = f"ended after {MAX_OUTPUT_BYTES} bytes of output"
        finally:
            started.end()
        output.seek(0)
        text = as_utf_8(output.read(MAX_OUTPUT_BYTES)).decode("utf-8", "replace")
    text = text.replace("\r\n", "\n")  # as Windows' own commands end lines; models write and expect LF
    return f"{text}\n[{ended or f'exit status {started.process.returncode}'}]"
