"""Writes a text in the user's own editor, on the chat's terminal."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from textual.app import App, SuspendNotSupported

from gguf_io.system import command_of
from localllm.errors import RequestError
from localllm.files import read_text
from localllm.text import shortened

_USUAL = ("notepad",) if sys.platform == "win32" else ("nano", "vi")


def edited(app: App[None], text: str) -> str:
    """Open the editor with a text and return what was saved; the chat stands still meanwhile.

    Raises RequestError if there is no editor, it fails, or the chat is in a browser. The text is then unchanged.
    """
    command = editor_command()
    with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
        path = Path(folder, "prompt.md")
        path.write_text(text, encoding="utf-8")
        try:
            with app.suspend():
                # The chat must outlive Ctrl+C in the editor, which sets its own handler.
                before = signal.signal(signal.SIGINT, lambda *_: None)
                try:
                    status = subprocess.run(command_of(command[0], [*command[1:], str(path)]), check=False).returncode
                finally:
                    signal.signal(signal.SIGINT, before)
        except SuspendNotSupported as error:
            raise RequestError("An editor can only be opened in a terminal.") from error
        except OSError as error:
            raise RequestError(f"{shortened(command[0])} cannot be started: {error.strerror}. Set EDITOR.") from error
        if status:
            raise RequestError(f"{shortened(command[0])} ended with exit status {status}. The prompt is as it was.")
        return read_text(path).removesuffix("\n")


def editor_command() -> list[str]:
    """The program's path and its arguments, from VISUAL or EDITOR, else a usual one. Raises RequestError."""
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        if sys.platform == "win32":  # backslashes are no escapes there, and quotes stay
            words = [word.strip('"') for word in shlex.split(chosen, posix=False)]
        else:
            words = shlex.split(chosen)
    except ValueError as error:
        raise RequestError(f"EDITOR is {shortened(chosen)!r}, which is no command: {error}.") from error
    found = words or [name for name in _USUAL if shutil.which(name)][:1]
    if not found:
        raise RequestError("There is no editor. Set EDITOR, for example EDITOR=nano.")
    return [shutil.which(found[0]) or found[0], *found[1:]]
