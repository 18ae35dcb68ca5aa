"""The `localllm` program with the chat in it."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.errors import SettingsError
from tests.systems import make_terminal, needs_shell, own_places
from tui.main import main, model_and_prompt

HEAVY = {"numba", "llvmlite", "textual", "fastapi", "llama_cpp", "tokenizers", "jinja2", "numpy"}


def run(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    script = (
        "import json, sys\n"
        "from tui.main import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main()\n"
        "finally:\n    sys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_help_of_the_chat_imports_nothing_heavy() -> None:
    for arguments in (["--help"], ["chat", "--help"]):
        result = run(arguments)
        assert result.returncode == 0
        assert "chat" in result.stdout.lower()
        loaded = {name.partition(".")[0] for name in json.loads(result.stderr.splitlines()[-1])}
        assert loaded.isdisjoint(HEAVY)


def test_without_a_terminal_the_chat_refuses_and_no_command_means_help() -> None:
    refused = run(["chat", "model.gguf"])
    assert refused.returncode == 2
    assert "needs a terminal" in refused.stderr
    assert "Models:" in run([]).stdout


@needs_shell
@pytest.mark.parametrize(("closed", "code"), [("<&-", 0), ("<&- >&-", 141)])
def test_closed_streams_are_not_bugs_but_lost_output_is_a_failure(closed: str, code: int) -> None:
    call = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", "from tui.main import main; main()", "--version"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def start_in_a_terminal(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the program up to the chat, and return its exit code."""
    for stream in (sys.stdin, sys.stdout):
        make_terminal(stream, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["localllm", *arguments])
    monkeypatch.setattr("tui.terminal.go_on_watched", lambda: None)
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


STORY = "Tell me a story."


@pytest.mark.parametrize(
    ("arguments", "model", "prompt"),
    [
        ([], None, None),
        (["chat"], None, None),
        (["chat", "qwen3:0.6b"], "qwen3:0.6b", None),
        (["chat", STORY], None, STORY),
        (["chat", "--ctx", "64", STORY], None, STORY),
        (["chat", "qwen3:0.6b", "Hello"], "qwen3:0.6b", "Hello"),
        (["run", "qwen3:0.6b"], "qwen3:0.6b", None),
        (["run", "qwen3:0.6b", "--temperature", "0.2"], "qwen3:0.6b", None),
        (["run", "qwen3:0.6b", "--system", "Be short."], "qwen3:0.6b", None),
    ],
)
def test_run_and_chat_open_the_chat_in_a_terminal(
    arguments: list[str], model: str | None, prompt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[object, dict[str, object], dict[str, object]]] = []

    def open_chat(name: object, flags: dict[str, object], **more: object) -> int:
        opened.append((name, flags, more))
        return 0

    monkeypatch.setattr("tui.start.run_chat", open_chat)
    assert start_in_a_terminal(arguments, monkeypatch) == 0
    ((name, flags, more),) = opened
    assert (name, more.get("prompt")) == (model, prompt)
    assert (flags.get("ctx"), flags.get("temperature"), more.get("system")) == (
        64 if "--ctx" in arguments else None,
        0.2 if "--temperature" in arguments else None,
        "Be short." if "--system" in arguments else None,
    )


def test_a_file_path_with_spaces_is_not_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert model_and_prompt("my model.gguf") == ("my model.gguf", None)
    assert model_and_prompt("my other model.gguf") == (None, "my other model.gguf")


@pytest.mark.parametrize(
    ("word", "is_model"),
    [
        ("mistral", True),
        ("qwen3:0.6b", True),
        ("hf.co/user/repo-GGUF:Q4_K_M", True),
        ("https://host/a?b=c", True),
        ("C:\\models\\a!.gguf", True),
        ("Hello!", False),
        ("Why?", False),
        ("Bonjour,", False),
    ],
)
def test_one_word_is_a_prompt_if_no_model_can_have_that_name(word: str, is_model: bool) -> None:
    assert model_and_prompt(word) == ((word, None) if is_model else (None, word))


@pytest.mark.parametrize(
    "option", [["--json"], ["--format", "json"], ["--image", "cat.png"], ["--tools", "read_file"], ["--think", "on"]]
)
def test_options_for_one_answer_want_a_prompt(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_in_a_terminal(["run", "qwen3:0.6b", *option], monkeypatch) == 2
    assert "No prompt." in capsys.readouterr().err


def test_a_chat_that_cannot_open_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_given: object, **_more: object) -> int:
        raise SettingsError("config.toml: top_k should be an integer.")

    monkeypatch.setattr("tui.start.run_chat", refuse)
    assert start_in_a_terminal([], monkeypatch) == 2
    assert "top_k should be an integer" in capsys.readouterr().err


def test_what_the_first_picture_does_not_need_is_not_imported() -> None:
    script = "import json, sys; import tui.main, tui.start, tui.engine_backend; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert loaded.isdisjoint((HEAVY | {"typer", "pydantic", "markdown_it", "httpx", "psutil"}) - {"textual"})


def test_ctrl_c_during_startup_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["localllm", "list"])
    monkeypatch.setattr("localllm.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_unread_output_ends_the_program_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-c", "from tui.main import main; main()", "completion", "bash"]
    result = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo terminals")
def test_the_chat_opens_in_a_terminal_without_a_size(tmp_path: Path) -> None:
    """As `script`, `expect` and `docker run -t` may open one. It claims to draw sixels in cells of 0 x 0 pixels."""
    import pty
    import termios

    pytest.importorskip("textual_image")
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    environment |= own_places(tmp_path)
    program = [sys.executable, "-c", "from tui.main import main; main()"]
    with subprocess.Popen(
        program, stdin=other_end, stdout=other_end, stderr=other_end, env=environment, start_new_session=True
    ) as process:
        os.close(other_end)
        seen = b""
        try:
            while b"sk anything" not in seen and b"error" not in seen:
                read = os.read(terminal, 1 << 16)
                seen += read
                if b"\x1b[c" in read:
                    os.write(terminal, b"\x1b[?62;4c")
                if b"\x1b[16t" in read:
                    os.write(terminal, b"\x1b[6;0;0t")
        finally:
            os.close(terminal)
            process.terminate()
    assert b"sk anything" in seen, seen[-300:]
