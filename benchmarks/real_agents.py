"""Coding agents with a real model: a small task, the tokens that were computed for it, and the time.

    real_agents.py MODEL.gguf CLIENTS [claude opencode cline] [--threads 2] [--limit 120]

CLIENTS is the folder that `make test-clients` fills. Each program gets a folder with a file of one line, the options
that make its prompt smallest, and a task: change a word in the file, and copy the file. Its first prompt is recorded
and computed ahead by `localllm warm --request`, which is timed. Then `localllm launch` starts it; it is stopped after
--limit seconds. New tokens are those after the longest beginning that a prompt shares with an earlier one and its
answer, the recorded one included.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_tools import table
from benchmarks.servers import Server, localllm
from localllm.wings.agents.launch import write_files
from localllm.wings.agents.programs import AgentEndpoint, program
from localllm.wings.agents.recording import RecordedRequest, record
from tests.fakes.counting import COUNTING, counted

CONTEXT = 32768
TASK = "Read notes.txt, change the word one to two in it, then run: cp notes.txt seen.txt"
RECORD_S = 60.0
SHOWN = 400  # last characters of what a program says


@dataclass(frozen=True, slots=True)
class Small:
    """A program's arguments for the task, with only the tools that it needs. files: in its folder, as JSON by name."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)


_UNUSED = ("glob", "grep", "list", "lsp", "patch", "question", "skill", "task", "todoread", "todowrite", "webfetch")
PROGRAMS = {
    "claude": Small(
        ("--bare", "--tools", "Read,Edit,Bash", "--dangerously-skip-permissions", "-p", TASK), {"IS_SANDBOX": "1"}
    ),
    "opencode": Small(
        ("run", "--title", "notes", TASK),
        files={"opencode.json": {"tools": dict.fromkeys((*_UNUSED, "websearch", "write"), False)}},
    ),
    "cline": Small((TASK,)),
    "codex": Small(("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK)),
    "pi": Small(("-p", TASK)),
    "qwen": Small((TASK, "--approval-mode", "yolo")),
    "copilot": Small(("-p", TASK, "--allow-all-tools", "--allow-all-paths")),
    "kilo": Small(("run", "--auto", TASK)),
    "vibe": Small(("-p", TASK, "--auto-approve", "--trust")),
    "hermes": Small(("chat", "-q", TASK, "--yolo")),
    "droid": Small(("exec", "--skip-permissions-unsafe", TASK)),
    "kimi": Small(("-p", TASK)),
    "openclaw": Small(("agent", "--local", "--agent", "main", "--message", TASK)),
    "goose": Small(("run", "--text", TASK), {"SSL_CERT_DIR": "/etc/ssl/certs"}),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs: its folder, its variables, and the server."""

    work: Path
    variables: Mapping[str, str]
    server: Server

    def start(self, command: Sequence[str], variables: Mapping[str, str], out: int) -> "subprocess.Popen[bytes]":
        """Start a program in the folder. out: for what it says, or subprocess.DEVNULL."""
        return subprocess.Popen(
            command,
            cwd=self.work,
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    def localllm(self, *arguments: str, limit_s: float) -> tuple[float, str]:
        """Run a command of localllm; the seconds, and the end of what it said. It is stopped after limit_s."""
        began = time.monotonic()
        port = self.server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "localllm", *arguments[:1], "--model", self.server.model, "--port", port]
        with tempfile.TemporaryFile() as said:
            process = self.start([*command, *arguments[1:]], {}, said.fileno())
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
            said.seek(0)
            return time.monotonic() - began, said.read().decode(errors="replace")[-SHOWN:]

    def first_prompt(self, name: str, small: Small, folder: Path) -> RecordedRequest | None:
        """The program's first prompt with the task. folder: for the files that it gets."""

        def start(url: str) -> "subprocess.Popen[bytes]":
            setup = program(name).set_up(AgentEndpoint(url, self.server.model, CONTEXT), folder)
            write_files(setup)
            return self.start([name, *setup.arguments, *small.arguments], setup.environment, subprocess.DEVNULL)

        return record(start, RECORD_S)


def measured(name: str, server: Server, clients: Path, folder: Path, limit_s: float) -> list[object]:
    """A row of the table."""
    small = PROGRAMS[name]
    work, home = folder / "work", folder / "home"
    for path in (work, home):
        path.mkdir(parents=True)
    (work / "notes.txt").write_text("one line\n")
    for file, content in small.files.items():
        (work / file).write_text(json.dumps(content))
    places = ("node_modules/.bin", "aider/bin", "vibe/bin", "hermes/bin")
    path_ = os.pathsep.join([*(str(clients / place) for place in places), os.environ["PATH"]])
    own = {"HOME": str(home), "PWD": str(work), "PATH": path_, **small.variables}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LOCALLLM_", "XDG_"))}
    place = Place(work, {**kept, **own, "PYTHONPATH": os.getcwd()}, server)
    before = counted(server.url, server.said())
    first, warm_s = place.first_prompt(name, small, folder / "files"), 0.0
    if first is not None:
        first.write(folder / "first.json")
        warm_s, _ = place.localllm("warm", "--request", str(folder / "first.json"), limit_s=10 * limit_s)
    seconds, said = place.localllm("launch", name, "--", *small.arguments, limit_s=limit_s)
    tokens = counted(server.url, server.said()).since(before)
    texts = [path.read_text().strip() if path.exists() else "none" for path in (work / "notes.txt", work / "seen.txt")]
    sys.stdout.write(f"--- {name}\n{said}\n")
    ratio = f"{tokens.computed / max(tokens.new, 1):.2f}"
    return [name, tokens.prompts, tokens.new, ratio, round(warm_s, 1), round(seconds, 1), *texts]


def main() -> None:
    """Parse the command line, run the programs one after the other, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("clients", type=Path)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", default=["claude", "opencode", "cline"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0)
    arguments = parser.parse_args()
    if unknown := set(arguments.programs) - set(PROGRAMS):
        parser.error(f"no task for {', '.join(sorted(unknown))}; there is one for {', '.join(PROGRAMS)}")
    rows = []
    flags = ("--ctx", str(CONTEXT))
    with (
        tempfile.TemporaryDirectory() as folder,
        localllm(arguments.model.resolve(), arguments.threads, flags=flags, begins=COUNTING) as server,
    ):
        for name in arguments.programs:
            place = Path(folder, name)
            rows.append(measured(name, server, arguments.clients.resolve(), place, arguments.limit))
    headings = ("program", "tokens of prompts", "new", "computed / new", "warm s", "task s", "notes.txt", "seen.txt")
    table(headings, rows)


if __name__ == "__main__":
    main()
