"""The sizes and constants of an image encoder, read from a projector's header and checked before anything is allocated.

Keys: tools/mtmd/clip-impl.h in llama.cpp.
"""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError, shortened
from models.errors import UnsupportedModelError
from models.sizes.reading import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, MAX_WIDTH

PREFIX = "clip.vision."
MAX_SIDE, MAX_PATCH, MAX_MERGE = 8192, 512, 16
_KIND = "clip.projector_type"
_GELU, _SILU = "clip.use_gelu", "clip.use_silu"


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of an image encoder.

    kind: the type of its projector. side: of the square picture that it was trained with, in pixels. patch: of a patch.
    merge: patches along each side of what becomes one row. width, hidden, layers, heads, head_size: of its transformer;
    zeros if it has none. projected: values of a row that the file states. mean, deviation: of the three colours.
    activation: "gelu", "silu", or "quick" for the sigmoid approximation of GELU.
    """

    kind: str
    side: int
    patch: int
    merge: int
    width: int
    hidden: int
    layers: int
    heads: int
    head_size: int
    projected: int
    epsilon: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    activation: str


def projector_kind(file: ModelFile) -> str:
    """The type of a projector's image encoder. Raises ModelFileError for another file, and UnsupportedModelError if it
    has none.
    """
    metadata = file.metadata
    if file.architecture != "clip":
        raise ModelFileError(
            f"{file.path} is not a projector (general.architecture is {file.architecture!r}, not 'clip'). "
            "Name the model's mmproj file."
        )
    kind = metadata.get_str(_KIND, "") or metadata.get_str(f"{PREFIX}projector_type", "")
    if not kind or not metadata.get_bool("clip.has_vision_encoder", f"{PREFIX}patch_size" in metadata):
        raise UnsupportedModelError(
            f"{file.path}: this projector is for sound, of the type {sound_kind(file)!r}, which the native engine "
            "does not support.",
            remedy="llama.cpp may: use --backend llama.",
        )
    return shortened(kind, 40)


def sound_kind(file: ModelFile) -> str:
    """The type of a projector's sound encoder, "" if it has none."""
    metadata = file.metadata
    if not metadata.get_bool("clip.has_audio_encoder", False):
        return ""
    return shortened(metadata.get_str("clip.audio.projector_type", "") or metadata.get_str(_KIND, "unknown"), 40)


def read_vision_config(file: ModelFile, merge_key: str = "projector.scale_factor", merge: int = 1) -> VisionConfig:
    """Read and check an encoder's configuration. Raises ModelFileError for a missing or out-of-range key.

    merge_key, merge: the key of VisionConfig.merge, and its value if the file does not state it.
    """
    metadata = file.metadata

    def number(name: str, minimum: int, maximum: int, default: int | None = None) -> int:
        return metadata.get_int(PREFIX + name, default, minimum=minimum, maximum=maximum)

    width, heads = number("embedding_length", 1, MAX_WIDTH), number("attention.head_count", 0, MAX_HEADS)
    size = number("attention.head_dim", 0, MAX_HEAD_SIZE, 0) or (width // heads if heads else 0)
    if size > MAX_HEAD_SIZE or heads * size > MAX_WIDTH:
        raise ModelFileError(f"{file.path}: {heads} heads of {size} values are too large. Use another version of it.")
    if number("attention.head_count_kv", 1, MAX_HEADS, max(heads, 1)) != max(heads, 1):
        raise UnsupportedModelError(
            f"{file.path}: its image encoder shares keys between heads, which the native engine does not support.",
            remedy="llama.cpp may: use --backend llama.",
        )
    gelu, silu = metadata.get_bool(_GELU, False), metadata.get_bool(_SILU, False)
    return VisionConfig(
        kind=projector_kind(file),
        side=number("image_size", 0, MAX_SIDE),
        patch=number("patch_size", 1, MAX_PATCH),
        merge=number(merge_key, 1, MAX_MERGE, merge),
        width=width,
        hidden=number("feed_forward_length", 0, MAX_WIDTH),
        layers=number("block_count", 0, MAX_LAYERS),
        heads=heads,
        head_size=size,
        projected=number("projection_dim", 0, MAX_WIDTH),
        epsilon=metadata.get_float(f"{PREFIX}attention.layer_norm_epsilon", minimum=0.0, maximum=1.0),
        mean=_colours(file, "image_mean"),
        deviation=_colours(file, "image_std"),
        activation="gelu" if gelu else "silu" if silu else "quick",
    )


def _colours(file: ModelFile, name: str) -> tuple[float, float, float]:
    """A number for red, green and blue, within the limits of numbers for pixels from 0 to 1."""
    values = file.metadata.get_list(PREFIX + name, float)
    if len(values) < 3 or not all(-10.0 <= value <= 10.0 for value in values[:3]):
        raise ModelFileError(f"{file.path}: {PREFIX}{name} must be three numbers between -10 and 10.")
    if name == "image_std" and min(map(abs, values[:3])) < 1e-3:
        raise ModelFileError(f"{file.path}: {PREFIX}{name} must not be zero.")
    return values[0], values[1], values[2]
