"""localllm launch: starts a coding agent with a model on this machine."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from gguf_io.system import command_of, end_within, make_folder, read_file, shell_line
from localllm.errors import LocalLLMError, RequestError
from localllm.front.local_server import LOAD_S, LocalServer, local_server, started
from localllm.front.options import model_names
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, answer, note
from localllm.library.names import BUILT_IN, is_gguf, plain, without_suffix
from localllm.settings import load_settings, sessions_path
from localllm.text import human_time

if TYPE_CHECKING:
    from localllm.wings.agents.programs import AgentEndpoint, AgentProgram, ProgramSetup

_END_S = 5.0  # for a program that is told to end

ProgramName = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="A coding agent such as claude; vscode, zed, ...", show_default=False)
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME", help="Name or path (the server's model).", autocompletion=model_names
    ),
]
Port = Annotated[int | None, typer.Option(metavar="P", help="Port of the server (11434).")]
Ctx = Annotated[int | None, typer.Option(metavar="N", help="Context of a server started for this (the model's).")]


def launch(
    name: ProgramName,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for the program.", show_default=False)
    ] = None,
    model: ModelName = None,
    port: Port = None,
    ctx: Ctx = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the program's own configuration instead, if there is none.")
    ] = False,
) -> None:
    """Start a coding agent with a local model.

    For editors, prints what to enter in their settings. Uses the running server of these settings, or starts one that
    ends with the program. Variables and arguments are set for this run only and are shown; the program's own files are
    not changed unless --write is given. Prints the expected time for the first prompt, from the results of `localllm
    bench`, and how much of it is on disk already. The exit status is the program's.
    """
    from localllm.wings.agents.editors import EDITORS
    from localllm.wings.agents.programs import program

    if editor := EDITORS.get(name):
        if write or arguments:
            raise RequestError(f"localllm prints settings for {editor.title}; it neither writes them nor starts it.")
        with served_model(model, port, ctx) as (_, endpoint, is_ours):
            answer(editor.steps(endpoint))
        if is_ours:
            again = shell_line(["localllm", "serve", "--model", endpoint.model])
            note(f"the server has ended; `{again}` starts one that stays")
        return
    agent = program(name, EDITORS)
    given = arguments or [*agent.alone]
    path = None if write else executable(agent)
    with served_model(model, port, ctx) as (server, endpoint, _):
        check_context(agent, endpoint)
        if path is None:
            _write(agent, endpoint)
            return
        tell_cost(agent, server, endpoint)
        setup = agent.set_up(endpoint, folder_of(agent.name))
        try:
            command = command_of(path, [*setup.arguments, *given])
        except ValueError as error:
            raise RequestError(
                f"{path} is a batch file, and {error}, which those cannot be given. Remove it."
            ) from error
        note(f"runs {_shown(agent, endpoint, given)}")
        status = _run(command, setup)
    raise typer.Exit(status)


def executable(agent: "AgentProgram") -> str:
    """The program's path. Raises RequestError with the command that installs it."""
    if (path := shutil.which(agent.name)) is None:
        raise RequestError(f"{agent.name} is not installed. Install it with `{agent.install}`.")
    return path


@contextmanager
def served_model(
    model: str | None, port: int | None, ctx: int | None
) -> "Iterator[tuple[LocalServer, AgentEndpoint, bool]]":
    """A server with the model loaded, the model's endpoint, and whether the server was started for this block.

    If no server runs, starts one that ends with the block, and pulls the model if needed. Without a name, the model is
    the one loaded last, or the server's only one. Raises RequestError if there is neither, LibraryError if the model
    cannot be found or pulled.
    """
    from localllm.wings.agents.programs import NO_KEY, AgentEndpoint

    server = local_server(port)
    running = server.runs()
    name = model or (_only_model(server) if running else None)
    if name is None:
        raise RequestError("No model is loaded. Choose one with --model; `localllm list` shows those on this machine.")
    if not running:
        obtain(name, load_settings({}))  # pull here to show progress; the server would not
    with StatusLine() as status, nullcontext() if running else started(server, name, ctx, folder_of("server") / "log"):
        if not running:
            name = server.ask("GET", "/v1/models")["data"][0]["id"]
        elif is_gguf(name):
            name = without_suffix(Path(name).name)
        status.show(f"loading {name}")
        server.ask("POST", "/api/generate", {"model": name, "stream": False}, LOAD_S)
        status.clear()
        rows = server.ask("GET", "/api/ps")["models"]
        about = next((row for row in rows if plain(row["name"]) == plain(name)), rows[0])  # the one used last
        name = about["name"]
        note(f"{name} is served at {server.url}, with a context of {about['context_length']:,} tokens")
        yield server, AgentEndpoint(server.url, name, about["context_length"], server.key or NO_KEY), not running


