"""JSON-RPC messages, one a line, on this process's standard streams."""

import asyncio
import json
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CHUNK = 2**16
_PARSE_ERROR = -32700

log = logging.getLogger(__name__)


class StandardStreams:
    """The SDK's Transport on stdin and stdout, whatever they are: pipes, sockets or files.

    From its creation on, whatever else this process or a library prints goes to stderr, and whatever else reads stdin
    finds its end: both carry the protocol only. On Windows, a library that NumPy loads asks for the state of stdin,
    which would wait for a pending read.
    """

    def __init__(self) -> None:
        """Call it from the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()  # b"" at the end
        sys.stdout.flush()
        self._input, self._output = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._writing = ThreadPoolExecutor(1, "stdout")  # a client that does not read must not stop the others
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message. Raises ConnectionError if the client is gone."""
        line = json.dumps(message, ensure_ascii=True).encode() + b"\n"
        await self._loop.run_in_executor(self._writing, self._write, line)

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end. A line that is no message is answered with an error."""
        while line := await self._lines.get():
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                log.error("A line on stdin is not JSON: %s", error)
                message = None
            if isinstance(message, dict):
                return message
            if line.strip():
                reason = {"code": _PARSE_ERROR, "message": "Each line must be a JSON-RPC message, an object."}
                await self.send({"jsonrpc": "2.0", "id": None, "error": reason})
        return None

    async def close(self) -> None:
        self._writing.shutdown(wait=False)

    def _read(self) -> None:
        """Read lines until the end; not with sys.stdin, whose lock would hold up the end of the program."""
        rest = b""
        while chunk := self._read_chunk():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._tell(line + b"\n")
        if rest:
            self._tell(rest)
        self._tell(b"")

    def _tell(self, line: bytes) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)

    def _write(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._output, line) :]
        except OSError as error:
            raise ConnectionError(f"stdout: {error.strerror}") from error

    def _read_chunk(self) -> bytes:
        try:
            return os.read(self._input, _CHUNK)
        except OSError as error:
            log.error("stdin cannot be read: %s", error.strerror)
            return b""
