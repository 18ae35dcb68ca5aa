"""llama.cpp's RPC worker on this machine's CPU, like its rpc-server: `python -m tests.fakes.rpc_worker PORT`."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_char_p, c_size_t, c_void_p

from gpu_offload.devices import device_handle, devices
from gpu_offload.library import ggml, llama
from tests.fakes.ports import free_port
from tests.waiting import eventually


@contextmanager
def rpc_worker() -> Iterator[str]:
    """Run a worker process, and yield its address."""
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
    """Serve the first device, the CPU, until the process ends."""
    llama()
    backend = ggml("ggml_backend_reg_by_name", c_void_p, c_char_p)(b"RPC")
    find = ggml("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
    start = CFUNCTYPE(None, c_char_p, c_char_p, c_size_t, c_size_t, c_void_p)(
        find(backend, b"ggml_backend_rpc_start_server")
    )
    served = (c_void_p * 1)(device_handle(devices()[0]))
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, served)


if __name__ == "__main__":
    main(sys.argv[1])
