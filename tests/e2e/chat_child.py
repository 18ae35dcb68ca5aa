"""A chat in its own terminal, driven by tests/e2e/test_terminal_restored.py: python chat_child.py DATABASE HOW."""

import os
import sys
from pathlib import Path

import tui.engine_backend
from tests.fakes.fake_backend import FakeBackend, said
from tui.screens.chat import ChatScreen
from tui.start import run_chat
from tui.terminal import go_on_watched


def main() -> None:
    database, how = sys.argv[1:]
    if how != "is told of no hang-up":
        # The first terminal that a session opens becomes its controlling one.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if how == "is watched":
        go_on_watched()
    backend = FakeBackend([said("Half an answer")])  # never ends
    if how == "loads for ever":
        backend.gate.clear()
    tui.engine_backend.EngineBackend = lambda _settings: backend  # type: ignore[assignment,misc]
    if how == "crashes":

        async def crash(_self: ChatScreen, _event: object) -> None:
            raise RuntimeError("a defect")

        ChatScreen.on_prompt_sent = crash  # type: ignore[assignment,method-assign]
    code = run_chat("tiny", {}, Path(database))
    print(f"ended with {code}")  # noqa: T201 - what the test reads
    sys.exit(code)


if __name__ == "__main__":
    main()
