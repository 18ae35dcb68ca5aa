"""localllm run --tools with a model of this machine that writes calls without its template's markers."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.cli.main import main
from tests.fakes.scripted_model import write_scripted_model
from tests.systems import use_own_places

SCRIPTS = {
    "0": '{"name": "read_file", "arguments": {"path": "a.txt"}}',
    "1": 'Now the others:\n\n```json\n{"name": "list_files", "arguments": {"path": "", "pattern": ""}}\n```',
    "2": '<tools>\n{"function": "search_files", "parameters": {"text": "second"}}\n</tools>',
    "3": '```json\n{"name": "run_command", "arguments": {"command": "touch made"}}\n```',
    "4": 'Example, no offered tool:\n```json\n{"name": "delete_file", "arguments": {"path": "a.txt"}}\n```\nDone!!',
}


def test_calls_without_markers_are_run_as_the_command_line_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_scripted_model(tmp_path / "scripted.gguf", SCRIPTS)
    monkeypatch.setattr("localllm.settings.config_path", lambda: tmp_path / "config.toml")
    use_own_places(tmp_path, monkeypatch)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO()))
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text("first\nsecond\n")
    monkeypatch.chdir(project)
    rules = ["read_file", "list_files", "search_files", "run_command git *"]
    allowed = [word for rule in rules for word in ("--tools", rule)]
    call = ["run", str(model), "Hi", *allowed, "--backend", "native", "--no-cache", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["localllm", *call])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert [line.partition(" {")[0] for line in err.splitlines() if " {'" in line] == [
        *("read_file", "list_files", "search_files", "run_command"),
    ]
    assert "a.txt:2: second" in err and "This call is not allowed." in err
    assert out == f"Now the others:\n{SCRIPTS['4']}\n"  # the objects of calls are not printed
    assert not (project / "made").exists()
