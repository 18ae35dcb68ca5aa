"""Encodes images and sounds as rows of embeddings with llama.cpp's multimodal library.

A projector (mmproj) is a second model file: an image encoder and the layers that bring its output to the width of the
language model's embeddings. Its output does not depend on the text around an image.
"""

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.cores import usable_cores
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageGrid, ImageRows, SeenPicture, SeenPieces, row_ids
from gguf_io.media import DEAF, Size, check_room
from gguf_io.model_file import open_model
from gguf_io.pictures import Budget, Picture
from gguf_io.sounds import Samples
from gpu_offload.devices import device_handle, gpus
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import LOG_CALLBACK, complaints, failure, llama, route_log
from gpu_offload.options import LlamaOptions

_MARKER = b"<__media__>"
# llama.cpp returns an image's positions as time, x, y and a fourth, and expects them as time, y, x and the fourth.
_SECTIONS = [0, 2, 1, 3]
_OF_THE_MODEL = -1  # a limit
_LEAST_SAMPLES = 1600  # of a sound; a tenth of a second
_SHRINKS, _MARGIN = 4, 0.98  # attempts to bring a picture into a budget, and how much smaller each is than needed


class LlamaProjector:
    """The image encoder of one loaded model. Thread-safe; one image is encoded at a time. Close it before the model."""

    def __init__(self, path: Path, model: Any, options: LlamaOptions) -> None:
        """Load it for a llama_model pointer. Raises ModelFileError, or LlamaCppError if it does not fit the model."""
        _check_projector(path)
        self._lib = _mtmd()
        self._lock = threading.Lock()
        self._width = int(llama().llama_model_n_embd_inp(model))
        self._most_rows, self._context_tokens = options.batch_rows, options.context_tokens
        params = self._lib.mtmd_context_params_default()
        params.use_gpu = options.gpu_layers != 0
        if params.use_gpu and (found := gpus()):  # the default would be the first GPU, wherever the model is
            params.device = device_handle(found[options.main_gpu])
        params.print_timings = False
        params.n_threads = options.threads or usable_cores()
        params.media_marker = _MARKER
        params.image_min_tokens = options.image_min_tokens or _OF_THE_MODEL
        params.image_max_tokens = options.image_max_tokens or _OF_THE_MODEL
        route_log()
        self._context: Any = self._lib.mtmd_init_from_file(str(path).encode(), model, params)
        if not self._context:
            raise failure(
                f"llama.cpp cannot use the projector {path} with this model. Name another one with --mmproj, or none"
            )

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        """See localllm.engine.runner.Projector. Encoding may take seconds on a CPU.

        A budget can only lower the most tokens of the options, by resizing the picture.
        """
        with self._lock:
            self._check_sight()
            return SeenPicture(self._pieces("image", self._of_picture(self._fitted(picture, budget)), content))

    def tokens(self, size: Size, budget: Budget) -> int:
        """See localllm.engine.runner.Projector."""
        with self._lock:
            self._check_sight()
            return self._tokens(self._fitted(Picture(np.zeros((size[1], size[0], 3), np.uint8)), budget))

    @property
    def sound_rate(self) -> int:
        """See localllm.engine.runner.Projector."""
        with self._lock:
            self._check_open()
            rate = int(self._lib.mtmd_get_audio_sample_rate(self._context))
        if rate <= 0:
            raise PictureError(DEAF)
        return rate

    def sound_tokens(self, samples: int) -> int:
        """See localllm.engine.runner.Projector. An empty sound stands for others: only its length matters."""
        with self._lock, self._chunks(self._of_samples(np.zeros(samples, np.float32))) as chunks:
            return self._count(chunks)

    def hear(self, samples: Samples, content: bytes) -> SeenPieces:
        """See localllm.engine.runner.Projector."""
        with self._lock:
            return self._pieces("sound", self._of_samples(samples), content)

    def close(self) -> None:
        """Free the encoder. Idempotent."""
        with self._lock:
            if self._context is not None:
                self._lib.mtmd_free(self._context)
                self._context = None

    def _fitted(self, picture: Picture, budget: Budget) -> Picture:
        """A picture that is small enough for a budget; the same one if its size does not matter to the encoder."""
        most = budget.most_tokens
        if most is None:
            return picture
        before = tokens = self._tokens(picture)
        found = picture
        for _ in range(_SHRINKS):
            if tokens <= most:
                break
            found = _shrunk(found, _MARGIN * math.sqrt(most / tokens))
            tokens = self._tokens(found)
        return found if tokens < before else picture

    def _tokens(self, picture: Picture) -> int:
        """The rows of a picture, which is not encoded."""
        with self._chunks(self._of_picture(picture)) as chunks:
            return self._count(chunks)

    def _count(self, chunks: list[Any]) -> int:
        return sum(int(self._lib.mtmd_input_chunk_get_n_tokens(chunk)) for chunk in chunks)

    def _pieces(self, what: str, bitmap: Callable[[], Any], content: bytes) -> tuple[ImageRows | tuple[int, ...], ...]:
        """Encode the pieces that the model expects. Raises PictureError before, if they do not fit the context."""
        with self._chunks(bitmap) as chunks:
            check_room(what, self._count(chunks), self._context_tokens)
            return tuple(self._piece(chunk, content, number) for number, chunk in enumerate(chunks))

    def _of_picture(self, picture: Picture) -> Callable[[], Any]:
        data = picture.pixels.tobytes()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return lambda: self._lib.mtmd_bitmap_init(*picture.size, buffer)

    def _of_samples(self, samples: Samples) -> Callable[[], Any]:
        """A sound, with silence after a very short one: llama.cpp ends the process for a single sample."""
        padded = np.pad(samples, (0, max(_LEAST_SAMPLES - len(samples), 0)))
        buffer = (ctypes.c_float * len(padded)).from_buffer_copy(padded.tobytes())
        return lambda: self._lib.mtmd_bitmap_init_from_audio(len(padded), buffer)

    def _check_open(self) -> None:
        if self._context is None:
            raise LlamaCppError("The model is being unloaded. Ask again.")

    def _check_sight(self) -> None:
        self._check_open()
        if not self._lib.mtmd_support_vision(self._context):
            raise PictureError("This model reads text and hears sound, but sees no images. Choose another model.")

    @contextlib.contextmanager
    def _chunks(self, make: Callable[[], Any]) -> Iterator[list[Any]]:
        """Split a picture or a sound into the pieces that the model expects, before any is encoded."""
        library = self._lib
        self._check_open()
        route_log()
        bitmap = make()
        if not bitmap:
            raise LlamaCppError(f"llama.cpp cannot take the file:\n{complaints()}")
        chunks = library.mtmd_input_chunks_init()
        try:
            text = library.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            if library.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                raise PictureError(f"The file cannot be prepared for this model. llama.cpp said:\n{complaints()}")
            count = library.mtmd_input_chunks_size(chunks)
            yield [library.mtmd_input_chunks_get(chunks, number) for number in range(count)]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)

    def _piece(self, chunk: Any, content: bytes, number: int) -> ImageRows | tuple[int, ...]:
        library = self._lib
        count = int(library.mtmd_input_chunk_get_n_tokens(chunk))
        if library.mtmd_input_chunk_get_type(chunk) == library.MTMD_INPUT_CHUNK_TYPE_TEXT:
            length = ctypes.c_size_t()
            tokens = library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(length))
            return tuple(tokens[: length.value])
        sees_all = bool(library.mtmd_decode_use_non_causal(self._context, chunk))
        if sees_all and count > self._most_rows:
            raise PictureError(
                f"The image takes {count} rows at once, more than {self._most_rows}. Send a smaller one."
            )
        if library.mtmd_encode_chunk(self._context, chunk):
            raise LlamaCppError(f"llama.cpp failed to encode the file:\n{complaints()}")
        rows = np.ctypeslib.as_array(library.mtmd_get_output_embd(self._context), shape=(count, self._width))
        grid = self._grid(chunk, count) if library.mtmd_decode_use_mrope(self._context) else None
        return ImageRows(row_ids(content, number, count), rows.astype(np.float32, copy=True), sees_all, grid)

    def _grid(self, chunk: Any, count: int) -> ImageGrid:
        """Positions of an image's rows for models with M-RoPE. Raises PictureError for an unknown layout."""
        library = self._lib
        image = library.mtmd_input_chunk_get_tokens_image(chunk)

        def places(first: int) -> NDArray[np.int32]:
            found = (library.mtmd_decoder_pos * count)()
            library.mtmd_helper_image_get_decoder_pos(image, first, found)
            by_row = np.ctypeslib.as_array(found).view(np.uint32).reshape(count, len(_SECTIONS)).astype(np.int32)
            return np.ascontiguousarray(by_row.T[_SECTIONS])

        from_zero = places(0)
        moves = places(1) - from_zero
        if (moves != moves[:, :1]).any():
            raise PictureError("This model counts the positions of images in a way that localllm does not support.")
        return ImageGrid(from_zero, moves[:, 0], int(library.mtmd_input_chunk_get_n_pos(chunk)))


def _shrunk(picture: Picture, factor: float) -> Picture:
    from PIL import Image

    width, height = (max(1, round(side * factor)) for side in picture.size)
    return Picture(np.asarray(Image.fromarray(picture.pixels).resize((width, height), Image.Resampling.BICUBIC)))


def _check_projector(path: Path) -> None:
    with open_model(path) as file:
        if file.architecture != "clip":
            raise LlamaCppError(
                f"{path} is not a projector (general.architecture is {file.architecture!r}, not 'clip').",
                remedy="Name the model's mmproj file with --mmproj.",
            )


@functools.cache
def _mtmd() -> Any:
    """llama-cpp-python's binding of the multimodal library, with its log routed. Raises LlamaCppError."""
    llama()
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, AttributeError) as error:
        raise LlamaCppError(
            f"This llama-cpp-python cannot read images ({error}). Install version 0.3.36 or newer."
        ) from error
    mtmd_cpp.mtmd_helper_log_set(LOG_CALLBACK, ctypes.c_void_p(0))
    return mtmd_cpp
