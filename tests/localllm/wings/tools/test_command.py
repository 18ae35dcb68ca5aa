"""The tool that runs commands, as the model sees their output."""

import sys
import threading
from pathlib import Path

import pytest

from localllm.actions.folder import Folder
from localllm.wings.tools.command import run_in_shell
from tests.systems import ON_WINE


def run(command: str, folder: Path) -> str:
    return run_in_shell(command, Folder(folder), threading.Event())


@pytest.mark.skipif(ON_WINE, reason="Wine's commands have a code page of their own where there is no console")
def test_letters_beyond_ascii_are_read_as_the_shell_writes_them(tmp_path: Path) -> None:
    assert run("echo Gr\u00fc\u00dfe", tmp_path) == "Gr\u00fc\u00dfe\n\n[exit status 0]"


def test_all_of_a_long_output_is_returned_for_the_action_to_shorten(tmp_path: Path) -> None:
    printed = "".join(f"line {number} \u6f22\n" for number in range(5000))
    (tmp_path / "long.py").write_text(
        "import sys\nfor i in range(5000): sys.stdout.buffer.write(f'line {i} \\u6f22\\n'.encode())\n", encoding="utf-8"
    )
    assert run(f'"{sys.executable}" long.py', tmp_path) == f"{printed}\n[exit status 0]"
