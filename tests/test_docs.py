"""The documentation: the site builds, and the examples of its quick start work against a server."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from localllm.cli.main import COMMANDS, application
from tests.localllm.server.conftest import Server, StartServer, model_files, start_server
from tui.main import COMMANDS as CHAT_COMMANDS

__all__ = ["model_files", "start_server"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
PROGRAMS = {"sh": ["sh", "-c"], "python": [sys.executable, "-c"], "js": ["node", "--input-type=module", "--eval"]}
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    with start_server(models=()) as running:
        yield running


def test_the_quick_start_has_an_example_for_each_kind_of_client() -> None:
    assert [language for language, _ in EXAMPLES] == ["sh", "sh", "python", "js"]


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[f"{at}-{one[0]}" for at, one in enumerate(EXAMPLES)])
def test_examples_of_the_quick_start_work(server: Server, language: str, code: str) -> None:
    needed = "curl" if language == "sh" else PROGRAMS[language][0]
    if shutil.which(needed) is None:
        pytest.skip(f"needs {needed}")
    code = code.replace("http://127.0.0.1:11434", server.url).replace("qwen3:0.6b", "builtin")
    done = subprocess.run([*PROGRAMS[language], code], capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.split()) > 3 and "error" not in done.stdout


PROGRAM: Any = typer.main.get_command(application({**CHAT_COMMANDS, **COMMANDS}))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_have_valid_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^    (?:\S+=\S+ )*localllm (\w.*)$", text, re.MULTILINE):
        if "[OPTIONS]" in line:
            continue
        # Comments behind spaces, pipes and files are not part of the command.
        name, *words = shlex.split(re.sub(r"\s\|.*|\s>.*|\s{3,}.*", "", line), comments=True)
        if name in ("help", "COMMAND"):
            continue
        command = PROGRAM.commands[name]
        if name == "measure":
            command = command.commands[words.pop(0)]
        with command.make_context(name, words):
            pass
