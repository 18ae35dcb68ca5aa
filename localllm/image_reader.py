"""Turns files of pictures and sounds into rows of embeddings, each content once: they are kept in memory and on disk.

A chat sends all of its pictures again with every message, and an agent sends a file again in another encoding. So the
key of an encoded picture is a digest of its pixels, of the files that encode it, and of the user's namespace.
"""

import hashlib
import json
import logging
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import platformdirs

from gguf_io import sounds
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageGrid, ImagePieces, ImageRows, ReadPicture, SeenPieces, row_ids
from gguf_io.interruption import held
from gguf_io.media import PictureView, SoundView, is_sound
from gguf_io.pictures import DEFAULT_BUDGET, Budget, Picture, check, decode, text_is_too_small
from gguf_io.sounds import Samples
from gguf_io.system import make_folder, read_file
from localllm.engine.runner import Projector
from localllm.files import write_whole

log = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20  # in memory
DISK_BYTES = 1 << 30
_KNOWN_FILES = 4096  # digests of files whose pixels are known
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.image")
_MAGIC = b"LLMIMG\x02\n"
_CHECKSUM = 4


def image_folder() -> Path:
    """The folder of encoded pictures that all processes of this user share, e.g. ~/.cache/localllm/images."""
    return Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "images"


class ImageReader:
    """Decodes and encodes pictures for one loaded model, or takes them from the caches. Thread-safe; close it first.

    identity: of everything that rows depend on besides pixels; called when it is first needed, since it may take time
    to compute. encode: token ids of a text with special tokens. folder: of the disk cache, None for none.
    """

    def __init__(
        self,
        projector: Projector,
        identity: Callable[[], str],
        encode: Callable[[str], list[int]],
        folder: Path | None,
    ) -> None:
        self._projector, self._identity, self._encode, self._folder = projector, identity, encode, folder
        self._lock = threading.Lock()  # of the caches in memory
        self._encoding = threading.Lock()  # one picture at a time; two requests with the same one encode it once
        self._closed = False
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()  # of files, by their digest
        self._kept: OrderedDict[bytes, ReadPicture] = OrderedDict()
        self._kept_bytes = 0

    def tokens(self, data: bytes, budget: Budget = DEFAULT_BUDGET, namespace: str = "") -> int:
        """The tokens of a file, which is not encoded; without the marks around it if it is not known."""
        if found := self._remembered(_digest(data, budget, namespace)):
            return found.view.tokens
        return self._sound_tokens(data) if is_sound(data) else self._projector.tokens(check(data), budget)

    def see(self, data: bytes, budget: Budget = DEFAULT_BUDGET, namespace: str = "") -> ReadPicture:
        """A picture or a WAV as rows and token ids. Raises PictureError, and what the projector raises."""
        file = _digest(data, budget, namespace)
        if found := self._remembered(file):
            return found
        medium = self._samples(data) if is_sound(data) else decode(data)
        content = self._content(medium, budget, namespace)
        with held(self._encoding):
            if self._closed:
                raise PictureError("The model is being unloaded. Ask again.")
            read = self._in_memory(content) or self._from_disk(content)
            if read is None:
                read = self._read(medium, content, budget)
                self._to_disk(content, read)
            self._keep(file, content, read)
        return read

    def close(self) -> None:
        """Wait for the picture that is being encoded, and refuse others from then on."""
        with self._encoding:
            self._closed = True

    def _sound_tokens(self, data: bytes) -> int:
        return self._projector.sound_tokens(sounds.samples_of(data, self._projector.sound_rate))

    def _samples(self, data: bytes) -> Samples:
        """A sound that the model can take."""
        self._sound_tokens(data)
        return sounds.decode(data, self._projector.sound_rate)

    def _read(self, medium: Picture | Samples, content: bytes, budget: Budget) -> ReadPicture:
        """What the projector makes of a picture or a sound, with the ids of its texts, and told."""
        if not isinstance(medium, Picture):
            pieces, tokens = self._with_ids(self._projector.hear(medium, content))
            return ReadPicture(pieces, SoundView(len(medium) / self._projector.sound_rate, tokens))
        seen = self._projector.see(medium, content, budget)
        pieces, tokens = self._with_ids(seen.pieces)
        too_small = seen.resized is not None and text_is_too_small(medium, seen.resized)
        return ReadPicture(pieces, PictureView(medium.size, seen.resized, seen.tiles, tokens, too_small))

    def _with_ids(self, seen: SeenPieces) -> tuple[ImagePieces, int]:
        """A projector's pieces with the ids of its texts, and how many tokens they take."""
        pieces = tuple(tuple(self._encode(piece)) if isinstance(piece, str) else piece for piece in seen)
        return pieces, sum(len(piece.ids) if isinstance(piece, ImageRows) else len(piece) for piece in pieces)

    def _content(self, medium: Picture | Samples, budget: Budget, namespace: str) -> bytes:
        """The digest of a picture or a sound, of what encodes it and how, and of who sent it."""
        if isinstance(medium, Picture):
            about, data = [*medium.size, self._identity(), str(budget), namespace], medium.pixels.tobytes()
        else:
            about, data = ["sound", self._identity(), namespace], medium.tobytes()
        return hashlib.sha256(json.dumps(about).encode() + data).digest()

    def _remembered(self, file: bytes) -> ReadPicture | None:
        with self._lock:
            content = self._contents.get(file)
        return self._in_memory(content) if content else None

    def _in_memory(self, content: bytes) -> ReadPicture | None:
        with self._lock:
            if content not in self._kept:
                return None
            self._kept.move_to_end(content)
            return self._kept[content]

    def _keep(self, file: bytes, content: bytes, read: ReadPicture) -> None:
        with self._lock:
            self._contents[file] = content
            if len(self._contents) > _KNOWN_FILES:
                self._contents.popitem(last=False)
            if content in self._kept:
                return
            self._kept[content] = read
            self._kept_bytes += _size(read.pieces)
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _size(oldest.pieces)

    def _path(self, content: bytes) -> Path | None:
        """The file of a picture on disk; None without a disk cache."""
        return self._folder / f"{content[:16].hex()}.image" if self._folder else None

    def _from_disk(self, content: bytes) -> ReadPicture | None:
        path = self._path(content)
        try:
            data = read_file(path) if path else b""
        except OSError:
            return None
        if not data or not path:
            return None
        read = _read(data, content)
        if read is None:
            log.warning("Removing %s: it is damaged", path)
            path.unlink(missing_ok=True)
            return None
        os.utime(path)
        return read

    def _to_disk(self, content: bytes, read: ReadPicture) -> None:
        """Write an encoded picture. After a failure nothing is written any more."""
        if (path := self._path(content)) is None:
            return
        try:
            make_folder(path.parent)
            write_whole(path, _written(content, read), lasting=False)
            _shrink(path.parent)
        except OSError as error:
            log.warning("Encoded pictures are not kept on disk: %s", error)
            self._folder = None


