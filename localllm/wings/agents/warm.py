"""localllm warm: computes an agent's system text and tools ahead of time."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_io.system import open_own, start_on_terminal
from localllm.errors import RequestError
from localllm.files import write_whole
from localllm.front.local_server import LOAD_S
from localllm.front.terminal import StatusLine, note
from localllm.text import human_time
from localllm.wings.agents.launch import (
    Ctx,
    ModelName,
    Port,
    counted_tokens,
    counts_path,
    environment_of,
    executable,
    folder_of,
    served_model,
    write_files,
)

if TYPE_CHECKING:
    from localllm.wings.agents.programs import AgentEndpoint, AgentProgram
    from localllm.wings.agents.recording import RecordedRequest

RECORD_S = 60.0
_PROMPT = "Say hello."


def warm(
    name: Annotated[
        str | None,
        typer.Argument(metavar="PROGRAM", help="A coding agent, as for launch.", show_default=False),
    ] = None,
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help='A recorded request instead: JSON with "path" and "body".')
    ] = None,
    model: ModelName = None,
    port: Port = None,
    ctx: Ctx = None,
) -> None:
    """Precompute an agent's system prompt and tools. They are stored on disk.

    Starts the program in this folder to capture its first prompt, which no model answers. The server of these settings
    then computes it, or one that is started for this. Later sessions only compute what they add.
    """
    from localllm.wings.agents.programs import program
    from localllm.wings.agents.recording import RecordedRequest, tokens_of

    if (name is None) == (request is None):
        raise RequestError("Name a program, such as claude, or use --request FILE.")
    agent = program(name) if name is not None else None
    if agent is not None and sys.platform == "win32":
        raise RequestError(
            "On Windows localllm cannot start a program on a terminal of its own, to record its first prompt. Give a "
            "request that was recorded elsewhere: localllm warm --request FILE."
        )
    if agent is not None:
        executable(agent)
    with served_model(model, port, ctx) as (server, endpoint, is_ours), StatusLine() as status:
        recorded = RecordedRequest.read(request) if request is not None else None
        if agent is not None:
            status.show(f"waiting for {agent.name}'s first prompt")
            recorded = _record(agent, endpoint)
        assert recorded is not None
        status.show("computing")
        began = time.monotonic()
        answer = server.ask("POST", recorded.path, recorded.for_model(endpoint.model), LOAD_S)
        seconds = time.monotonic() - began
        status.clear()
        usage = answer.get("usage") or {"prompt_tokens": answer.get("prompt_eval_count", 0)}
        tokens, known = tokens_of(usage)
        note(f"{tokens:,} tokens, {known:,} of them known already: {human_time(seconds)}")
        if agent is not None:
            counted = {**counted_tokens(agent.name), endpoint.model: tokens}
            write_whole(counts_path(agent.name), json.dumps(counted).encode())
    note("on disk" if is_ours else "the server writes it to the disk as soon as it is idle")


def _record(agent: "AgentProgram", endpoint: "AgentEndpoint") -> "RecordedRequest":
    """The program's first prompt. Raises RequestError if it sends none."""
    from localllm.wings.agents.recording import record

    path = executable(agent)
    log = folder_of(agent.name) / "log"

    def start(url: str) -> "subprocess.Popen[bytes]":
        setup = agent.set_up(replace(endpoint, url=url), folder_of(agent.name))
        write_files(setup)
        return _on_terminal([path, *setup.arguments, *agent.asked, _PROMPT], environment_of(setup), log)

    recorded = record(start, RECORD_S)
    if recorded is None:
        raise RequestError(
            f"{agent.name} sent no prompt. It may want to ask you something first, such as whether to trust this "
            f"folder: start it here once with `localllm launch {agent.name}`. Its output is in {log}."
        )
    recorded.write(folder_of(agent.name) / "request.json")
    return recorded


def _on_terminal(command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a program on a new pseudo-terminal, because some use another system text without one. log: its output."""
    process, ours = start_on_terminal(command, environment, (40, 120))

    def keep() -> None:
        log.unlink(missing_ok=True)
        with (
            os.fdopen(open_own(log, new=True), "wb") as said,
            contextlib.suppress(OSError),
            os.fdopen(ours, "rb", buffering=0) as read,
        ):
            while data := read.read(65536):  # raises OSError when the program has ended
                said.write(data)

    threading.Thread(target=keep, daemon=True).start()
    return process
