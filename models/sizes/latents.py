"""Sizes of attention on latents (DeepSeek 2): what a token stores for all heads, and the heads made from it."""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError

# Limits: values of a latent, and of a part of a head.
MAX_RANK = 4096
MAX_PART = 1024
_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_SHORT_QUERIES = ".attn_q_a.weight"
_TURNED = "rope.dimension_count"
_KEY, _VALUE = "attention.key_length", "attention.value_length"


@dataclass(frozen=True)
class Latents:
    """Sizes of attention on latents, in values: of what a token stores for all heads, and of the heads made from it.

    rank: the latent. query_rank: the latent that queries are made from, 0 if they are made from the row itself. plain,
    turned: the parts of a head's query and key without and with rotation; the rotated part is stored after the latent.
    value: a head's value.
    """

    rank: int
    query_rank: int
    plain: int
    turned: int
    value: int

    @property
    def stored(self) -> int:
        """Values that a token stores in a layer."""
        return self.rank + self.turned


def stated(file: ModelFile) -> bool:
    """Whether a file's attention works on latents: other heads have keys and values of their own."""
    return f"{file.architecture}.{_RANK}" in file.metadata


def read(file: ModelFile) -> Latents:
    """The sizes of a file's latents.

    Files come in two generations. Newer ones state the stored sizes as head sizes and the heads' own sizes under
    separate keys (`_mla`), and have one tensor of all heads' key matrices and one of their value matrices. Older ones
    state the heads' sizes and have both matrices in one tensor. The computation is the same.
    Raises ModelFileError for sizes that are missing or do not fit together.
    """
    metadata, name = file.metadata, file.architecture

    def size(key: str, maximum: int = MAX_PART) -> int:
        return metadata.get_int(f"{name}.{key}", minimum=1, maximum=maximum)

    generation = "_mla" if f"{name}.{_KEY}_mla" in metadata else ""
    key, turned = size(_KEY + generation), size(_TURNED)
    if turned % 2 or turned >= key:
        raise ModelFileError(
            f"{file.path}: {name}.{_TURNED} is {turned}, which must be an even number below the head size, {key}. "
            "Use another version of the model."
        )
    short = any(tensor.endswith(_SHORT_QUERIES) for tensor in file.tensors)
    return Latents(
        rank=size(_RANK, MAX_RANK),
        query_rank=size(_QUERY_RANK, MAX_RANK) if short else 0,
        plain=key - turned,
        turned=turned,
        value=size(_VALUE + generation),
    )
