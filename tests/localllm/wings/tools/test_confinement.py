"""Tools reach one folder, read hidden files only with approval, and change only what was shown."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from localllm.actions.action import Action, MalformedCallError, Toolbox, ToolError, shortened_result
from localllm.actions.approvals import Approvals
from localllm.actions.folder import Folder
from localllm.answer.tool_calls import ToolCall
from localllm.wings.tools.builtin import builtin_tools
from localllm.wings.tools.command import pattern_of
from localllm.wings.tools.journal import Journal
from tests.systems import needs_commands, needs_links, needs_named_pipes

NEVER = threading.Event()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The tools' folder, with a secret beside it."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.py").write_text("one\ntwo\nthree\n")
    (folder / ".env").write_text("KEY=hidden needle\n")
    (tmp_path / "secret.txt").write_text("needle outside\n")
    (folder / "out").symlink_to(tmp_path)
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return folder


@pytest.fixture
def tools(home: Path, tmp_path: Path) -> Toolbox:
    return Toolbox(builtin_tools(Folder(home), Journal(tmp_path / "changes.db", home)))


def call(tools: Toolbox, name: str, **arguments: Any) -> str:
    return tools.plan(ToolCall(name, arguments)).result(NEVER)


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "src/../../secret.txt", "/etc/passwd", "a\0b"),
        *(pytest.param(path, marks=needs_links) for path in ("out/secret.txt", "link.txt", "out")),
    ],
)
@pytest.mark.parametrize("tool", ["read_file", "list_files", "search_files", "edit_file"])
def test_nothing_outside_the_folder_is_reached(tools: Toolbox, home: Path, tool: str, path: str) -> None:
    arguments = {
        "read_file": {"path": path},
        "list_files": {"path": path},
        "search_files": {"path": path, "text": "needle"},
        "edit_file": {"path": path, "old_text": "needle", "new_text": "gone"},
    }
    with pytest.raises(ToolError, match=r"outside the folder|NUL"):
        tools.plan(ToolCall(tool, arguments[tool]))
    assert (home.parent / "secret.txt").read_text() == "needle outside\n"


@needs_links
def test_a_link_that_is_put_in_the_way_after_the_user_looked_is_not_followed(tools: Toolbox, home: Path) -> None:
    edit = tools.plan(ToolCall("edit_file", {"path": "src/a.py", "old_text": "two", "new_text": "2"}))
    reads = [
        tools.plan(ToolCall("read_file", {"path": "src/a.py"})),
        tools.plan(ToolCall("list_files", {"path": "src"})),
        tools.plan(ToolCall("search_files", {"path": "src", "text": "two"})),
    ]
    outside = home.parent / "outside"
    outside.mkdir()
    (outside / "a.py").write_text("one\ntwo\nthree\n")
    (home / "src" / "a.py").unlink()
    (home / "src").rmdir()
    (home / "src").symlink_to(outside)
    assert "outside the folder" in edit.result(NEVER)
    assert all("outside the folder" in read.result(NEVER) for read in reads)
    assert (outside / "a.py").read_text() == "one\ntwo\nthree\n"
    (home / "src").unlink()
    (home / "src").mkdir()
    (home / "src" / "a.py").symlink_to(home / ".env")
    assert "hidden needle" not in reads[0].result(NEVER)


def test_hidden_files_are_read_only_when_asked_for_one_by_one(tools: Toolbox, home: Path) -> None:
    assert call(tools, "list_files") == "src/a.py"
    assert call(tools, "search_files", text="NEEDLE") == "[not found]"
    secret = tools.plan(ToolCall("read_file", {"path": ".env"}))
    plain = tools.plan(ToolCall("read_file", {"path": "src/a.py"}))
    assert (secret.asks, plain.asks) == (True, False)
    approvals = Approvals(home, given=["read_file", "read_file *"])
    assert not approvals.allow(secret)


def _missing() -> str:
    """The system's words for a file that is not there."""
    try:
        os.lstat("there is no such file")
    except OSError as error:
        return str(error.strerror)
    raise AssertionError


def test_reading_listing_and_searching(tools: Toolbox, home: Path) -> None:
    (home / "long.txt").write_text("".join(f"line {number}\n" for number in range(1, 1001)))
    assert call(tools, "read_file", path="src/a.py") == "one\ntwo\nthree\n"
    part = call(tools, "read_file", path="long.txt", start=700)
    assert part.startswith("line 700\n") and part.endswith("[lines 700 to 1000 of 1000]")
    assert call(tools, "search_files", text="TWO", pattern="*.py") == "src/a.py:2: two"
    assert call(tools, "list_files", pattern="*.txt") == "long.txt"
    assert call(tools, "read_file", path="none") == f"Error: none: {_missing()}"


@needs_named_pipes
def test_files_that_are_not_text_are_refused_without_waiting(tools: Toolbox, home: Path) -> None:
    os.mkfifo(home / "pipe")
    (home / "image").write_bytes(b"\xff\xfe\x00")
    assert "not a regular file" in call(tools, "read_file", path="pipe")
    assert "not UTF-8" in call(tools, "read_file", path="image")
    assert "it is a folder" in call(tools, "read_file", path="src")


@pytest.mark.parametrize("path", [".git/hooks/pre-commit", "src/.GIT/config", ".git"])
def test_git_is_not_changed(tools: Toolbox, path: str) -> None:
    with pytest.raises(ToolError, match="not changed by tools"):
        tools.plan(ToolCall("edit_file", {"path": path, "old_text": "", "new_text": "x"}))


