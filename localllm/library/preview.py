"""Reads the header of a model that is not on this machine, for advice before the download.

The headers of its files are fetched by ranges of growing size. Each is written into a sparse file as long as the real
one, with a hole for the tensors: everything that reads headers (plans, layouts, llama.cpp's dry run) sees what it will
see after the pull. Nothing enters the store.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from gguf_io.header import MAX_HEADER_BYTES, read_header
from gguf_io.system import lengthen
from localllm.errors import reason
from localllm.library import hub
from localllm.library.errors import LibraryError, PullError
from localllm.library.lookup import stored_name
from localllm.library.names import HUGGING_FACE_HOST
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.pull import files_of
from localllm.library.web import PassingError, check_range, check_status, get, new_client, persistently

FIRST_BYTES = 1 << 20  # of the first range; each further one doubles the total


@dataclass(frozen=True, slots=True)
class Preview:
    """A model not yet pulled. path: a file with its header and size, or the first part; only its header can be read.

    size: bytes of the model's files to pull; projector: bytes of its projector, 0 for none.
    """

    name: str
    path: Path
    size: int
    projector: int


@contextmanager
def previewed(name: str, tell: Callable[[str], None] = lambda _what: None) -> Iterator[Preview]:
    """Fetch the header of the model that a pull of this name would fetch; its files are removed afterwards.

    Raises PullError and LibraryError as a pull does, and ModelFileError if it is not a model.
    """
    with new_client() as client:
        plan = files_of(client, name)
        with TemporaryDirectory(prefix="localllm-plan-") as folder:
            yield _preview(client, plan, Path(folder), tell)


def every_preview(name: str, tell: Callable[[str], None] = lambda _what: None) -> Iterator[Preview]:
    """The same for each model of a Hugging Face repository, smallest first; each is removed before the next one.

    Raises LibraryError also for a name that is not a Hugging Face repository.
    """
    parsed = stored_name(name)
    if parsed.host != HUGGING_FACE_HOST:
        raise LibraryError(f"{name} is not a Hugging Face repository; only those list their quantisations.")
    with new_client() as client:
        for plan in hub.every_plan(client, parsed):
            with TemporaryDirectory(prefix="localllm-plan-") as folder:
                yield _preview(client, plan, Path(folder), tell)


def _preview(client: httpx2.Client, plan: PullPlan, folder: Path, tell: Callable[[str], None]) -> Preview:
    parts = [file for file in plan.files if file.kind == "model"]
    # Names of the host's files could lead elsewhere: on Windows, backslashes and colons do.
    names = [f"model-{number:05}-of-{len(parts):05}.gguf" for number in range(1, len(parts) + 1)]
    paths = [folder / name for name in (names if len(parts) > 1 else ["model.gguf"])]
    for part, path in zip(parts, paths, strict=True):
        tell(f"reading the header of {part.what}")
        _write_stand_in(_Beginning(client, part), path)
    projectors = [file for file in plan.files if file.kind == "projector"]
    for number, file in enumerate(projectors):  # beside the model, where it is looked for
        tell(f"reading the header of {file.what}")
        _write_stand_in(_Beginning(client, file), folder / f"mmproj-{number}.gguf")
    size = sum(part.size for part in parts)
    return Preview(str(plan.name), paths[0], size, sum(file.size for file in projectors))


class _Beginning:
    """The first bytes of a remote file, fetched on demand and somewhat ahead."""

    def __init__(self, client: httpx2.Client, file: RemoteFile) -> None:
        self._client = client
        self.file = file
        self.data = bytearray()

    def read(self, start: int, stop: int) -> bytes:
        """A range of the file. Raises PullError."""
        if stop > len(self.data):
            wanted = min(max(stop, 2 * len(self.data), FIRST_BYTES), self.file.size, MAX_HEADER_BYTES)
            persistently(lambda: self._grow(wanted), time.sleep)
        return bytes(self.data[start:stop])

    def _grow(self, stop: int) -> None:
        start, size = len(self.data), self.file.size
        with get(self._client, self.file.remote, {"Range": f"bytes={start}-{stop - 1}"}) as response:
            check_status(response, self.file.what)
            if not check_range(response, (start, stop), size, self.file.what):
                start = 0  # no ranges: the whole file is sent, and reading stops early
            del self.data[start:]
            for piece in response.iter_raw():
                self.data += piece[: stop - len(self.data)]
                if len(self.data) == stop:
                    return
        raise PassingError(f"{response.url.host} ended the connection early")


def _write_stand_in(beginning: _Beginning, path: Path) -> None:
    """Write a file's header, and a hole in place of its tensors. Raises PullError if it cannot be written."""
    header = read_header(beginning.read, beginning.file.size, Path(beginning.file.what))
    try:
        with path.open("xb") as file:
            file.write(beginning.data[: header.nbytes])
            file.flush()
            lengthen(file.fileno(), beginning.file.size)
    except OSError as error:
        raise PullError(
            f"{path}: the header cannot be written: {reason(error)}. Set TMPDIR to another folder."
        ) from error
