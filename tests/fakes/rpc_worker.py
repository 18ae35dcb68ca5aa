"""llama.cpp's RPC worker on this machine's processor, as its rpc-server is: `python -m tests.fakes.rpc_worker PORT`."""

import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_offload.library import ggml, llama
from tests.fakes.ports import free_port
from tests.waiting import eventually


@contextmanager
def rpc_worker() -> Iterator[str]:
    """Run a worker as a process, and give its address."""
    port = free_port()
    command = [sys.executable, "-m", "tests.fakes.rpc_worker", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(process, port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    def answers() -> bool:
        assert process.poll() is None, "the worker ended"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    eventually(answers, "the worker does not answer")


def main(port: str) -> None:
    """Serve the first device, the processor, until the process ends."""
    llama()
    registry, base = ggml("ggml"), ggml("ggml-base")
    registry.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    base.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    function = base.ggml_backend_reg_get_proc_address(
        registry.ggml_backend_reg_by_name(b"RPC"), b"ggml_backend_rpc_start_server"
    )
    kinds = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    devices = (ctypes.c_void_p * 1)(registry.ggml_backend_dev_get(0))
    ctypes.CFUNCTYPE(None, *kinds)(function)(f"127.0.0.1:{port}".encode(), None, 1, 1, devices)


if __name__ == "__main__":
    main(sys.argv[1])
