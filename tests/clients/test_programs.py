"""Real coding agents perform a task: read a file, edit it, run a command. `make test-clients` installs
and runs them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients import libraries
from tests.clients.conftest import CLIENTS, Installed
from tests.fakes.counting import COUNTING, counted
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import Server, StartServer

TASK = "Change the notes and copy them."
TITLE = "A short title about notes, and nothing else."
DONE = "All three steps have been done, goodbye."
LIMIT_S = 900  # for one start of a program: on busy cores some take minutes before their first request
MOST_COMPUTED = 1.01  # per new token

Record = Callable[[str, object], None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * LIMIT_S),  # the most starts of a test, and its server's
    pytest.mark.skipif(not CLIENTS.is_dir(), reason="TEST_CLIENTS names no folder of programs: make test-clients"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A program's three calls in a folder, and its arguments for the task.

    The calls must match the tools' schemas, with all required arguments: the server allows the model nothing else.
    """

    name: str
    calls: Callable[[Path], Sequence[str]]
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def _claude(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("Read", file_path=notes),
        call("Edit", file_path=notes, old_string="one", new_string="two"),
        call("Bash", command="cp notes.txt seen.txt", description="Copy the notes"),
    )


def _codex(_folder: Path) -> Sequence[str]:
    return (
        call("exec_command", cmd="cat notes.txt"),
        call("exec_command", cmd="sed -i s/one/two/ notes.txt && echo edited"),
        call("exec_command", cmd="cp notes.txt seen.txt && echo copied it"),
    )


def _opencode(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read", filePath=notes),
        call("edit", filePath=notes, oldString="one", newString="two"),
        call("bash", command="cp notes.txt seen.txt"),
    )


def _continue(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("Read", filepath=notes),
        call("Edit", file_path=notes, old_string="one", new_string="two"),
        call("Bash", command="cp notes.txt seen.txt"),
    )


def _cline(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read_files", files=[{"path": notes}]),
        call("editor", path=notes, old_text="one", new_text="two"),
        call("run_commands", commands=["cp notes.txt seen.txt"]),
    )


def _pi(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read", path=notes),
        call("edit", path=notes, edits=[{"oldText": "one", "newText": "two"}]),
        call("bash", command="cp notes.txt seen.txt"),
    )


def _qwen(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read_file", file_path=notes),
        call("edit", file_path=notes, old_string="one", new_string="two"),
        call("run_shell_command", command="cp notes.txt seen.txt", description="Copy the notes"),
    )


def _copilot(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("view", path=notes),
        call("edit", path=notes, old_str="one", new_str="two"),
        call("bash", command="cp notes.txt seen.txt", description="Copy the notes"),
    )


def _kimi(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("Read", path=notes),
        call("Edit", path=notes, old_string="one", new_string="two"),
        call("Bash", command="cp notes.txt seen.txt"),
    )


def _openclaw(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read", path=notes),
        call("edit", path=notes, edits=[{"oldText": "one", "newText": "two"}]),
        call("exec", command=f"cp {notes} {folder / 'seen.txt'}"),
    )


def _droid(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("Read", file_path=notes),
        call("Edit", file_path=notes, old_str="one", new_str="two"),
        call(
            "Execute",
            summary="Copy the notes",
            command="cp notes.txt seen.txt",
            riskLevelReason="It copies a file.",
            riskLevel="low",
        ),
    )


def _vibe(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read_file", path=notes),
        call("edit", file_path=notes, old_string="one", new_string="two"),
        call("bash", command="cp notes.txt seen.txt"),
    )


def _hermes(folder: Path) -> Sequence[str]:
    notes = str(folder / "notes.txt")
    return (
        "I will read the file.\n" + call("read_file", path=notes),
        call("patch", mode="replace", path=notes, old_string="one", new_string="two"),
        call("terminal", command="cp notes.txt seen.txt"),
    )


def _goose(_folder: Path) -> Sequence[str]:
    return (
        "I will read the file.\n" + call("shell", command="cat notes.txt"),
        call("edit", path="notes.txt", before="one", after="two"),
        call("shell", command="cp notes.txt seen.txt"),
    )


CASES = [
    Case("claude", _claude, ("-p", TASK, "--dangerously-skip-permissions"), (("IS_SANDBOX", "1"),)),
    Case("codex", _codex, ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK)),
    Case("opencode", _opencode, ("run", TASK)),
    Case("cn", _continue, ("--auto", "-p", TASK)),
    Case("cline", _cline, (TASK,)),
    Case("pi", _pi, ("-p", TASK)),
    Case("qwen", _qwen, (TASK, "--approval-mode", "yolo")),
    Case("copilot", _copilot, ("-p", TASK, "--allow-all-tools", "--allow-all-paths")),
    Case("kilo", _opencode, ("run", "--auto", TASK)),
    Case("vibe", _vibe, ("-p", TASK, "--auto-approve", "--trust")),
    Case("hermes", _hermes, ("chat", "-q", TASK, "--yolo")),
    Case("droid", _droid, ("exec", "--skip-permissions-unsafe", TASK)),
    Case("kimi", _kimi, ("-p", TASK)),
    Case("openclaw", _openclaw, ("agent", "--local", "--agent", "main", "--message", TASK)),
    # It does not start without the certificates that other tests do without.
    Case("goose", _goose, ("run", "--text", TASK), (("SSL_CERT_DIR", "/etc/ssl/certs"),)),
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("one line\n")
    return folder


