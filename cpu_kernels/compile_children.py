"""Child processes that compile kernels (see cpu_kernels.compile_child).

LLVM aborts the process if one of its assertions fails, and a miscompiled kernel may crash while it is checked. So the
process that serves or chats compiles nothing itself. Children also compile in parallel, which Numba and LLVM cannot do
within one process.
"""

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cpu_kernels.cores import usable_cores
from cpu_kernels.kernel_cache import CachedKernel, cache_directory, write_kernel
from gguf_io.system import ABORTED

CompileProgress = Callable[[int, int], None]
"""Called with the number of finished kernels and the total; may raise to cancel."""

# Importing Numba takes a child as long as compiling two kernels.
_KERNELS_PER_CHILD = 3
# Signals of wrong code; LLVM's failed assertions abort. On Windows, exit codes from here on are such exceptions.
_CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGFPE, getattr(signal, "SIGBUS", signal.SIGSEGV))
_LEAST_EXCEPTION = 0xC0000000
_PORTABLE = "portable"
"""The word that asks a child for a build without this processor's special instructions."""
_WAIT_S = 0.1
_IDLE_S = 3.0
_ADVICE = "Use --backend llama, and please report it with what localllm doctor prints."
log = logging.getLogger("localllm.kernels")


class KernelError(Exception):
    """A kernel that could not be compiled, or of which every build gives wrong results. remedy: as in LocalLLMError."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(f"{message} {remedy}".strip())


class _CrashError(Exception):
    """A child that ended before it answered. crashed: whether it did something illegal, as wrong code does."""

    def __init__(self, how: str, crashed: bool) -> None:
        super().__init__(how)
        self.crashed = crashed


class _Child:
    """A process that compiles one kernel after another, and another process when that one has crashed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self._start()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        start = "import sys; sys.path[:] = sys.argv[1:]; from cpu_kernels.compile_child import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def compile(self, module: str, name: str) -> CachedKernel:
        """Compile the kernel of this name, which importing the module declares. Raises KernelError.

        If the compiler or the check of its code crashes, e.g. at an instruction that the processor lacks, the kernel is
        built without this processor's special instructions.
        """
        try:
            try:
                reply, code = self._ask(module, name)
            except _CrashError as crash:
                if not (crash.crashed and self._restart()):
                    raise
                log.warning("compiling the kernel %s failed: %s. A portable build is tried.", name, crash)
                reply, code = self._ask(module, name, _PORTABLE)
        except _CrashError as crash:
            raise KernelError(f"compiling the kernel {name} failed: {crash}.", _ADVICE) from None
        for warning in reply["warnings"]:
            log.warning(warning)
        if reply["cache"] != cache_directory(module).name:
            raise KernelError(
                "localllm, or its compiler, was changed while this process ran: kernels of the new version do not fit. "
                "Start localllm again."
            )
        if "error" in reply:
            raise KernelError(reply["error"], _ADVICE)
        return CachedKernel(code, reply["portable"])

    def _ask(self, *words: str) -> tuple[dict[str, Any], bytes]:
        """Send a request; return the reply and the object file. Raises _CrashError."""
        commands, replies = self._process.stdin, self._process.stdout
        assert commands is not None and replies is not None
        try:
            commands.write(f"{' '.join(words)}\n".encode())
            commands.flush()
            head = replies.readline()
            reply = json.loads(head) if head else {}
            code = replies.read(reply.get("bytes", 0))
        except (OSError, ValueError):
            reply, code = {}, b""
        if not reply or len(code) < reply.get("bytes", 0):
            raise _CrashError(*self._end())
        return reply, code

    def _end(self) -> tuple[str, bool]:
        """How the process ended with the last line of its error output, and whether it crashed."""
        code = self._process.wait()
        self._errors.seek(-min(4096, self._errors.seek(0, os.SEEK_END)), os.SEEK_END)
        words = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        crashed = -code in _CRASHES or code in ABORTED or code >= _LEAST_EXCEPTION
        return f"{how} ({words})" if words else how, crashed

    def _restart(self) -> bool:
        """Start another process, unless the child has been killed meanwhile; returns whether it did."""
        with self._lock:
            if not self._killed:
                self._close()
                self._start()
            return not self._killed

    def _close(self) -> None:
        self._process.kill()
        with self._process:  # closes its pipes and waits
            self._errors.close()

    def kill(self) -> None:
        """End the process."""
        with self._lock:
            self._killed = True
            self._close()


class _Pool:
    """A pool of children. Idle ones are kept for a few seconds for the next kernels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._timer = threading.Timer(0, self.end_idle)

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[_Child]]:
        """Lend `count` children, idle ones first. Afterwards they are idle again, or killed if the body raised."""
        with self._lock:
            children, self._idle = self._idle[:count], self._idle[count:]
        try:
            while len(children) < count:
                children.append(_Child())
            yield children
        except BaseException:
            for child in children:
                child.kill()
            raise
        with self._lock:
            self._idle += children
            self._timer.cancel()
            self._timer = threading.Timer(_IDLE_S, self.end_idle)
            self._timer.daemon = True
            self._timer.start()

    def end_idle(self) -> None:
        """Kill all idle children."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()


POOL = _Pool()
atexit.register(POOL.end_idle)


def compile_in_children(
    kernels: Sequence[tuple[str, str]], done: Callable[[int], None] = lambda done: None
) -> dict[str, CachedKernel]:
    """Compile kernels, and write each to the cache as soon as it is compiled. Returns them by name.

    kernels: (module, name of a kernel that it declares) each. done: called with the number of compiled kernels; it may
    raise to cancel, which kills the children. Raises KernelError.
    """
    queue, built, errors = deque(kernels), dict[str, CachedKernel](), list[BaseException]()

    def feed(child: _Child) -> None:
        try:
            while True:
                module, name = queue.popleft()
                built[name] = child.compile(module, name)
                write_kernel(module, name, built[name])
        except IndexError:
            return
        except Exception as error:  # raised again below
            errors.append(error)

    with POOL.take(min(usable_cores(), -(-len(queue) // _KERNELS_PER_CHILD))) as children:
        threads = [threading.Thread(target=feed, args=(child,), daemon=True) for child in children]
        for thread in threads:
            thread.start()
        while not errors and (busy := [thread for thread in threads if thread.is_alive()]):
            done(len(built))
            busy[0].join(_WAIT_S)
        if errors:
            raise errors[0]
    return built
