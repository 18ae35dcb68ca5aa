"""How a model pools the hidden states of a text's tokens: into a vector, or into a score of a pair of texts."""

from enum import IntEnum

from gguf_io.errors import ModelFileError
from gguf_io.model_file import ModelFile

_SCORES_MEANS = ("modern-bert",)


class Pooling(IntEnum):
    """Values of `<architecture>.pooling_type`."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def pooling_of(file: ModelFile) -> Pooling:
    """The file's pooling type, by default MEAN; RANK also if it has a classification head and no type.

    Old converters wrote the head without the type. Raises ModelFileError for an unknown type, and for RANK without a
    head.
    """
    key = f"{file.architecture}.pooling_type"
    if is_reranker(file):
        if not _has_head(file):
            raise ModelFileError(
                f"{file.path} has no classification head (cls.weight or cls.output.weight) and cannot score pairs. "
                "Convert the model again with a newer convert_hf_to_gguf.py."
            )
        return Pooling.RANK
    return Pooling(file.metadata.get_int(key, Pooling.MEAN, minimum=0, maximum=Pooling.RANK)) or Pooling.MEAN


def averages(file: ModelFile) -> bool:
    """Whether the model pools the mean of all hidden states; a reranker's head may use that too, if its file says so.

    ModernBERT's does unless its file says otherwise. Raises what `pooling_of` raises.
    """
    pooling = pooling_of(file)
    if pooling is not Pooling.RANK:
        return pooling is Pooling.MEAN
    default = Pooling.MEAN if file.architecture in _SCORES_MEANS else Pooling.NONE
    stated = file.metadata.get_int(f"{file.architecture}.classifier.pooling_type", default, maximum=Pooling.RANK)
    return Pooling(stated) is Pooling.MEAN


def is_reranker(file: ModelFile) -> bool:
    """Whether the file's pooling type is RANK, or it has a classification head and no pooling type."""
    key = f"{file.architecture}.pooling_type"
    return file.metadata.get_int(key, 0) == Pooling.RANK or (key not in file.metadata and _has_head(file))


def _has_head(file: ModelFile) -> bool:
    return any(name in file.tensors for name in ("cls.weight", "cls.output.weight"))