def _places() -> str:
    """PATH with the installed programs first, and the Node that they run on."""
    places = ("node_modules/.bin", "aider/bin", "vibe/bin", "hermes/bin")
    return os.pathsep.join([*(str(CLIENTS / place) for place in places), os.environ["PATH"]])


def _run(
    command: Sequence[str], work: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    home = work.with_name("home")
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "PWD": str(work),  # some programs give this precedence over the system
        "PATH": _places(),
        **(variables or {}),
    }
    return subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@contextmanager
def _counted(start_server: StartServer, model: Path, record: Record) -> Iterator[Server]:
    """A server of a model. Afterwards it must have computed a program's new tokens only; the figures are recorded."""
    with start_server("--model", str(model), models=(), begins=COUNTING, LOCALLLM_KV_MIB="512") as server:
        yield server
        tokens = counted(server.url, server.process.out.read_text())
    record("tokens of prompts", f"{tokens.prompts:,}")
    record("computed / new", f"{tokens.computed / max(tokens.new, 1):.2f}")
    assert tokens.new and tokens.computed <= tokens.new * MOST_COMPUTED


def _launched(
    name: str, server: Server, arguments: Sequence[str], work: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "localllm", "launch", name, "--model", "scripted", "--port", str(server.port)]
    return _run([*launch, "--", *arguments], work, variables)


def _texts(work: Path) -> list[str]:
    """The contents of the edited file and its copy."""
    return [path.read_text() if path.exists() else "" for path in (work / "notes.txt", work / "seen.txt")]


def _scripts(calls: Sequence[str]) -> dict[str, str]:
    return {"plain": TITLE, **{str(at): text for at, text in enumerate([*calls, DONE])}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_three_calls(
    case: Case, start_server: StartServer, work: Path, installed: Installed, record_property: Record
) -> None:
    installed(case.name)
    model = write_scripted_model(work.with_name("scripted.gguf"), _scripts(case.calls(work)))
    with _counted(start_server, model, record_property) as server:
        done = _launched(case.name, server, case.arguments, work, dict(case.variables))
        assert done.returncode == 0, done.stdout + done.stderr
        assert DONE in done.stdout
        assert _texts(work) == ["two line\n"] * 2, done.stdout + done.stderr


def test_codex_as_it_is_asked_for_local_models(
    start_server: StartServer, work: Path, installed: Installed, record_property: Record
) -> None:
    """`codex --oss` treats the server as Ollama."""
    installed("codex", " --oss")
    model = write_scripted_model(work.with_name("scripted.gguf"), _scripts(_codex(work)))
    words = ["codex", "exec", "--oss", "--local-provider", "ollama", "-m", "scripted"]
    words += ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK]
    with _counted(start_server, model, record_property) as server:
        done = _run(words, work, {"CODEX_OSS_BASE_URL": f"{server.url}/v1"})
        assert done.returncode == 0 and DONE in done.stdout, done.stdout + done.stderr
        assert _texts(work) == ["two line\n"] * 2, done.stdout + done.stderr


def test_aider_edits_and_tests(
    start_server: StartServer, work: Path, installed: Installed, record_property: Record
) -> None:
    """aider has no tools: the prompt has the file, the answer has the edit, and aider's test option runs
    the command.
    """
    installed("aider")
    edit = "I will change it.\n\nnotes.txt\n<<<<<<< SEARCH\none line\n=======\ntwo line\n>>>>>>> REPLACE\n"
    model = write_scripted_model(work.with_name("scripted.gguf"), {"plain": edit})
    test = ("--auto-test", "--test-cmd", "cp notes.txt seen.txt")
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-stream")
    arguments = (*quiet, "--edit-format", "diff", *test, "--message", TASK, "notes.txt")
    with _counted(start_server, model, record_property) as server:
        done = _launched("aider", server, arguments, work, {})
        assert done.returncode == 0, done.stdout + done.stderr
        assert _texts(work) == ["two line\n"] * 2, done.stdout + done.stderr


