"""Completion scripts of the shells; bash itself is driven through a terminal."""

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm.cli.completion import BASH, Shell, completion
from localllm.front.options import COMPLETION_VARIABLE, PROGRAM
from tests.systems import own_places
from tests.waiting import PATIENCE_S

pty = pytest.importorskip("pty", reason="Windows has no such module")

NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with two files named like models, so that no store is needed."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("qwen3:0.6b", "qwen3:1.7b", "other", "with blanks in it"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    return tmp_path


@contextmanager
def bash(home: Path, *, setup: str = "") -> Iterator[Callable[[str], str]]:
    """Yields a function that types the beginning of a line and Tab into bash, and returns the completed line."""
    program = home / "localllm"
    program.write_text(f"#!{sys.executable}\nfrom tui.main import main\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    show_line = r"""bind -x '"\C-g": printf "<<%s>>\n" "$READLINE_LINE"'"""
    (home / "rc").write_text(f"PS1='ready$ '\n{setup}\nbind 'set bell-style none'\n{show_line}\n{BASH}\n")
    environment = {
        "HOME": str(home),
        "PATH": f"{home}:{os.environ['PATH']}",
        "LOCALLLM_MODEL_FOLDERS": str(home / "models"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TERM": "dumb",
    }
    outside, inside = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(home / "rc"), "-i"],
        stdin=inside, stdout=inside, stderr=inside, env=environment, cwd=home, start_new_session=True,
    )  # fmt: skip
    os.close(inside)

    def until(mark: str) -> str:
        seen, end = "", time.monotonic() + PATIENCE_S
        while mark not in seen:
            assert select.select([outside], [], [], max(end - time.monotonic(), 0))[0], f"bash says only {seen!r}"
            seen += os.read(outside, 4096).decode(errors="replace")
        return seen.partition(mark)[0]

    def completed(line: str) -> str:
        os.write(outside, f"{line}\t\x07\x15".encode())  # press Tab, print the line, delete it
        return until(">>").rpartition("<<")[2]

    try:
        until("ready$ ")
        yield completed
    finally:
        shell.kill()
        shell.wait()
        os.close(outside)


@NEEDS_BASH
def test_bash_completes_names_with_colons(home: Path) -> None:
    with bash(home) as completed:
        assert completed("localllm run qw") == "localllm run qwen3:"
        assert completed("A=1 localllm rm other qwen3:1.") == "A=1 localllm rm other qwen3:1.7b "
        assert completed('localllm run qwen3:0.6b "Say: this" --temperat') == (
            'localllm run qwen3:0.6b "Say: this" --temperature '
        )
        assert completed("localllm measure per") == "localllm measure perplexity "
        assert completed("localllm show with") == "localllm show with\\ blanks\\ in\\ it "
        assert completed("localllm run ./models/oth") == "localllm run ./models/other.gguf "


@NEEDS_BASH
def test_bash_that_does_not_split_at_colons_completes_them_too(home: Path) -> None:
    with bash(home, setup='COMP_WORDBREAKS="${COMP_WORDBREAKS//:}"') as completed:
        assert completed("localllm run qwen3:0") == "localllm run qwen3:0.6b "


@pytest.mark.parametrize("shell", Shell)
def test_every_shell_has_a_script_that_asks_us(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    completion(shell)
    script = capsys.readouterr().out
    assert f"complete_{shell}" in script and COMPLETION_VARIABLE in script and PROGRAM in script


def test_another_shell_is_answered(home: Path) -> None:
    asked = {COMPLETION_VARIABLE: "complete_zsh", "_TYPER_COMPLETE_ARGS": "localllm run qwen3:0"}
    environment = {**os.environ, **asked, **own_places(home), "LOCALLLM_MODEL_FOLDERS": str(home / "models")}
    call = [sys.executable, "-c", "import sys; sys.argv = ['localllm']; from tui.main import main; main()"]
    told = subprocess.run(call, env=environment, capture_output=True, check=True, timeout=PATIENCE_S, text=True).stdout
    assert "0.6b" in told and "1.7b" not in told
