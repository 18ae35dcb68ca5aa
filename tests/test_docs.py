"""The documentation: the site builds, and the examples of its quick start work against a server."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.localllm.server.conftest import Server, StartServer, model_files, start_server

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
