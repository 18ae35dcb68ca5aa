"""What a projector needs beside its model, told from its file's header alone."""

from pathlib import Path

from gguf_io.model_file import ModelFile, open_model

_FLOAT = 4
# Models of the Qwen-VL kind take images of any size, up to so many rows of 2 x 2 patches (llama.cpp's clip.cpp).
_ANY_SIZE = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"})
_MOST_PATCHES = 4 * 4096


def projector_bytes(path: Path) -> int:
    """Bytes of the weights and of the scratch memory for the largest image. Raises ModelFileError."""
    with open_model(path) as file:
        return sum(tensor.nbytes for tensor in file.tensors.values()) + _compute_bytes(file)


def _compute_bytes(file: ModelFile) -> int:
    """The peak over attention and feed-forward part of one layer, as llama.cpp reports it with flash attention."""
    width, inner, side, patch = (
        file.metadata.get_int(f"clip.vision.{key}", 0)
        for key in ("embedding_length", "feed_forward_length", "image_size", "patch_size")
    )
    any_size = file.metadata.get_str("clip.projector_type", "") in _ANY_SIZE
    patches = _MOST_PATCHES if any_size else (side // patch) ** 2 if patch else 0
    return patches * _FLOAT * max(2 * width + inner, 5 * width)
