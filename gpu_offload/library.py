"""llama.cpp itself: loaded on first use, with its log routed into `logging`."""

import ctypes
import functools
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf_io.system import run_within
from gpu_offload.errors import LlamaCppError, LlamaCppMemoryError, LlamaCppMissingError

logger = logging.getLogger("localllm.llama_cpp")

# ggml_log_level; its info messages are verbose, so they are logged as debug. 5 continues the line before.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
# Messages about intended states: more cells than one sequence may have, interrupted steps, operations that a device
# cannot fuse, files whose token types llama.cpp corrects, windows whose cells are all kept, and a build for GPUs on a
# machine without a driver (doctor tells of a GPU that lies idle).
_NO_WARNING = (
    "n_ctx_train",
    "removing memory module entries",
    "compute_async failed with error 1",
    "compute status: 1",
    "failed to decode, ret = 2",
    "resolve_fused_ops",
    "control-looking token",
    "using full-size SWA cache",
    "ggml_cuda_init: failed to initialize",
    "ggml_vulkan: No devices found",
)
_RECENT_ERRORS = 8
_TRIED = "llama_cpp"
"""Name of the stored identity of the library that ran on this processor."""
# What happens in every process before llama.cpp is chosen.
_TRIAL = """
import sys
sys.path[:] = sys.argv[1:]
from gpu_offload import library
from gpu_offload.devices import devices
library.try_library = lambda: None
try:
    devices(), library.llama()
except library.LlamaCppMissingError:
    pass
"""
_TRIAL_S = 120
ABORTED = "llama.cpp ended the process: "  # begins the last line on standard error when it does
# What llama.cpp's backends log, in lower case, when a device is out of memory. There is no error code for that.
_OUT_OF_MEMORY = ("out of memory", "failed to allocate", "unable to allocate", "failed to reserve", "outofdevicememory")


class _Log:
    """Joins llama.cpp's pieces of text into lines, logs them, and keeps the last warnings and errors."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.muted = False
        self._pending = ""
        self._level = logging.DEBUG

    def take(self, kind: int, text: bytes | None, _user_data: object) -> None:
        if kind != _CONTINUE:
            self._level = _LEVELS.get(kind, logging.DEBUG)
        *lines, self._pending = (self._pending + (text or b"").decode("utf-8", "replace")).split("\n")
        for line in lines:
            if not line.strip():
                continue
            harmless = self.muted or any(phrase in line for phrase in _NO_WARNING)
            level = logging.DEBUG if harmless else self._level
            logger.log(level, "%s", line)
            if level >= logging.WARNING:
                self.complaints = [*self.complaints, line][-_RECENT_ERRORS:]


def _report_abort(message: bytes) -> None:
    """Print one line with the reason of an abort, instead of a debugger's backtrace."""
    place, colon, reason = message.decode("utf-8", "replace").partition(": ")
    sys.stderr.write(f"{ABORTED}{os.path.basename(place)}{colon}{reason}\n")
    sys.stderr.flush()


_log = _Log()
# Callbacks of ggml. C holds bare pointers to them, so they are never freed.
LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_log.take)
_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_report_abort)


