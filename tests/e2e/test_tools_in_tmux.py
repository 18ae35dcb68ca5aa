"""Tools in a chat in a real terminal, with a scripted server; the chat is killed, and the change is undone."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.test_chat_in_tmux import ROOT, Terminal
from tests.fakes.openai_server import openai_server
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


def test_an_edit_is_allowed_and_taken_back_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (folder / "a.txt").chmod(0o640)
    environment = {
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
    }
    arguments = json.dumps({"path": "a.txt", "old_text": "two", "new_text": "2"})
    edit = {"tool_calls": [{"index": 0, "function": {"name": "edit_file", "arguments": arguments}}]}
    with openai_server() as server:
        server.turns = [[edit, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]]
        server.says("It says 2 now.")
        terminal = Terminal(tmp_path / "tmux", 60, 20, environment)
        try:
            chat = f"{sys.executable} -c 'from tui.main import main; main()' chat tiny --remote {server.address}"
            terminal.keys(f"cd {folder}; {chat}", "Enter")
            terminal.wait_for("ctx 0/512")
            terminal.keys("/tools on", "Enter")
            terminal.wait_for("offered")
            terminal.keys("Change it", "Enter")
            terminal.wait_for("Make this change?")
            assert (folder / "a.txt").read_bytes() == b"one\r\ntwo\r\n"
            terminal.keys("Down", "Enter")
            terminal.wait_for("It says 2 now.")
            assert (folder / "a.txt").read_bytes() == b"one\r\n2\r\n"
            (watcher,) = terminal.shell().children()
            (process,) = watcher.children()
            process.kill()
            watcher.wait(PATIENCE_S)  # restoring the terminal discards what was typed meanwhile
            terminal.keys(f"clear; {chat}", "Enter")
            terminal.wait_for("Ask anything")
            terminal.keys("/undo", "Enter")
            terminal.wait_for("It was made in another chat.")
            terminal.keys("Down", "Enter")
            terminal.wait_for("Undone")
        finally:
            terminal.close()
    assert (folder / "a.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert (folder / "a.txt").stat().st_mode & 0o777 == 0o640
