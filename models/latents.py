"""Sizes of attention on latents, read from a file: what a token stores for all heads, and the heads that it stands for.

Files come in two generations. One states the sizes of what is stored as those of heads, and the heads' own under keys
of their own (`_mla`), beside a tensor of each head's matrix for keys and one for values. Older ones state the heads'
sizes and have both matrices in one tensor. What is computed is the same.
"""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError

MAX_RANK = 4096
MAX_PART = 1024
_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_TURNED = "rope.dimension_count"
_KEY, _VALUE = "attention.key_length", "attention.value_length"


@dataclass(frozen=True)
class Latents:
    """Sizes in values.

    rank: of a latent. query_rank: of what queries are made from, 0 where that is the row itself. plain, turned: of a
    head's query and key without and with rotation; the turned part is stored behind the latent. value: of a head's
    value.
    """

    rank: int
    query_rank: int
    plain: int
    turned: int
    value: int

    @property
    def stored(self) -> int:
        """What a token stores in a layer."""
        return self.rank + self.turned


def read_latents(file: ModelFile) -> Latents | None:
    """The sizes that a file states, None where its heads have keys and values of their own.

    Raises ModelFileError for sizes that are missing or do not go together.
    """
    metadata, name = file.metadata, file.architecture
    if f"{name}.{_RANK}" not in metadata:
        return None

    def size(key: str, maximum: int = MAX_PART) -> int:
        return metadata.get_int(f"{name}.{key}", minimum=1, maximum=maximum)

    generation = "_mla" if f"{name}.{_KEY}_mla" in metadata else ""
    key, turned = size(_KEY + generation), size(_TURNED)
    if turned % 2 or turned >= key:
        raise ModelFileError(
            f"{file.path}: {name}.{_TURNED} is {turned}, and heads have {key} values, of which an even number smaller "
            "than that can turn. Get another edition of the model."
        )
    return Latents(
        rank=size(_RANK, MAX_RANK),
        query_rank=size(_QUERY_RANK, MAX_RANK) if "blk.0.attn_q_a.weight" in file.tensors else 0,
        plain=key - turned,
        turned=turned,
        value=size(_VALUE + generation),
    )
