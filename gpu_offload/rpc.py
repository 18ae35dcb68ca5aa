"""llama.cpp's RPC workers: devices of other machines that hold layers and compute them.

A worker is llama.cpp's `rpc-server`, built from the same source as the library here. Its protocol has no password and
no encryption: use it on trusted networks only. llama.cpp ends the process if a worker cannot be reached, has another
version, or disconnects, so each worker is first tried in a child process.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_char_p, c_void_p
from importlib.metadata import version

from gguf_io.system import run_within
from gpu_offload.builds import compile_command
from gpu_offload.errors import DeviceRequestError, LlamaCppMissingError
from gpu_offload.library import ABORTED, ggml, llama

_ADDRESS = re.compile(r"(?P<host>[^\s,:/\[\]]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_TRY_SECONDS = 30.0
_TRY = "import sys; from gpu_offload.rpc import connect; connect(sys.argv[1])"

_lock = threading.Lock()
_connected: set[str] = set()


def can_reach_workers() -> bool:
    """Whether this build of llama.cpp supports workers. Raises LlamaCppMissingError without the llama extra."""
    llama()
    return bool(_backend())


def add_workers(addresses: Sequence[str]) -> None:
    """Let llama.cpp use the devices of these workers (host:port) from now on; devices() lists them.

    Adding a worker again does nothing; workers cannot be removed. Raises DeviceRequestError for an invalid address or a
    worker that does not answer, LlamaCppMissingError if this build does not support workers.
    """
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found["port"]) < 2**16:
            raise DeviceRequestError(
                f"{address!r} is not the address of a worker (rpc): give host:port, as 10.0.0.2:50052."
            )
    with _lock:
        fresh = [address for address in dict.fromkeys(addresses) if address not in _connected]
        if not fresh:
            return
        if not can_reach_workers():
            here = version("llama_cpp_python")
            raise LlamaCppMissingError(
                f"the installed llama-cpp-python {here} was built without RPC, which workers need",
                f"{compile_command('RPC', version=here)}\n"
                "Add what your own device needs to CMAKE_ARGS, such as -DGGML_CUDA=on.",
            )
        for address in fresh:
            _try(address)
            connect(address)
            _connected.add(address)


def connect(address: str) -> None:
    """Register a worker's devices. llama.cpp ends the process if that fails.

    Raises DeviceRequestError for a worker without devices.
    """
    llama()
    find = ggml("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
    add_server = CFUNCTYPE(c_void_p, c_char_p)(find(_backend(), b"ggml_backend_rpc_add_server"))
    found = add_server(address.encode())
    if not found:
        raise DeviceRequestError(f"The worker at {address} has no devices.")
    ggml("ggml_backend_register", None, c_void_p)(found)


def _backend() -> int | None:
    """ggml's RPC backend, if this build has it."""
    found: int | None = ggml("ggml_backend_reg_by_name", c_void_p, c_char_p)(b"RPC")
    return found


def _try(address: str) -> None:
    """Connect in a child process, which llama.cpp may end. Raises DeviceRequestError."""
    try:
        tried = run_within(_TRY_SECONDS, [sys.executable, "-c", _TRY, address])
    except subprocess.TimeoutExpired as error:
        raise DeviceRequestError(
            f"The worker at {address} accepts connections but does not answer within {_TRY_SECONDS:g} s. "
            "Is it llama.cpp's rpc-server?"
        ) from error
    if tried.returncode:
        lines = [line for line in tried.stderr.decode(errors="replace").splitlines() if line.strip()]
        reasons = [line.removeprefix(ABORTED) for line in lines if line.startswith(ABORTED)] or lines[-1:]
        raise DeviceRequestError(
            f"The worker at {address} cannot be used. Start llama.cpp's rpc-server there, of the same version as "
            f"llama-cpp-python here, with --host and --port. llama.cpp said:\n{(reasons or ['nothing'])[0]}"
        )
