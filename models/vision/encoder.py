"""Opens a projector (mmproj) for our own kernels: the table of families, their memory, and encoding."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.records import Step
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.pictures import DEFAULT_BUDGET, Budget
from gguf_io.runner_info import LoadProgress
from gguf_io.sounds import Samples
from models.errors import UnsupportedModelError, kernels_needed
from models.needs import Needs, addressable, touched_bytes
from models.steps import compiling, usable_threads
from models.vision.config import projector_kind, sound_kind
from models.vision.family import EncoderFamily, Passes, Progress, Rows
from models.vision.gemma4ua import FRAME, KIND, Gemma4Sound
from models.vision.layout import ImageLayout, PictureSizeError
from models.vision.pixels import Pixels
from models.vision.recording import VisionRecording
from models.weights import WeightLoader

FAMILIES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("gemma3", "Gemma3"),
    "gemma4uv": ("gemma4uv", "Gemma4Unified"),
    "gemma4v": ("gemma4v", "Gemma4"),
    "idefics3": ("idefics3", "Idefics3"),
    "internvl": ("internvl", "InternVL"),
    "lfm2": ("lfm2", "Lfm2"),
    "mlp": ("llava", "Llava"),
    "pixtral": ("pixtral", "Pixtral"),
    "qwen2vl_merger": ("qwen", "Qwen"),
    "qwen2.5vl_merger": ("qwen", "Qwen"),
    "qwen3vl_merger": ("qwen", "Qwen"),
}
"""The module, and its class, for each projector type."""
MAX_PICTURE_SIDE = 1 << 16
_SOUND = ("a.", "mm.a.")
"""How names of tensors of audio encoders begin, which a projector may have beside an image encoder."""


class ImageEncoder:
    """A projector's image encoder on our own kernels. Not thread-safe; close it after use.

    A picture's rows are the same bits with any number of threads. width: values of a row; a multiple of the language
    model's width if rows are added to several of its layers. sound: its encoder of sound, None if it has none that is
    computed. sound_kind: the type of the one that it has, "" for none.
    """

    def __init__(self, file: ModelFile, threads: int | None = None, progress: LoadProgress | None = None) -> None:
        """Load and pack the weights and compile the kernels; see open_encoder."""
        self._family = family = _family_of(file)
        self.sound, self.sound_kind = _sound_of(file), sound_kind(file)
        self.width = family.width
        team = self._team = ThreadTeam(usable_threads(threads))
        try:
            if progress is not None:
                progress("loading the image encoder", 0.0)
            loader = WeightLoader(file, words=True)
            fields = _record(family, self.sound, loader, team.threads)
            with kernels_needed():
                loader.load(team, progress)
                program = loader.builder.build(compiling(progress))
        except BaseException:
            team.close()
            raise
        self._passes = Passes(program, team, fields, family.pass_rows)
        self._closed = False

    def layout(self, width: int, height: int, budget: Budget = DEFAULT_BUDGET) -> ImageLayout:
        """What becomes of a picture of this size. Raises PictureSizeError if it cannot be encoded."""
        return _layout(self._family, width, height, budget)

    def encode(self, pixels: Pixels, layout: ImageLayout, progress: Progress | None = None) -> list[Rows]:
        """The rows of each run of a layout, each float32[count, width]. Ends soon if the work is cancelled.

        pixels: uint8[height, width, 3] of the layout's source. progress: called with the part that is done, 0 to 1.
        """
        if self._closed:
            raise ValueError("this image encoder is closed")
        if pixels.dtype != np.uint8 or pixels.shape != (layout.source[1], layout.source[0], 3):
            raise ValueError(f"pixels are {pixels.dtype}{list(pixels.shape)}, which is not what the layout is for")
        self._passes.begin(self._family.work(layout), progress)
        return self._family.encode(pixels, layout, self._passes)

    def encode_sound(self, samples: Samples) -> Rows:
        """The rows of a sound. Ends soon if the work is cancelled."""
        if self._closed or self.sound is None:
            raise ValueError("this encoder is closed, or has none for sound")
        return self.sound.encode(samples, self._passes)

    def close(self) -> None:
        """Stop the threads; memory is released with the last reference. Idempotent."""
        self._closed = True
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_encoder(file: ModelFile, threads: int | None = None, progress: LoadProgress | None = None) -> ImageEncoder:
    """Load a projector's image encoder. The file may be closed afterwards.

    threads: None for all cores this process may use. Raises ModelFileError for a file that is damaged or no projector,
    UnsupportedModelError for one that the native engine does not compute, before anything large is allocated.
    """
    return ImageEncoder(file, threads, progress)


def header_layout(file: ModelFile) -> Callable[..., ImageLayout]:
    """The method ImageEncoder.layout, from a projector's header alone. Raises as open_encoder does."""
    return partial(_layout, _family_of(file))


def rows_together(file: ModelFile) -> int:
    """The most rows of a picture that see each other, from a projector's header. Raises as open_encoder does."""
    return _family_of(file).together


def vision_needs(file: ModelFile, threads: int | None = None) -> Needs:
    """What an image encoder takes, from its header alone; the buffers include the largest picture's.

    Raises as open_encoder does.
    """
    family, loader = _family_of(file), WeightLoader(file, words=True)
    with addressable(file):
        _record(family, _sound_of(file), loader, usable_threads(threads))
    return Needs(loader.packed_bytes, touched_bytes(loader.builder) + family.picture_bytes)


def _family_of(file: ModelFile) -> EncoderFamily:
    kind = projector_kind(file)
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: the native engine does not support image encoders of the type {kind!r}.",
            remedy="llama.cpp may: use --backend llama.",
        )
    module, name = FAMILIES[kind]
    made: EncoderFamily = getattr(import_module(f"models.vision.{module}"), name)(file)
    return made


def _sound_of(file: ModelFile) -> Gemma4Sound | None:
    return Gemma4Sound(file) if sound_kind(file) == KIND else None


def _record(
    family: EncoderFamily, sound: Gemma4Sound | None, loader: WeightLoader, threads: int
) -> dict[Step, NDArray[np.generic]]:
    """Record a family's program; return the arrays of its step record."""
    longest = max(family.longest, FRAME if sound else 0)
    recording = VisionRecording(loader, family.pass_rows, longest, threads)
    family.record(loader, recording)
    if sound:
        sound.record(loader, recording)
    for start in _SOUND:
        loader.leave_out(*loader.names(start))
    loader.check_all_used(0)
    return family.new_fields(loader.builder, threads)


def _layout(family: EncoderFamily, width: int, height: int, budget: Budget = DEFAULT_BUDGET) -> ImageLayout:
    if not (1 <= width <= MAX_PICTURE_SIDE and 1 <= height <= MAX_PICTURE_SIDE):
        raise PictureSizeError(f"A picture of {width:,} x {height:,} pixels cannot be shown to a model.")
    return family.layout((width, height), budget)
