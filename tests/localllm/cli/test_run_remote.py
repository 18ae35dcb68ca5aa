"""localllm run --remote against a scripted server."""

import base64
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.cli.main import main
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.picture_files import png
from tests.systems import use_own_places


@pytest.fixture
def script() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        yield server


@pytest.fixture
def run(script: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run the command line with --remote and return the exit code."""
    monkeypatch.setattr("localllm.settings.config_path", lambda: tmp_path / "config.toml")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO()))

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["localllm", "run", "--remote", script.address, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def test_the_answer_comes_as_from_here(
    run: Callable[..., int], script: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    script.says("Hel", "lo", prompt_tokens=9, completion_tokens=2)
    assert run("tiny", "Hi", "--system", "Be short.", "--seed", "3", "--stop", "END", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert f"remote: {script.address}/v1\n" in err
    assert "prompt 9 tokens" in err and "whole request" in err
    # Figures unknown to this machine are not shown: memory, the server's seed, a decode speed without bursts.
    assert not [word for word in ("memory", "seed", "decode", "load") if word in err]
    asked = script.asked[0]
    assert [turn["role"] for turn in asked["messages"]] == ["system", "user"]
    assert (asked["seed"], asked["stop"]) == (3, ["END"])
    # What the user has not set is left to the server.
    assert not asked.keys() & {"temperature", "top_p", "top_k", "max_tokens"}


def test_reasoning_is_set_apart_and_json_is_whole(
    run: Callable[..., int], script: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    script.says("Yes.", prompt_tokens=9, completion_tokens=4)
    script.pieces.insert(0, {"reasoning_content": "Hm."})
    assert run("tiny", "Hi", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "<think>\nHm.\n</think>\n\nYes."
    assert (result["backend"], result["completion_tokens"], result["finish_reason"]) == ("remote", 4, "stop")


def test_images_go_along(run: Callable[..., int], script: ScriptedOpenAI, tmp_path: Path) -> None:
    script.says("A fox.")
    picture = tmp_path / "fox.png"
    picture.write_bytes(png(1))
    assert run("tiny", "What is it?", "--image", str(picture)) == 0
    image, text = script.asked[0]["messages"][0]["content"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert (head, base64.b64decode(data)) == ("data:image/png;base64", png(1))
    assert text == {"type": "text", "text": "What is it?"}


def test_errors_and_what_a_server_cannot_follow(
    run: Callable[..., int], script: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    script.refusal = (404, {"error": {"message": "no such model"}})
    assert run("other", "Hi") == 2
    assert "refuses: no such model" in capsys.readouterr().err
    assert run("tiny", "Hi", "--ctx", "99", "--n-cpu-moe", "2") == 2
    assert "--ctx, --n-cpu-moe cannot be used with --remote" in capsys.readouterr().err
    assert run("tiny", "Hi", "--raw", "--system", "x") == 2
    assert len(script.asked) == 1


def calls_of(*calls: tuple[str, dict[str, object]]) -> list[dict[str, object]]:
    """The pieces of an answer with tool calls."""
    deltas = [
        {"index": index, "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return [{"tool_calls": deltas}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path, monkeypatch)
    made = tmp_path / "project"
    made.mkdir()
    (made / "a.txt").write_text("one\n")
    monkeypatch.chdir(made)
    return made


def test_tools_run_only_as_the_command_line_allows(
    run: Callable[..., int], script: ScriptedOpenAI, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit = {"path": "a.txt", "old_text": "one", "new_text": "two"}
    script.turns = [
        calls_of(("read_file", {"path": "a.txt"}), ("run_command", {"command": "touch made"}), ("edit_file", edit)),
        calls_of(("read_file", {"file": "a.txt"})),
    ]
    script.says("Done.")
    assert run("tiny", "Go", "--tools", "read_file", "--tools", "run_command git *") == 0
    out, err = capsys.readouterr()
    assert out == "Done.\n" and "read_file" in err
    assert [tool["function"]["name"] for tool in script.asked[0]["tools"]] == ["read_file", "run_command"]
    results = [turn["content"] for turn in script.asked[1]["messages"] if turn["role"] == "tool"]
    assert results[0] == "one\n"
    assert "not allowed" in results[1] and "There is no tool 'edit_file'" in results[2]
    assert ((folder / "a.txt").read_text(), (folder / "made").exists()) == ("one\n", False)
    # The malformed call is retried under its schema.
    assert [asked.get("tool_choice") for asked in script.asked] == [None, None, "required"]
    assert [tool["function"]["name"] for tool in script.asked[2]["tools"]] == ["read_file"]


def test_tools_that_are_unknown_or_go_on_for_ever(
    run: Callable[..., int], script: ScriptedOpenAI, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tiny", "Go", "--tools", "delete_all") == 2
    assert "there is no tool 'delete_all'" in capsys.readouterr().err
    assert not script.asked
    script.pieces = calls_of(("list_files", {}))
    assert run("tiny", "Go", "--tools", "list_files") == 0
    assert "Stopped after 16 rounds of tools." in capsys.readouterr().err
    assert len(script.asked) == 17
