"""Processes forked from one that has done its imports; new ones where the system cannot fork.

For tests that start dozens of processes, or kill them: importing would take each half a second. Each child has its own
environment and output, and handles Ctrl-C as in a terminal.
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.cli.main import COMMANDS
from tests.systems import KILL, OWN_CONSOLE, press_ctrl_c
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "from localllm.__main__ import main; main()"
"""What the command localllm runs."""
APPLICATION = (
    *sorted({function.partition(":")[0] for function in COMMANDS.values()}),
    *(
        "tui.main",
        "tui.command",
        "typer._adapters",
        "httpcore2",
        "gguf",
        "localllm.placement.llama",
        "gpu_offload.loading",
    ),
    *(
        "localllm.placement.backends",
        "localllm.engine.constraint",
        "localllm.placement.loaded_model",
        "models.native_runner",
    ),
    *(
        "localllm.library.create",
        "localllm.library.pull",
        "localllm.wings.lab.quality.quantize",
        "localllm.server.local_models",
    ),
    *("localllm.server.app", "localllm.server.serve", "uvicorn.lifespan.on", "uvicorn.loops.auto"),
    *("uvicorn.protocols.http.auto", "anyio._backends._asyncio"),
)
"""What most of its processes import."""


@dataclass
class Forked:
    """A child of a Nursery. returncode: as in subprocess; None while it runs or has not been waited for."""

    nursery: "Nursery"
    pid: int
    out: Path
    err: Path
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.ask(ended=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # not waited for yet, so the pid is still its own
            press_ctrl_c(self.pid) if number == signal.SIGINT else os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(KILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        eventually(lambda: self.poll() is not None, "the process does not end")
        assert self.returncode is not None
        return self.returncode

    def communicate(self) -> tuple[bytes, bytes]:
        """Wait for its end; return its stdout and stderr."""
        self.wait()
        return self.out.read_bytes(), self.err.read_bytes()


class Nursery:
    """The process that has imported `modules` and forks children."""

    def __init__(self, modules: Sequence[str], folder: Path, path: Sequence[Path] = ()) -> None:
        self._folder = folder
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
        command = [sys.executable, "-m", "tests.forking", *modules]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def start(
        self,
        code: str,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Forked:
        """Run Python code in a new process. variables, folder: its environment and working directory."""
        out, err = (Path(tempfile.mkstemp(suffix=suffix, dir=self._folder)[1]) for suffix in (".out", ".err"))
        wanted = {"code": code, "arguments": [*arguments], "variables": dict(variables or os.environ)}
        pid = self.ask(**wanted, out=str(out), err=str(err), folder=str(folder or Path.cwd()))
        assert isinstance(pid, int)
        return Forked(self, pid, out, err)

    def run(self, *arguments: str, folder: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of localllm to its end. variables: beside those of now."""
        process = self.start(PROGRAM, arguments, {**os.environ, **variables}, folder)
        out, err = process.communicate()
        said = (each.decode().replace(os.linesep, "\n") for each in (out, err))
        return subprocess.CompletedProcess(arguments, process.wait(), *said)

    def ask(self, **order: Any) -> int | None:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


class Beginner(Nursery):
    """Starts a new interpreter for each child: for Windows, which cannot fork."""

    def __init__(self, folder: Path, path: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._path = os.pathsep.join(map(str, [*path, ROOT, os.environ.get("PYTHONPATH", "")]))
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def ask(self, **order: Any) -> int | None:
        if "ended" in order:
            return self._children[order["ended"]].poll()
        with open(order["out"], "wb") as out, open(order["err"], "wb") as err:
            child = subprocess.Popen(
                [sys.executable, "-c", order["code"], *order["arguments"]],
                env={**order["variables"], "PYTHONPATH": self._path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=order["folder"],
                **OWN_CONSOLE,
            )
        self._children[child.pid] = child
        return child.pid

    def close(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()


@contextmanager
def nursery(modules: Sequence[str], folder: Path, path: Sequence[Path] = ()) -> Iterator[Nursery]:
    """modules: imported once; folder: for the children's output; path: further folders to search for modules."""
    opened = Nursery(modules, folder, path) if hasattr(os, "fork") else Beginner(folder, path)
    try:
        yield opened
    finally:
        opened.close()


def _serve(modules: Sequence[str]) -> None:
    for name in modules:
        __import__(name)
    gc.collect()
    gc.freeze()  # or the first search for garbage in each child would copy all of it
    for line in sys.stdin:
        order = json.loads(line)
        if "code" in order:
            pid = os.fork()
            if pid == 0:
                _become(order)
            answer: int | None = pid
        else:
            ended, status = os.waitpid(order["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def _become(order: dict[str, Any]) -> None:
    """Run the code as its own program; does not return."""
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *order["arguments"]]
    code = 1
    try:
        exec(compile(order["code"], "<child>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
