"""localllm launch and warm, with a program that acts like a coding agent: it sends a prompt and shows an answer."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gguf_io import open_model
from localllm.errors import RequestError
from localllm.front import local_server
from localllm.speed.work import attention_operations, looks
from localllm.wings.agents.editors import EDITORS
from localllm.wings.agents.launch import _shown, counted_tokens, counts_path
from localllm.wings.agents.programs import NO_KEY, PROGRAMS, AgentEndpoint
from localllm.wings.agents.recording import RecordedRequest, record, tokens_of
from models.config import read_config
from tests.fakes.ports import free_port
from tests.fakes.scripted_model import call, write_scripted_model
from tests.forking import PROGRAM, Nursery
from tests.localllm.server.conftest import StartServer
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.systems import KILLED, make_program, needs_signals, own_places, use_own_places
from tests.waiting import eventually

AT = AgentEndpoint("http://127.0.0.1:1234", "m:8b", 40960, "a secret")
# Its first request is for a title, as agents send it.
AGENT = """\
import json, os, sys, urllib.error, urllib.request
def ask(**body):
    body |= {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 64}
    body |= {"messages": [{"role": "user", "content": sys.argv[-1]}]}
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        print("refused", error.code)
        return {"content": []}
ask(system="Find a title.")
tool = {"name": "read", "description": "Read a file. " * 40, "input_schema": {"type": "object", "properties": {}}}
answer = ask(system="You are an agent. " * 200, tools=[tool])
print(answer["content"], "ANTHROPIC_API_KEY" in os.environ)
sys.exit(7)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a program in bin/, and nothing else."""
    folder = tmp_path / "home" / "bin"
    folder.mkdir(parents=True)
    make_program(folder / "claude", AGENT)
    return tmp_path / "home"


@pytest.fixture
def localllm(home: Path, children: Nursery, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    model = write_scripted_model(tmp_path / "scripted.gguf", {"plain": "A title.", "0": call("read", path="a.txt")})
    environment = {
        **own_places(home),
        "PATH": os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"]),
        "ANTHROPIC_API_KEY": "of somebody",
        "LOCALLLM_KV_MIB": "64",
        "LOCALLLM_THREADS": "1",
    }

    def run(command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        words = [command, *arguments[:1], "--model", str(model), "--port", str(free_port()), *arguments[1:]]
        return children.run(*words, folder=home, **environment)

    return run


@pytest.mark.slow
def test_a_program_runs_and_its_prompt_is_warm_afterwards(
    localllm: Callable[..., "subprocess.CompletedProcess[str]"], home: Path
) -> None:
    warmed = localllm("warm", "claude")
    assert warmed.returncode == 0, warmed.stderr
    tokens, known = map(_number, re.findall(r"([\d,]+) tokens, ([\d,]+) of them known", warmed.stderr)[0])
    assert tokens > 4000 and known == 0 and "on disk" in warmed.stderr

    done = localllm("launch", "claude", "--", "Change the notes.")
    assert done.returncode == 7, done.stderr
    assert "'name': 'read'" in done.stdout and done.stdout.endswith("False\n")
    assert f"has about {tokens:,} tokens" in done.stderr and "on disk already: system text and tools" in done.stderr
    url = re.findall(r"ANTHROPIC_BASE_URL(?:=| = ')(http[\w.:/]+)", done.stderr)[0]
    assert done.stderr.endswith(" claude 'Change the notes.'\n")
    with pytest.raises(httpx.TransportError):  # the server ended with the program
        httpx.get(url)

    again = localllm("warm", "claude")
    assert _number(re.findall(r"([\d,]+) of them known", again.stderr)[0]) >= tokens - 300
    assert {path.name for path in home.iterdir()} <= {"bin", "localllm"}
    private = [path for path in (home / "localllm").rglob("*") if path.is_dir() and path.parent.name == "agents"]
    assert private and all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in private)


@pytest.mark.slow
def test_what_cannot_work_is_refused(localllm: Callable[..., "subprocess.CompletedProcess[str]"]) -> None:
    short = localllm("launch", "claude", "--ctx", "4096")
    assert short.returncode == 2 and "needs a context of 32,768; scripted has 4,096 here" in short.stderr
    absent = localllm("launch", "codex")
    assert absent.returncode == 2 and "Install it with `npm install --global @openai/codex`" in absent.stderr
    unknown = localllm("launch", "emacs")
    assert unknown.returncode == 2 and "choose one of claude, codex, opencode, cn, aider, cline, pi" in unknown.stderr


@pytest.mark.slow
def test_a_configuration_is_written_only_where_there_is_none(
    localllm: Callable[..., "subprocess.CompletedProcess[str]"], home: Path
) -> None:
    assert localllm("launch", "claude", "--write").returncode == 0
    path = home / ".claude" / "settings.json"
    written = json.loads(path.read_text())
    assert written["env"]["ANTHROPIC_MODEL"] == "scripted"
    path.write_text("{}")
    refused = localllm("launch", "claude", "--write")
    assert refused.returncode == 2 and "exists and is yours" in refused.stderr
    assert path.read_text() == "{}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_programs_are_given(name: str, tmp_path: Path) -> None:
    made = PROGRAMS[name].set_up(AT, tmp_path)
    told = json.dumps([dict(made.environment), made.arguments, {str(path): text for path, text in made.files.items()}])
    assert AT.url in told and AT.model in told and AT.key in told
    assert all(path.is_relative_to(tmp_path) for path in made.files)


def test_a_damaged_count_of_tokens_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_places(tmp_path, monkeypatch)
    assert counted_tokens("claude") == {}
    for content, found in ((b'{"m:8b": 4000}', {"m:8b": 4000}), (b'{"m', {}), (b"[]", {})):
        counts_path("claude").write_bytes(content)
        assert counted_tokens("claude") == found


@pytest.mark.parametrize("name", PROGRAMS)
def test_own_configurations_name_the_server_and_the_model(name: str) -> None:
    """JSON, YAML or TOML below the home folder, or a command to run."""
    agent = PROGRAMS[name]
    text = agent.own_text(AT)
    assert AT.url in text and AT.model in text
    path = Path(agent.own_path)
    assert not path.is_absolute()
    if path.suffix == ".toml":
        assert tomllib.loads(text)
    elif path.suffix == ".json":
        assert json.loads(text)


def test_contexts_given_to_programs_fit_the_server(tmp_path: Path) -> None:
    short = replace(AT, context=20_000)
    extension = next(iter(PROGRAMS["pi"].set_up(short, tmp_path).files.values()))
    assert '"contextWindow": 20000' in extension and '"maxTokens": 5000' in extension
    copilot = PROGRAMS["copilot"].set_up(short, tmp_path).environment
    limits = [int(copilot[f"COPILOT_PROVIDER_MAX_{part}_TOKENS"]) for part in ("PROMPT", "OUTPUT")]
    assert sum(limits) == 20_000
    (vibe,) = (tomllib.loads(text) for text in PROGRAMS["vibe"].set_up(short, tmp_path).files.values())
    assert vibe["models"][0]["auto_compact_threshold"] == 15_000
    assert vibe["providers"][0]["name"] == vibe["models"][0]["provider"]


@pytest.mark.parametrize("name", EDITORS)
def test_settings_for_editors_are_printed(name: str) -> None:
    for at in (AT, replace(AT, key=NO_KEY)):
        text = EDITORS[name].steps(at)
        assert at.url in text and (at.key in text or "any text" in text)
        assert at.model in text or name in ("open-webui", "xcode")  # these list the server's models
        for block in re.findall(r"(?ms)^[\[{]$.*?^[\]}]$", text):
            assert json.loads(block)


@pytest.mark.slow
def test_an_editor_s_settings_are_printed_and_nothing_is_started(
    localllm: Callable[..., "subprocess.CompletedProcess[str]"], home: Path
) -> None:
    told = localllm("launch", "zed")
    assert told.returncode == 0, told.stderr
    assert '"name": "scripted"' in told.stdout and '"max_tokens": 262144' in told.stdout
    assert "the server has ended" in told.stderr
    for more in (("--write",), ("--", "file.py")):
        refused = localllm("launch", "vscode", *more)
        assert refused.returncode == 2 and "neither writes them nor starts it" in refused.stderr
    assert {path.name for path in home.iterdir()} <= {"bin", "localllm"}


@pytest.mark.slow
def test_a_running_server_tells_the_cost_for_a_model_given_as_a_file(
    start_server: StartServer, home: Path, children: Nursery, tmp_path: Path
) -> None:
    """No store of the launching user has the model: only the server knows the file. Its only model needs no name."""
    (tmp_path / "elsewhere").mkdir()
    model = write_scripted_model(tmp_path / "elsewhere" / "kept.gguf", {"plain": "A title.", "0": "Done with that."})
    environment = {**own_places(home), "PATH": os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"])}
    with start_server("--model", str(model), models=(), LOCALLLM_KV_MIB="64", **own_places(home)) as server:
        port = server.url.rpartition(":")[2]
        done = children.run("launch", "claude", "--port", port, folder=home, **environment)
    assert done.returncode == 7, done.stderr
    assert "the first prompt of claude has about 20,600 tokens" in done.stderr
    assert "nothing of it is on disk yet" in done.stderr and "not known" not in done.stderr


def test_a_key_is_not_shown_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes in it are written in other ways in shells and in JSON."""
    use_own_places(tmp_path, monkeypatch)
    at = replace(AT, key='a "secret" that\'s long')
    for name in ("claude", "opencode"):
        told = _shown(PROGRAMS[name], at, ["Hi."])
        assert "KEY" in told and "secret" not in told and AT.url in told
    assert "none" in _shown(PROGRAMS["opencode"], replace(AT, key=NO_KEY), [])