def _digest(data: bytes, budget: Budget, namespace: str) -> bytes:
    return hashlib.sha256(f"{budget}{namespace}\0".encode() + data).digest()


def _size(pieces: ImagePieces) -> int:
    return sum(piece.embeddings.nbytes for piece in pieces if isinstance(piece, ImageRows))


def _shrink(folder: Path) -> None:
    """Remove the pictures that were not used for the longest time, beyond DISK_BYTES; other files stay."""
    own = (entry for entry in os.scandir(folder) if IMAGE_NAME.fullmatch(entry.name))
    found = [entry for entry in own if entry.is_file(follow_symlinks=False)]
    files = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in found)
    size = sum(each for _, each, _ in files)
    for _, each, path in files:
        if size <= DISK_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        size -= each


def _written(content: bytes, read: ReadPicture) -> bytes:
    """magic, content, JSON line, float32 rows of all runs, CRC-32. Ids are made of the content again."""
    about: list[object] = []
    rows: list[bytes] = []
    for piece in read.pieces:
        if isinstance(piece, ImageRows):
            grid = piece.grid and [piece.grid.places.tolist(), piece.grid.moves.tolist(), piece.grid.count]
            about.append({"shape": piece.embeddings.shape, "sees_all": piece.sees_all, "grid": grid})
            rows.append(piece.embeddings.astype("<f4").tobytes())
        else:
            about.append(list(piece))
    body = b"".join([_MAGIC, content, json.dumps([asdict(read.view), about]).encode(), b"\n", *rows])
    return body + zlib.crc32(body).to_bytes(_CHECKSUM, "little")


def _read(data: bytes, content: bytes) -> ReadPicture | None:
    """What `_written` has written; None if it is damaged, or of another picture."""
    body, head = data[:-_CHECKSUM], _MAGIC + content
    if zlib.crc32(body) != int.from_bytes(data[-_CHECKSUM:], "little") or not body.startswith(head):
        return None
    line, _, rest = body[len(head) :].partition(b"\n")
    pieces: list[ImageRows | tuple[int, ...]] = []
    at = 0
    view, about = json.loads(line)
    for number, one in enumerate(about):
        if isinstance(one, list):
            pieces.append(tuple(one))
            continue
        count, width = one["shape"]
        values = np.frombuffer(rest, "<f4", count * width, at).reshape(count, width).astype(np.float32)
        at += values.nbytes
        grid = None
        if one["grid"]:
            places, moves, length = one["grid"]
            grid = ImageGrid(np.array(places, np.int32), np.array(moves, np.int32), length)
        pieces.append(ImageRows(row_ids(content, number, count), values, one["sees_all"], grid))
    if "seconds" in view:
        return ReadPicture(tuple(pieces), SoundView(**view))
    sizes = {name: value and tuple(value) for name, value in view.items() if name in _SIZES}
    return ReadPicture(tuple(pieces), PictureView(**{**view, **sizes}))


_SIZES = ("source", "resized", "tiles")  # fields of PictureView that JSON stores as lists