@functools.cache
def llama() -> Any:
    """Return llama-cpp-python's low-level module, its backend started.

    Raises LlamaCppMissingError if the package is absent or too old, or its library does not load or run.
    """
    try_library()
    try:
        from llama_cpp import llama_cpp  # takes a fifth of a second, and may be absent
    except ImportError as error:
        raise LlamaCppMissingError("the package llama-cpp-python is not installed") from error
    except (OSError, RuntimeError) as error:  # a library of another platform, or one of its dependencies
        raise LlamaCppMissingError(f"its library does not load: {error}") from error
    # Older versions lack the field, and restore states only into contiguous cells (ggml-org/llama.cpp#17982).
    if not hasattr(llama_cpp.llama_context_params, "n_outputs_max"):
        from importlib.metadata import version

        raise LlamaCppMissingError(f"llama-cpp-python {version('llama_cpp_python')} is too old, 0.3.36 is needed")
    llama_cpp.llama_log_set(LOG_CALLBACK, ctypes.c_void_p(0))
    ggml("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(_ABORT_CALLBACK)
    llama_cpp.llama_backend_init()
    return llama_cpp


def route_log() -> None:
    """Send llama.cpp's log to the logger "localllm.llama_cpp", if it was redirected, and forget complaints."""
    llama().llama_log_set(LOG_CALLBACK, ctypes.c_void_p(0))
    _log.complaints = []


@contextmanager
def muted() -> Iterator[None]:
    """Log everything from llama.cpp inside the block as debug, errors too."""
    route_log()
    _log.muted = True
    try:
        yield
    finally:
        _log.muted = False


def complaints() -> str:
    """Return llama.cpp's last warnings and errors since route_log(), one per line, for error messages."""
    return "\n".join(_log.complaints) or "it gave no reason"


def failure(what: str) -> LlamaCppError:
    """Return an error with what failed and llama.cpp's reason: LlamaCppMemoryError if memory ran out."""
    reason = complaints()
    if any(phrase in reason.lower() for phrase in _OUT_OF_MEMORY):
        advice = "Give it fewer GPU layers, a shorter context or smaller KV types."
        return LlamaCppMemoryError(f"{what}: not enough memory. {advice} llama.cpp said:\n{reason}")
    return LlamaCppError(f"{what}. It said:\n{reason}")


def _library_folder() -> Path:
    """Where llama-cpp-python's libraries are. Raises LlamaCppMissingError if it is not installed."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise LlamaCppMissingError("the package llama-cpp-python is not installed")
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH", Path(package.origin).parent / "lib"))


def try_library() -> None:
    """Let another process load the library first, since one built for another processor ends its process.

    Raises LlamaCppMissingError if it is not installed, crashes or does not answer. Other faults show when it is loaded.
    """
    if fault := _fault(_library_folder()):
        raise LlamaCppMissingError(fault)


@functools.cache
def _fault(folder: Path) -> str:
    """Why the library must not be loaded, "" if it may be.

    That it ran is stored beside the kernels, which other processors do not share, until its files change.
    """
    from cpu_kernels.kernel_cache import read_measured, write_measured

    identity: list[Any] = [str(folder)]
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            state = path.stat()
            identity.append([path.name, state.st_size, state.st_mtime_ns])
    stored = json.dumps(identity).encode()
    if read_measured(_TRIED) == stored:
        return ""
    command = [sys.executable, "-I", "-c", _TRIAL, *sys.path]
    try:
        done = run_within(_TRIAL_S, command)
    except subprocess.TimeoutExpired:
        return f"its library gave no answer in {_TRIAL_S} seconds"
    if done.returncode != 0:
        code = done.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code:#x}"
        return f"its library crashes on this processor: {how}"
    write_measured(_TRIED, stored)
    return ""


@functools.cache
def shared_library(name: str) -> ctypes.CDLL:
    """Return a library of llama-cpp-python: "llama", "ggml" (device registry), "ggml-base" or "ggml-cpu".

    It does not import the Python package, which takes 0.2 s. Raises LlamaCppMissingError as llama() does.
    """
    if sys.platform == "win32":
        llama()  # adds the folders of devices' libraries to Windows' search path
    try_library()
    folder = _library_folder()
    # Use the names by which the libraries link to each other: wheels have copies instead of links, and each copy would
    # have its own devices and log.
    names = (f"lib{name}.so.0", f"lib{name}.0.dylib", f"lib{name}.so", f"lib{name}.dylib")
    for file in (*names, f"{name}.dll", f"lib{name}.dll"):
        if os.path.exists(folder / file):
            try:
                return ctypes.CDLL(str(folder / file))
            except OSError as error:
                raise LlamaCppMissingError(f"its library does not load: {error}") from error
    raise LlamaCppMissingError(f"{folder} holds no {name} library")


@functools.cache
def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml that llama-cpp-python does not bind. result, arguments: their ctypes types.

    ggml's log goes to the logger "localllm.llama_cpp" from then on. Raises LlamaCppMissingError as llama() does.
    """
    base = shared_library("ggml-base")
    base.ggml_log_set.argtypes, base.ggml_log_set.restype = [type(LOG_CALLBACK), ctypes.c_void_p], None
    base.ggml_log_set(LOG_CALLBACK, None)
    holder = next(one for one in map(shared_library, ("ggml-base", "ggml", "ggml-cpu")) if hasattr(one, name))
    function = getattr(holder, name)
    function.restype, function.argtypes = result, arguments
    return function
