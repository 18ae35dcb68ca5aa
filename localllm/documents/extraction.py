"""A file's text, whatever its format: plain text here, other formats in a child process."""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.documents.worker import CPU_SECONDS, EXIT_MEMORY
from localllm.errors import LocalLLMError
from localllm.text import shortened

MAX_TEXT_BYTES = 4 << 20
MAX_PACKED_BYTES = 64 << 20  # of a PDF or DOCX
WALL_SECONDS = 2 * CPU_SECONDS
_BINARY_BYTES = 8192  # of a file's beginning are looked at for a NUL
_KINDS = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".docx": "docx"}
_LIBRARIES = {"pdf": "pypdf", "docx": "docx"}
_DISTRIBUTIONS = {"pypdf": "pypdf", "docx": "python-docx"}
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from localllm.documents.worker import main; main()"


class UnreadableError(LocalLLMError):
    """A file has no text that can be read. The message says why, without the file's name.

    lasting: whether it stays so until the file changes.
    """

    def __init__(self, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Document:
    """A file's text. pages: lines; other formats than PDF have one page. cut: what was left out, or ""."""

    pages: tuple[tuple[str, ...], ...]
    is_paged: bool = False
    cut: str = ""


def read_file(path: Path) -> tuple[bytes, str]:
    """A file's content and its digest. Raises UnreadableError for links, special files and those that are too large."""
    most = MAX_PACKED_BYTES if _KINDS.get(path.suffix.lower()) in _LIBRARIES else MAX_TEXT_BYTES
    try:
        # Without waiting for the writer of a pipe; the walk found a file, so a link is one that was put there since.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableError("is not a regular file")
            if status.st_size > most:
                raise UnreadableError(f"is larger than {most >> 20} MiB")
            data = file.read(most + 1)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}", lasting=False) from error
    return data, hashlib.blake2b(data, digest_size=16).hexdigest()


class Extractor:
    """Takes the text out of files. One thread at a time; `close` ends its child process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Extractor] | None = None

    def extract(self, path: Path, data: bytes) -> Document:
        """The text of a file's content. Raises UnreadableError."""
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            return Document((tuple(_lines(_decoded(data))),))
        if (library := _LIBRARIES.get(kind)) and importlib.util.find_spec(library) is None:
            install = f"{sys.executable} -m pip install {_DISTRIBUTIONS[library]}"
            raise UnreadableError(f"needs {_DISTRIBUTIONS[library]}: {install}", lasting=False)
        reply = self._ask(kind, data)
        if "error" in reply:
            raise UnreadableError(f"cannot be read as {kind.upper()}: {shortened(str(reply['error']), 200)}")
        return Document(tuple(map(tuple, reply["pages"])), is_paged=kind == "pdf", cut=reply["cut"])

    def close(self) -> None:
        """End the child process. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._child = None

    def _ask(self, kind: str, data: bytes) -> dict[str, Any]:
        child = self._running_child()
        clock = threading.Timer(WALL_SECONDS, child.kill)
        clock.daemon = True
        clock.start()
        answer = b""
        try:
            assert child.stdin is not None and child.stdout is not None
            with contextlib.suppress(OSError):  # it has ended, which the missing answer shows
                child.stdin.write(json.dumps({"kind": kind, "bytes": len(data)}).encode() + b"\n" + data)
                child.stdin.flush()
                answer = child.stdout.readline()
        finally:
            clock.cancel()
            if not answer.endswith(b"\n"):
                self.close()
        if not answer.endswith(b"\n"):
            raise UnreadableError(f"cannot be read as {kind.upper()}: {_reason_of_end(child.returncode)}")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOTSTRAP, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libraries' remarks on strangers' files
            )
            self._finalizer = weakref.finalize(self, _end, self._child)
        return self._child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not read by a dead child cannot be flushed
                pipe.close()
    child.wait()


def _reason_of_end(returncode: int | None) -> str:
    if returncode == EXIT_MEMORY:
        return "it takes too much memory"
    late = () if sys.platform == "win32" else (-signal.SIGPROF, -signal.SIGKILL)
    return "it takes too long" if returncode in late else f"the reader ended with status {returncode}"


def _decoded(data: bytes) -> str:
    """The text of a plain file. Raises UnreadableError."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\0" in data[:_BINARY_BYTES]:
        raise UnreadableError("is not text")
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError("is not UTF-8 text") from error


def _lines(text: str) -> list[str]:
    """Lines as editors count them: str.splitlines also ends them at form feeds and others."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