def test_own_settings_are_not_changed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.actions.folder.config_path", lambda: home / "settings" / "config.toml")
    tools = Toolbox(builtin_tools(Folder(home), Journal(tmp_path / "changes.db", home)))
    with pytest.raises(ToolError, match="not changed by tools"):
        tools.plan(ToolCall("edit_file", {"path": "settings/approvals.json", "old_text": "", "new_text": "{}"}))


def test_calls_must_fit_their_schema(tools: Toolbox) -> None:
    for name, arguments, said in (
        ("delete_everything", {}, "There is no tool 'delete_everything'"),
        ("read_file", {}, '"path" is a required property'),
        ("read_file", {"path": 3}, '3 is not of type "string"'),
        ("read_file", {"path": "a", "mode": "w"}, "'mode' was unexpected"),
        ("run_command", {"command": ""}, "schema of run_command"),
        ("run_command", {"command": "echo \ud83d"}, "cannot be written as UTF-8"),
        ("read_file", {"path": "\ud83d"}, "cannot be written as UTF-8"),
        ("edit_file", {"path": "b", "old_text": "", "new_text": "\ud83d"}, "cannot be written as UTF-8"),
    ):
        with pytest.raises(MalformedCallError, match=said):
            tools.plan(ToolCall(name, arguments))
    assert tools.must_call(ToolCall("read_file", {})) == "read_file"
    assert tools.must_call(ToolCall("other", {})) is None


@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        ("git status", "git status *"),
        ("git diff src", "git diff *"),
        ("ls", "ls"),
        ("ls -la", "ls -la"),
        ("rm -rf build", "rm -rf build"),
        ("git status; rm -rf ~", None),
        ("git status\nrm x", None),
        ("git status && x", None),
        ("git status | sh", None),
        ("git status $(rm x)", None),
        ("git status `rm x`", None),
        ("git status > file", None),
        ("git status *", None),
        ("PATH=. git status", None),
        ("git  status", None),
    ],
)
def test_patterns_cover_plain_commands_alone(tools: Toolbox, home: Path, command: str, pattern: str | None) -> None:
    assert pattern_of(command) == pattern
    action = tools.plan(ToolCall("run_command", {"command": command}))
    allowed = Approvals(home, given=["run_command git status *"]).allow(action)
    assert allowed == (command == "git status")


def test_rules_for_edits_keep_to_their_folder_and_kind(tools: Toolbox, home: Path) -> None:
    approvals = Approvals(home)
    first = _new_file(tools, "src/b.py")
    assert not approvals.allow(first)
    approvals.add(first, lasting=False)
    assert approvals.rules == ["edit_file src/*.py"]
    paths = ("src/c.py", "src/c.sh", "c.py", ".hidden/src/c.py", "src/.c.py", "src/../c.py")
    allowed = {path: approvals.allow(_new_file(tools, path)) for path in paths}
    assert [path for path, may in allowed.items() if may] == ["src/c.py"]


def test_lasting_rules_hold_for_their_folder(tools: Toolbox, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings" / "approvals.json"
    Approvals(home, file).add(_new_file(tools, "src/b.py"), lasting=True)
    assert Approvals(home, file).allow(_new_file(tools, "src/d.py"))
    assert Approvals(tmp_path, file).rules == []


def _new_file(tools: Toolbox, path: str) -> Action:
    return tools.plan(ToolCall("edit_file", {"path": path, "old_text": "", "new_text": "x"}))


@needs_commands
def test_a_command_runs_in_the_folder_without_input_and_own_keys(
    tools: Toolbox, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_REMOTE_KEY", "a secret")
    said = call(tools, "run_command", command="pwd; cat; echo ${LOCALLLM_REMOTE_KEY:-none}; echo wrong >&2; exit 3")
    assert said == f"{home}\nnone\nwrong\n\n[exit status 3]"


def test_lines_of_a_command_end_alike_on_every_system(tools: Toolbox) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'one\r\ntwo\r\n')"
    assert call(tools, "run_command", command=f'"{sys.executable}" -c "{code}"') == "one\ntwo\n\n[exit status 0]"


@needs_commands
def test_a_command_that_is_stopped_ends_with_all_that_it_started(tools: Toolbox, home: Path) -> None:
    stop = threading.Event()
    action = tools.plan(ToolCall("run_command", {"command": "(sleep 600 & echo $! > child); touch ready; sleep 600"}))
    results: list[str] = []
    runs = threading.Thread(target=lambda: results.append(action.result(stop)))
    runs.start()
    while not (home / "ready").exists():
        NEVER.wait(0.01)
    stop.set()
    runs.join(60)
    assert results == ["\n[stopped by the user]"]
    child = int((home / "child").read_text())
    for _ in range(1000):  # it is killed; its new parent may still have to reap it
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            break
        if state == "Z":
            break
        NEVER.wait(0.01)
    else:
        pytest.fail("what the command started is alive")


@needs_commands
def test_long_results_keep_their_ends(tools: Toolbox) -> None:
    said = call(tools, "run_command", command="seq 1 100000")
    assert said.startswith("1\n2\n") and "100000\n" in said and "characters left out" in said
    assert shortened_result("short") == "short"
