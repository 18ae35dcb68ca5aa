"""The `localllm` program with the chat in it."""

import json
import subprocess
import sys

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
    assert "Commands:" in run([]).stderr