def test_a_further_ctrl_c_does_not_change_how_launch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that end with the second Ctrl-C leave a third one to launch, which waits for the server then."""
    ended = []

    def end(_seconds: float, process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        ended.append(process.wait())
        raise KeyboardInterrupt

    monkeypatch.setattr(local_server, "end_within", end)
    monkeypatch.setattr(local_server.LocalServer, "runs", lambda _self: True)
    with local_server.started(local_server.LocalServer("http://127.0.0.1:1", 1), "none", None, tmp_path / "log"):
        pass
    assert ended
    with (
        pytest.raises(KeyboardInterrupt, match="the first"),
        local_server.started(local_server.LocalServer("http://127.0.0.1:1", 1), "none", None, tmp_path / "log"),
    ):
        raise KeyboardInterrupt("the first")


def test_codex_gets_settings_that_are_toml() -> None:
    made = PROGRAMS["codex"].set_up(AT, Path())
    settings = tomllib.loads("\n".join(made.arguments[1::2]))
    assert settings["model"] == AT.model and settings["model_context_window"] == AT.context
    assert settings["model_providers"]["localllm"]["base_url"] == f"{AT.url}/v1"
    assert tomllib.loads(PROGRAMS["codex"].own_text(AT)) == settings


# Says that it runs, and when it is told to end.
WAITS = """\
#!{python}
import os, signal, sys, time
def end(number, frame):
    print("told to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("runs at", os.environ["ANTHROPIC_BASE_URL"], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@needs_signals
def test_the_program_and_its_server_end_as_the_terminal_is_closed(
    home: Path, tmp_path: Path, children: Nursery
) -> None:
    (home / "bin" / "claude").write_text(WAITS.format(python=sys.executable))
    model = write_scripted_model(tmp_path / "scripted.gguf", {"plain": "Hello there."})
    words = ["launch", "claude", "--model", str(model), "--port", str(free_port())]
    places = {**own_places(home), "PATH": os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"])}
    process = children.start(PROGRAM, words, {**os.environ, **places, "LOCALLLM_KV_MIB": "64"}, home)
    eventually(lambda: "runs at" in process.out.read_text() or process.poll() is not None, process.err.read_text())
    url = re.findall(r"runs at (\S+)", process.out.read_text())[0]
    process.send_signal(signal.SIGHUP)  # of launch alone: real terminals tell the program, too
    assert process.wait() == 128 + signal.SIGHUP and "told to end" in process.out.read_text()
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


@needs_signals
def test_a_program_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.wings.agents.recording.END_S", 0.1)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
        assert record(lambda _url: process, 0.0) is None
    assert process.returncode == KILLED


def test_a_recorded_request_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    RecordedRequest("/v1/responses", {"input": "Hi", "stream": True}).write(path)
    body = RecordedRequest.read(path).for_model("m")
    pinned = {"prompt_cache_retention": "24h"}
    assert body == {"input": "Hi", "stream": False, "model": "m", "max_output_tokens": 1, **pinned}
    for content in ("", "[]", '{"path": "/etc", "body": {}}', '{"path": "/api/chat", "body": 3}'):
        path.write_text(content)
        with pytest.raises(RequestError, match=r"first\.json"):
            RecordedRequest.read(path)


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 1},
        {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}},
        {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 7}},
    ],
)
def test_tokens_in_every_protocol(usage: dict[str, object]) -> None:
    assert tokens_of(usage) == (10, 7)


def test_operations_of_attention(tmp_path: Path) -> None:
    """Counted one by one: each row has two products with each token that it sees, in each head and layer."""
    for name, window in (("llama", None), ("gemma2", 40)):
        with open_model(write(MODELS[name], tmp_path / f"{name}.gguf")) as file:
            heads, tokens = read_config(file).attention.usual, 100
            counted = sum(
                4 * heads.queries * heads.size * min(row + 0.5, look)
                for look, _ in looks(file)
                for row in range(tokens)
            )
            assert window is None or window in [look for look, _ in looks(file)]
            assert attention_operations(file, tokens) == pytest.approx(counted, rel=0.02)


def _number(text: str) -> int:
    return int(text.replace(",", ""))
