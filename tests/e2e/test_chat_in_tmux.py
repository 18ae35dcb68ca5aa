"""The chat in a real terminal: typing, reading the screen, leaving, and restoring the terminal."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


class Terminal:
    """A tmux session with its own socket."""

    def __init__(self, socket: Path, columns: int, lines: int, environment: dict[str, str]) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(lines)]
        variables = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        subprocess.run([*self._tmux, "new-session", "-d", *size, *variables, "sh"], check=True)

    def keys(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> str:
        return subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout

    def shell(self) -> psutil.Process:
        told = subprocess.run([*self._tmux, "display", "-p", "#{pane_pid}"], check=True, capture_output=True)
        return psutil.Process(int(told.stdout))

    def wait_for(self, text: str) -> str:
        """Wait until the text is on the screen, and return the screen."""
        end = time.monotonic() + PATIENCE_S
        while text not in (screen := self.screen()):
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{screen}"
            time.sleep(0.1)
        return screen

    def wait_until_gone(self, text: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while text in (screen := self.screen()):
            assert time.monotonic() < end, f"{text!r} stays on the screen:\n{screen}"
            time.sleep(0.1)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    stores = {name: str(tmp_path / "none") for name in ("OLLAMA_MODELS", "HF_HUB_CACHE", "LLAMA_CACHE")}
    environment = {
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
    } | stores
    opened = Terminal(tmp_path / "tmux", 80, 24, environment)
    yield opened
    opened.close()


def test_the_first_start_offers_a_model_and_the_built_in_one_answers(terminal: Terminal) -> None:
    terminal.keys(f"{sys.executable} -c 'from tui.main import main; main()'", "Enter")
    terminal.wait_for("No model is installed yet")
    terminal.wait_for("To pull from ollama.com")
    terminal.keys("Enter")
    terminal.wait_until_gone("No model is installed yet")
    terminal.keys("Tell me a story about a fox", "Enter")
    terminal.wait_for("tokens ·")
    assert "builtin" in terminal.screen()
    terminal.keys("C-q")
    terminal.wait_until_gone("Ask anything")


def test_ask_stop_quit_and_come_back(terminal: Terminal, data_dir: Path) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    chat = f"{sys.executable} -c 'from tui.main import main; main()' chat {model}"
    terminal.keys(f"{chat}; echo back $((40 + 2))", "Enter")
    terminal.wait_for("Ask anything")
    terminal.keys("Once upon a time", "Enter")
    terminal.wait_for("TTFT")
    terminal.keys("Escape")
    terminal.wait_for("tokens ·")
    terminal.keys("/bye", "Enter")
    terminal.wait_for("back 42")  # wait for the shell: earlier input would be lost with the chat
    terminal.keys("clear; stty -a | tr ' ' '\\n' | grep -x -e icanon -e echo | sort | tr '\\n' ' '", "Enter")
    terminal.wait_for("echo icanon")
    terminal.keys(f"clear; {chat}", "Enter")
    terminal.wait_for("Ask anything")
    terminal.keys("F3")
    terminal.wait_for("Once upon a time")
    terminal.keys("Escape", "C-q")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process that its parent is gone")
def test_killing_the_process_that_watches_gives_the_terminal_back(terminal: Terminal) -> None:
    nowhere = "chat model --host 127.0.0.1:9"
    terminal.keys(f"{sys.executable} -c 'from tui.main import main; main()' {nowhere}", "Enter")
    terminal.wait_for("Ask anything")
    (watcher,) = terminal.shell().children()
    watcher.kill()
    terminal.wait_until_gone("Ask anything")  # left in order by the chat only
    terminal.keys("clear; echo back $((40 + 2))", "Enter")
    terminal.wait_for("back 42")