def test_acpx_drives_localllm_s_agent(
    start_server: StartServer, work: Path, installed: Installed, record_property: Record
) -> None:
    """An editor's side of the Agent Client Protocol. It allows what it is asked."""
    installed("acpx", ", `localllm agent`")
    calls = (
        "I will read the file.\n" + call("read_file", path="notes.txt"),
        call("edit_file", path="notes.txt", old_text="one", new_text="two"),
        call("run_command", command="cp notes.txt seen.txt"),
    )
    model = write_scripted_model(work.with_name("scripted.gguf"), _scripts(calls))
    with _counted(start_server, model, record_property) as server:
        agent = f"{sys.executable} -m localllm agent scripted --host {server.url}"
        done = _run(["acpx", "--approve-all", "--agent", agent, "exec", TASK], work)
        assert done.returncode == 0 and DONE in done.stdout, done.stdout + done.stderr
        assert _texts(work) == ["two line\n"] * 2, done.stdout + done.stderr


@pytest.mark.parametrize("name", libraries.PROGRAMS)
def test_libraries(
    name: str, start_server: StartServer, work: Path, installed: Installed, record_property: Record
) -> None:
    installed(name)
    question = call("get_weather", city="Paris")
    code = "I will look.\n<code>\nfinal_answer(get_weather('Paris') + ', goodbye')\n</code>"
    answers = {"plain": code, "0": question, "1": "It is warm today, goodbye."}
    model = write_scripted_model(work.with_name("scripted.gguf"), answers)
    with _counted(start_server, model, record_property) as server:
        program = work.with_name("program.py")  # smolagents reads the source of its tools
        program.write_text(libraries.PROGRAMS[name].replace("BASE", f"{server.url}/v1"))
        done = _run([str(CLIENTS / name / "bin" / "python"), str(program)], work, libraries.QUIET)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("called for Paris") == 1 and "goodbye" in done.stdout, done.stdout + done.stderr


# A summary as each program wants it. Answers in sessions with tools do not begin with a tag, which qwen-code refuses.
SUMMARY = "<{0}>The user sent a text about rain and wants to go on with it.</{0}>"
LAST = "Both texts have been read, goodbye."


@dataclass(frozen=True, slots=True)
class Overflow:
    """A program that is not told the context, so that its second prompt exceeds it. context, characters: of each text.

    summary: its answers. set_up: of the server's address and the home folder, to variables.
    """

    name: str
    context: int
    characters: int
    summary: str
    arguments: tuple[str, ...]
    set_up: Callable[[str, Path], Mapping[str, str]]


def _told_claude(url: str, _home: Path) -> Mapping[str, str]:
    own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "scripted"}
    more = {"ANTHROPIC_SMALL_FAST_MODEL": "scripted", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return {**own, **more, "IS_SANDBOX": "1"}


def _told_qwen(url: str, _home: Path) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}


def _told_pi(url: str, home: Path) -> Mapping[str, str]:
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"compaction": {"keepRecentTokens": 2000}}))
    model = {"id": "scripted", "name": "scripted", "contextWindow": 200_000, "maxTokens": 4096}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    (folder / "models.json").write_text(json.dumps({"providers": {"localllm": provider}}))
    return {}


OVERFLOWS = [
    Overflow("claude", 64_000, 14_000, "summary", ("--dangerously-skip-permissions",), _told_claude),
    Overflow("pi", 26_000, 14_000, "summary", ("--provider", "localllm", "--model", "scripted"), _told_pi),
    Overflow(
        "qwen", 96_000, 14_000, "state_snapshot", ("--auth-type", "openai", "--approval-mode", "yolo"), _told_qwen
    ),
]


@pytest.mark.parametrize("case", OVERFLOWS, ids=lambda case: case.name)
def test_a_session_that_overflows_goes_on(
    case: Overflow, start_server: StartServer, work: Path, installed: Installed
) -> None:
    installed(case.name, ", a session that overflows")
    summary = SUMMARY.format(case.summary)
    other = summary.replace("rain", "snow").replace("user", "person").replace("wants", "likes")
    model = write_scripted_model(work.with_name("scripted.gguf"), {"plain": summary, "0": f"{LAST} {other}"})
    home = work.with_name("home")
    home.mkdir()
    options = ("--model", str(model), "--ctx", str(case.context))
    with start_server(*options, models=(), LOCALLLM_KV_MIB="512") as server:
        variables = case.set_up(server.url, home)
        texts = [
            sentence * (case.characters // len(sentence)) for sentence in ("Rain fell here. ", "Snow fell there. ")
        ]
        for index, text in enumerate([*texts, "And now?"]):
            again = ["-c"] if index else []
            done = _run([case.name, *again, "-p", text, *case.arguments], work, variables)
            assert done.returncode == 0 and LAST in done.stdout, done.stdout + done.stderr
        refused = re.findall(r"exceeds|the context holds", server.log.read_text())
        assert 1 <= len(refused) <= 2  # the prompt, and qwen-code's summary with its tools