def _only_model(server: LocalServer) -> str | None:
    """The model that a running server loaded last, or else its only one besides the built-in."""
    if loaded := server.ask("GET", "/api/ps")["models"]:
        return str(loaded[0]["name"])
    listed = [row["id"] for row in server.ask("GET", "/v1/models")["data"] if not row.get("parent")]  # no adapters
    names = [name for name in listed if name != BUILT_IN]
    return names[0] if len(names) == 1 else None


def check_context(agent: "AgentProgram", endpoint: "AgentEndpoint") -> None:
    """Raise RequestError if the model's context is too short for the program's prompts."""
    if endpoint.context < agent.least_context:
        raise RequestError(
            f"{agent.name} begins with about {agent.first_prompt:,} tokens and needs a context of "
            f"{agent.least_context:,}; {endpoint.model} has {endpoint.context:,} here. Start the server with a longer "
            "--ctx, or take another model."
        )


def tell_cost(agent: "AgentProgram", server: LocalServer, endpoint: "AgentEndpoint") -> None:
    """Report what the first prompt costs, and which prefixes are on disk already. The server tells: it has the file."""
    tokens = counted_tokens(agent.name).get(endpoint.model, agent.first_prompt)
    try:
        told = server.ask("GET", f"/api/inspect?model={quote(endpoint.model, safe='')}&prompt={tokens}")
        seconds, prefixes = told["seconds"], told["shared_prefixes"]
    except LocalLLMError as error:  # for example a model that runs on another machine
        note(f"the cost of the first prompt is not known: {error}")
        return
    except KeyError:
        note("the cost of the first prompt is not known: the server is of an older version")
        return
    cost = f"about {human_time(seconds)} here" if seconds else "`localllm bench MODEL` measures how long that takes"
    note(f"the first prompt of {agent.name} has about {tokens:,} tokens: {cost}")
    for prefix in prefixes[:3]:
        ago = human_time(max(time.time() - prefix["used"], 0))
        note(f"on disk already: system text and tools of {prefix['tokens']:,} tokens, used {ago} ago")
    if not prefixes:
        note(f"nothing of it is on disk yet; `localllm warm {agent.name}` computes it in advance")


def folder_of(name: str) -> Path:
    """localllm's folder for a program's files; created if missing."""
    folder = sessions_path().parent / "agents" / name
    make_folder(folder)
    return folder


def counts_path(name: str) -> Path:
    """The file with the tokens of a program's first prompt by model, as `warm` counted them."""
    return folder_of(name) / "warm.json"


def counted_tokens(name: str) -> dict[str, int]:
    """The content of counts_path; empty if `warm` has not run, or its file is damaged."""
    try:
        counted = json.loads(read_file(counts_path(name)))
    except (OSError, ValueError, RecursionError):
        return {}
    return counted if isinstance(counted, dict) else {}


def write_files(setup: "ProgramSetup") -> None:
    for path, content in setup.files.items():
        make_folder(path.parent)
        path.write_text(content, encoding="utf-8", newline="\n")
        path.chmod(0o600)


def environment_of(setup: "ProgramSetup") -> dict[str, str]:
    """This process's environment, with the setup's variables added and removed."""
    kept = {name: value for name, value in os.environ.items() if name not in setup.removed}
    return {**kept, **setup.environment}


def _run(command: str | list[str], setup: "ProgramSetup") -> int:
    """Run a program in the foreground; returns its exit code, or 128 plus the signal. Only the program gets Ctrl-C.

    It is told to end if this process is.
    """
    write_files(setup)
    process = subprocess.Popen(command, env=environment_of(setup))
    try:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                continue
            return code if code >= 0 else 128 - code
    finally:
        if process.poll() is None:
            end_within(_END_S, process)


def _shown(agent: "AgentProgram", endpoint: "AgentEndpoint", arguments: list[str]) -> str:
    """The command as a shell line, with the key masked."""
    from localllm.wings.agents.programs import NO_KEY

    masked = endpoint if endpoint.key == NO_KEY else replace(endpoint, key="KEY")
    setup = agent.set_up(masked, folder_of(agent.name))
    return shell_line([agent.name, *setup.arguments, *arguments], setup.environment, setup.removed)


def _write(agent: "AgentProgram", endpoint: "AgentEndpoint") -> None:
    """Write the program's own configuration. If it exists, raises RequestError with the content to add."""
    content = agent.own_text(endpoint)
    if not agent.own_path:
        raise RequestError(f"{agent.name} has no configuration file for that. Run this instead:\n{content}")
    path = Path.home() / agent.own_path
    try:
        make_folder(path.parent)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)
    except FileExistsError:
        raise RequestError(f"{path} exists and is yours. Add this to it:\n{content}") from None
    note(f"wrote {path}")
